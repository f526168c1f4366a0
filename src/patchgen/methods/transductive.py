"""ARM and DPL: a small network summarises the images of one domain, and the classifier reads this context.

In training, the support of an image is the part of its batch from the same domain; **in prediction it is the batch
being predicted**, so a different batch size or order can change a prediction.

    arm   c = mean of context(x_i) over the support,   CE of the classifier, which reads each image together with c
    dpl   D_e  = mean over the support of MLP(v),  v the image vector of CLIP before normalisation
          t_ce = sentence [start] D_e1 ... D_en <class> . [end]
          main = mean over the labelled images of CE of s <f, t_ce>,  e the image's own domain

In ARM, a layer that starts at zero adds c: to the image in convolutional backbones, in a ViT (ours) to every patch
embedding. DPL's objective is the paper's: the release draws every image to the sentences of the first domain.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchgen.data.loaders import Batch
from patchgen.methods.clip import Sentences
from patchgen.methods.method import COUNT, Method, Term, by_domain
from patchgen.model.backbone import Backbone
from patchgen.model.classifier import Classifier, Output
from patchgen.model.clip import ClipText

WIDTH = 16  # of ARM's network
FIRST_BIAS, DROPOUT = 0.01, 0.1  # of DPL's


class Transductive(Method):
    """A part of the model reads the images of each domain together in a training pass, else the whole batch."""

    whole_batch = True

    def reader(self) -> Any:
        raise NotImplementedError

    def forward(self, network: nn.Module, batch: Batch, mask: Tensor | None = None) -> Output:
        part = self.reader()
        part.groups = by_domain(batch)
        try:
            return super().forward(network, batch, mask)
        finally:
            part.groups = None


def by_group(groups: list[Tensor] | None, act: Callable[[Any], Tensor]) -> Tensor:
    """``act`` on the positions of each group, as one tensor in the order of the batch; None is a single group."""
    if groups is None:
        return act(slice(None))
    return torch.cat([act(rows) for rows in groups])[torch.cat(groups).argsort()]


class Arm(Transductive, Term):
    summary = "ARM: the classifier reads a context of the images it predicts together (transductive)"
    reference = "Zhang et al., Adaptive Risk Minimization: Learning to Adapt to Domain Shift, NeurIPS 2021"
    needs = ("transductive",)

    def extend(self, model: Classifier) -> None:
        super().extend(model)
        model.backbone.context = Context(model.backbone)

    def reader(self) -> Any:
        return self.classifier.backbone.context


class Context(nn.Module):
    """Hooked to the backbone's first layer, whose input (a map) or output (a vector) gets the context added."""

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        self.groups: list[Tensor] | None = None
        self.into: nn.Module
        if backbone.family.convolutional:
            self.look = nn.Sequential(
                nn.Conv2d(3, WIDTH, 5, padding=2), nn.ReLU(),
                nn.Conv2d(WIDTH, WIDTH, 5, padding=2), nn.ReLU(),
                nn.Conv2d(WIDTH, 1, 5, padding=2),
            )  # fmt: skip
            self.into = nn.Conv2d(1, 3, 1, bias=False)
            backbone.model.get_submodule("embedder").register_forward_pre_hook(self.add_map)
        else:
            self.look = nn.Sequential(
                nn.Conv2d(3, WIDTH, 5, stride=4, padding=2), nn.ReLU(), nn.Conv2d(WIDTH, WIDTH, 5, padding=2), nn.ReLU()
            )
            self.into = nn.Linear(WIDTH, backbone.dim, bias=False)
            stem = next(module for module in backbone.model.modules() if isinstance(module, nn.Conv2d))
            stem.register_forward_hook(self.add_vector)
        nn.init.zeros_(self.into.weight)  # type: ignore[arg-type]

    def average(self, said: Tensor) -> Tensor:
        """Replace each image's context (B, ...) by the mean over its support."""
        return by_group(self.groups, lambda rows: said[rows].mean(0, keepdim=True).expand_as(said[rows]))

    def add_map(self, stem: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """The stem's inputs, with the context added to the images (B, 3, H, W)."""
        images, *rest = inputs
        return (images + self.into(self.average(self.look(images))), *rest)

    def add_vector(self, stem: nn.Module, inputs: tuple[Any, ...], patches: Tensor) -> Tensor:
        """Patch embeddings (B, D, h, w) with the context of their images added."""
        said = self.look(inputs[0]).mean((2, 3))  # (B, WIDTH)
        return patches + self.into(self.average(said))[:, :, None, None]


class Dpl(Transductive, Sentences):
    summary = "DPL: a network writes each domain's prompt from a batch of its images (transductive)"
    reference = "Zhang et al., Domain Prompt Learning for Efficiently Adapting CLIP to Unseen Domains, 2023"
    needs = ("text", "transductive")
    optimizer = "sgd"
    momentum = 0.1
    defaults = {"context": 16, "width": 512}
    bounds = {"context": COUNT, "width": COUNT}

    def head(self, model: Classifier, text: ClipText, names: list[str]) -> nn.Module:
        return PromptHead(text, names, int(self.hparams["context"]), int(self.hparams["width"]))

    def reader(self) -> Any:
        return self.classifier.head


class PromptHead(nn.Module):
    """Features (B, D) -> logits (B, C) by sentences with ``count`` vectors, generated for the image's group."""

    def __init__(self, text: ClipText, names: list[str], count: int, width: int) -> None:
        super().__init__()
        self.in_features, self.out_features = text.projection.in_features, len(names)
        self.tower, self.projection, self.count = text.tower, text.projection.requires_grad_(False), count
        self.scale: Tensor
        self.ids: Tensor
        self.register_buffer("scale", text.scale.detach().clone(), persistent=False)
        ids = text.tower.tokens([f"{name}." for name in names], room=count)
        self.register_buffer("ids", ids, persistent=False)
        sizes = (text.projection.out_features, width, width, count * text.tower.dim)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(sizes, sizes[1:], strict=False))
        for layer in self.layers:
            nn.init.xavier_uniform_(layer.weight)  # type: ignore[arg-type]
            nn.init.constant_(layer.bias, FIRST_BIAS)  # type: ignore[arg-type]
        self.groups: list[Tensor] | None = None

    def forward(self, features: Tensor) -> Tensor:
        with torch.autocast(features.device.type, enabled=False):
            image = self.projection(features.float())  # (B, E)
            written, unit = self.write(image), F.normalize(image, dim=-1)
            return by_group(self.groups, lambda rows: self.scale.exp() * unit[rows] @ self.sentences(written[rows]).T)

    def write(self, image: Tensor) -> Tensor:
        """Image vectors (B, E) -> one prompt per image, (B, n x dim)."""
        drops = self.training and torch.is_grad_enabled()
        *inner, last = self.layers
        for layer in inner:
            image = F.relu(F.dropout(layer(image), DROPOUT, drops))
        written: Tensor = last(image)
        return written

    def sentences(self, written: Tensor) -> Tensor:
        """The prompts of a group's images (B, n x dim) -> the unit sentences of the classes (C, E)."""
        vectors: Tensor = written.mean(0).view(self.count, -1)
        tower: Any = self.tower
        return tower(self.ids, vectors)
