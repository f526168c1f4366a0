"""A backbone, a pool that turns its tokens into one or two vectors, and a linear head: what every method trains.

The pools are ``cls``, ``mean`` and both (``cls-mean``) for the baselines, ``patchgen`` for the paper's module after
the backbone, ``patchgen-cls`` for that module and the class token, and ``select`` for the selection inside the
backbone. A head that reads two vectors is one linear layer on both: the sum of two linear heads.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from patchgen.model.backbone import Backbone, Tokens
from patchgen.model.patchgen import PatchGen
from patchgen.model.selector import Selector

POOLS: dict[str, Callable[[Tokens], Tensor]] = {  # what each reads of the tokens
    "cls": lambda tokens: tokens.cls,
    "mean": lambda tokens: tokens.patches.mean(1),
    "cls-mean": lambda tokens: torch.stack([tokens.cls, tokens.patches.mean(1)], 1),
    "patchgen": lambda tokens: tokens.patches,
    "patchgen-cls": lambda tokens: torch.cat([tokens.cls.unsqueeze(1), tokens.patches], 1),
    "select": lambda tokens: tokens.cls,
}
MASKED = ("patchgen", "patchgen-cls", "select")  # pools with a mask
PAIRED = ("cls-mean", "patchgen-cls")  # pools whose head reads two vectors


class Saved(nn.Module):
    """Named constants that predictions need: saved in checkpoints, never trained."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor.detach().clone())

    def __getitem__(self, name: str) -> Tensor:
        return self.get_buffer(name)


class Output(NamedTuple):
    logits: Tensor  # (B, C)
    features: Tensor  # (B, D)  the input of the head, after dropout as in the releases: z+ for PatchGen; two: (B, 2 D)
    mask: Tensor | None = None  # (B, P)
    complementary_logits: Tensor | None = None  # (B, C)  head on z-, without gradient: for reference only
    own_mask: Tensor | None = None  # (B, P)  the mask that the classifier uses, if `mask` is calibrated for display
    context: Tensor | None = None  # (B, D)  the mean early token, without gradient: the image before any selection
    complementary: Tensor | None = None  # (B, D)  z-, with its gradient: `model.head` on it gives logits that train
    halves: tuple[Tensor, Tensor] | None = None  # (B, C) each: the head on one of its two vectors; z+ comes first

    def selection(self) -> Tensor:
        """The mask (B, P) of a model that has one."""
        if self.mask is None:
            raise ValueError(f"this model has no mask: only the pools {' and '.join(MASKED)} make one")
        return self.mask


