"""Predictions without the patches that a selection leaves out: they leave the pass behind the early block, or later.

    drop_unselected(model)             # from now on; ValueError where a model cannot do without them
    drop_unselected(model, after=8)    # they pass eight blocks first: slower, and closer to the whole pass

Blocks of most vision transformers treat patches as a set: position is in the tokens from the first block on. Where a
block adds positions of its own (rotary embeddings, a relative bias), it would take the patches that stay for others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from patchgen.model.backbone import Backbone
from patchgen.model.classifier import Classifier
from patchgen.model.hooks import on_input
from patchgen.model.selector import Selector

KEPT = [2, 3, 7, 8, 13]  # of the 16 patches of the small image that is tried
ROUNDINGS = 100  # by which sums in another order may differ


def drop_unselected(model: Classifier, after: int | None = None) -> None:
    """Let patches whose mask is shown below 0.5 leave the pass.

    Args:
        after: How many blocks they pass first; None: those up to the early one, where the mask is scored.

    Raises:
        ValueError: they cannot leave there, or the model has no selection inside its backbone, no calibrated level, or
            a backbone that needs all patches.
    """
    selector = model.select
    if not isinstance(selector, Selector):
        raise ValueError(
            "unselected patches can be dropped only where the selection acts inside the backbone: by a model of method "
            "patchgen-select"
        )
    if not selector.level[0] > 0:
        raise ValueError(
            "this model's mask has no calibrated level, so that 0.5 does not tell what is selected; unselected patches "
            "can be dropped only by models of the tasks mdg and mdg_gcd"
        )
    require_sets(model.backbone)
    early, blocks = model.backbone.early_block, len(model.backbone.model.get_submodule(model.backbone.family.blocks))
    after = early if after is None else after
    if not early <= after < blocks:
        raise ValueError(
            f"unselected patches can leave after {early} to {blocks - 1} of the {blocks} blocks, not {after}; the "
            f"mask is scored after {early}"
        )
    selector.drop = after


@torch.no_grad()
def require_sets(backbone: Backbone) -> None:
    """ValueError unless the blocks behind the early one take any patches, in any order, to the same class token."""
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
