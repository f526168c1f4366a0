"""BFMix, our reading: backgrounds and foregrounds are blended separately between domains.

The foreground is the half of the patches that CLS attends to most in the last block (mean over heads, a pass without
gradients). Each image x_i is paired with an image x_j of another domain, with one lambda ~ Beta(blend, blend) per pair
of domains:

    background mix   patches that are background in both are lambda x_i + (1 - lambda) x_j; label y_i
    foreground mix   likewise for foreground in both; labels y_i and y_j by their shares
    main = CE of x_i,  L_background and L_foreground = CE of the mixes

**Our reading**, hence the name `bfmix-like`: we know only the abstract, which describes the attention scores, the
split by rank and both kinds of mixes. The last block, the half, the distribution (`blend` 0.2), the pairs as in
`mixup`, pixels rather than tokens, the labels and equal weights are our choices. For vision transformers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from patchgen.data.augment import send
from patchgen.data.loaders import Batch
from patchgen.methods.domains import by_domain
from patchgen.methods.method import POSITIVE, Method
from patchgen.methods.mixup import MixedBatch, draw_partners, mixed_cross_entropy
from patchgen.model.attention import attention_layers, patch_attention
from patchgen.model.backbone import Backbone
from patchgen.model.classifier import Classifier, Output
from patchgen.model.losses import cross_entropy


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
        self._backbone = (model.backbone,)

    def blend(self, batch: Batch) -> Batch:
        return mix(self._backbone[0], super().blend(batch), self.hparams["blend"])

    def losses(self, out: Output, batch: Batch) -> dict[str, Tensor]:
        if not isinstance(batch, ThreeBatches):
            return super().losses(out, batch)
        clean, background, foreground = out.logits.chunk(3)
        own = out._replace(logits=clean, features=out.features.chunk(3)[0])
        return super().losses(own, batch.clean) | {
            "L_background": cross_entropy(background, batch.clean.label),
            "L_foreground": mixed_cross_entropy(foreground, batch.foreground),
        }


def mix(backbone: Backbone, batch: Batch, alpha: float) -> ThreeBatches:
    """The batch followed by both kinds of mixes; uses torch's default generator."""
    partner, share = draw_partners(by_domain(batch, "cpu"), alpha)
    partner, share = send(partner, batch.image.device), send(share.to(batch.image.dtype), batch.image.device)
    front = foreground(patch_attention(backbone, batch.image))  # (B, P)
    both = [blend(batch.image, partner, share, part & part[partner], backbone.patch_size) for part in (~front, front)]
    labels = torch.stack([batch.label, batch.label[partner]])
    mixed = MixedBatch(both[1], batch.label, batch.domain, batch.index, labels=labels, share=share)
    three = {name: getattr(batch, name).repeat(3) for name in ("label", "domain", "index")}
    return ThreeBatches(image=torch.cat([batch.image, *both]), **three, clean=replace(batch), foreground=mixed)


def foreground(attention: Tensor) -> Tensor:
    """The half of the patches (B, P) with the largest attention."""
    rank = attention.argsort(1, descending=True).argsort(1)
    return rank < attention.shape[1] // 2


def blend(images: Tensor, partner: Tensor, share: Tensor, patches: Tensor, size: int) -> Tensor:
    """Images (B, 3, H, W), blended as share * own + (1 - share) * partner within the given patches (B, P)."""
    grid = images.shape[2] // size, images.shape[3] // size
    inside = patches.unflatten(1, grid).repeat_interleave(size, 1).repeat_interleave(size, 2).unsqueeze(1)
    weight = share.view(-1, 1, 1, 1)
    return torch.where(inside, weight * images + (1 - weight) * images[partner], images)