class Classifier(nn.Module):
    """Images in, logits (and a mask) out, in two stages, ``read`` and ``classify``; ``module`` are for `PatchGen`."""

    def __init__(
        self,
        backbone: Backbone,
        num_classes: int,
        *,
        image_size: int,
        pool: str = "patchgen",
        dropout: float = 0.0,
        **module: Any,
    ) -> None:
        super().__init__()
        if pool not in POOLS:
            raise ValueError(f"pool must be one of {', '.join(POOLS)}, not {pool!r}")
        self.backbone = backbone
        self.pool = pool
        self.context = False  # outputs include the mean early token, which an unselective reader would see
        self.size, self.grid = image_size, backbone.grid(image_size)
        self.select: PatchGen | Selector | None = None
        if pool in ("patchgen", "patchgen-cls"):
            self.select = PatchGen(backbone.dim, self.grid[0] * self.grid[1], grid=self.grid, **module)
        elif pool == "select":
            self.select = Selector(backbone)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(backbone.dim * (2 if pool in PAIRED else 1), num_classes)

    @property
    def has_mask(self) -> bool:
        return self.select is not None

    @property
    def reads_frozen(self) -> bool:
        """Whether nothing before ``classify`` is trained, so that the result of ``read`` can be cached."""
        return self.backbone.frozen and self.pool != "select"

    @property
    def reads_hidden(self) -> bool:
        """Whether the lower blocks of the backbone are frozen, so that their tokens (B, T, D) can be stored."""
        return self.backbone.tuned_from > 0 and self.pool != "select" and not self.context

    @torch.no_grad()
    def start(self, images: Tensor) -> None:
        """Initialise the mask on normalised source images (B, 3, H, W), before the first step; or on their tokens."""
        if isinstance(self.select, PatchGen):
            self.select.calibrate(self._tokens(images).patches.float())
        elif self.select is not None:
            self.select.start(self.select(self.backbone, images).early)

    def read(self, images: Tensor) -> Tensor:
        """Normalised images (B, 3, H, W) -> (B, D) for one vector, (B, 2, D) for cls-mean, (B, P, D) for PatchGen.

        ``patchgen-cls`` has the class token first: (B, 1 + P, D). With ``context`` the mean early token is appended.
        """
        if not self.context:
            return POOLS[self.pool](self._tokens(images))
        shown: list[Tensor] = []
        read = POOLS[self.pool](self.backbone(images, shown.append))
        early = nn.functional.layer_norm(shown[0].detach().float(), shown[0].shape[-1:])
        return torch.cat([read if read.ndim == 3 else read.unsqueeze(1), early.mean(1, keepdim=True)], 1)

    def _tokens(self, inputs: Tensor) -> Tokens:
        """Images (B, 3, H, W), or the stored tokens of their lower blocks (B, T, D) -> tokens."""
        return self.backbone(inputs) if inputs.ndim == 4 else self.backbone.upper(inputs, self.size)

    def classify(self, read: Tensor, mask: Tensor | None = None) -> Output:
        """The result of ``read`` -> output; ``mask`` (B, P) replaces the learned one, if given."""
        context = read[:, -1].detach() if self.context else None  # (B, D)
        if self.context:
            read = read[:, :-1] if self.pool in ("patchgen", *PAIRED) else read[:, 0]
        if self.select is None:
            features = self.drop(read.flatten(1))
            return Output(self.head(features), features, context=context, halves=self._halves(features))
        cls = read[:, :1] if self.pool == "patchgen-cls" else None  # (B, 1, D)
        out = self.select(read if cls is None else read[:, 1:], mask=mask)
        selected, complementary = out.selected, out.complementary
        if cls is not None:
            selected, complementary = (torch.cat([z, cls.flatten(1)], 1) for z in (selected, complementary))
        rest = nn.functional.linear(complementary.detach(), self.head.weight.detach(), self.head.bias.detach())
        z = self.drop(selected)
        return Output(
            self.head(z), z, out.mask, rest, context=context, complementary=complementary, halves=self._halves(z)
        )

    def _halves(self, features: Tensor) -> tuple[Tensor, Tensor] | None:
        """The logits of each of the two vectors that the head reads; their sum counts the bias twice."""
        if self.pool not in PAIRED or not isinstance(self.head, nn.Linear):
            return None
        (first, second), weights = features.chunk(2, 1), self.head.weight.chunk(2, 1)
        bias, linear = self.head.bias, nn.functional.linear
        return linear(first, weights[0], bias), linear(second, weights[1], bias)

    def forward(self, inputs: Tensor, mask: Tensor | None = None) -> Output:
        """Images (four dimensions), or what is cached of them: the tokens of ``reads_hidden``, else their ``read``."""
        if isinstance(self.select, Selector):
            (_, cls, _), own, shown, early = self.select(self.backbone, inputs, mask)
            context = early.detach().mean(1) if self.context else None
            features = self.drop(cls)
            return Output(self.head(features), features, shown, own_mask=own, context=context)
        whole = inputs.ndim == 4 or self.reads_hidden
        return self.classify(self.read(inputs) if whole else inputs, mask)


def trained_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The tensors in a checkpoint, by name: trainable parameters, the level of a selection, ``Saved``."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    places = [f"{name}." for name, module in model.named_modules() if isinstance(module, Saved)]
    return trained | {
        name: buffer
        for name, buffer in model.named_buffers()
        if name.endswith("select.level") or any(name.startswith(place) for place in places)
    }
