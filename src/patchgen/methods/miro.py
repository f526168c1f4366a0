"""MIRO and GMDG: features near the pretrained ones, and the same distribution of features and labels in all domains.

    miro   L_miro = miro * sum_l 1/2 mean[ (z_l - z0_l)^2 / v_l + log v_l ]
    gmdg   also L_shift  = shift * s * mean square of C_xy C_yy^+ C_yx,   s = max |dCE/dx| / max |dpenalty/dx| detached
                L_domain = domain * 1/2 mean[ (c - m)^2 / v + log v ],    c = [x, y] without gradient
                L_label  = cross-entropy of the head (detached) on y
    domain-moments    L_moments = moments * s * mean over domains and entries of (C_e - C)^2,   C_e = X_e^T X_e / B_e
    domain-gaussian   L_gaussian = gaussian * L_domain with c = [x, x]

z_l is the output of tap l, z0_l that with the pretrained weights, v_l a learned variance per channel. Taps that have no
trained tensors before them cannot drift and are left out. x are the features, y embeds the label, m is the mean of the
domains' means; features and embedding are normed and centred before the covariances. The variants are L-Reg's `shift`
and `d_shift` without `use_condition1` and `use_condition2`: X normed, **not centred**. As in the release, c carries no
gradient, so with equally many samples per domain L_domain and L_gaussian train v alone; one v replaces equal ones.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from patchgen.data.loaders import Batch
from patchgen.methods.averages import NamedBuffers
from patchgen.methods.method import Term
from patchgen.model.backbone import Backbone
from patchgen.model.classifier import Classifier, Output
from patchgen.model.generic import on_tensor
from patchgen.model.losses import cross_entropy, gather_over_ranks, pseudo_labels

LREG = "Tan et al., Interpret Your Decision: Logical Reasoning Regularization, NeurIPS 2024 (code)"
LEAST_VARIANCE = 1e-5
FIRST_VARIANCE = 0.1
NUM_BLOCKS = 4


class Miro(Term):
    summary = "MIRO: intermediate features stay near the pretrained ones"
    reference = "Cha et al., Domain Generalization by Mutual-Information Regularization with Pre-trained Models, 2022"
    defaults = {"miro": 0.1, "miro_lr_mult": 10.0}
    learned = {"variances": "miro_lr_mult"}
    backbone_term = "miro"
    idle_tunes = ("head",)

    def setup(self, model: Classifier) -> None:
        super().setup(model)
        self.variances = nn.ModuleList()
        if not self.hparams["miro"]:
            return
        learned = {name: tensor for name, tensor in model.backbone.named_parameters() if tensor.requires_grad}
        self.pretrained = NamedBuffers(learned, saved=False)  # a resumed run gets them from the backbone
        modules = tap_modules(model.backbone)
        found = zip(modules, first_outputs(modules, model), strict=True)
        drifting = {module: num_channels(output) for module, output in found if output.requires_grad}
        self._taps = Taps(list(drifting))
        self.variances.extend(ChannelVariance(channels) for channels in drifting.values())

    def losses(self, out: Output, batch: Batch) -> dict[str, Tensor]:
        terms = super().losses(out, batch)
        if not self.hparams["miro"]:
            return terms
        now, backbone, weights = self._taps.take(), self.classifier.backbone, self.pretrained.named()
        half = self.config.precision == "bf16-mixed"
        with torch.no_grad(), torch.autocast(batch.image.device.type, torch.bfloat16, enabled=half):
            then = outputs_of(self._taps.modules, lambda: functional_call(backbone, weights, batch.image))
        taps = zip(now, then, self.variances, strict=True)
        drift = torch.stack([gaussian_nll(z, z0, variance()) for z, z0, variance in taps]).sum()
        return terms | {"L_miro": self.hparams["miro"] * drift}


class ChannelVariance(nn.Module):
    """One learned variance per channel, shared by all samples and positions."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        start = math.log(math.expm1(FIRST_VARIANCE - LEAST_VARIANCE))  # its softplus is the initial variance
        self.bias = nn.Parameter(torch.full((channels,), start))

    def forward(self) -> Tensor:
        return F.softplus(self.bias) + LEAST_VARIANCE


