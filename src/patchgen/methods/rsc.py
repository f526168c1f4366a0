"""RSC: mute the feature dimensions that the head relies on most.

For each image, the share `rsc_features` of dimensions with the largest gradient of the target logit is set to 0. This
is applied to the share `rsc_samples` of images whose target probability drops most; the other images are unchanged. The
resulting logits replace the original ones in all terms: in CE, and in those of a method it is added to (PatchGen's z+
is muted like any features; L_sim still sees it unmuted).

Differences from DomainBed's code: the head is linear, so its weight is the gradient; shares are rounded to whole
numbers of dimensions and images, not percentiles; the drop is measured without dropout. Images without a label use
their arg-max as their class. Images are ranked within this device's part of the batch, or within a micro-batch with
gradient accumulation; DomainBed supports one device, and ranks the whole batch.
"""

from __future__ import annotations

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
    """(B, D): 1 for features that are kept, 0 for muted ones.

    Args:
        features: (B, D).
        target: (B,) class ids.
        head: The head that reads the features.
        share_features: Share of an image's dimensions to mute.
        share_samples: Share of the images in which to mute them.
    """
    steepest = head.weight[target].topk(round(share_features * features.shape[1]), 1).indices  # dlogit_y / dx
    kept = torch.ones_like(features).scatter(1, steepest, 0)
    own = target.unsqueeze(1)
    whole, muted = (F.linear(x, head.weight, head.bias).softmax(1).gather(1, own) for x in (features, features * kept))
    hit = (whole - muted).squeeze(1).topk(round(share_samples * len(features))).indices
    result = torch.ones_like(kept)
    result[hit] = kept[hit]
    return result
