"""Memory of the PatchGen module over the number of patches P, against a version that forms the P x P scores.

    memory = measure(patches=(256, 1024, 4096))
    memory["exponent"]                          # of the peak bytes: about 1 for PatchGen, 2 for the explicit version

Bytes are counted, not sampled: they are the same on every run.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import Line, fit_exponent, report
from patchgen.diagnose.cost import PeakMemory
from patchgen.model.patchgen import PatchGen, PatchGenOutput, default_heads

TARGET = 0.1  # the largest share of the explicit version's bytes wanted at the largest P
SMALL = {"dim": 64, "patches": (64, 256)}
Forward = Callable[[PatchGen, Tensor], PatchGenOutput]


def measure(*, dim: int = 384, patches: tuple[int, ...] = (256, 1024, 4096)) -> dict[str, Any]:
    """Peak bytes of forward and backward on one image over P, and the power of P with which they grow.

    The exponent is the slope of a log-log line through all P; gradients of the weights, which do not depend on P,
    are part of the bytes and pull it down where P is small.

    Args:
        dim: Features per patch; the default is ViT-S, 6 heads.
        patches: P, in rising order.
    """
    if len(patches) < 2 or min(patches) < 1:
        raise ValueError(f"patches must be two or more positive numbers, not {list(patches)}")
    rows = []
    for count in patches:
        row = {"patches": count} | {name: peak_bytes(forward, dim, count) for name, forward in FORWARDS.items()}
        report(f"{count} patches: " + ", ".join(f"{name} {row[name] / 1e6:.1f} MB" for name in FORWARDS))
        rows.append(row)
    exponent = {name: fit_exponent(patches, [row[name] for row in rows]) for name in FORWARDS}
    return {"dim": dim, "heads": default_heads(dim), "bytes": rows, "exponent": exponent}


def lines(result: dict[str, Any]) -> list[Line]:
    ratios = [row["patchgen"] / row["explicit"] for row in result["bytes"]]
    sizes: list[Line] = [
        (f"module at P = {row['patches']:,}: bytes / explicit P x P", f"{ratio:.3f}")
        for row, ratio in zip(result["bytes"], ratios, strict=True)
    ]
    sizes[-1] = (*sizes[-1][:2], f"<= {TARGET}", ratios[-1] <= TARGET)
    growth = result["exponent"]
    return [*sizes, ("peak bytes over P: exponent (explicit)", f"{growth['patchgen']:.2f} ({growth['explicit']:.2f})")]


def explicit_forward(module: PatchGen, tokens: Tensor) -> PatchGenOutput:
    """The naive reference: PatchGen's equations as they are written, with the (B, H, P, P) scores formed."""
    q, k, v = module.qkv(tokens).unflatten(-1, (3, module.num_heads, -1)).permute(2, 0, 3, 1, 4)  # (B, H, P, d_k)
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])  # (B, H, P, P)
    mask = scores.mean((1, 3)).sigmoid()  # Eq. 3: mean over heads and targets, (B, P)
    u = (scores / module.log_temperature.exp()).softmax(-1) @ v  # (B, H, P, d_k)
    weighted = module.out(u.transpose(1, 2).flatten(2)) * module.rho.T  # (B, P, D)
    selected, rest = (weighted * mask.unsqueeze(2)).sum(1), (weighted * (1 - mask).unsqueeze(2)).sum(1)
    gate = module.gate(selected)
    return PatchGenOutput(mask, module.refine(gate * selected), module.refine(gate * rest))


FORWARDS: dict[str, Forward] = {"patchgen": lambda module, tokens: module(tokens), "explicit": explicit_forward}


def peak_bytes(forward: Forward, dim: int, num_patches: int) -> int:
    """Most bytes alive at once while the module learns from one image, beyond its weights and the tokens."""
    generator = torch.Generator().manual_seed(0)
    module = PatchGen(dim, num_patches, grid=(1, num_patches))
    tokens = torch.randn(1, num_patches, dim, generator=generator).requires_grad_()
    with PeakMemory([tokens, *module.parameters()]) as memory:
        out = forward(module, tokens)
        (out.selected.square().mean() + out.mask.mean()).backward()
    return memory.peak
