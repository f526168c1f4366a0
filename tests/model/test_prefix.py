"""The frozen part of a backbone: exact for every family, absent where something in it learns, limited in its memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from patchgen.model.backbone import Backbone, Origin, load_backbone, set_tuning
from patchgen.model.convert import Loaded, build
from patchgen.model.prefix import Memory, Prefix, find_prefix

VIT = {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 2, "patch_size": 4, "image_size": 16}
WIDE = VIT | {"intermediate_size": 256}
SMALL = {"dinov2": VIT, "dinov2_with_registers": VIT, "vit": WIDE, "vit_mae": WIDE, "clip_vision_model": WIDE}
ROOM = 1 << 20
ROWS = np.array([4, 2, 9])


def small(family: str = "dinov2", tune: str = "last_block") -> Backbone:
    model = build(family, SMALL[family])
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    backbone = Backbone(Loaded(model), Origin("small", "small"))
    set_tuning(backbone, tune)
    return backbone


def found(backbone: Backbone, size: int = 16, room: int = ROOM) -> Prefix:
    prefix = find_prefix(backbone, size, room)
    assert prefix is not None
    return prefix


def images(size: int = 16, batch: int = 3) -> Tensor:
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(1))


def count_calls(module: nn.Module) -> list[int]:
    """Grows by the batch size of each call of a module."""
    calls: list[int] = []
    module.register_forward_hook(lambda module, inputs, output: calls.append(len(inputs[0])))
    return calls


@pytest.mark.parametrize("size", [16, 24])
@pytest.mark.parametrize("family", ["dinov2", "dinov2_with_registers", "vit", "vit_mae"])
def test_both_parts_together_are_the_backbone(family: str, size: int) -> None:
    backbone = small(family)
    prefix, x = found(backbone, size), images(size)
    assert prefix.first == 2
    with torch.no_grad():
        own, again = backbone(x), prefix.after(prefix.before(x))
    assert torch.equal(own.patches, again.patches) and torch.equal(own.cls, again.cls) and own.grid == again.grid


def test_there_is_none_for_clip_whose_blocks_want_an_attention_mask() -> None:
    assert find_prefix(small("clip_vision_model"), 16, ROOM) is None


@pytest.mark.parametrize("tune", ["layernorm", "full"])
def test_there_is_none_where_the_first_block_learns(tune: str) -> None:
    assert find_prefix(small(tune=tune), 16, ROOM) is None


def test_there_is_none_where_an_embedding_learns() -> None:
    backbone = small()
    backbone.model.embeddings.cls_token.requires_grad_(True)
    assert find_prefix(backbone, 16, ROOM) is None


def test_a_wholly_frozen_backbone_has_all_but_its_last_block() -> None:
    assert found(small(tune="head")).first == 2


def test_there_is_none_for_convolutions_and_where_a_hook_sits() -> None:
    conv = build("resnet", {"embedding_size": 8, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]})
    resnet = Backbone(Loaded(conv), Origin("small", "small"))
    set_tuning(resnet, "last_block")
    assert find_prefix(resnet, 64, ROOM) is None
    hooked = small()
    hooked.model.embeddings.register_forward_hook(lambda module, inputs, output: None)
    assert find_prefix(hooked, 16, ROOM) is None


class Needy(nn.Module):
    """A block that wants more than its input."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: Tensor, more: Any) -> Tensor:
        result: Tensor = self.inner(hidden)
        return result


class Fickle(Needy):
    """A block that says something else without its second argument."""

    def forward(self, hidden: Tensor, *more: Any) -> Tensor:
        result: Tensor = self.inner(hidden)
        return result if more else result + 1e-6


@pytest.mark.parametrize("kind", [Needy, Fickle])
def test_there_is_none_where_the_rest_is_not_exact(kind: type[Needy]) -> None:
    backbone = small()
    blocks = backbone.model.get_submodule(backbone.family.blocks)
    plain = blocks[2]
    blocks[2] = kind(plain)
    blocks[2].register_forward_pre_hook(lambda module, inputs: (*inputs[:1], None) if len(inputs) > 1 else None)
    own = backbone(images()).patches  # the backbone itself hands two arguments on
    assert own.isfinite().all() and find_prefix(backbone, 16, ROOM) is None


def test_a_batch_passes_the_frozen_blocks_once_and_each_answer_is_the_backbones() -> None:
    backbone = small()
    prefix, x = found(backbone), images()
    blocks = backbone.model.get_submodule(backbone.family.blocks)
    frozen, learning = count_calls(blocks[0]), count_calls(blocks[2])
    for turn in range(3):
        with torch.no_grad():
            kept = prefix.tokens(ROWS, x)
            assert len(frozen) == turn + 1 and len(learning) == 2 * turn + 1  # one of each turn is the plain pass below
            own = backbone(x)
            assert torch.equal(own.patches, kept.patches) and torch.equal(own.cls, kept.cls)
            for parameter in blocks[2].parameters():  # as a step of training would
                parameter.add_(0.01)


def test_another_batch_with_the_same_rows_is_another_one() -> None:
    backbone = small()
    prefix, x = found(backbone), images()
    frozen = count_calls(backbone.model.get_submodule(backbone.family.blocks)[0])
    for rows, pixels in ((ROWS, x), (ROWS[:2], x[:2]), (ROWS[::-1], x.flip(0)), (ROWS, x)):
        with torch.no_grad():
            patches = prefix.tokens(rows, pixels).patches
        assert torch.equal(patches, backbone(pixels).patches)
    assert frozen == [3, 3, 2, 2, 3, 3, 3]  # from the prefix and plain in turn; the last one was there


def test_what_an_evaluation_kept_can_be_trained_on() -> None:
    backbone = small()
    prefix, x = found(backbone), images()
    with torch.inference_mode():
        prefix.tokens(ROWS, x)
    prefix.tokens(ROWS, x).patches.sum().backward()
    last = backbone.model.get_submodule(backbone.family.blocks)[2]
    assert all(parameter.grad is not None for parameter in last.parameters())


def test_memory_is_limited() -> None:
    memory = Memory(3 * 16 + 5)
    batch = torch.arange(20.0).view(5, 4)
    for row, tensor in enumerate(batch):
        memory.keep(row, tensor)
    memory.keep(0, batch[4])  # what is there stays
    assert list(memory) == [0, 1, 2] and memory.room == 5 and torch.equal(memory[0], batch[0])
    assert sum(tensor.untyped_storage().nbytes() for tensor in memory.values()) == 3 * 16  # no batch hangs on them


def test_without_room_nothing_is_kept() -> None:
    backbone = load_backbone("tiny")
    set_tuning(backbone, "last_block")
    prefix, x = found(backbone, 28, room=0), images(28)
    with torch.no_grad():
        patches = prefix.tokens(ROWS, x).patches
    assert torch.equal(patches, backbone(x).patches) and not prefix.memory
