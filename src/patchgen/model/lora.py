"""LoRA: low-rank updates of the attention layers of a frozen vision transformer, by peft.

    add_lora(backbone, rank=8)        # query, key and value of every block; called by set_tuning(backbone, "lora")
    plain = merged(model)             # a copy with the updates merged into its layers, for export

y = W x + 2 B A x, with A (r, d_in) random and B (d_out, r) zero at the start: the first step sees the pretrained
network. Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, ICLR 2022.
"""

from __future__ import annotations

import copy
from importlib.util import find_spec
from typing import TYPE_CHECKING, TypeVar

from torch import nn

if TYPE_CHECKING:
    from patchgen.model.backbone import Backbone

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
