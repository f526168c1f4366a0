"""CLIPCEIL++, our reading: an adapter over several depths of CLIP keeps what separates classes, not domains.

    z    = p_L + MLP(transformer layer over p_1 ... p_L),    p_l the projected CLS token after block l
    main = CE of s cos(z, t_c),    t_c the mean of eighty sentences of class c
    L_channel   = channel * sum_j (Var over domains of mu_dj - Var over classes of mu_cj),    mu means of unit z
    L_direction = direction * mean of 1 - cos(z_i - z_k, t_yi - t_yk) over pairs that differ in class and domain

The whole image tower is tuned ("++"). There is no released code, and we had only the abstract and the captions: known
are taps at several depths, one transformer layer and a projector, frozen sentences from eighty templates and the three
losses. Ours are the taps (the last block of each quarter), the residual form with an MLP that is initially 0, width and
heads, the difference of variances over unit vectors, the pooling of templates, and the weights 1, 1, 1.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchgen.data.loaders import Batch
from patchgen.methods.clip import Sentences
from patchgen.methods.method import take
from patchgen.methods.miro import tap_modules
from patchgen.model.backbone import Backbone
from patchgen.model.classifier import Classifier, Output, Saved
from patchgen.model.clip import IMAGENET, ClipText, sentences
from patchgen.model.generic import on_tensor
from patchgen.model.losses import gather_over_ranks

HEADS = 8


class ClipCeil(Sentences):
    summary = "CLIPCEIL++, our reading: an adapter over depths of CLIP with channel and direction terms"
    reference = "Yu et al., CLIPCEIL: Domain Generalization through CLIP via Channel Refinement, NeurIPS 2024"
    tune = "full"
    self_contained = True
    defaults = {"channel": 1.0, "direction": 1.0}

    def head(self, model: Classifier, text: ClipText, names: list[str]) -> nn.Module:
        each = torch.stack([text.tower.read(sentences(template, names)) for template in IMAGENET])  # (80, C, E)
        return FusionHead(model.backbone, text.projection.weight, text.scale, F.normalize(each.mean(0), dim=1))

    def restored(self, model: Classifier, saved: Mapping[str, Tensor]) -> nn.Module:
        return FusionHead(model.backbone, saved["head.weight"], torch.zeros(()), saved["head.constants.vectors"])

    def losses(self, out: Output, batch: Batch) -> dict[str, Tensor]:
        head: Any = self.classifier.head
        image, label, domain = (gather_over_ranks(part) for part in (take(head, "image"), batch.label, batch.domain))
        unit = F.normalize(image, dim=1)
        channel = group_variance(unit, domain) - group_variance(unit[label >= 0], label[label >= 0])
        return super().losses(out, batch) | {
            "L_channel": self.hparams["channel"] * channel,
            "L_direction": self.hparams["direction"] * direction_loss(image, head.vectors, label, domain),
        }


class FusionHead(nn.Module):
    """Features (B, D) of the last tap, with the outputs of the earlier taps in the same pass -> logits (B, C).

    ``weight`` (E, D) is that of CLIP's image projection, and is trained; ``vectors`` (C, E) are unit sentences.
    """

    def __init__(self, backbone: Backbone, weight: Tensor, scale: Tensor, vectors: Tensor) -> None:
        super().__init__()
        width, self.in_features = weight.shape
        self.out_features = len(vectors)
        self.weight = nn.Parameter(weight.detach().clone())
        self.constants = Saved({"scale": scale, "vectors": vectors})
        heads = max(count for count in range(1, HEADS + 1) if width % count == 0)
        self.fuse = nn.TransformerEncoderLayer(width, heads, 2 * width, 0.0, batch_first=True, norm_first=True)
        self.project = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
        for tensor in self.project[-1].parameters():
            nn.init.zeros_(tensor)
        *earlier, _ = tap_modules(backbone)[1:]
        self._norm = (backbone.model.get_submodule(backbone.family.final_norm),)  # part of the backbone: not registered
        self._taps: dict[int, Tensor] = {}
        self.image: Tensor | None = None  # z (B, E) of the last pass with gradients
        for i, block in enumerate(earlier):
            on_tensor(block, partial(self._note, i))

    def _note(self, tap: int, hidden: Tensor) -> None:
        self._taps[tap] = hidden[:, 0]

    @property
    def vectors(self) -> Tensor:
        """(C, E)"""
        return self.constants["vectors"]

    def forward(self, features: Tensor) -> Tensor:
        taps = [self._norm[0](tap) for _, tap in sorted(self._taps.items())]
        self._taps.clear()
        with torch.autocast(features.device.type, enabled=False):
            depths = torch.stack([*taps, features], 1).float() @ self.weight.T  # (B, L, E)
            image = depths[:, -1] + self.project(self.fuse(depths)[:, -1])
            self.image = image if torch.is_grad_enabled() else None
            return self.constants["scale"].exp() * F.normalize(image, dim=1) @ self.vectors.T


def group_variance(values: Tensor, group: Tensor) -> Tensor:
    """Sum over channels of the variance of the groups' means, for values (B, E) and group ids (B,)."""
    if not len(group):
        return values.sum() * 0
    own = F.one_hot(torch.unique(group, return_inverse=True)[1]).to(values.dtype)  # (B, G)
    means = own.T @ values / own.sum(0).unsqueeze(1)
    return means.var(0, correction=0).sum()


def direction_loss(image: Tensor, sentences: Tensor, label: Tensor, domain: Tensor) -> Tensor:
    """Mean of 1 - cos between differences of images (B, E) and of their sentences, over pairs that differ."""
    pairs = (label.unsqueeze(1) != label) & (domain.unsqueeze(1) != domain) & (label >= 0) & (label >= 0).unsqueeze(1)
    i, k = pairs.triu().nonzero(as_tuple=True)
    if not len(i):
        return image.sum() * 0
    own = sentences[label.clamp(min=0)]
    return (1 - F.cosine_similarity(image[i] - image[k], own[i] - own[k], dim=1)).mean()
