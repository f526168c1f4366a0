"""Options that commands share: the model with its device and runtime, the images, and the engine of the work."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import tyro

from patchgen.commands import COUNT, Maybe, check_bounds

if TYPE_CHECKING:
    from patchgen.predict.predictor import Predictor
    from patchgen.predict.runtime import RuntimeName
    from patchgen.sweep.jobs import Unit


@dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    accelerator: Maybe[str] = None
    """cpu, cuda, mps or auto; by default the CPU for a run that was trained on it, else auto."""
    precision: Literal["32-true", "bf16-mixed", "auto"] = "32-true"
    """Precision of the forward pass; `auto`: bf16-mixed where the device has native bfloat16, else 32-true."""

    @property
    def device(self) -> dict[str, Any]:
        return {"accelerator": self.accelerator, "precision": self.precision}


@dataclass(frozen=True, kw_only=True)
class WeightsOptions:
    checkpoint: Literal["selected", "swad"] = "selected"
    """Of a run: the checkpoint chosen on source validation, or the weight average of one trained with --swad."""
    backbone: Maybe[str] = None
    """Where the backbone's weights are, if the model leaves them out and they are not where it says."""
    allow_download: bool = False
    """Let the model's own settings choose which backbone is downloaded."""

    @property
    def weights(self) -> dict[str, Any]:
        return {"backbone": self.backbone, "allow_download": self.allow_download}


@dataclass(frozen=True, kw_only=True)
class ModelOptions(WeightsOptions, DeviceOptions):
    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """Model folder of `patchgen fit`, or run folder of `patchgen train`."""

    @property
    def how(self) -> dict[str, Any]:
        return {**self.device, **self.weights}

    def load(self, images: int | None = None) -> "Predictor":
        """The classifier of the model folder or run folder."""
        from patchgen.predict.predictor import load_predictor

        return load_predictor(self.model, self.checkpoint, **self.how)


@dataclass(frozen=True, kw_only=True)
class RuntimeOptions(ModelOptions):
    runtime: Literal["auto", "torch", "onnx", "openvino"] = "auto"
    """Inference runtime; `auto` is the fastest one that is installed and agrees with torch on this machine."""

    def load(self, images: int | None = None) -> "Predictor":
        """The classifier on the chosen runtime, which is reported on stderr; for a few images nothing is converted."""
        return super().load().use(self.runtime, partial(print, file=sys.stderr, flush=True), images)

    def load_once(self) -> "Predictor":
        """The same for many pieces of work of one process, which share the model."""
        return _load_once(RuntimeOptions(**{name: getattr(self, name) for name in RuntimeOptions.__dataclass_fields__}))

    def resolved_runtime(self, predictor: "Predictor") -> "RuntimeName":
        """The runtime that `auto` resolved to in this process: workers must use the same one or fail."""
        runtime = predictor.runtime
        if self.runtime != "auto" or (runtime and runtime.name.startswith("torch")):  # half, if a worker has a GPU
            return self.runtime
        return cast("RuntimeName", runtime.name.split()[0]) if runtime else "torch"


@lru_cache(1)
def _load_once(options: RuntimeOptions) -> "Predictor":
    return options.load(images=0)  # their number is not known yet: `auto` uses what is converted already


@dataclass(frozen=True, kw_only=True)
class StrictOptions:
    strict: bool = False
    """Exit with code 1 if any image could not be read, not only if none could."""


@dataclass(frozen=True, kw_only=True)
class ImageOptions(StrictOptions):
    images: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="IMAGES...")]
    """Image files, folders (searched with their sub-folders) and patterns such as 'photos/**/*.jpg'."""


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
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

    def use_threads(self) -> None:
        """Before a runtime queries them."""
        from patchgen.common.machine import use_threads

        if self.alone:
            use_threads(self.threads)

    def check_engine(self) -> None:
        """Check the numbers before any work."""
        check_bounds(self, workers=COUNT, threads=COUNT)
        if self.address is not None and self.engine != "ray":
            raise ValueError("--address names a Ray cluster: add --engine ray")

    def do_units(self, units: "Sequence[Unit]", work: Path, what: str, quiet: bool = False) -> dict[str, str]:
        """Process the units, here or on the engine; returns the reasons of failures, by label.

        Args:
            work: Parent of their claims.
            quiet: No overall progress, if each unit shows its own.
        """
        from patchgen.sweep.launch import LauncherOptions, run_units

        options = LauncherOptions(work, workers=self.workers, threads=self.threads, address=self.address)
        failures = run_units(units, None if self.alone else self.engine, options, what, quiet)
        return {label: failure.error for label, failure in failures.items()}
