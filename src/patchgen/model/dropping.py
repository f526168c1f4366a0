"""Faster predictions: patches that are not selected are removed after the early block, or a later one.

    drop_unselected(model)             # from now on; ValueError if the model needs all patches
    drop_unselected(model, after=8)    # removed after eight blocks: slower, and closer to the full pass

The blocks of most vision transformers treat patches as a set, because positions are added before the first block. A
block that adds positions itself (rotary embeddings, a relative bias) would give the remaining patches wrong positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from patchgen.model.backbone import Backbone
from patchgen.model.classifier import Classifier
from patchgen.model.hooks import on_input
from patchgen.model.selector import Selector

KEPT = [2, 3, 7, 8, 13]  # of the 16 patches of the small test image
ROUNDINGS = 100  # tolerance, in rounding errors, for sums in a different order


def drop_unselected(model: Classifier, after: int | None = None) -> None:
    """Remove patches whose displayed mask is below 0.5 during the forward pass.

    Args:
        after: Number of blocks before they are removed; None: up to the early block, where the mask is computed.

    Raises:
        ValueError: they cannot be removed there, or the model has no selection inside its backbone, no calibrated
            level, or a backbone that needs all patches.
    """
    selector = model.select
    if not isinstance(selector, Selector):
        raise ValueError(
            "unselected patches can be dropped only where the selection acts inside the backbone: by a model of method "
            "patchgen-select"
        )
    if not selector.level[0] > 0:
        raise ValueError(
            "this model's mask has no calibrated level, so 0.5 does not separate selected patches; unselected patches "
            "can be dropped only by models of the tasks mdg and mdg_gcd"
        )
    require_sets(model.backbone)
    early, blocks = model.backbone.early_block, len(model.backbone.model.get_submodule(model.backbone.family.blocks))
    after = early if after is None else after
    if not early <= after < blocks:
        raise ValueError(
            f"unselected patches can be dropped after {early} to {blocks - 1} of the {blocks} blocks, not {after}; the "
            f"mask is computed after {early}"
        )
    selector.drop = after


@torch.no_grad()
def require_sets(backbone: Backbone) -> None:
    """ValueError unless the later blocks accept any subset of patches, and the class token ignores their order."""
    reason = "it is convolutional" if backbone.family.convolutional else _reason(backbone)
    if reason:
        raise ValueError(
            f"unselected patches cannot be dropped with {backbone.source!r} ({backbone.model_type}): {reason}; "
            "predict without dropping"
        )


def _reason(backbone: Backbone) -> str | None:
    weight, side = next(backbone.parameters()), 4 * backbone.patch_size
    images = torch.arange(3 * side * side, device=weight.device).sin().view(1, 3, side, side).to(weight.dtype)

    block = backbone.model.get_submodule(backbone.family.blocks)[backbone.early_block]

    def read(patches: list[int]) -> Tensor:
        kept = [*range(backbone.num_prefix_tokens), *(backbone.num_prefix_tokens + patch for patch in patches)]
        with on_input(block, lambda hidden: hidden[:, kept]):
            return backbone(images).cls

    try:
        forth, back = read(KEPT), read(KEPT[::-1])
    except (RuntimeError, ValueError, IndexError) as error:
        return f"its later blocks need all patches ({str(error).splitlines()[0][:120]})"
    rounding = ROUNDINGS * torch.finfo(forth.dtype).eps * forth.abs().max()
    return None if (forth - back).abs().max() <= rounding else "its later blocks add positions of their own"
