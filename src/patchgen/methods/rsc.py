"""RSC: mute the feature dimensions that the head relies on most.

For each image, the share `rsc_features` of dimensions with the largest gradient of the target logit (the head's weight)
is set to 0, but only in the share `rsc_samples` of images whose target probability drops most. The resulting logits
replace the original ones in all terms, also in those of a method it is added to (L_sim still sees z+ unmuted). Images
without a label use their arg-max as their class.

Unlike in DomainBed's code, shares are rounded to whole numbers of dimensions and images, not percentiles, and the drop
is measured without dropout. Each device ranks the images of its part of the batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchgen.data.loaders import Batch
from patchgen.methods.method import SHARE, Method, require_linear_head
from patchgen.model.classifier import Classifier, Output
from patchgen.model.losses import pseudo_labels


class Rsc(Method):
    summary = "RSC: mutes the feature dimensions that a decision relies on most"
    reference = "Huang et al., Self-Challenging Improves Cross-Domain Generalization, ECCV 2020"
    addable = True
    defaults = {"rsc_features": 0.3333, "rsc_samples": 0.3333}
    bounds = {"rsc_features": SHARE, "rsc_samples": SHARE}

    def setup(self, model: Classifier) -> None:
        super().setup(model)
        require_linear_head(self, model)

    def losses(self, out: Output, batch: Batch) -> dict[str, Tensor]:
        head: Any = self.classifier.head
        target = pseudo_labels(out.logits, batch.label)
        kept = kept_features(out.features, target, head, self.hparams["rsc_features"], self.hparams["rsc_samples"])
        return super().losses(out._replace(logits=head(out.features * kept)), batch)


@torch.no_grad()
def kept_features(
    features: Tensor, target: Tensor, head: nn.Linear, share_features: float, share_samples: float
) -> Tensor:
    """(B, D): 1 for features (B, D) that are kept, 0 for muted ones; ``target`` (B,) are class ids."""
    steepest = head.weight[target].topk(round(share_features * features.shape[1]), 1).indices  # dlogit_y / dx
    kept = torch.ones_like(features).scatter(1, steepest, 0)
    own = target.unsqueeze(1)
    whole, muted = (F.linear(x, head.weight, head.bias).softmax(1).gather(1, own) for x in (features, features * kept))
    hit = (whole - muted).squeeze(1).topk(round(share_samples * len(features))).indices
    result = torch.ones_like(kept)
    result[hit] = kept[hit]
    return result
