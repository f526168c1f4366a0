"""Zero-shot CLIP, CoOp, CLIPood and CLIPCEIL++: classes are sentences, and an image is assigned to the nearest one.

    clip      "a photo of a <name>." for each class; nothing is trained
    coop      `context` learned vectors, shared by all classes, replace the words before the name
    clipood   main = CE over c of s (<f, t_c> - margin <t_y, t_c>)    t_c of "a photo of a <name>.", s CLIP's scale
              theta_mean = sum_i w_i theta_i / sum_i w_i,   i = 0 ... N, theta_0 the pretrained weights, N `--steps`,
              w_i the Beta(beta, beta) density at (i + 1/2) / (N + 1); it is kept in 32 bits, in the release in 16
    clipceil  z    = p_L + MLP(transformer layer over p_1 ... p_L),    p_l the projected CLS token after block l
              main = CE of s cos(z, t_c),    t_c the mean of eighty sentences of class c
              L_channel   = channel * sum_j (Var over domains of mu_dj - Var over classes of mu_cj),  mu means of unit z
              L_direction = direction * mean of 1 - cos(z_i - z_k, t_yi - t_yk), pairs that differ in class and domain

`clipceil` is **our reading** of the abstract and the captions: no code is released. Ours are the taps (last block of a
quarter), the residual form with an MLP that starts at 0, width and heads, the difference of variances over unit
vectors, the pooling of templates, and the weights 1, 1, 1.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchgen.config import Config
from patchgen.data.loaders import Batch
from patchgen.methods.averages import AverageOfSteps
from patchgen.methods.method import COUNT, POSITIVE, Method, take
from patchgen.methods.miro import Taps, tap_modules
from patchgen.model.backbone import Backbone
from patchgen.model.classifier import Classifier, Output, Saved
from patchgen.model.clip import (
    IMAGENET,
    PHOTO,
    ClassVectors,
    ClipHead,
    ClipText,
    Learned,
    TextTower,
    Written,
    load_text,
    sentences,
)
from patchgen.model.losses import cross_entropy, gather_over_ranks

if TYPE_CHECKING:
    from patchgen.train.loop import Step

HEADS = 8  # of the layer in `clipceil`


class Sentences(Method):
    """Common base: a head that compares images with one sentence per class."""

    tune = "head"
    compared = False
    needs: ClassVar[tuple[str, ...]] = ("text",)
    self_contained: ClassVar[bool] = False  # checkpoints contain the whole head: predictions need no text tower

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.read: ClipHead | None = None  # a head with encoded sentences, which needs no text tower
        if config.task != "mdg":
            raise ValueError(f"{config.method!r} reads the name of every class, and task {config.task!r} hides some")
        if self.chosen_pool != "cls":
            raise ValueError(f"method {config.method!r} reads what CLIP projects: leave out --pool, or give cls")
        if self.tune == "full" and self.chosen_tune == "head":
            raise ValueError(f"method {config.method!r} tunes CLIP's image tower: leave out --tune head")

    def extend(self, model: Classifier) -> None:
        super().extend(model)
        head: nn.Module | None = self.read
        if self.self_contained and self.saved is not None:
            head = self.restored(model, self.saved)
        elif head is None:
            if not self.class_names:
                raise ValueError(f"method {self.config.method!r} needs `class_names` before the model is built")
            head = self.head(model, load_text(model.backbone), [name.replace("_", " ") for name in self.class_names])
        model.add_module("head", head)

    def head(self, model: Classifier, text: ClipText, names: list[str]) -> nn.Module:
        """The module that turns features (B, D) into logits (B, C)."""
        raise NotImplementedError

    def restored(self, model: Classifier, saved: Mapping[str, Tensor]) -> nn.Module:
        """The same head without a text tower, with the shapes of a checkpoint; its tensors are loaded later."""
        return ClassVectors.like(saved)


class WithoutImages(Sentences):
    """Does not train on images: their batches are only scored."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if "+" in config.method or self.chosen_tune != "head" or config.devices > 1:
            raise ValueError(f"{config.method!r} does not train on images: leave out --tune, --devices and a '+' term")

    def update(self, step: "Step") -> bool:
        """Make no step; before an evaluation, record the loss of the batch."""
        if step.number % self.config.eval_every == 0 or step.number == self.config.steps - 1:
            batch = step.batch()
            with torch.no_grad():
                step.note(self.losses(step.forward(batch), batch))
        return True


