"""Methods for a stream of stages: two views of each image in, named losses out; the loop reads their attributes."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from patchgen.ccd.model import StreamModel
from patchgen.ccd.settings import StreamConfig
from patchgen.common import plugins
from patchgen.common.text import did_you_mean
from patchgen.model.classifier import Output
from patchgen.model.losses import class_similarity, label_probability, mask_suppression, selected_confidence

PROTOTYPE_TEMPERATURE = 0.1  # of p_h, and of SimGCD's student
TEACHER_TEMPERATURE = (0.07, 0.04)  # of SimGCD's teacher: first epoch of a stage, and from the end of warm-up on


@dataclass(frozen=True)
class Views:
    """A batch as a method sees it: rows 0..B-1 are the first views, rows B..2B-1 the second."""

    out: Output  # of all 2B views
    target: Tensor  # (2B,) position among the known classes in the labelled stage, -1 later
    pseudo: Tensor  # (2B,) the same, with a mixture component if there is no label; -1 for none
    centres: Tensor | None  # (K, D) what pseudo indexes: means of the known classes, or of the components
    classes: int  # number of classes so far
    epoch: int
    labelled: bool  # the stage has labels; inspecting the targets would synchronise the device


class Gcd:
    """Pulls together the views of an image, and images of the same class if labels are given."""

    pool: ClassVar[str] = "cls"
    prompts: ClassVar[bool] = False  # the mixture's means are added to the tokens
    mixture: ClassVar[bool] = False  # a mixture is fitted
    prototypes: ClassVar[bool] = False  # classes are learned prototypes, and evaluated by them instead of k-means
    decays_vectors: ClassVar[bool] = True  # weight decay acts on biases and norms too
    summary: ClassVar[str] = "contrast between views, and between classes where labels are given"
    reference: ClassVar[str] = "Vaze et al. 2022"

    def __init__(self, config: StreamConfig) -> None:
        self.config = config

    def losses(self, model: StreamModel, views: Views) -> dict[str, Tensor]:
        """Named terms, already weighted: a step minimises their sum."""
        c, projected = self.config, model.head(views.out.features)
        share = self.supervised(views)
        terms = {"info_nce": (1 - share) * info_nce(projected, c.temperature)}
        if share:
            terms["sup_con"] = share * supervised_contrastive(projected, views.target, c.supervised_temperature)
        return terms

    def watch(self, views: Views) -> dict[str, Tensor]:
        """Named values to log; they are not trained on."""
        return {}

    def supervised(self, views: Views) -> float:
        """Weight of the supervised terms: 0 without labels."""
        return self.config.supervised_weight if views.labelled else 0.0


class SimGcd(Gcd):
    prototypes = True
    decays_vectors = False
    summary = "gcd with learned prototypes: self-distillation between views, with all classes in use"
    reference = "Wen et al. 2023"

    def losses(self, model: StreamModel, views: Views) -> dict[str, Tensor]:
        share, logits = self.supervised(views), model.classify(views.out.features, views.classes)  # (2B, K)
        log_p = (logits / PROTOTYPE_TEMPERATURE).log_softmax(1)
        teacher = (logits.detach() / self._teacher(views.epoch)).softmax(1).roll(len(logits) // 2, 0)  # the other view
        mean = log_p.exp().mean(0)  # (K,)
        unused = math.log(views.classes) + (mean * mean.clamp(min=1e-12).log()).sum()  # log K - H(mean)
        terms = super().losses(model, views) | {
            "distil": (1 - share) * -(teacher * log_p).sum(1).mean(),
            "entropy": (1 - share) * self.config.entropy_weight * unused,
        }
        if share:
            terms["classes"] = share * F.nll_loss(log_p, views.target, ignore_index=-1)
        return terms

    def _teacher(self, epoch: int) -> float:
        (start, end), last = TEACHER_TEMPERATURE, self.config.warm_up - 1  # the last epoch of the warm-up
        return end if epoch > last else start + (end - start) * epoch / max(last, 1)


class PromptCcd(Gcd):
    prompts = mixture = True
    summary = "gcd with prompts: the means of an image's likeliest mixture components are added to its tokens"
    reference = "Cendra et al. 2024"


class GcdPatchGen(Gcd):
    """z+ replaces CLS everywhere; pseudo-labels come from the mixture, p_h from cosines with its means."""

    summary = "gcd with PatchGen's module and losses: pseudo-labels from the mixture, no prompts"
    pool = "patchgen"
    mixture = True

    def losses(self, model: StreamModel, views: Views) -> dict[str, Tensor]:
        c, features, mask = self.config, views.out.features, views.out.mask
        assert mask is not None  # the pool makes one
        terms = super().losses(model, views) | {"L_ms": c.lambda_ms * mask_suppression(mask, c.tau)}
        if views.centres is not None:
            logits = cosine_logits(features, views.centres)
            terms["L_conf"] = c.lambda_conf * selected_confidence(logits, views.pseudo)
            terms["L_sim"] = c.lambda_sim * class_similarity(features, views.pseudo, len(views.centres))
        return terms

    @torch.no_grad()
    def watch(self, views: Views) -> dict[str, Tensor]:
        """Share of weak mask entries; p_h(y | z-), the appendix's reference; L_neg = p_h(y | z-) - p_h(y | z+)."""
        features, mask, rest = views.out.features, views.out.mask, views.out.complementary
        assert mask is not None and rest is not None
        values = {"weak_share": (mask < self.config.tau).float().mean()}
        if views.centres is not None:
            complementary = label_probability(cosine_logits(rest, views.centres), views.pseudo)
            selected = label_probability(cosine_logits(features, views.centres), views.pseudo)
            values |= {"complementary_confidence": complementary, "L_neg": complementary - selected}
        return values


