"""The linear layers of a vision transformer's attention, across naming schemes, and the attention of CLS to patches.

for layers in attention_layers(backbone):         # one entry per block
    layers.inputs, layers.out                     # [query, key, value] or [all three in one], and the output
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from patchgen.model.tuning import plain_name

if TYPE_CHECKING:
    from patchgen.model.backbone import Backbone

QUERY, KEY, VALUE = ("q_proj", "query"), ("k_proj", "key"), ("v_proj", "value")
FUSED = ("qkv",)  # timm
OUT = ("o_proj", "out_proj", "attention.output.dense", "attn.proj")


class AttentionLayers(NamedTuple):
    """The attention layers of one block."""

    inputs: list[nn.Linear]  # query, key, value; or one layer whose output is all three
    out: nn.Linear


def attention_layers(backbone: Backbone) -> list[AttentionLayers]:
    """The attention layers of each block.

    Raises:
        ValueError: the backbone is convolutional, or its layers have unknown names.
    """
    blocks: Any = () if backbone.family.convolutional else backbone.model.get_submodule(backbone.family.blocks)
    layers = [_layers_of(block) for block in blocks]
    if not layers or None in layers:
        raise ValueError(
            f"this needs the attention layers of a vision transformer, and backbone {backbone.source!r} "
            f"({backbone.model_type}) has none that are known; choose a ViT such as clip-b16 or dinov2-small"
        )
    return layers  # type: ignore[return-value]


def _layers_of(block: nn.Module) -> AttentionLayers | None:
    # a layer with a LoRA update wraps the plain one (its `base_layer`) and returns the sum of both
    parts = [(name, part) for name, part in block.named_modules() if name == plain_name(name)]
    linear: dict[str, Any] = {n: p for n, p in parts if isinstance(p, nn.Linear) or hasattr(p, "base_layer")}

    def named(ends: tuple[str, ...]) -> nn.Linear | None:
        return next((part for name, part in linear.items() if f".{name}".endswith(tuple(f".{e}" for e in ends))), None)

    fused, out = named(FUSED), named(OUT)
    inputs = [fused] if fused else [named(ends) for ends in (QUERY, KEY, VALUE)]
    return AttentionLayers(inputs, out) if out and all(inputs) else None  # type: ignore[arg-type]


@torch.no_grad()
def patch_attention(backbone: Backbone, images: Tensor) -> Tensor:
    """Attention of CLS to each patch in the last block, mean over heads (B, P), computed from queries and keys."""
    last = attention_layers(backbone)[-1].inputs
    said: dict[int, Tensor] = {}
    hooks = [
        layer.register_forward_hook(lambda module, inputs, output, i=i: said.__setitem__(i, output))
        for i, layer in enumerate(last)
    ]
    try:
        patches = backbone(images).patches.shape[1]
    finally:
        for hook in hooks:
            hook.remove()
    query, key = (said[0], said[1]) if len(last) == 3 else said[0].chunk(3, -1)[:2]  # (B, T, D)
    heads = _heads(backbone)
    first, every = query[:, 0].unflatten(-1, (heads, -1)), key.unflatten(-1, (heads, -1))  # (B, H, d), (B, T, H, d)
    scores = torch.einsum("bhd,bthd->bht", first, every) / first.shape[-1] ** 0.5
    return scores.softmax(-1).mean(1)[:, -patches:]


def _heads(backbone: Backbone) -> int:
    known = getattr(backbone.model.config, "num_attention_heads", None)
    counts: list[Any] = [part.num_heads for part in backbone.modules() if hasattr(part, "num_heads")]  # timm
    return int(known or counts[-1])
