"""MTL, RSC, MixStyle and SagNet: in training the head reads changed features.

    mtl       logits = W x + b + W_2 e_d,   e_d <- ema * e_d + (1 - ema) * mean of the batch's features of domain d
    rsc       logits = W (x * kept) + b
    mixstyle  with probability `mixstyle`, at each place:   x <- (x - mu) / sigma * sigma' + mu'
              mu' = l mu + (1 - l) mu_pi,  sigma' likewise,  l ~ Beta(a, a) per sample, a = `mixstyle_alpha`
    sagnet    the head always reads features with mixed styles, with l ~ U(0, 1) and variances mixed:
              sigma'^2 = l sigma^2 + (1 - l) sigma_pi^2
              L_style = CE of a style head on sigma * ((x - mu) / sigma)_pi + mu: own style, content of another sample
              L_adv   = `sagnet` * cross-entropy of the style head with the uniform distribution, for the backbone

`mtl`: W_2 starts at 0, the averages are bias-corrected; predictions use W_2 mean(e). DomainBed overwrites e by noise.
`rsc`: the share `rsc_features` of dimensions with the largest gradient of the target logit is 0 in the share
`rsc_samples` of images whose target probability drops most; L_sim still sees z+ unmuted.
Styles: mu, sigma are of each channel over the positions of one sample, pi permutes the batch. Convolutional networks
are changed where published (MixStyle stages 1 to 3, SagNet 2); in a ViT both act after its first quarter, our choice.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Beta
from torch.func import functional_call
from torch.nn import functional as F

from patchgen.data.augment import send
from patchgen.data.loaders import Batch
from patchgen.methods.alignment import positions
from patchgen.methods.method import BELOW_ONE, POSITIVE, SHARE, Term, take
from patchgen.methods.miro import first_outputs, num_channels
from patchgen.model.backbone import Backbone
from patchgen.model.classifier import Classifier, Output, trained_tensors
from patchgen.model.generic import on_tensor
from patchgen.model.losses import cross_entropy, pseudo_labels, sum_over_ranks

LEAST_VARIANCE, SAGNET_LEAST = 1e-6, 1e-5  # added to a variance, as published
STYLE_WIDTH = 128  # of the style head


class Mtl(Term):
    summary = "MTL: the head also reads the mean feature of the image's domain"
    reference = "Blanchard et al., Domain Generalization by Marginal Transfer Learning, JMLR 2021"
    linear_head = True
    defaults = {"ema": 0.99}
    bounds = {"ema": BELOW_ONE}
    learned = {"shift": ""}
    sums: Tensor  # (K, D) moving sums of the domains' mean features
    mass: Tensor  # () sum of their weights; the embeddings are sums / mass

    def setup(self, model: Classifier) -> None:
        super().setup(model)
        dim = model.backbone.dim
        self.shift = nn.Linear(dim, model.head.out_features, bias=False)  # W_2
        nn.init.zeros_(self.shift.weight)
        self.register_buffer("sums", torch.zeros(len(self.sources), dim))
        self.register_buffer("mass", torch.tensor(0.0))

    def losses(self, out: Output, batch: Batch) -> dict[str, Tensor]:
        belongs = F.one_hot(positions(batch.domain, self.sources), len(self.sources)).float()  # (B, K)
        count = sum_over_ranks(belongs.sum(0)).clamp(min=1)  # (K,)
        mean = sum_over_ranks(belongs.T @ out.features.detach().float()) / count.unsqueeze(1)  # (K, D)
        self.sums.lerp_(mean, 1 - self.hparams["ema"])
        self.mass.lerp_(torch.ones_like(self.mass), 1 - self.hparams["ema"])
        logits = out.logits + belongs @ self.shift(self.embeddings())
        return super().losses(out._replace(logits=logits), batch)

    def embeddings(self) -> Tensor:
        """e: (K, D), in the order of the sources; 0 before the first step."""
        return self.sums / self.mass.clamp(min=1e-12)

    @torch.no_grad()
    def predicting(self, model: Classifier) -> Mapping[str, Tensor] | None:
        tensors: dict[str, Tensor] = dict(trained_tensors(model))
        tensors["head.bias"] = tensors["head.bias"] + self.shift(self.embeddings().mean(0))
        return tensors


class Rsc(Term):
    summary = "RSC: mutes the feature dimensions that a decision relies on most"
    reference = "Huang et al., Self-Challenging Improves Cross-Domain Generalization, ECCV 2020"
    linear_head = True
    defaults = {"rsc_features": 0.3333, "rsc_samples": 0.3333}
    bounds = {"rsc_features": SHARE, "rsc_samples": SHARE}

    def losses(self, out: Output, batch: Batch) -> dict[str, Tensor]:
        head: Any = self.classifier.head
        target = pseudo_labels(out.logits, batch.label)
        kept = kept_features(out.features, target, head, self.hparams["rsc_features"], self.hparams["rsc_samples"])
        return super().losses(out._replace(logits=head(out.features * kept)), batch)


@torch.no_grad()
def kept_features(features: Tensor, target: Tensor, head: nn.Linear, dims: float, images: float) -> Tensor:
    """(B, D): 1 for features (B, D) that are kept, 0 for the shares of dimensions and images that are muted."""
    steepest = head.weight[target].topk(round(dims * features.shape[1]), 1).indices  # dlogit_y / dx
    kept = torch.ones_like(features).scatter(1, steepest, 0)
    own = target.unsqueeze(1)
    whole, muted = (F.linear(x, head.weight, head.bias).softmax(1).gather(1, own) for x in (features, features * kept))
    hit = (whole - muted).squeeze(1).topk(round(images * len(features))).indices
    return torch.ones_like(kept).index_copy(0, hit, kept[hit])


# By style


class MixStyle(Term):
    summary = "MixStyle: channel means and deviations are mixed between the images of a batch"
    reference = "Zhou et al., Domain Generalization with MixStyle, ICLR 2021"
    defaults = {"mixstyle": 0.5, "mixstyle_alpha": 0.1}
    bounds = {"mixstyle": SHARE, "mixstyle_alpha": POSITIVE}
    each_pass = "mixes styles"

    def setup(self, model: Classifier) -> None:
        super().setup(model)
        stages = (0, 1, 2) if model.backbone.family.convolutional else ()
        for place in style_places(model.backbone, stages):
            on_training_passes(place, model.backbone, self._mix)

    def _mix(self, x: Tensor) -> Tensor:
        if torch.rand(()) >= self.hparams["mixstyle"]:
            return x
        alpha = self.hparams["mixstyle_alpha"]
        share = send(Beta(alpha, alpha).sample((len(x),)), x.device)
        return mix_deviations(x, torch.randperm(len(x), device=x.device), share)


class SagNet(Term):
    summary = "SagNet: features of mixed style, in which a second head cannot find the class by style"
    reference = "Nam et al., Reducing Domain Gap by Reducing Style Bias, CVPR 2021"
    defaults = {"sagnet": 0.1, "sagnet_lr_mult": 10.0}
    learned = {"style": "sagnet_lr_mult"}
    each_pass = "mixes styles"
    backbone_term = "sagnet"
    idle_tunes = ("head", "last_block")  # it takes style out of the early layers

    def setup(self, model: Classifier) -> None:
        super().setup(model)
        [place] = style_places(model.backbone, (1,) if model.backbone.family.convolutional else ())
        self.style = StyleHead(num_channels(first_outputs([place], model)[0]), model.head.out_features)
        self.seen: Tensor | None = None
        on_training_passes(place, model.backbone, self._randomise)

    def _randomise(self, x: Tensor) -> Tensor:
        self.seen = x
        share = torch.rand(len(x), device=x.device)
        return mix_variances(x, torch.randperm(len(x), device=x.device), share)

    def losses(self, out: Output, batch: Batch) -> dict[str, Tensor]:
        x = take(self, "seen")
        mixed = swap_content(x, torch.randperm(len(x), device=x.device))  # (B, N, C)
        held = {name: tensor.detach() for name, tensor in self.style.named_parameters()}
        fooled: Tensor = functional_call(self.style, held, mixed)
        return super().losses(out, batch) | {
            "L_style": cross_entropy(self.style(mixed.detach()), batch.label),
            "L_adv": -self.hparams["sagnet"] * fooled.log_softmax(1).mean(),
        }


class StyleHead(nn.Module):
    """Positions (B, N, C) -> logits; nonlinear before the mean, else it could only use the channel means."""

    def __init__(self, channels: int, num_classes: int) -> None:
        super().__init__()
        self.each = nn.Linear(channels, STYLE_WIDTH)
        self.out = nn.Linear(STYLE_WIDTH, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(self.each(x.float()).relu().mean(1))
        return logits


# Statistics


def statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and unbiased variance of each channel over the positions: (B, N, C) -> (B, 1, C) twice."""
    return x.mean(1, keepdim=True), x.var(1, keepdim=True, correction=min(1, x.shape[1] - 1))