class ZeroShot(WithoutImages):
    summary = "CLIP's zero-shot classifier: class names in a sentence, nothing is trained"
    reference = "Radford et al., Learning Transferable Visual Models From Natural Language Supervision, ICML 2021"

    def head(self, model: Classifier, text: ClipText, names: list[str]) -> nn.Module:
        return ClipHead(text, Written(text.tower.read(sentences(PHOTO, names))), len(names))


class SourceFree(WithoutImages):
    """One vector per class, learned from sentences in the first step and saved in checkpoints; nothing else learns."""

    needs = ("text", "source-free")
    self_contained = True
    log_scale: ClassVar[float | None] = None  # of the products; None: CLIP's

    def head(self, model: Classifier, text: ClipText, names: list[str]) -> nn.Module:
        self._text = (text.tower, names)  # a tuple, so that the tower is not registered as a submodule
        return ClassVectors(text.projection, text.scale, text.tower.read(sentences(PHOTO, names)), tuned=False)

    def begin_step(self, step: "Step") -> None:
        super().begin_step(step)
        if step.number == 0:
            tower, names = self._text
            head: Any = step.model.head
            tower.to(head.vectors.device)
            with torch.enable_grad():
                head.vectors.copy_(self.learn(tower, names).detach())
            if self.log_scale is not None:
                head.scale.fill_(self.log_scale)

    def learn(self, tower: TextTower, names: list[str]) -> Tensor:
        """The classes' vectors (C, E)."""
        raise NotImplementedError


class CoOp(Sentences):
    summary = "CoOp: learned vectors replace the words before the class name"
    reference = "Zhou et al., Learning to Prompt for Vision-Language Models, IJCV 2022"
    defaults = {"context": 16}
    bounds = {"context": COUNT}

    def head(self, model: Classifier, text: ClipText, names: list[str]) -> nn.Module:
        return ClipHead(text, Learned(text.tower, names, int(self.hparams["context"])), len(names))


# CLIPood


class ClipOod(AverageOfSteps, Sentences):
    summary = "CLIPood: CLIP's image tower tuned with semantic margins; a Beta average of the weights predicts"
    reference = "Shu et al., CLIPood: Generalizing CLIP to Out-of-Distributions, ICML 2023"
    tune = "full"
    optimizer = "adamw"
    lr_schedule = "cosine"
    replaces_main = True
    self_contained = True
    defaults = {"margin": 0.3, "beta": 0.5}
    bounds = {"beta": POSITIVE}
    shares: Tensor  # (steps + 1,) share of the newest weights in the average

    def head(self, model: Classifier, text: ClipText, names: list[str]) -> nn.Module:
        return ClassVectors(text.projection, text.scale, text.tower.read(sentences(PHOTO, names)), tuned=True)

    def setup(self, model: Classifier) -> None:
        super().setup(model)
        self.register_buffer("shares", beta_shares(self.config.steps, self.hparams["beta"]), persistent=False)

    def losses(self, out: Output, batch: Batch) -> dict[str, Tensor]:
        head: Any = self.classifier.head
        near = (head.vectors @ head.vectors.T)[batch.label.clamp(min=0)]  # (B, C) to the true class's sentence
        logits = out.logits.float() - head.scale.exp() * self.hparams["margin"] * near
        return super().losses(out, batch) | {"main": cross_entropy(logits, batch.label, self.weights(out, batch))}

    def share(self) -> Tensor:
        return self.shares[(self.made + 1).clamp(max=self.config.steps)]


def beta_shares(steps: int, beta: float) -> Tensor:
    """Share of the weights after step i in the average so far, (steps + 1,) for i = 0 ... steps."""
    place = (torch.arange(steps + 1, dtype=torch.float64) + 0.5) / (steps + 1)
    weight = (place * (1 - place)) ** (beta - 1)  # the constant of the density cancels
    return (weight / weight.cumsum(0)).float()


# CLIPCEIL++


