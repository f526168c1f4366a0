"""Jobs as Ray tasks, on this machine or on a cluster (extra `ray`).

On a cluster the run folders must be on a file system that all machines share, with locks that hold across them, and
the data and PatchGen must be available at the same path everywhere. A task that loses its worker is restarted by Ray,
up to `retries` times, and resumes from the last evaluation.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import chdir
from typing import Any, cast

from patchgen.common import plugins
from patchgen.common.child_process import SOURCE, safe_children
from patchgen.sweep.jobs import Outcome, Work, perform, read_work
from patchgen.sweep.launch import LauncherLost, WorkerLost


def ray_perform(text: str, folder: str) -> Outcome:
    """One job in a Ray worker; `folder` is the launcher's working directory, for relative paths in the settings."""
    if os.path.isdir(folder):
        os.chdir(folder)
    return perform(read_work(text))


class RayLauncher:
    def __init__(self, threads: int, retries: int, address: str | None = None, cpus: int | None = None) -> None:
        try:
            import ray
        except ImportError:
            raise ValueError(
                '--engine ray needs Ray, which is not installed: pip install "patchgen[ray]", or use --engine local'
            ) from None
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # Ray's future default, without its warning
        self.ray: Any = ray
        own: dict[str, Any] = {"address": address}
        if address is None:
            own = {"num_cpus": cpus, "include_dashboard": False}
        if plugins.VARIABLE in os.environ:  # a cluster's machines do not inherit it
            own["runtime_env"] = {"env_vars": {plugins.VARIABLE: os.environ[plugins.VARIABLE]}}
        try:
            # Ray workers import from the launcher's current folder: set it to that of this package
            with safe_children(), chdir(SOURCE):
                ray.init(log_to_driver=False, logging_level=logging.ERROR, **own)
        except ConnectionError as error:
            raise ValueError(f"--address {address}: {error}; `ray status` on that machine shows a cluster") from error
        self.threads, self.retries = threads, retries
        resources = ray.cluster_resources()
        self.gpus = bool(resources.get("GPU"))
        self.slots = 100_000  # Ray has its own queue
        self._check_room(int(resources.get("CPU", 0)))

    def _check_room(self, cpus: int) -> None:
        if cpus < self.threads:
            self.close()
            raise ValueError(f"a run asks Ray for --threads {self.threads} CPUs and it has {cpus}; lower --threads")

    def submit(self, jobs: Sequence[Work]) -> list[Any]:
        return [self._task(job).remote(job.to_json(), os.getcwd()) for job in jobs]

    def _task(self, job: Work) -> Any:
        """The function with its resource requirements."""
        devices = getattr(job.config, "devices", 1)
        gpus = devices if self.gpus and job.config.accelerator != "cpu" else 0
        cpus = self.threads * (devices if not gpus else 1)
        return self.ray.remote(num_cpus=cpus, num_gpus=gpus, max_retries=self.retries)(ray_perform)

    def finished(self, handles: Sequence[Any], seconds: float) -> list[Any]:
        return list(self.ray.wait(list(handles), num_returns=1, timeout=seconds)[0])

    def outcome(self, handle: Any) -> Outcome:
        try:
            return cast(Outcome, self.ray.get(handle))
        except self.ray.exceptions.LocalRayletDiedError as error:
            raise LauncherLost(
                "Ray has died on this machine, and with it the workers; the same command resumes"
            ) from error
        except self.ray.exceptions.RayError as error:
            raise WorkerLost(f"Ray lost the run's worker: {error}") from error

    def close(self) -> None:
        self.ray.shutdown()