def mix_deviations(x: Tensor, order: Tensor, share: Tensor) -> Tensor:
    """MixStyle: each sample's content (B, N, C), with its own share (B,) of style mixed with that of ``order`` (B,)."""
    mean, variance = statistics(x.detach())  # no gradient passes through them
    deviation = (variance + LEAST_VARIANCE).sqrt()
    return (x - mean) / deviation * _between(deviation, order, share) + _between(mean, order, share)


def mix_variances(x: Tensor, order: Tensor, share: Tensor) -> Tensor:
    """SagNet: the same with means and variances, and with gradients through them; arguments as above."""
    mean, variance = statistics(x)
    content = (x - mean) / (variance + SAGNET_LEAST).sqrt()
    return content * (_between(variance, order, share) + SAGNET_LEAST).sqrt() + _between(mean, order, share)


def _between(value: Tensor, order: Tensor, share: Tensor) -> Tensor:
    own = share.view(-1, 1, 1)
    return own * value + (1 - own) * value[order]


def swap_content(x: Tensor, order: Tensor) -> Tensor:
    """Each sample's style, with gradient, on the content of another, without: (B, N, C)."""
    mean, variance = statistics(x)
    deviation = (variance + SAGNET_LEAST).sqrt()
    return ((x - mean) / deviation)[order].detach() * deviation + mean


# Places


def style_places(backbone: Backbone, stages: tuple[int, ...]) -> list[nn.Module]:
    """The given stages of a convolutional network; for a ViT, the last block of the first quarter."""
    blocks = backbone.model.get_submodule(backbone.family.blocks)
    return [blocks[i] for i in stages or (max(len(blocks) // 4, 1) - 1,)]


def on_training_passes(place: nn.Module, backbone: Backbone, change: Callable[[Tensor], Tensor]) -> None:
    """Apply ``change`` to the output of a module, as positions (B, N, C) in float32, in passes with gradients."""
    prefix = backbone.num_prefix_tokens

    def act(output: Tensor) -> Tensor | None:
        if not torch.is_grad_enabled():
            return None
        with torch.autocast(output.device.type, enabled=False):
            if output.ndim == 4:  # (B, C, h, w)
                changed = change(output.float().flatten(2).transpose(1, 2))
                return changed.transpose(1, 2).reshape(output.shape).to(output.dtype)
            changed = change(output[:, prefix:].float())
        return torch.cat([output[:, :prefix], changed.to(output.dtype)], 1)

    on_tensor(place, act)
