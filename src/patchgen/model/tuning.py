"""Which tensors of a backbone are trained, and LoRA by peft.

    names = set_tuning(backbone, "layernorm")     # trainable tensors; everything else stays frozen
    set_tuning(backbone, "lora", lora_rank=8)     # low-rank updates of query, key and value of every block
    plain = merged(model)                         # a copy with the updates merged into its layers, for export

LoRA (Hu et al., ICLR 2022): y = W x + 2 B A x, with A (r, d_in) random and B (d_out, r) zero at the start, so that the
first step sees the pretrained network.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, TypeVar

from torch import nn

from patchgen.common.text import did_you_mean

if TYPE_CHECKING:
    from patchgen.model.backbone import Backbone

SCALE = 2  # peft's alpha over rank
ADDED, WRAPPED = "lora_", ".base_layer"  # in the names of peft's tensors
M = TypeVar("M", bound=nn.Module)


def _tune_layernorm(backbone: nn.Module) -> list[nn.Module]:
    # each family of transformers and timm has its own RMSNorm class, without a common base
    kinds, own = (nn.LayerNorm, nn.BatchNorm2d), "rmsnorm"
    return [part for part in backbone.modules() if isinstance(part, kinds) or type(part).__name__.lower().endswith(own)]


def _tune_upper_layernorm(backbone: Backbone) -> list[nn.Module]:
    if backbone.family.convolutional:
        raise ValueError(f"--tune upper-layernorm needs transformer blocks, and {backbone.source!r} is convolutional")
    backbone.tuned_from = len(backbone.blocks) * 2 // 3
    norm = backbone.family.final_norm
    tuned = [*backbone.blocks[backbone.tuned_from :], *([backbone.model.get_submodule(norm)] if norm else [])]
    return [norm for part in tuned for norm in _tune_layernorm(part)]


def _tune_last_block(backbone: Backbone) -> list[nn.Module]:
    last, norm = backbone.blocks[-1], backbone.family.final_norm
    return [last, backbone.model.get_submodule(norm)] if norm else [last]


TUNING: dict[str, Callable[[Backbone], list[nn.Module]]] = {
    "head": lambda backbone: [],
    "layernorm": _tune_layernorm,
    "upper-layernorm": _tune_upper_layernorm,
    "full": lambda backbone: [backbone.model],
    "last_block": _tune_last_block,
}


def set_tuning(backbone: Backbone, mode: str, lora_rank: int = 8) -> list[str]:
    """Make exactly the tensors of `mode` trainable, and return their names.

    Args:
        mode: `head` nothing; `layernorm` the affine parameters of all LayerNorms and RMSNorms (BatchNorms in
            convolutional nets); `upper-layernorm` those of the last third of the blocks; `last_block` the last
            transformer block (last stage) and the final norm; `full` all; `lora` updates of rank `lora_rank`, added to
            the attention layers and initialised at random (extra `lora`).
    """
    known = [*TUNING, "lora"]
    if mode not in known:
        raise ValueError(f"tuning must be one of {sorted(known)}, got {mode!r}{did_you_mean(mode, known)}")
    backbone.requires_grad_(False)
    backbone.tuned_from = 0
    for module in add_lora(backbone, lora_rank) if mode == "lora" else TUNING[mode](backbone):
        module.requires_grad_(True)
    return [name for name, parameter in backbone.named_parameters() if parameter.requires_grad]


# LoRA


def require_peft() -> None:
    """ValueError if the package of the extra `lora` is missing."""
    if find_spec("peft") is None:
        raise ValueError("tune 'lora' needs peft: install it with `pip install 'patchgen[lora]'`")


def add_lora(backbone: Backbone, rank: int) -> list[nn.Module]:
    """Add updates of this rank to query, key and value of every block; returns the trainable modules."""
    require_peft()
    from peft import LoraConfig, inject_adapter_in_model

    from patchgen.model.attention import attention_layers

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
