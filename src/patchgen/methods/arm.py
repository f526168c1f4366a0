"""ARM: a small network summarises several images of one domain, and the classifier reads this context.

    c = mean of context(x_i) over the support, the images of one domain that are predicted together
    CE of the classifier, which reads each of these images together with c

In training, the support of an image is the part of its batch from the same domain; **in prediction it is the batch
being predicted**. The method is transductive: a different batch size or order can change a prediction.

So that the first step starts from the pretrained network, a layer that is initially zero adds c: in convolutional
backbones c is a map (1, H, W), added to the image (the release appends it as a fourth input channel, which a pretrained
stem does not have); in a ViT c is a vector, added to every patch embedding (this form is ours). Unlike in the release
there are 16 channels, not 64, and no BatchNorm, whose statistics would be a second context. The context network is part
of the backbone, uses its learning rate in every tuning mode, and is saved.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from patchgen.data.loaders import Batch
from patchgen.methods.method import Method, by_domain
from patchgen.model.backbone import Backbone
from patchgen.model.classifier import Classifier, Output

WIDTH = 16


class Arm(Method):
    summary = "ARM: the classifier reads a context of the images it predicts together (transductive)"
    reference = "Zhang et al., Adaptive Risk Minimization: Learning to Adapt to Domain Shift, NeurIPS 2021"
    needs = ("transductive",)
    addable = True
    whole_batch = True

    def extend(self, model: Classifier) -> None:
        super().extend(model)
        model.backbone.context = Context(model.backbone)

    def forward(self, network: nn.Module, batch: Batch, mask: Tensor | None = None) -> Output:
        context: Any = self.classifier.backbone.context
        context.groups = by_domain(batch)
        try:
            return super().forward(network, batch, mask)
        finally:
            context.groups = None


class Context(nn.Module):
    """Hooked to the backbone's first layer, whose input (a map) or output (a vector) gets the context added."""

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        # positions of the images that form a support; None: the whole batch
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
        if self.groups is None:
            return said.mean(0, keepdim=True).expand_as(said)
        means = [said[rows].mean(0, keepdim=True).expand_as(said[rows]) for rows in self.groups]
        return torch.cat(means)[torch.cat(self.groups).argsort()]

    def add_map(self, stem: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """The stem's inputs, with the context added to the images (B, 3, H, W)."""
        images, *rest = inputs
        return (images + self.into(self.average(self.look(images))), *rest)

    def add_vector(self, stem: nn.Module, inputs: tuple[Any, ...], patches: Tensor) -> Tensor:
        """Patch embeddings (B, D, h, w) with the context of their images added."""
        said = self.look(inputs[0]).mean((2, 3))  # (B, WIDTH)
        return patches + self.into(self.average(said))[:, :, None, None]
