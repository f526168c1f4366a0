"""Images of two source domains are blended: whole (Mixup), or backgrounds and foregrounds separately (BFMix).

The source domains are arranged in a random circle; each image x_i of a domain is paired with an image x_j of the next,
with one lambda ~ Beta(a, a) for all images of that pair of domains:

    mixup       x    = lambda x_i + (1 - lambda) x_j
                main = mean of lambda CE(x, y_i) + (1 - lambda) CE(x, y_j),     of those that have a label
    bfmix-like  main = CE of x_i,   L_background and L_foreground = CE of the mixes, which are added to the batch
                background mix   patches that are background in both are lambda x_i + (1 - lambda) x_j; label y_i
                foreground mix   likewise for foreground in both; labels y_i and y_j by their shares

Terms of other methods (`patchgen+mixup`) see the label of the larger share. The foreground is the half of the patches
that CLS attends to most in the last block. `bfmix-like` is **our reading** of an abstract that describes the attention
scores, the split by rank and both kinds of mixes; all else is ours.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from patchgen.config import Config
from patchgen.data.augment import send
from patchgen.data.loaders import Batch
from patchgen.methods.method import POSITIVE, Method, Term, by_domain
from patchgen.model.backbone import Backbone
from patchgen.model.classifier import Classifier, Output
from patchgen.model.losses import cross_entropy, mean_over_ranks
from patchgen.model.tuning import attention_layers, patch_attention


@dataclass(frozen=True, kw_only=True)
class MixedBatch(Batch):
    """Blended images; ``label`` is that of the larger share."""

    labels: Tensor  # (2, B)  of x_i and x_j
    share: Tensor  # (B,)  lambda


class Mixup(Term):
    summary = "Mixup: images of different domains are blended, with their labels"
    reference = "Yan et al., Improve Unsupervised Domain Adaptation with Mixup Training, 2020"
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
        terms = super().losses(out, batch)
        return terms | {"main": mixed_cross_entropy(out.logits, batch)} if isinstance(batch, MixedBatch) else terms


def mix(batch: Batch, alpha: float) -> MixedBatch:
    """Blend every domain with its neighbour in a random circle; uses torch's default generator."""
    partner, share = draw_partners(batch, alpha)
    of_image = share.view(-1, *[1] * (batch.image.ndim - 1))
    image = of_image * batch.image + (1 - of_image) * batch.image[partner]
    labels = torch.stack([batch.label, batch.label[partner]])
    label = torch.where(share >= 0.5, labels[0], labels[1])
    return MixedBatch(image, label, batch.domain, batch.index, None, batch.num_domains, labels=labels, share=share)


def draw_partners(batch: Batch, alpha: float) -> tuple[Tensor, Tensor]:
    """The row (B,) that each is blended with, and its own share (B,); the domains have equally many rows."""
    groups = by_domain(batch, "cpu")
    order = torch.randperm(len(groups)).tolist()
    shares = torch.distributions.Beta(alpha, alpha).sample((len(groups),))  # one per pair
    partner = torch.empty_like(torch.cat(groups))
    share = torch.empty(len(partner))
    for own, other, value in zip(order, [*order[1:], order[0]], shares, strict=True):
        partner[groups[own]] = groups[other]
        share[groups[own]] = value
    return send(partner, batch.image.device), send(share.to(batch.image.dtype), batch.image.device)


def mixed_cross_entropy(logits: Tensor, batch: MixedBatch) -> Tensor:
    """Mean cross-entropy with both labels, weighted by their shares, over the global batch."""
    shares = torch.stack([batch.share, 1 - batch.share])  # (2, B)
    each = [F.cross_entropy(logits.float(), label, ignore_index=-1, reduction="none") for label in batch.labels]
    return mean_over_ranks((shares * torch.stack(each)).sum(), (shares * (batch.labels >= 0)).sum())


# Backgrounds and foregrounds


@dataclass(frozen=True, kw_only=True)
class ThreeBatches(Batch):
    """``image`` (3B, ...): the images, their background mixes, their foreground mixes."""

    clean: Batch
    foreground: MixedBatch


class BfMixLike(Method):
    summary = "BFMix, our reading: backgrounds and foregrounds blended between domains, each on its own"
    reference = "Zhang et al., BFMix, ICME 2024 (abstract)"
    compared = False
    defaults = {"blend": 0.2}
    bounds = {"blend": POSITIVE}
    each_pass = "blends images"

    def setup(self, model: Classifier) -> None:
        super().setup(model)
        attention_layers(model.backbone)  # raises before the first step if there is no attention

    def blend(self, batch: Batch) -> Batch:
        return mix_parts(self.classifier.backbone, super().blend(batch), self.hparams["blend"])

    def losses(self, out: Output, batch: Batch) -> dict[str, Tensor]:
        if not isinstance(batch, ThreeBatches):
            return super().losses(out, batch)
        clean, background, foreground = out.logits.chunk(3)
        own = out._replace(logits=clean, features=out.features.chunk(3)[0])
        return super().losses(own, batch.clean) | {
            "L_background": cross_entropy(background, batch.clean.label),
            "L_foreground": mixed_cross_entropy(foreground, batch.foreground),
        }


def mix_parts(backbone: Backbone, batch: Batch, alpha: float) -> ThreeBatches:
    """The batch followed by both kinds of mixes; uses torch's default generator."""
    partner, share = draw_partners(batch, alpha)
    front = foreground(patch_attention(backbone, batch.image))  # (B, P)
    both = [
        blend_patches(batch.image, partner, share, part & part[partner], backbone.patch_size)
        for part in (~front, front)
    ]
    labels = torch.stack([batch.label, batch.label[partner]])
    mixed = MixedBatch(both[1], batch.label, batch.domain, batch.index, labels=labels, share=share)
    three = {name: getattr(batch, name).repeat(3) for name in ("label", "domain", "index")}
    return ThreeBatches(image=torch.cat([batch.image, *both]), **three, clean=replace(batch), foreground=mixed)


def foreground(attention: Tensor) -> Tensor:
    """The half of the patches (B, P) with the largest attention."""
    rank = attention.argsort(1, descending=True).argsort(1)
    return rank < attention.shape[1] // 2


def blend_patches(images: Tensor, partner: Tensor, share: Tensor, patches: Tensor, size: int) -> Tensor:
    """Images (B, 3, H, W), blended as share * own + (1 - share) * partner within the given patches (B, P)."""
    grid = images.shape[2] // size, images.shape[3] // size
    inside = patches.unflatten(1, grid).repeat_interleave(size, 1).repeat_interleave(size, 2).unsqueeze(1)
    weight = share.view(-1, 1, 1, 1)
    return torch.where(inside, weight * images + (1 - weight) * images[partner], images)