def gaussian_nll(z: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """1/2 mean[(z - mean)^2 / v + log v], for tokens (B, T, D), vectors (B, D) or maps (B, D, h, w), and v (D,)."""
    of_channel = variance.view(-1, 1, 1) if z.ndim == 4 else variance
    return ((z.float() - mean.float()).square() / of_channel).mean() / 2 + variance.log().mean() / 2


# GMDG


class Gmdg(Miro):
    summary = "GMDG: MIRO with label-conditional covariance and domain-invariance terms"
    reference = "Tan et al., Rethinking Multi-domain Generalization with A General Learning Objective, CVPR 2024"
    defaults = {"shift": 0.1, "domain": 0.1}
    learned = {"embedding": "miro_lr_mult", "variance": "miro_lr_mult"}

    def setup(self, model: Classifier) -> None:
        super().setup(model)
        if self.hparams["shift"] or self.hparams["domain"]:
            self.embedding = LabelEmbedding(model.backbone.dim)
            self.variance = ChannelVariance(2 * model.backbone.dim)

    def losses(self, out: Output, batch: Batch) -> dict[str, Tensor]:
        terms = super().losses(out, batch)
        if not (self.hparams["shift"] or self.hparams["domain"]):
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


class DomainMoments(Term):
    summary = "equal second moments of the features in all domains, without labels"
    reference = LREG
    idle_tunes = ("head",)
    linear_head = True
    defaults = {"moments": 0.1}

    def losses(self, out: Output, batch: Batch) -> dict[str, Tensor]:
        features, domain = gather_over_ranks(out.features.float()), gather_over_ranks(batch.domain)
        steepest = cross_entropy_slope(out.logits, batch.label, self.classifier.head.weight).abs().max()
        penalty = scaled_penalty(lambda x: moment_distance(x, domain), features, steepest)
        return super().losses(out, batch) | {"L_moments": self.hparams["moments"] * penalty}


class DomainGaussian(Term):
    summary = "one Gaussian for the features of all domains, without labels (trains only its variance)"
    reference = LREG
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
    normed = (matrix / (matrix.norm() + 1e-12) for matrix in (features, labels))
    x, y = (matrix - matrix.mean(0) for matrix in normed)
    u, size, _ = torch.linalg.svd(y, full_matrices=False)  # (B, r), (r,)
    # the cutoff of torch.linalg.pinv for the D x D covariance, whose eigenvalues are the squares
    kept = size.square() > y.shape[1] * torch.finfo(y.dtype).eps * size.max().square()
    inside = (u * kept).T @ x  # (r, D)
    return (inside @ inside.T / len(x)).square().sum() / x.shape[1] ** 2


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
    """The average of the domains' means: (B, N) values, (B,) domains -> (N,)."""
    share = 1 / (domain.unsqueeze(1) == domain).sum(1).to(values.dtype)  # (B,), sum K, the number of domains
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


# Taps


def tap_modules(backbone: Backbone) -> list[nn.Module]:
    """The stem, and the last block of each quarter; fewer if there are fewer blocks."""
    blocks = backbone.model.get_submodule(backbone.family.blocks)
    if hasattr(backbone.model, "embedder"):  # ResNet, RegNet
        stem = backbone.model.get_submodule("embedder")
    else:
        stem = next(module for module in backbone.modules() if isinstance(module, nn.Conv2d))
    last = sorted({quarter * len(blocks) // NUM_BLOCKS - 1 for quarter in range(1, NUM_BLOCKS + 1)})
    return [stem, *(blocks[i] for i in last if i >= 0)]


def outputs_of(modules: Sequence[nn.Module], run: Callable[[], object]) -> list[Tensor]:
    """The outputs of modules, in the order of the pass that ``run`` makes."""
    outputs: list[Tensor] = []
    handles = [on_tensor(module, outputs.append) for module in modules]
    run()
    for handle in handles:
        handle.remove()
    return outputs


def first_outputs(modules: Sequence[nn.Module], model: Classifier) -> list[Tensor]:
    """The outputs for one black image, in a pass with gradients."""
    size = [side * model.backbone.patch_size for side in model.grid]
    image = torch.zeros(1, 3, *size, device=next(model.parameters()).device)
    with torch.enable_grad():
        return outputs_of(modules, lambda: model.backbone(image))


def num_channels(output: Tensor) -> int:
    """Of tokens (B, T, D), vectors (B, D) or maps (B, D, h, w)."""
    return output.shape[1] if output.ndim == 4 else output.shape[-1]


class Taps:
    """Records the outputs of modules in training passes, those with gradients, or in all of them."""

    def __init__(self, modules: Sequence[nn.Module], *, always: bool = False) -> None:
        self.modules, self.always = modules, always
        self._seen: list[Tensor] = []
        for i, module in enumerate(modules):
            on_tensor(module, partial(self._note, i))

    def _note(self, i: int, output: Tensor) -> None:
        if self.always or torch.is_grad_enabled():
            self._seen[i:] = [output]  # a new pass begins with the first tap

    def take(self) -> list[Tensor]:
        """Outputs of the last pass; can be taken once, so that its graph is freed."""
        seen, self._seen = self._seen, []
        return seen