def cosine_logits(features: Tensor, centres: Tensor) -> Tensor:
    """The logits of p_h: cosines (B, K) with the centres, divided by the temperature."""
    return F.normalize(features, dim=1) @ F.normalize(centres, dim=1).T / PROTOTYPE_TEMPERATURE


class PromptCcdPatchGen(GcdPatchGen, PromptCcd):
    summary = "promptccd with PatchGen's module and losses (the paper's method for a stream)"


class GcdSelect(Gcd):
    pool = "select"
    summary = "gcd on a class token that reads what the mask inside the backbone selects"


class PromptCcdSelect(PromptCcd):
    pool = "select"
    summary = "promptccd on a class token that reads what the mask inside the backbone selects"


def info_nce(projected: Tensor, temperature: float = 1.0) -> Tensor:
    """Identify the other view of an image among all 2B - 1 others: unit vectors (2B, E), first views first."""
    similarity = _without_self(projected @ projected.T / temperature)
    other = torch.arange(len(projected), device=projected.device).roll(len(projected) // 2)  # the other view's row
    return F.cross_entropy(similarity, other)


def supervised_contrastive(projected: Tensor, label: Tensor, temperature: float = 0.07) -> Tensor:
    """Khosla et al. 2020 on unit vectors (N, E): mean of -log p over the positives of a view; label -1 is ignored."""
    labelled = label >= 0
    similarity = _without_self(projected @ projected.T / temperature)
    log_p = similarity.masked_fill(~labelled, torch.finfo(similarity.dtype).min).log_softmax(1)  # their columns
    positive = ((label[:, None] == label) & labelled).fill_diagonal_(False)
    number = positive.sum(1)
    of_view = torch.where(positive, log_p, 0).sum(1) / number.clamp(min=1)  # (N,)
    return -of_view.sum() / (number > 0).sum().clamp(min=1)


def _without_self(similarity: Tensor) -> Tensor:
    itself = torch.eye(len(similarity), dtype=torch.bool, device=similarity.device)
    return similarity.masked_fill(itself, -torch.inf)


STREAM_METHODS: dict[str, type[Gcd]] = {
    "gcd": Gcd,
    "simgcd": SimGcd,
    "promptccd": PromptCcd,
    "gcd+patchgen": GcdPatchGen,
    "promptccd+patchgen": PromptCcdPatchGen,
    "gcd+patchgen-select": GcdSelect,
    "promptccd+patchgen-select": PromptCcdSelect,
}


def make_stream_method(config: StreamConfig) -> Gcd:
    """The method named in the settings; raises ValueError for settings that do not fit it."""
    if config.method not in STREAM_METHODS:
        plugins.load_all()
    if config.method not in STREAM_METHODS:
        hint = did_you_mean(config.method, STREAM_METHODS)
        raise ValueError(f"task ccd has no method {config.method!r}{hint} (known: {', '.join(STREAM_METHODS)})")
    method = STREAM_METHODS[config.method](config)
    if config.pool and method.pool != "cls":
        raise ValueError(f"pool {config.pool!r} does not fit method {config.method!r}, which has a mask; leave it out")
    if config.components == "grow" and not method.mixture:
        raise ValueError(f"components 'grow' needs a mixture, which {config.method!r} does not have; use promptccd")
    if config.test_prompts and not method.prompts:
        raise ValueError(f"test_prompts needs prompts, which {config.method!r} does not have; use promptccd")
    return method
