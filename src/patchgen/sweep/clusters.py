"""Jobs on clusters: Ray tasks (extra `ray`, also on this machine), and Slurm tasks through submitit (extra `slurm`).

A task that loses its worker, reaches its time limit or is preempted is started again and resumes from the last
evaluation: run folders must be on a shared file system, with locks that hold across machines.
"""

import logging
import os
import shlex
from collections.abc import Sequence
from contextlib import chdir
from pathlib import Path
from typing import Any, cast

from patchgen.common import plugins
from patchgen.common.child_process import SOURCE, python, safe_children
from patchgen.sweep.jobs import Outcome, Work, perform, read_work, to_json
from patchgen.sweep.launch import LauncherLost, WorkerLost

UNBOUNDED = 100_000  # slots of a launcher with its own queue


def ray_perform(text: str, folder: str) -> Outcome:
    """One job in a Ray worker; `folder` is the launcher's working directory, for relative paths in the settings."""
    if os.path.isdir(folder):
        os.chdir(folder)
    return perform(read_work(text))


class RayLauncher:
    slots, pause = UNBOUNDED, 0.1

    def __init__(self, threads: int, retries: int, address: str | None = None, cpus: int | None = None) -> None:
        try:
            import ray
        except ImportError:
            raise ValueError(
                '--engine ray needs Ray, which is not installed: pip install "patchgen[ray]", or use --engine local'
            ) from None
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # Ray's future default, without its warning
        self.ray: Any = ray
        options: dict[str, Any] = {"address": address}
        if address is None:
            options = {"num_cpus": cpus, "include_dashboard": False}
        if plugins.VARIABLE in os.environ:  # a cluster's machines do not inherit it
            options["runtime_env"] = {"env_vars": {plugins.VARIABLE: os.environ[plugins.VARIABLE]}}
        try:
            # Ray workers import from the launcher's current folder: set it to that of this package
            with safe_children(), chdir(SOURCE):
                ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)
        except ConnectionError as error:
            raise ValueError(f"--address {address}: {error}; `ray status` on that machine shows a cluster") from error
        self.threads, self.retries = threads, retries
        resources = ray.cluster_resources()
        self.gpus = bool(resources.get("GPU"))
        if (total := int(resources.get("CPU", 0))) < threads:
            self.close()
            raise ValueError(f"a run asks Ray for --threads {threads} CPUs and it has {total}; lower --threads")

    def submit(self, jobs: Sequence[Work]) -> list[Any]:
        handles = []
        for job in jobs:
            devices = getattr(job.config, "devices", 1)
            gpus = devices if self.gpus and job.config.accelerator != "cpu" else 0
            cpus = self.threads * (devices if not gpus else 1)
            task = self.ray.remote(num_cpus=cpus, num_gpus=gpus, max_retries=self.retries)(ray_perform)
            handles.append(task.remote(to_json(job), os.getcwd()).future())
        return handles

    def outcome(self, handle: Any) -> Outcome:
        try:
            return cast(Outcome, handle.result())
        except self.ray.exceptions.LocalRayletDiedError as error:
            raise LauncherLost(
                "Ray has died on this machine, and with it the workers; the same command resumes"
            ) from error
        except self.ray.exceptions.RayError as error:
            raise WorkerLost(f"Ray lost the run's worker: {error}") from error

    def close(self) -> None:
        self.ray.shutdown()


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
    slots, pause = UNBOUNDED, 2.0  # Slurm answers slowly

    def __init__(
        self, out: Path, threads: int, *, workers: int | None = None, gpus: int = 0, partition: str | None = None,
        minutes: int = 240, cluster: str | None = None,
    ) -> None:  # fmt: skip
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
        needs: dict[str, Any] = {"timeout_min": minutes, "cpus_per_task": threads, "gpus_per_node": gpus or None}
        if self.executor.cluster == "slurm":
            needs |= {"slurm_partition": partition, "slurm_array_parallelism": workers}
        needs = {name: value for name, value in needs.items() if value is not None}
        self.executor.update_parameters(name="patchgen-sweep", **needs)
        self.open: list[Any] = []

    def submit(self, jobs: Sequence[Work]) -> list[Any]:
        with safe_children(), self.executor.batch():  # one array, submitted in a single call
            handles = [self.executor.submit(SlurmTask(), to_json(job)) for job in jobs]
        self.open += handles
        return handles

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
