"""Resolve `--precision auto`: bfloat16 if the device computes it natively, otherwise float32.

    config = settled(config, "runs", fingerprint)       # `bf16-mixed` or `32-true`, before the run is named

The precision affects a run's results, so it is resolved before the run is named, and recorded in the run folder. A run
keeps the precision that it was started with: if `auto` finds a run of these settings in the other precision, it resumes
that one, also on another machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from patchgen.common.machine import native_bf16, require_bf16
from patchgen.config import Config
from patchgen.runs.folder import run_name

if TYPE_CHECKING:
    import torch

AUTO = "auto"
Precision = Literal["32-true", "bf16-mixed"]
Wanted = Literal["32-true", "bf16-mixed", "auto"]
FORMATS: tuple[Precision, Precision] = ("32-true", "bf16-mixed")


def settled(config: Config, out: str | Path, data: str) -> Config:
    """The settings with `auto` replaced by a precision.

    Args:
        out: Parent of the run folders.
        data: Fingerprint of the data.
    """
    return replace(config, precision=settle([config], out, data)) if config.precision == AUTO else config


def settle(configs: Sequence[Config], out: str | Path, data: str) -> Precision:
    """One precision for runs that belong together: the device's, unless only runs in the other were started."""
    usual: Precision = "bf16-mixed" if computes_bf16(configs[0].accelerator) else "32-true"
    begun = {
        one: any(
            (Path(out) / run_name(replace(config, precision=one), data) / "config.yaml").exists() for config in configs
        )
        for one in FORMATS
    }
    other = next(one for one in FORMATS if one != usual)
    return other if begun[other] and not begun[usual] else usual


def computes_bf16(accelerator: str) -> bool:
    """Whether the device of `--accelerator` computes bfloat16 products natively."""
    import torch

    if accelerator in ("auto", "cuda", "gpu") and torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return accelerator in ("auto", "cpu") and not _has_mps(accelerator) and native_bf16()


def _has_mps(accelerator: str) -> bool:
    import torch

    return accelerator == "auto" and torch.backends.mps.is_available()


def computes_half(device: torch.device, precision: Wanted) -> bool:
    """Whether to use bfloat16; ValueError if it was named and kills processes on this machine."""
    if precision == "auto":
        return computes_bf16(device.type)
    if device.type == "cpu":
        require_bf16()
    return True
