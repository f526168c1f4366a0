"""Mixup between domains: images of two source domains are blended, and so are their labels.

The source domains are arranged in a random circle; each image x_i of a domain is paired with an image x_j of the next,
with one lambda ~ Beta(mixup_alpha, mixup_alpha) for all images of that pair of domains:

    x    = lambda x_i + (1 - lambda) x_j
    main = mean of lambda CE(x, y_i) + (1 - lambda) CE(x, y_j)

Terms of other methods (`patchgen+mixup`) see the blended images, with the label of the larger share and the domain of
x_i: a term is one number for the whole batch, so it cannot be weighted per pair. With the default 0.2, lambda is mostly
near 0 or 1, and the difference is small.

Differences from DomainBed: all pairs are processed in one pass; if an image has no label, only its partner's share
counts. Each device blends its own part of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from patchgen.config import Config
from patchgen.data.augment import send
from patchgen.data.loaders import Batch
from patchgen.methods.domains import by_domain
from patchgen.methods.method import POSITIVE, Method
from patchgen.model.classifier import Output
from patchgen.model.losses import mean_over_ranks


@dataclass(frozen=True, kw_only=True)
class MixedBatch(Batch):
    """Blended images; ``label`` is that of the larger share."""

    labels: Tensor  # (2, B)  of x_i and x_j
    share: Tensor  # (B,)  lambda


class Mixup(Method):
    summary = "Mixup: images of different domains are blended, with their labels"
    reference = "Yan et al., Improve Unsupervised Domain Adaptation with Mixup Training, 2020"
    addable = True
    replaces_main = True
    defaults = {"mixup_alpha": 0.2}
    bounds = {"mixup_alpha": POSITIVE}
    each_pass = "blends images"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if self.mask == "true":
            raise ValueError(f"method {config.method!r}: a blended image has no true mask; mixup needs a learned one")

    def blend(self, batch: Batch) -> Batch:
        return mix(super().blend(batch), self.hparams["mixup_alpha"])

    def losses(self, out: Output, batch: Batch) -> dict[str, Tensor]:
        found = super().losses(out, batch)
        return found | {"main": mixed_cross_entropy(out.logits, batch)} if isinstance(batch, MixedBatch) else found


def mix(batch: Batch, alpha: float) -> MixedBatch:
    """Blend every domain with its neighbour in a random circle; uses torch's default generator."""
    partner, share = draw_partners(by_domain(batch, "cpu"), alpha)
    partner, share = send(partner, batch.image.device), send(share.to(batch.image.dtype), batch.image.device)
    of_image = share.view(-1, *[1] * (batch.image.ndim - 1))
    image = of_image * batch.image + (1 - of_image) * batch.image[partner]
    labels = torch.stack([batch.label, batch.label[partner]])
    label = torch.where(share >= 0.5, labels[0], labels[1])
    return MixedBatch(image, label, batch.domain, batch.index, None, batch.num_domains, labels=labels, share=share)


def draw_partners(groups: list[Tensor], alpha: float) -> tuple[Tensor, Tensor]:
    """For rows in equal groups: the row (B,) that each is blended with, and its own share (B,)."""
    order = torch.randperm(len(groups)).tolist()
    shares = torch.distributions.Beta(alpha, alpha).sample((len(groups),))  # one per pair
    partner = torch.empty_like(torch.cat(groups))
    share = torch.empty(len(partner))
    for own, other, value in zip(order, [*order[1:], order[0]], shares, strict=True):
        partner[groups[own]] = groups[other]
        share[groups[own]] = value
    return partner, share


def mixed_cross_entropy(logits: Tensor, batch: MixedBatch) -> Tensor:
    """Mean cross-entropy with both labels, weighted by their shares, over the global batch."""
    shares = torch.stack([batch.share, 1 - batch.share])  # (2, B)
    each = [F.cross_entropy(logits.float(), label, ignore_index=-1, reduction="none") for label in batch.labels]
    return mean_over_ranks((shares * torch.stack(each)).sum(), (shares * (batch.labels >= 0)).sum())
