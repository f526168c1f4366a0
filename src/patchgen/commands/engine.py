"""The options of a command that can share its work among processes or machines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from patchgen.sweep.unit import Unit


@dataclass(frozen=True, kw_only=True)
class EngineArguments:
    engine: Literal["local", "ray"] = "local"
    """Where to run: processes of this machine, or Ray tasks, also on a cluster (extra `ray`)."""
    workers: int | None = None
    """Parallel processes. Local: 1 by default. Ray: by default as many as its CPUs allow."""
    threads: int | None = None
    """CPU threads of each process; the same number gives the same bytes on every engine."""
    address: str | None = None
    """ray: a cluster's address, such as `auto` or HOST:6379; by default Ray is started on this machine."""

    @property
    def alone(self) -> bool:
        """Whether all work is done in this process."""
        return self.engine == "local" and (self.workers or 1) == 1

    def check_engine(self) -> None:
        """Check the numbers before any work."""
        from patchgen.sweep.engines import LauncherOptions

        LauncherOptions(Path(), workers=self.workers, threads=self.threads)
        if self.address is not None and self.engine != "ray":
            raise ValueError("--address names a Ray cluster: add --engine ray")

    def do_units(self, units: Sequence[Unit], work: Path, what: str, quiet: bool = False) -> dict[str, str]:
        """Process the units, here or on the engine; returns the reasons of failures, by label.

        Args:
            work: Parent of their claims.
            quiet: No overall progress, if each unit shows its own.
        """
        from patchgen.sweep.engines import LauncherOptions
        from patchgen.sweep.unit import run_units

        options = LauncherOptions(work, workers=self.workers, threads=self.threads, address=self.address)
        failures = run_units(units, None if self.alone else self.engine, options, what, quiet)
        return {label: failure.error for label, failure in failures.items()}
