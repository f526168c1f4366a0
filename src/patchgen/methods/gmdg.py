"""GMDG: MIRO, a penalty on the feature covariance explained by the labels, and one Gaussian for all domains.

    L_shift  = shift * s * mean square of C_xy C_yy^+ C_yx,   s = max |dCE/dx| / max |dpenalty/dx|   (detached)
    L_domain = domain * 1/2 mean[ (c - m)^2 / v + log v ],    c = [x, y] without gradient
    L_label  = cross-entropy of the head (detached) on y

x are the features, y embeds the label (a three-layer network fed with the class id in every input, dropout 0.2 always
on), m is the mean of the domains' means of [x, y], v a learned variance. Features and embedding are divided by their
Frobenius norms and centred before the covariances. Samples without a label use their arg-max.

    domain-moments    L_moments = moments * s * mean over domains and entries of (C_e - C)^2,   C_e = X_e^T X_e / B_e
    domain-gaussian   L_gaussian = gaussian * L_domain with c = [x, x]

are L-Reg's `shift` and `d_shift` without `use_condition1` and `use_condition2`, whose weights its paper sets to 0. X is
divided by the batch's Frobenius norm and **not centred**; C is the mean of the C_e.

As in the release, c carries no gradient and m is an average of the same c: with equally many samples per domain, the
gradient of L_domain and L_gaussian in the features is exactly zero, and they train v and nothing else.

Differences from the released code: the embedding is trained in the same step as the features, not before them; maxima
in s are of absolute values; m averages the domains' means, not the i-th samples of all domains; one variance replaces
one per domain, which start equal, get equal gradients, and are only used in their average.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchgen.data.loaders import Batch
from patchgen.methods.method import Method
from patchgen.methods.miro import ChannelVariance, Miro, gaussian_nll
from patchgen.model.classifier import Classifier, Output
from patchgen.model.losses import cross_entropy, gather_over_ranks, pseudo_labels

LREG = "Tan et al., Interpret Your Decision: Logical Reasoning Regularization, NeurIPS 2024 (code)"


class Gmdg(Miro):
    summary = "GMDG: MIRO with label-conditional covariance and domain-invariance terms"
    reference = "Tan et al., Rethinking Multi-domain Generalization with A General Learning Objective, CVPR 2024"
    defaults = {"shift": 0.1, "domain": 0.1}
    learned = {"embedding": "miro_lr_mult", "variance": "miro_lr_mult"}

    def setup(self, model: Classifier) -> None:
        super().setup(model)
        if self._needs_labels:
            self.embedding = LabelEmbedding(model.backbone.dim)
            self.variance = ChannelVariance(2 * model.backbone.dim)

    @property
    def _needs_labels(self) -> bool:
        return bool(self.hparams["shift"] or self.hparams["domain"])

    def losses(self, out: Output, batch: Batch) -> dict[str, Tensor]:
        terms = super().losses(out, batch)
        if not self._needs_labels:
            return terms
        head, target = self.classifier.head, pseudo_labels(out.logits, batch.label)
        embedded = self.embedding(target)  # (B, D)
        seen = F.linear(embedded, head.weight.detach(), head.bias.detach())
        terms["L_label"] = cross_entropy(seen, batch.label)
        features, labels = gather_over_ranks(out.features.float()), gather_over_ranks(embedded.detach())
        if self.hparams["shift"]:
            steepest = cross_entropy_slope(out.logits, batch.label, head.weight).abs().max()
            penalty = scaled_penalty(lambda x: explained_covariance(x, labels), features, steepest)
            terms["L_shift"] = self.hparams["shift"] * penalty
        if self.hparams["domain"]:
            pair = torch.cat([features, labels], 1)  # (B, 2 D)
            mean = mean_of_domains(pair, gather_over_ranks(batch.domain))
            terms["L_domain"] = self.hparams["domain"] * gaussian_nll(pair.detach(), mean, self.variance())
        return terms


class DomainMoments(Method):
    summary = "equal second moments of the features in all domains, without labels"
    reference = LREG
    addable = True
    moves_features = True
    linear_head = True
    defaults = {"moments": 0.1}

    def losses(self, out: Output, batch: Batch) -> dict[str, Tensor]:
        features, domain = gather_over_ranks(out.features.float()), gather_over_ranks(batch.domain)
        steepest = cross_entropy_slope(out.logits, batch.label, self.classifier.head.weight).abs().max()
        penalty = scaled_penalty(lambda x: moment_distance(x, domain), features, steepest)
        return super().losses(out, batch) | {"L_moments": self.hparams["moments"] * penalty}


class DomainGaussian(Method):
    summary = "one Gaussian for the features of all domains, without labels (trains only its variance)"
    reference = LREG
    addable = True
    defaults = {"gaussian": 0.1, "gaussian_lr_mult": 10.0}
    learned = {"spread": "gaussian_lr_mult"}

    def setup(self, model: Classifier) -> None:
        super().setup(model)
        self.spread = ChannelVariance(2 * model.backbone.dim)

    def losses(self, out: Output, batch: Batch) -> dict[str, Tensor]:
        twice = gather_over_ranks(out.features.float()).repeat(1, 2)  # (B, 2 D)
        mean = mean_of_domains(twice, gather_over_ranks(batch.domain))
        term = gaussian_nll(twice.detach(), mean, self.spread())
        return super().losses(out, batch) | {"L_gaussian": self.hparams["gaussian"] * term}


class LabelEmbedding(nn.Module):
    """Class ids (B,) -> (B, D), through D copies of the number."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.layers = nn.Sequential(
            nn.Linear(dim, dim // 2), nn.Dropout(0.2), nn.ReLU(),
            nn.Linear(dim // 2, dim), nn.Dropout(0.2), nn.ReLU(),
            nn.Linear(dim, dim), nn.Dropout(0.2),
        )  # fmt: skip

    def forward(self, target: Tensor) -> Tensor:
        embedded: Tensor = self.layers(target.float().unsqueeze(1).expand(-1, self.dim))
        return embedded


def explained_covariance(features: Tensor, labels: Tensor) -> Tensor:
    """Mean square of C_xy C_yy^+ C_yx, the covariance of the features that the labels explain linearly.

    With X, Y (B, D) normed and centred the matrix is (1/B) Xt P X, P = U Ut the projection on the columns of Y, and its
    Frobenius norm is that of the small matrix (Ut X)(Ut X)t / B: no pseudo-inverse of a D x D matrix is needed.
    """
    x, y = (centred(matrix) for matrix in (features, labels))
    u, size, _ = torch.linalg.svd(y, full_matrices=False)  # (B, r), (r,)
    # the cutoff of torch.linalg.pinv for the D x D covariance, whose eigenvalues are the squares
    kept = size.square() > y.shape[1] * torch.finfo(y.dtype).eps * size.max().square()
    inside = (u * kept).T @ x  # (r, D)
    return (inside @ inside.T / len(x)).square().sum() / x.shape[1] ** 2


def centred(matrix: Tensor) -> Tensor:
    """The matrix divided by its Frobenius norm, minus the mean of its rows."""
    normed = matrix / (matrix.norm() + 1e-12)
    return normed - normed.mean(0)


def scaled_penalty(measure: Callable[[Tensor], Tensor], features: Tensor, steepest: Tensor) -> Tensor:
    """A penalty on features (B, D), scaled so that its largest gradient entry is ``steepest``."""
    leaf = features.detach().requires_grad_()
    penalty = measure(leaf)
    (slope,) = torch.autograd.grad(penalty, leaf)
    scale = steepest / slope.abs().max().clamp(min=torch.finfo(slope.dtype).tiny)
    # the slope is already known: a linear term carries it, so the penalty is differentiated once instead of twice
    return scale * (penalty.detach() + (slope * (features - features.detach())).sum())


@torch.no_grad()
def cross_entropy_slope(logits: Tensor, label: Tensor, weight: Tensor) -> Tensor:
    """dCE/dx (B, D) of the global batch, for the input x of a linear head with this weight (C, D)."""
    logits, label = gather_over_ranks(logits.float()), gather_over_ranks(label)
    labelled = (label >= 0).float()
    wrong = logits.softmax(1) - F.one_hot(label.clamp(min=0), logits.shape[1])  # (B, C)
    return wrong * (labelled / labelled.sum().clamp(min=1)).unsqueeze(1) @ weight.float()


def mean_of_domains(values: Tensor, domain: Tensor) -> Tensor:
    """The average of the domains' means: (B, N) values, (B,) domains -> (N,).

    A sample from a domain with n samples has weight 1 / (n K), where K is the number of domains.
    """
    share = 1 / (domain.unsqueeze(1) == domain).sum(1).to(values.dtype)  # (B,), sum K
    return (share / share.sum()) @ values


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
