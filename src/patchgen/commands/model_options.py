"""The options of a command that uses a trained model: which checkpoint, on which device, with which runtime."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Literal, cast

from patchgen.commands import Maybe

if TYPE_CHECKING:
    from patchgen.predict.predictor import Predictor
    from patchgen.predict.runtime import RuntimeName


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
class ModelOptions(DeviceOptions):
    checkpoint: Literal["selected", "swad"] = "selected"
    """Of a run: the checkpoint chosen on source validation, or the weight average of one trained with --swad."""

    backbone: Maybe[str] = None
    """Where the backbone's weights are, if the model leaves them out and they are not where it says."""
    allow_download: bool = False
    """Let the model's own settings choose which backbone is downloaded."""

    @property
    def how(self) -> dict[str, Any]:
        return {**self.device, "backbone": self.backbone, "allow_download": self.allow_download}

    def load(self, path: str, images: int | None = None) -> Predictor:
        """The classifier of a model folder or run folder."""
        from patchgen.predict.predictor import load_predictor

        return load_predictor(path, self.checkpoint, **self.how)


@dataclass(frozen=True, kw_only=True)
class RuntimeOptions(ModelOptions):
    runtime: Literal["auto", "torch", "onnx", "openvino"] = "auto"
    """Inference runtime; `auto` is the fastest one that is installed and agrees with torch on this machine."""

    def load(self, path: str, images: int | None = None) -> Predictor:
        """The classifier on the chosen runtime, which is reported on stderr.

        Args:
            images: Number of images to predict: for a few, `auto` does not convert a model.
        """
        say = partial(print, file=sys.stderr, flush=True)
        return super().load(path).use(self.runtime, say, images)

    def load_once(self, path: str) -> Predictor:
        """The same for many pieces of work of one process, which share the model."""
        names = RuntimeOptions.__dataclass_fields__
        return _load_once(path, RuntimeOptions(**{name: getattr(self, name) for name in names}))

    def resolved_runtime(self, predictor: Predictor) -> RuntimeName:
        """The runtime that `auto` resolved to in this process: workers must use the same one or fail."""
        runtime = predictor.runtime
        if self.runtime != "auto" or (runtime and runtime.name.startswith("torch")):  # half, if a worker has a GPU
            return self.runtime
        return cast("RuntimeName", runtime.name.split()[0]) if runtime else "torch"


@lru_cache(1)
def _load_once(path: str, options: RuntimeOptions) -> Predictor:
    return options.load(path, images=0)  # their number is not known yet: `auto` uses what is converted already
