"""MTL and RSC: what the head reads in training, and so the logits of all terms, changes.

    mtl   logits = W x + b + W_2 e_d,   e_d <- ema * e_d + (1 - ema) * mean of the batch's features of domain d

The head reads the features together with an embedding of their domain. It is linear, so reading [x, e] shifts the
logits: W and b belong to the model's head, W_2 (initially 0) to the method. The embeddings have no gradient; the moving
averages are bias-corrected, as in Adam, and span the global batch. An unseen domain gets the mean of the sources'
embeddings, so predictions (source validation too) use the bias b + W_2 mean(e). In DomainBed's code the embedding is
overwritten by noise before the head reads it, 0.99 is the weight of the newest batch, and an unseen domain is embedded
by the current batch, as in the paper; here a prediction depends only on its own image.

    rsc   logits = W (x * kept) + b

For each image, the share `rsc_features` of dimensions with the largest gradient of the target logit (the head's weight)
is set to 0, but only in the share `rsc_samples` of images whose target probability drops most. L_sim still sees z+
unmuted. Images without a label use their arg-max as their class. Unlike in DomainBed's code, shares are rounded to
whole numbers of dimensions and images, not percentiles, and the drop is measured without dropout. Each device ranks the
images of its part of the batch.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchgen.data.loaders import Batch
from patchgen.methods.method import BELOW_ONE, SHARE, Method
from patchgen.model.classifier import Classifier, Output, trained_tensors
from patchgen.model.losses import pseudo_labels, sum_over_ranks


class Mtl(Method):
    summary = "MTL: the head also reads the mean feature of the image's domain"
    reference = "Blanchard et al., Domain Generalization by Marginal Transfer Learning, JMLR 2021"
    addable = True
    linear_head = True
    defaults = {"ema": 0.99}
    bounds = {"ema": BELOW_ONE}
    learned = {"shift": ""}
    sums: Tensor  # (K, D) moving sums of the domains' mean features
    mass: Tensor  # () sum of their weights; the embeddings are sums / mass
    ids: Tensor  # (K,)

    def setup(self, model: Classifier) -> None:
        super().setup(model)
        dim = model.backbone.dim
        self.shift = nn.Linear(dim, model.head.out_features, bias=False)  # W_2
        nn.init.zeros_(self.shift.weight)
        self.register_buffer("sums", torch.zeros(len(self.sources), dim))
        self.register_buffer("mass", torch.tensor(0.0))
        self.register_buffer("ids", torch.tensor(self.sources, dtype=torch.long), persistent=False)

    def losses(self, out: Output, batch: Batch) -> dict[str, Tensor]:
        belongs = (batch.domain.unsqueeze(1) == self.ids).float()  # (B, K)
        self._follow(out.features.detach().float(), belongs)
        logits = out.logits + belongs @ self.shift(self.embeddings())
        return super().losses(out._replace(logits=logits), batch)

    def _follow(self, features: Tensor, belongs: Tensor) -> None:
        count = sum_over_ranks(belongs.sum(0)).clamp(min=1)  # (K,)
        mean = sum_over_ranks(belongs.T @ features) / count.unsqueeze(1)  # (K, D)
        self.sums.lerp_(mean, 1 - self.hparams["ema"])
        self.mass.lerp_(torch.ones_like(self.mass), 1 - self.hparams["ema"])

    def embeddings(self) -> Tensor:
        """e: (K, D), in the order of the sources; 0 before the first step."""
        return self.sums / self.mass.clamp(min=1e-12)

    @torch.no_grad()
    def predicting(self, model: Classifier) -> Mapping[str, Tensor] | None:
        tensors: dict[str, Tensor] = dict(trained_tensors(model))
        tensors["head.bias"] = tensors["head.bias"] + self.shift(self.embeddings().mean(0))
        return tensors


class Rsc(Method):
    summary = "RSC: mutes the feature dimensions that a decision relies on most"
    reference = "Huang et al., Self-Challenging Improves Cross-Domain Generalization, ECCV 2020"
    addable = True
    linear_head = True
    defaults = {"rsc_features": 0.3333, "rsc_samples": 0.3333}
    bounds = {"rsc_features": SHARE, "rsc_samples": SHARE}

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
