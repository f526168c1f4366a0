"""RSC: the head must do without the feature dimensions that it leans on most.

For each image, the share `rsc_features` of dimensions with the largest slope of the own class's logit is set to 0. This
is kept for the share `rsc_samples` of images whose probability of the own class falls most by it; the other images stay
whole. What the head says of these features takes the place of the logits in all terms: in CE, and behind a `+` in those
of the other method (PatchGen's z+ is muted like any features; L_sim still sees it whole).

What differs from DomainBed's code: the head is linear, so the slope is its weight and is not differentiated for; shares
are whole numbers of dimensions and images, rounded, not percentiles; the fall is measured without dropout. Images
without a label take their arg-max as their class. The images are ranked over this device's part of the batch, and of it
over a micro-batch under accumulation; DomainBed knows one device, and ranks the whole batch.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchgen.config import Config
from patchgen.data.loaders import Batch
from patchgen.methods.method import Method, require_linear_head
from patchgen.model.classifier import Classifier, Output
from patchgen.model.losses import pseudo_labels


class Rsc(Method):
    summary = "RSC: the feature dimensions that a decision leans on most are muted"
    reference = "Huang et al., Self-Challenging Improves Cross-Domain Generalization, ECCV 2020"
    addable = True
    defaults = {"rsc_features": 0.3333, "rsc_samples": 0.3333}

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        for name in ("rsc_features", "rsc_samples"):
            if not self.hparams[name] <= 1:
                raise ValueError(f"{name} is a share from 0 to 1, not {self.hparams[name]}; the usual one is a third")

    def setup(self, model: Classifier) -> None:
        super().setup(model)
        require_linear_head(self, model)
        self._behind = (model.head,)

    def losses(self, out: Output, batch: Batch) -> dict[str, Tensor]:
        [head] = self._behind
        target = pseudo_labels(out.logits, batch.label)
        kept = kept_features(out.features, target, head, self.hparams["rsc_features"], self.hparams["rsc_samples"])
        return super().losses(out._replace(logits=head(out.features * kept)), batch)


@torch.no_grad()
def kept_features(
    features: Tensor, target: Tensor, head: nn.Linear, share_features: float, share_samples: float
) -> Tensor:
    """1 where a feature stays and 0 where it is muted, (B, D).

    Args:
        features: (B, D).
        target: (B,) class ids.
        head: What reads the features.
        share_features: Of an image's dimensions, those to mute.
        share_samples: Of the images, those to mute them in.
    """
    steepest = head.weight[target].topk(round(share_features * features.shape[1]), 1).indices  # dlogit_y / dx
    kept = torch.ones_like(features).scatter(1, steepest, 0)
    own = target.unsqueeze(1)
    whole, muted = (F.linear(x, head.weight, head.bias).softmax(1).gather(1, own) for x in (features, features * kept))
    hit = (whole - muted).squeeze(1).topk(round(share_samples * len(features))).indices
    result = torch.ones_like(kept)
    result[hit] = kept[hit]
    return result
