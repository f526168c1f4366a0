"""Which tensors of a backbone are trained, its attention layers across naming schemes, and LoRA by peft.

LoRA (Hu et al., ICLR 2022): y = W x + 2 B A x, with A (r, d_in) random and B (d_out, r) zero at the start, so that the
first step sees the pretrained network.
"""

import copy
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from patchgen.common.text import did_you_mean
from patchgen.model.generic import on_tensor

if TYPE_CHECKING:
    from patchgen.model.backbone import Backbone

SCALE = 2  # peft's alpha over rank
ADDED, WRAPPED = "lora_", ".base_layer"  # in the names of peft's tensors
FUSED, OUT = ("qkv",), ("o_proj", "out_proj", "attention.output.dense", "attn.proj")  # FUSED: timm
QUERY_KEY_VALUE = ("q_proj", "query"), ("k_proj", "key"), ("v_proj", "value")
M = TypeVar("M", bound=nn.Module)


def _norms(part: nn.Module) -> list[nn.Module]:
    # each family of transformers and timm has its own RMSNorm class, without a common base
    kinds = (nn.LayerNorm, nn.BatchNorm2d)
    return [m for m in part.modules() if isinstance(m, kinds) or type(m).__name__.lower().endswith("rmsnorm")]


def _final_norm(backbone: "Backbone") -> list[nn.Module]:
    return [backbone.model.get_submodule(backbone.family.final_norm)] if backbone.family.final_norm else []


def _upper_norms(backbone: "Backbone") -> list[nn.Module]:
    if backbone.family.convolutional:
        raise ValueError(f"--tune upper-layernorm needs transformer blocks, and {backbone.source!r} is convolutional")
    backbone.tuned_from = len(backbone.blocks) // 2
    return [norm for part in (*backbone.blocks[backbone.tuned_from :], *_final_norm(backbone)) for norm in _norms(part)]


TUNING: "dict[str, Callable[[Backbone], list[nn.Module]]]" = {
    "head": lambda backbone: [],
    "layernorm": _norms,
    "upper-layernorm": _upper_norms,
    "full": lambda backbone: [backbone.model],
    "last_block": lambda backbone: [backbone.blocks[-1], *_final_norm(backbone)],
}


def set_tuning(backbone: "Backbone", mode: str, lora_rank: int = 8) -> list[str]:
    """Make exactly the tensors of `mode` trainable, and return their names.

    `head` is nothing; `layernorm` the affine parameters of all LayerNorms and RMSNorms (BatchNorms in convolutional
    nets), `upper-layernorm` those of the upper half of the blocks; `last_block` the last block (stage) and the final
    norm; `full` all; `lora` updates of rank `lora_rank`, added to the attention layers, random at first (extra `lora`).
    """
    known = [*TUNING, "lora"]
    if mode not in known:
        raise ValueError(f"tuning must be one of {sorted(known)}, got {mode!r}{did_you_mean(mode, known)}")
    backbone.requires_grad_(False)
    backbone.tuned_from = 0
    for module in add_lora(backbone, lora_rank) if mode == "lora" else TUNING[mode](backbone):
        module.requires_grad_(True)
    return [name for name, parameter in backbone.named_parameters() if parameter.requires_grad]


class AttentionLayers(NamedTuple):
    inputs: list[nn.Linear]  # query, key, value; or one layer whose output is all three
    out: nn.Linear


def attention_layers(backbone: "Backbone") -> list[AttentionLayers]:
    """The attention layers of each block; ValueError if the backbone is convolutional, or their names are unknown."""
    layers = [] if backbone.family.convolutional else [_layers_of(block) for block in backbone.blocks]
    if not layers or None in layers:
        raise ValueError(
            f"this needs the attention layers of a vision transformer, and {backbone.source!r} ({backbone.model_type}) "
            "has none that are known; choose a ViT such as clip-b16 or dinov2-small"
        )
    return layers  # type: ignore[return-value]


def _layers_of(block: nn.Module) -> AttentionLayers | None:
    # a layer with a LoRA update wraps the plain one (its `base_layer`) and returns the sum of both
    parts = [(name, part) for name, part in block.named_modules() if name == plain_name(name)]
    linear: dict[str, Any] = {n: p for n, p in parts if isinstance(p, nn.Linear) or hasattr(p, "base_layer")}

    def named(ends: tuple[str, ...]) -> nn.Linear | None:
        return next((part for name, part in linear.items() if f".{name}".endswith(tuple(f".{e}" for e in ends))), None)

    fused, out = named(FUSED), named(OUT)
    inputs = [fused] if fused else [named(ends) for ends in QUERY_KEY_VALUE]
    return AttentionLayers(inputs, out) if out and all(inputs) else None  # type: ignore[arg-type]


@torch.no_grad()
def attention_maps(backbone: "Backbone", images: Tensor, last: bool = False) -> list[Tensor]:
    """Each block's attention (or the last one's), mean over heads: (B, T, T) softmax(<q, k> / sqrt(d))."""
    blocks = [block.inputs for block in attention_layers(backbone)[-1 if last else 0 :]]
    outputs: dict[nn.Module, Tensor] = {}  # models call the layers in any order
    with ExitStack() as hooks:
        for layer in chain.from_iterable(blocks):
            hooks.enter_context(on_tensor(layer, partial(outputs.__setitem__, layer)))
        backbone(images)
    counts: list[Any] = [part.num_heads for part in backbone.modules() if hasattr(part, "num_heads")]  # timm
    heads, maps = int(getattr(backbone.model.config, "num_attention_heads", None) or counts[-1]), []
    for layers in blocks:
        parts = [outputs[layer] for layer in layers]
        pair = parts[:2] if len(parts) == 3 else parts[0].chunk(3, -1)[:2]  # (B, T, D) each
        q, k = (part.float().unflatten(-1, (heads, -1)).transpose(1, 2) for part in pair)  # (B, H, T, d)
        maps.append((q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1).mean(1))
    return maps


def patch_attention(backbone: "Backbone", images: Tensor) -> Tensor:
    """Attention of CLS to each patch in the last block, mean over heads (B, P)."""
    return attention_maps(backbone, images, last=True)[0][:, 0, backbone.num_prefix_tokens :]


def require_peft() -> None:
    if find_spec("peft") is None:
        raise ValueError("tune 'lora' needs peft: install it with `pip install 'patchgen[lora]'`")


def add_lora(backbone: "Backbone", rank: int) -> list[nn.Module]:
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
            parent, _, leaf = name.rpartition(".")
            setattr(whole.get_submodule(parent), leaf, part.get_base_layer())
    return whole
