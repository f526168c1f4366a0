"""MTL: the head reads the features together with an embedding of their domain, its mean feature.

    logits = W x + b + W_2 e_d,   e_d <- ema * e_d + (1 - ema) * mean of the batch's features of domain d

The head is linear, so reading [x, e] shifts the logits: W and b belong to the model's head, W_2 (initially 0) to the
method. The embeddings have no gradient; the moving averages are bias-corrected, as in Adam. An unseen domain gets the
mean of the sources' embeddings, so predictions (source validation too) use the bias b + W_2 mean(e).

Differences from DomainBed's code: there the embedding is overwritten by noise before the head reads it, 0.99 is the
weight of the newest batch, and an unseen domain is embedded by the current batch, as in the paper; here a prediction
depends only on its own image. On several devices the means span the global batch.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from patchgen.data.loaders import Batch
from patchgen.methods.method import BELOW_ONE, Method, require_linear_head
from patchgen.model.classifier import Classifier, Output, trained_tensors
from patchgen.model.losses import sum_over_ranks


class Mtl(Method):
    summary = "MTL: the head also reads the mean feature of the image's domain"
    reference = "Blanchard et al., Domain Generalization by Marginal Transfer Learning, JMLR 2021"
    addable = True
    defaults = {"ema": 0.99}
    bounds = {"ema": BELOW_ONE}
    learned = {"shift": ""}
    sums: Tensor  # (K, D) moving sums of the domains' mean features
    mass: Tensor  # () sum of their weights; the embeddings are sums / mass
    ids: Tensor  # (K,)

    def setup(self, model: Classifier) -> None:
        super().setup(model)
        require_linear_head(self, model)
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