class ClipCeil(Sentences):
    summary = "CLIPCEIL++, our reading: an adapter over depths of CLIP with channel and direction terms"
    reference = "Yu et al., CLIPCEIL: Domain Generalization through CLIP via Channel Refinement, NeurIPS 2024"
    tune = "full"
    self_contained = True
    defaults = {"channel": 1.0, "direction": 1.0}

    def head(self, model: Classifier, text: ClipText, names: list[str]) -> nn.Module:
        each = torch.stack([text.tower.read(sentences(template, names)) for template in IMAGENET])  # (80, C, E)
        return FusionHead(model.backbone, text.projection.weight, text.scale, F.normalize(each.mean(0), dim=1))

    def restored(self, model: Classifier, saved: Mapping[str, Tensor]) -> nn.Module:
        return FusionHead(model.backbone, saved["head.weight"], torch.zeros(()), saved["head.constants.vectors"])

    def losses(self, out: Output, batch: Batch) -> dict[str, Tensor]:
        head: Any = self.classifier.head
        image, label, domain = (gather_over_ranks(part) for part in (take(head, "image"), batch.label, batch.domain))
        unit = F.normalize(image, dim=1)
        channel = group_variance(unit, domain) - group_variance(unit[label >= 0], label[label >= 0])
        return super().losses(out, batch) | {
            "L_channel": self.hparams["channel"] * channel,
            "L_direction": self.hparams["direction"] * direction_loss(image, head.constants["vectors"], label, domain),
        }


class FusionHead(nn.Module):
    """Features (B, D) of the last tap, with those of the earlier ones in the same pass -> logits (B, C)."""

    def __init__(self, backbone: Backbone, weight: Tensor, scale: Tensor, vectors: Tensor) -> None:
        super().__init__()
        width, self.in_features = weight.shape
        self.out_features = len(vectors)
        self.weight = nn.Parameter(weight.detach().clone())  # (E, D) of CLIP's image projection
        self.constants = Saved({"scale": scale, "vectors": vectors})  # (), and unit sentences (C, E)
        heads = max(count for count in range(1, HEADS + 1) if width % count == 0)
        self.fuse = nn.TransformerEncoderLayer(width, heads, 2 * width, 0.0, batch_first=True, norm_first=True)
        self.project = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
        for tensor in self.project[-1].parameters():
            nn.init.zeros_(tensor)
        self._norm = (backbone.model.get_submodule(backbone.family.final_norm),)  # part of the backbone: not registered
        self._taps = Taps(tap_modules(backbone)[1:-1], always=True)
        self.image: Tensor | None = None  # z (B, E) of the last pass with gradients

    def forward(self, features: Tensor) -> Tensor:
        taps = [self._norm[0](tokens[:, 0]) for tokens in self._taps.take()]
        with torch.autocast(features.device.type, enabled=False):
            depths = torch.stack([*taps, features], 1).float() @ self.weight.T  # (B, L, E)
            image = depths[:, -1] + self.project(self.fuse(depths)[:, -1])
            self.image = image if torch.is_grad_enabled() else None
            return self.constants["scale"].exp() * F.normalize(image, dim=1) @ self.constants["vectors"].T


def group_variance(values: Tensor, group: Tensor) -> Tensor:
    """Sum over channels of the variance of the groups' means, for values (B, E) and group ids (B,)."""
    if not len(group):
        return values.sum() * 0
    own = F.one_hot(torch.unique(group, return_inverse=True)[1]).to(values.dtype)  # (B, G)
    means = own.T @ values / own.sum(0).unsqueeze(1)
    return means.var(0, correction=0).sum()


def direction_loss(image: Tensor, sentences: Tensor, label: Tensor, domain: Tensor) -> Tensor:
    """Mean of 1 - cos between differences of images (B, E) and of their sentences, over pairs that differ."""
    pairs = (label.unsqueeze(1) != label) & (domain.unsqueeze(1) != domain) & (label >= 0) & (label >= 0).unsqueeze(1)
    i, k = pairs.triu().nonzero(as_tuple=True)
    if not len(i):
        return image.sum() * 0
    own = sentences[label.clamp(min=0)]
    return (1 - F.cosine_similarity(image[i] - image[k], own[i] - own[k], dim=1)).mean()
