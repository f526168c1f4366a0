"""The engines by name, and the resources that each uses."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from patchgen.sweep.jobs import Work
from patchgen.sweep.launch import Launcher


@dataclass(frozen=True)
class LauncherOptions:
    out: Path
    workers: int | None = None
    threads: int | None = None
    retries: int = 2
    address: str | None = None  # ray
    partition: str | None = None  # slurm
    minutes: int = 240  # slurm

    def __post_init__(self) -> None:
        for name, least in {"workers": 1, "threads": 1, "retries": 0, "minutes": 1}.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"--{name} must be at least {least}, not {value}")


@dataclass(frozen=True)
class Share:
    """The resources of each local worker."""

    workers: int
    threads: int
    devices: tuple[str, ...] = ()  # CUDA devices of each worker, as CUDA_VISIBLE_DEVICES; empty without CUDA


def divide(workers: int | None, threads: int | None, cores: int, cuda: Sequence[str], devices: int = 1) -> Share:
    """Divide a machine: one worker per group of `devices` CUDA devices, or per `threads` cores.

    By default, without CUDA, a worker has one thread, which is fastest for many small runs.
    """
    if cuda:
        groups = [",".join(cuda[i : i + devices]) for i in range(0, len(cuda) - devices + 1, devices)]
        if not groups:
            raise ValueError(f"a run asks for {devices} devices and this machine has {len(cuda)}")
        workers = workers or len(groups)
        shares = tuple(groups[i % len(groups)] for i in range(workers))
        return Share(workers, threads or max(1, cores // workers), shares)
    if workers:
        return Share(workers, threads or max(1, cores // (workers * devices)))
    return Share(max(1, cores // ((threads or 1) * devices)), threads or 1)


def share_of(options: LauncherOptions, jobs: Sequence[Work]) -> Share:
    """The resources of a local worker on this machine."""
    import torch

    needs_cuda = any(job.config.accelerator != "cpu" for job in jobs)
    count = torch.cuda.device_count() if needs_cuda else 0
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = named.split(",")[:count] if named else [str(i) for i in range(count)]
    return divide(options.workers, threads_of(options, jobs), os.cpu_count() or 1, names, devices_of(jobs))


def threads_of(options: LauncherOptions, jobs: Sequence[Work]) -> int | None:
    """The option's value, else the maximum of the recipes, if any."""
    return options.threads or max((job.config.threads or 0 for job in jobs), default=0) or None


def devices_of(jobs: Sequence[Work]) -> int:
    """The maximum number of devices of a run."""
    return max((getattr(job.config, "devices", 1) for job in jobs), default=1)


def _local(options: LauncherOptions, jobs: Sequence[Work]) -> Launcher:
    from patchgen.sweep.local import LocalLauncher

    share = share_of(options, jobs)
    return LocalLauncher(options.out, min(share.workers, max(1, len(jobs))), share.threads, share.devices)


def _ray(options: LauncherOptions, jobs: Sequence[Work]) -> Launcher:
    from patchgen.sweep.clusters import RayLauncher

    threads = threads_of(options, jobs) or 1
    cpus = options.workers * threads if options.workers and options.address is None else None
    return RayLauncher(threads, options.retries, options.address, cpus)


def _slurm(options: LauncherOptions, jobs: Sequence[Work]) -> Launcher:
    from patchgen.sweep.clusters import SlurmLauncher

    gpus = 0 if all(job.config.accelerator == "cpu" for job in jobs) else devices_of(jobs)
    return SlurmLauncher(
        options.out, threads_of(options, jobs) or 1, workers=options.workers, gpus=gpus, partition=options.partition,
        minutes=options.minutes,
    )  # fmt: skip


LAUNCHERS: dict[str, Callable[[LauncherOptions, Sequence[Work]], Launcher]] = {
    "local": _local,
    "ray": _ray,
    "slurm": _slurm,
}
