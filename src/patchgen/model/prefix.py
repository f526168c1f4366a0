"""The frozen part of a backbone, up to the first block that learns: a batch that was seen before starts behind it.

    prefix = find_prefix(backbone, image_size, room)     # None where there is none, or where it would change a bit
    tokens = prefix.tokens(rows, images)                 # backbone(images); the frozen blocks are passed once a batch

What enters the first learning block is kept by batch, not by row: the last bits of a matrix product may depend on the
rows beside it, and so a batch from memory is what the same batch would be, on any device and after a resume.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from patchgen.model.backbone import Backbone, Tokens


class Memory(dict[Hashable, Tensor]):
    """Tensors by key, off the device, in at most `room` bytes; what does not fit any more is not kept."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room

    def keep(self, key: Hashable, tensor: Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        if size <= self.room and key not in self:
            self.room -= size
            with torch.inference_mode(False):  # an evaluation's tensors cannot be trained on
                self[key] = tensor.cpu().clone()  # a part of a batch would keep the whole batch alive


class _Reached(Exception):
    def __init__(self, hidden: Tensor) -> None:
        super().__init__("the first block that learns")
        self.hidden = hidden


class Prefix:
    """Blocks 0..first-1 and all before them are frozen. Nothing is ever forgotten: what a run trains is settled before
    its first step (`set_tuning`), checkpoints hold trained tensors alone, and so a frozen tensor never changes."""

    def __init__(self, backbone: Backbone, first: int, image_size: int, room: int) -> None:
        self.backbone, self.first, self.grid = backbone, first, backbone.grid(image_size)
        self.blocks: Any = backbone.model.get_submodule(backbone.family.blocks)
        self.memory = Memory(room)

    @torch.no_grad()
    def before(self, images: Tensor) -> Tensor:
        """Normalised images (B, 3, S, S) -> what enters the first learning block, (B, T, D)."""
        with self.blocks[self.first].register_forward_pre_hook(_stop):
            try:
                self.backbone(images)
            except _Reached as reached:
                return reached.hidden
        raise ValueError(f"{self.backbone.source!r} does not pass its own block {self.first}")

    def after(self, hidden: Tensor) -> Tokens:
        """(B, T, D) -> the tokens of `Backbone.forward`."""
        for block in self.blocks[self.first :]:
            hidden = block(hidden)
        norm, prefix = self.backbone.family.final_norm, self.backbone.num_prefix_tokens
        hidden = self.backbone.model.get_submodule(norm)(hidden) if norm else hidden
        patches = hidden[:, prefix:]
        return Tokens(patches, hidden[:, 0] if prefix else patches.mean(1), self.grid)

    def tokens(self, rows: np.ndarray, images: Tensor) -> Tokens:
        """What the backbone says of the images (B, 3, S, S) of these rows (B,)."""
        key = rows.tobytes()
        kept = self.memory.get(key)
        hidden = self.before(images) if kept is None else kept.to(images.device)
        self.memory.keep(key, hidden)
        return self.after(hidden)

    @torch.no_grad()
    def exact(self) -> bool:
        """Whether two images get the backbone's own tokens, bit for bit."""
        side = self.backbone.patch_size
        shape = 2, 3, self.grid[0] * side, self.grid[1] * side
        device = next(self.backbone.parameters()).device
        images = torch.arange(int(np.prod(shape)), device=device).sin().view(shape)  # moves no random generator
        own = self.backbone(images)
        try:
            found = self.after(self.before(images))
            return torch.equal(own.patches, found.patches) and torch.equal(own.cls, found.cls)
        except Exception:  # whatever a block raises that wants more than its input, or hands on more, it means this
            return False


def find_prefix(backbone: Backbone, image_size: int, room: int) -> Prefix | None:
    """The frozen part in front of the first block that learns (of the last one, if none does), or None.

    None also where a hook may change the frozen part's answer, and where the rest cannot be had bit for bit.

    Args:
        room: bytes for what enters that block.
    """
    if backbone.family.convolutional:
        return None
    blocks: Any = backbone.model.get_submodule(backbone.family.blocks)
    first = next((i for i, block in enumerate(blocks) if _learns(block)), len(blocks) - 1)
    norm = backbone.family.final_norm
    behind = [*blocks[first:], *([backbone.model.get_submodule(norm)] if norm else [])]
    inside = {id(module) for part in behind for module in part.modules()}
    front = [module for module in backbone.modules() if id(module) not in inside]
    own = any(parameter.requires_grad for module in front for parameter in module.parameters(recurse=False))
    hooked = any(module._forward_hooks or module._forward_pre_hooks for module in front)
    prefix = Prefix(backbone, first, image_size, room)
    return prefix if first and not own and not hooked and prefix.exact() else None


def _learns(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def _stop(block: nn.Module, inputs: tuple[Any, ...]) -> None:
    raise _Reached(inputs[0])
