"""The linear layers of a vision transformer's attention, the attention of CLS to patches, and LoRA by peft.

    for layers in attention_layers(backbone):         # one entry per block
        layers.inputs, layers.out                     # [query, key, value] or [all three in one], and the output
    add_lora(backbone, rank=8)        # query, key and value of every block; called by set_tuning(backbone, "lora")
    plain = merged(model)             # a copy with the updates merged into its layers, for export

LoRA (Hu et al., ICLR 2022): y = W x + 2 B A x, with A (r, d_in) random and B (d_out, r) zero at the start, so that the
first step sees the pretrained network.
"""

from __future__ import annotations

import copy
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

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


# LoRA

SCALE = 2  # peft's alpha over rank
ADDED, WRAPPED = "lora_", ".base_layer"  # in the names of peft's tensors
M = TypeVar("M", bound=nn.Module)


def require_peft() -> None:
    """ValueError if the package of the extra `lora` is missing."""
    if find_spec("peft") is None:
        raise ValueError("tune 'lora' needs peft: install it with `pip install 'patchgen[lora]'`")


def add_lora(backbone: Backbone, rank: int) -> list[nn.Module]:
    """Add updates of this rank to query, key and value of every block; returns the trainable modules."""
    require_peft()
    from peft import LoraConfig, inject_adapter_in_model

    layers = {id(layer) for block in attention_layers(backbone) for layer in block.inputs}
    names = [name for name, part in backbone.model.named_modules() if id(part) in layers]
    inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=SCALE * rank, target_modules=names), backbone.model)
    return [part for name, part in backbone.model.named_modules() if name.rpartition(".")[2].startswith(ADDED)]


def plain_name(name: str) -> str | None:
    """The name of a tensor without LoRA; None for tensors that LoRA has added."""
    return None if ADDED in name else name.replace(WRAPPED, "")


def merged(model: M) -> M:
    """A copy with the updates merged into its layers; the model itself if it has none."""
    if find_spec("peft") is None:
        return model
    from peft.tuners.lora import LoraLayer

    if not any(isinstance(part, LoraLayer) for part in model.modules()):
        return model
    whole = copy.deepcopy(model)
    for name, part in list(whole.named_modules()):
        if isinstance(part, LoraLayer):
            part.merge()  # type: ignore[operator]
            parent, _, own = name.rpartition(".")
            setattr(whole.get_submodule(parent), own, part.get_base_layer())
    return whole
