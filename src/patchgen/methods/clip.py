"""Zero-shot CLIP, CoOp and CLIPood: classes are sentences, and an image is assigned to the nearest one.

    clip     zero-shot: "a photo of a <name>." for each class; nothing is trained
    coop     CoOp: `context` learned vectors, shared by all classes, replace the words before the name
    clipood  the image tower and its projection are tuned with semantic margins; an average along the way predicts

All need a CLIP backbone with its text tower and the names of the classes, in which `_` is read as a space. The head
gives exp(scale) * cosine of the projected CLS token and the sentence. A run of `clip` only records losses: all
evaluations are equal, and `--steps 1` is enough. The release trains `coop` by SGD at 0.002 with a cosine schedule, here
Adam at `--lr`. For `clipood`,

    main = CE over c of s (<f, t_c> - margin <t_y, t_c>)         t_c of "a photo of a <name>.", s CLIP's scale
    theta_mean = sum_i w_i theta_i / sum_i w_i,    i = 0 ... N,  w_i the Beta(beta, beta) density at (i + 1/2) / (N + 1)

theta_0 are the pretrained weights, and N is `--steps`; with beta 0.5, both ends of training count most. It uses AdamW
and a cosine schedule. The release stores the average in 16 bits, where shares near 1e-4 are lost to rounding; here it
has 32.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from patchgen.config import Config
from patchgen.data.loaders import Batch
from patchgen.methods.averages import AverageOfSteps
from patchgen.methods.method import COUNT, POSITIVE, Method
from patchgen.model.classifier import Classifier, Output
from patchgen.model.clip import (
    PHOTO,
    ClassVectors,
    ClipHead,
    ClipText,
    Learned,
    TextTower,
    Written,
    load_text,
    sentences,
    spoken,
)
from patchgen.model.losses import cross_entropy

if TYPE_CHECKING:
    from patchgen.train.loop import Step


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
        model.add_module("head", self._head_of(model))

    def _head_of(self, model: Classifier) -> nn.Module:
        if self.read is not None:
            return self.read
        if self.self_contained and self.saved is not None:
            return self.restored(model, self.saved)
        if not self.class_names:
            raise ValueError(f"method {self.config.method!r} needs names: set `class_names` before the model is built")
        return self.head(model, load_text(model.backbone), [spoken(name) for name in self.class_names])

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
            what = "learns from sentences alone" if "source-free" in self.needs else "trains nothing"
            raise ValueError(
                f"{config.method.split('+')[0]!r} {what}: leave out --tune, --devices and the part after '+'; "
                "'coop' is the method whose prompt is learned"
            )

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
                vectors, scale = self.learn(tower, names)
            head.vectors.copy_(vectors.detach())
            if scale is not None:
                head.scale.fill_(scale)

    def learn(self, tower: TextTower, names: list[str]) -> tuple[Tensor, float | None]:
        """The classes' vectors (C, E), and the logarithm of the factor on their products (None: CLIP's)."""
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
        logits = with_margins(out.logits, batch.label, head.vectors, head.scale.exp() * self.hparams["margin"])
        return super().losses(out, batch) | {"main": cross_entropy(logits, batch.label, self.weights(out, batch))}

    def share(self) -> Tensor:
        return self.shares[(self.made + 1).clamp(max=self.config.steps)]


def with_margins(logits: Tensor, label: Tensor, vectors: Tensor, margin: Tensor) -> Tensor:
    """Logits (B, C) less ``margin`` times the similarity of each class's vector to the true one's."""
    near = vectors @ vectors.T  # (C, C)
    return logits.float() - margin * near[label.clamp(min=0)]


def beta_shares(steps: int, beta: float) -> Tensor:
    """Share of the weights after step i in the average so far, (steps + 1,) for i = 0 ... steps."""
    place = (torch.arange(steps + 1, dtype=torch.float64) + 0.5) / (steps + 1)
    weight = (place * (1 - place)) ** (beta - 1)  # the constant of the density cancels
    return (weight / weight.cumsum(0)).float()
