"""mDSDI: one part of the features is domain-invariant, another domain-specific, and the head reads both.

    i = P x, s = Q x,   logits = W [i, s] + b                              (P, Q orthogonal at the start)
    L_invariant  = CE of the domain from i (three layers),   gradient reversed, times `invariant`, for P and x
    L_specific   = specific * CE of the domain from s (one layer)
    L_covariance = covariance * mean square of Cov(i, s)
    L_meta       = meta * mean over source domains d of CE_d at (Q, W, b) moved by one step on the other domains

The inner step of L_meta is a plain gradient step at `--lr`, treated as a constant (first order); the gradient of L_meta
reaches only Q, W and b. P, Q, W and b form the model's head; in `patchgen+mdsdi`, x is z+. On several devices the
covariance spans the global batch, and the inner step uses this device's part.

Differences from the released code:

- It has two backbones, for i and for s; here both are projections of one, which costs no second backbone.
- It squares each image's products i_a s_b before it averages over images, which equals |i|^2 |s|^2 / D^2 and makes both
  short, whatever their covariance. Here the average comes first.
- Its meta step is a second Adam step. Here it is a term of the single step, and `main` takes the role of meta-train.
- Its inner step is the first one of a fresh Adam, as large for tiny gradients: an easy problem was learned and then
  unlearned. Here the step shrinks with the gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from patchgen.data.loaders import Batch
from patchgen.methods.alignment import domain_network, positions, reverse_gradient
from patchgen.methods.method import Method, by_domain, require_linear_head
from patchgen.model.classifier import Classifier, Output
from patchgen.model.losses import cross_entropy, gather_over_ranks


class Mdsdi(Method):
    summary = "mDSDI: a domain-invariant and a domain-specific part of the features, kept apart"
    reference = "Bui et al., Exploiting Domain-Specific Features to Enhance Domain Generalization, NeurIPS 2021"
    addable = True
    defaults = {"invariant": 1.0, "specific": 1.0, "covariance": 1.0, "meta": 1.0}
    learned = {"adversary": "", "recogniser": ""}

    def extend(self, model: Classifier) -> None:
        super().extend(model)
        require_linear_head(self, model)  # any other head would be lost
        model.add_module("head", TwoPartHead(model.backbone.dim, model.head.out_features))

    def setup(self, model: Classifier) -> None:
        super().setup(model)
        self.adversary = domain_network(model.backbone.dim, len(self.sources))
        self.recogniser = nn.Linear(model.backbone.dim, len(self.sources))

    def losses(self, out: Output, batch: Batch) -> dict[str, Tensor]:
        found, hparams = super().losses(out, batch), self.hparams
        head: Any = self.classifier.head
        features, domain = out.features.float(), positions(batch.domain, self.sources)
        invariant, specific = head.invariant(features), head.specific(features)
        told = self.adversary(reverse_gradient(invariant, hparams["invariant"]))
        found["L_invariant"] = F.cross_entropy(told, domain)
        found["L_specific"] = hparams["specific"] * F.cross_entropy(self.recogniser(specific), domain)
        found["L_covariance"] = hparams["covariance"] * squared_covariance(invariant, specific)
        if hparams["meta"]:
            found["L_meta"] = hparams["meta"] * risk_after_a_step(head, features.detach(), batch, self.config.lr)
        return found


class TwoPartHead(nn.Module):
    """Features (B, D) -> logits (B, C) through two projections; `weight` and `bias` are those of the composition."""

    def __init__(self, dim: int, num_classes: int) -> None:
        super().__init__()
        self.in_features, self.out_features = dim, num_classes
        self.invariant, self.specific = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.joint = nn.Linear(2 * dim, num_classes, bias=False)
        self.bias = nn.Parameter(torch.zeros(num_classes))
        for projection in (self.invariant, self.specific):
            nn.init.orthogonal_(projection.weight)  # keeps the norm of the pretrained features

    @property
    def weight(self) -> Tensor:
        """(C, D)"""
        return self.joint.weight @ torch.cat([self.invariant.weight, self.specific.weight])

    def forward(self, features: Tensor) -> Tensor:
        return F.linear(features, self.weight, self.bias)


def squared_covariance(one: Tensor, other: Tensor) -> Tensor:
    """Mean square of the covariances between the columns of two sets (B, D), over the global batch."""
    one, other = gather_over_ranks(one), gather_over_ranks(other)
    return ((one - one.mean(0)).T @ (other - other.mean(0)) / max(len(one) - 1, 1)).square().mean()


def risk_after_a_step(head: TwoPartHead, features: Tensor, batch: Batch, rate: float) -> Tensor:
    """Mean over domains of a domain's CE, with a head that made a gradient step on the others.

    Its invariant projection is not changed; the features (B, D) are without gradient.
    """
    fixed = {"invariant.weight": head.invariant.weight.detach()}
    start = {name: tensor for name, tensor in head.named_parameters() if name not in fixed}
    risks = []
    groups = by_domain(batch)
    for held_out in groups:
        rest = torch.cat([held_out[:0], *(rows for rows in groups if rows is not held_out)])  # none of a single one
        risk = cross_entropy(functional_call(head, start | fixed, features[rest]), batch.label[rest])
        slopes = torch.autograd.grad(risk, list(start.values()))
        moved = {name: tensor - rate * slope for (name, tensor), slope in zip(start.items(), slopes, strict=True)}
        risks.append(cross_entropy(functional_call(head, moved | fixed, features[held_out]), batch.label[held_out]))
    return torch.stack(risks).mean()
