"""Resolve `--precision auto`: bfloat16 if the device computes it natively, otherwise float32.

It affects results, so it is resolved before a run is named; a run started in the other precision is resumed in that.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

from patchgen.common.machine import native_bf16, require_bf16
from patchgen.config import Settings
from patchgen.runs.folder import run_name

if TYPE_CHECKING:
    import torch

S = TypeVar("S", bound=Settings)
AUTO = "auto"
Precision = Literal["32-true", "bf16-mixed"]
Wanted = Literal["32-true", "bf16-mixed", "auto"]


def with_precision(config: S, out: str | Path, data: str) -> S:
    """The settings with `auto` replaced by a precision; `out` is the parent of runs, `data` a fingerprint."""
    return replace(config, precision=choose_precision([config], out, data)) if config.precision == AUTO else config


def choose_precision(configs: Sequence[Settings], out: str | Path, data: str) -> Precision:
    """One precision for runs that belong together: the device's, unless only runs in the other were started."""

    def started(precision: Precision) -> bool:
        names = (run_name(replace(config, precision=precision), data) for config in configs)
        return any((Path(out) / name / "config.yaml").exists() for name in names)

    choices: list[Precision] = ["32-true", "bf16-mixed"]
    other, native = choices if computes_bf16(configs[0].accelerator) else choices[::-1]
    return other if started(other) and not started(native) else native


def computes_bf16(accelerator: str) -> bool:
    """Whether the device of `--accelerator` computes bfloat16 products natively."""
    import torch

    if accelerator in ("auto", "cuda", "gpu") and torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    has_mps = accelerator == "auto" and torch.backends.mps.is_available()
    return accelerator in ("auto", "cpu") and not has_mps and native_bf16()


def computes_half(device: "torch.device", precision: Wanted) -> bool:
    """Whether to use bfloat16; ValueError if it was named and kills processes on this machine."""
    if precision == "auto":
        return computes_bf16(device.type)
    if device.type == "cpu":
        require_bf16()
    return True
