"""Domain invariance without labels: the two unconditional terms in L-Reg's code, whose weights the paper sets to 0.

    domain-moments    L_moments = moments * s * mean over domains and entries of (C_e - C)^2,   C_e = X_e^T X_e / B_e
    domain-gaussian   L_gaussian = gaussian * 1/2 mean[ (c - m)^2 / v + log v ],   c = [x, x] without gradient

X are the features, divided by the batch's Frobenius norm and **not centred**; C is the mean of the C_e; s scales the
penalty's largest slope to that of the cross-entropy, as in `gmdg`. m is the mean of the domains' means of [x, x], v a
learned variance. Only the first affects the features: with equally many samples per domain, the gradient of the second
with respect to the features is exactly zero, as for `gmdg`'s L_domain, and it trains only v.

These are L-Reg's `shift` with `use_condition1` and `d_shift` with `use_condition2` set to false. Differences: the
maxima in s are of absolute values, and domains may have different numbers of samples.
"""

from __future__ import annotations

from torch import Tensor, nn

from patchgen.config import Config
from patchgen.data.loaders import Batch
from patchgen.methods.gmdg import cross_entropy_slope, mean_of_domains, scaled_penalty
from patchgen.methods.method import Method, refuse_fixed_features, require_linear_head
from patchgen.methods.miro import ChannelVariance, gaussian_nll
from patchgen.model.classifier import Classifier, Output
from patchgen.model.losses import gather_over_ranks

REFERENCE = "Tan et al., Interpret Your Decision: Logical Reasoning Regularization, NeurIPS 2024 (code)"


class DomainMoments(Method):
    summary = "equal second moments of the features in all domains, without labels"
    reference = REFERENCE
    addable = True
    defaults = {"moments": 0.1}

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        refuse_fixed_features(self)

    def setup(self, model: Classifier) -> None:
        super().setup(model)
        require_linear_head(self, model)
        self._linear = (model.head,)

    def losses(self, out: Output, batch: Batch) -> dict[str, Tensor]:
        features, domain = gather_over_ranks(out.features.float()), gather_over_ranks(batch.domain)
        steepest = cross_entropy_slope(out.logits, batch.label, self._linear[0].weight).abs().max()
        penalty = scaled_penalty(lambda x: moment_distance(x, domain), features, steepest)
        return super().losses(out, batch) | {"L_moments": self.hparams["moments"] * penalty}


class DomainGaussian(Method):
    summary = "one Gaussian for the features of all domains, without labels (trains only its variance)"
    reference = REFERENCE
    addable = True
    defaults = {"gaussian": 0.1, "gaussian_lr_mult": 10.0}

    def setup(self, model: Classifier) -> None:
        super().setup(model)
        self.spread = ChannelVariance(2 * model.backbone.dim)

    def rates(self) -> list[tuple[nn.Module, float]]:
        return [*super().rates(), (self.spread, self.config.lr * self.hparams["gaussian_lr_mult"])]

    def losses(self, out: Output, batch: Batch) -> dict[str, Tensor]:
        twice = gather_over_ranks(out.features.float()).repeat(1, 2)  # (B, 2 D)
        mean = mean_of_domains(twice, gather_over_ranks(batch.domain))
        term = gaussian_nll(twice.detach(), mean, self.spread())
        return super().losses(out, batch) | {"L_gaussian": self.hparams["gaussian"] * term}


def moment_distance(features: Tensor, domain: Tensor) -> Tensor:
    """Mean squared distance of the domains' second moments (D, D) from their mean, for features (B, D).

    <C_e, C_f> is the sum of (x_i x_j)^2 / (B_e B_f) over i in e and j in f, so no D x D matrix is needed.
    """
    x = features / (features.norm() + 1e-12)
    same = (domain.unsqueeze(1) == domain).to(x.dtype)  # (B, B)
    weight = 1 / same.sum(1)  # (B,), sum K, the number of domains
    count = weight.sum()
    products = (x @ x.T).square() * weight * weight.unsqueeze(1)
    return (products * (same - 1 / count)).sum() / count / x.shape[1] ** 2
