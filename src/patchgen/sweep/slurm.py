"""Jobs as Slurm tasks through submitit (extra `slurm`): one array, with at most `workers` tasks in parallel.

The run folders must be on a file system that all nodes share. A task that reaches its time limit or is preempted is
requeued and resumes from the last evaluation.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from patchgen.common.child_process import python, safe_children
from patchgen.sweep.jobs import Outcome, Work, perform, read_work
from patchgen.sweep.launch import WorkerLost

POLL = 2.0  # seconds between two queries to Slurm, which answers slowly


class SlurmTask:
    """The task that runs on a node."""

    def __call__(self, text: str) -> Outcome:
        # a task is one whole run: otherwise its trainer would act as one rank of a distributed job
        os.environ.pop("SLURM_NTASKS", None)
        return perform(read_work(text))

    def checkpoint(self, text: str) -> Any:
        """Called before a time-out or preemption: requeue the same task."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, text)


class SlurmLauncher:
    def __init__(
        self,
        out: Path,
        threads: int,
        *,
        workers: int | None = None,
        gpus: int = 0,
        partition: str | None = None,
        minutes: int = 240,
        cluster: str | None = None,
    ) -> None:
        """`cluster` is for tests: submitit's own stand-ins for Slurm, `local` and `debug`."""
        try:
            import submitit
        except ImportError:
            raise ValueError(
                '--engine slurm needs submitit, which is not installed: pip install "patchgen[slurm]"'
            ) from None
        command = shlex.join(python())
        self.executor: Any = submitit.AutoExecutor(
            folder=out / ".slurm", cluster=cluster, slurm_python=command, local_python=command
        )
        if cluster is None and self.executor.cluster != "slurm":
            raise ValueError("--engine slurm finds no srun here; start it on a Slurm node, or use --engine local")
        wanted: dict[str, Any] = {"timeout_min": minutes, "cpus_per_task": threads, "gpus_per_node": gpus or None}
        if self.executor.cluster == "slurm":
            wanted |= {"slurm_partition": partition, "slurm_array_parallelism": workers}
        given = {name: value for name, value in wanted.items() if value is not None}
        self.executor.update_parameters(name="patchgen-sweep", **given)
        self.slots = 100_000  # Slurm has its own queue
        self.open: list[Any] = []

    def submit(self, jobs: Sequence[Work]) -> list[Any]:
        with safe_children(), self.executor.batch():  # one array, submitted in a single call
            handles = [self.executor.submit(SlurmTask(), job.to_json()) for job in jobs]
        self.open += handles
        return handles

    def finished(self, handles: Sequence[Any], seconds: float) -> list[Any]:
        ended = [handle for handle in handles if handle.done()]
        if not ended:
            time.sleep(max(seconds, POLL) if self.executor.cluster == "slurm" else 0.1)
        return ended

    def outcome(self, handle: Any) -> Outcome:
        from submitit.core.utils import FailedJobError, UncompletedJobError

        self.open.remove(handle)
        try:
            return cast(Outcome, handle.result())
        except (FailedJobError, UncompletedJobError) as error:
            raise WorkerLost(f"the Slurm task {handle.job_id} was lost: {error}") from error

    def close(self) -> None:
        for handle in self.open:
            handle.cancel(check=False)
