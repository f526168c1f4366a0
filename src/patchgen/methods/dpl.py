"""DPL: a small network writes the prompt of a domain from a batch of its images.

    D_e  = mean over the images of domain e of MLP(v),  v the image vector before normalisation
    t_ce = sentence [start] D_e1 ... D_en <class> . [end]
    main = mean over the labelled images of CE of s <f, t_ce>,  e the image's own domain

In training the mean is over the images of the domain in the batch; **in prediction it is over the batch being
predicted**: the method is transductive, like `arm`. CLIP stays frozen; the network has `width` hidden units and
`context` x 512 outputs, with dropout 0.1. The default optimiser is SGD with momentum 0.1.

The objective is the paper's. The release concatenates the sentences of all domains as K x C classes but keeps the
labels 0 ... C - 1, so that every image is drawn to the sentences of the first domain.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchgen.data.loaders import Batch
from patchgen.methods.clip import Sentences
from patchgen.methods.method import COUNT, by_domain
from patchgen.model.classifier import Classifier, Output
from patchgen.model.clip import ClipText

FIRST_BIAS = 0.01
DROPOUT = 0.1


class Dpl(Sentences):
    summary = "DPL: a network writes each domain's prompt from a batch of its images (transductive)"
    reference = "Zhang et al., Domain Prompt Learning for Efficiently Adapting CLIP to Unseen Domains, 2023"
    needs = ("text", "transductive")
    optimizer = "sgd"
    momentum = 0.1
    whole_batch = True
    defaults = {"context": 16, "width": 512}
    bounds = {"context": COUNT, "width": COUNT}

    def head(self, model: Classifier, text: ClipText, names: list[str]) -> nn.Module:
        return PromptHead(text, names, int(self.hparams["context"]), int(self.hparams["width"]))

    def forward(self, network: nn.Module, batch: Batch, mask: Tensor | None = None) -> Output:
        head: Any = self.classifier.head
        head.groups = by_domain(batch)
        try:
            return super().forward(network, batch, mask)
        finally:
            head.groups = None


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
        self.groups: list[Tensor] | None = None  # positions of each domain's images; None: a single domain

    def forward(self, features: Tensor) -> Tensor:
        with torch.autocast(features.device.type, enabled=False):
            image = self.projection(features.float())  # (B, E)
            written, unit = self.write(image), F.normalize(image, dim=-1)
            if self.groups is None:
                return self.scale.exp() * unit @ self.sentences(written).T
            logits = [self.scale.exp() * unit[rows] @ self.sentences(written[rows]).T for rows in self.groups]
            return torch.cat(logits)[torch.cat(self.groups).argsort()]

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
