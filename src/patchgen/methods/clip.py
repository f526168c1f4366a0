"""CLIP as it is, and CoOp: the classes are sentences, and an image belongs to the one it is nearest to.

    clip    zero-shot: "a photo of a <name>." for each class; nothing is trained
    coop    CoOp: `context` learned vectors, shared by all classes, stand in the place of the words before the name

Both need a CLIP backbone with its text tower (`--backbone clip-b16`, a hub id, a folder) and the names of the classes,
in which `_` is read as a space. The head gives exp(scale) * cosine of the projected CLS token and the sentence.

A run of `clip` has no trained tensor: its steps only count the loss of the batch before an evaluation, all evaluations
say the same, and `--steps 1` is enough. What differs in `coop` from the release: Adam at `--lr` in place of SGD at
0.002 with a cosine schedule; batches from all source domains; `--tune layernorm` lets the vision tower learn too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from patchgen.config import Config
from patchgen.methods.method import Method
from patchgen.model.classifier import Classifier
from patchgen.model.clip import ClipHead, Learned, TextTower, Written, load_text

if TYPE_CHECKING:
    from patchgen.train.step import Step

TEMPLATE = "a photo of a {}."


class Sentences(Method):
    """What both share: a head that compares images with a sentence for each class."""

    tune = "head"
    compared = False

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.read: ClipHead | None = None  # a head whose sentences were read before: no text tower is needed then
        if config.task != "mdg":
            raise ValueError(
                f"method {config.method!r} reads the name of every class, and task {config.task!r} hides some"
            )
        if self.chosen_pool != "cls":
            raise ValueError(f"method {config.method!r} reads what CLIP projects: leave out --pool, or give cls")

    def extend(self, model: Classifier) -> None:
        super().extend(model)
        if self.read is not None:
            model.head = self.read  # type: ignore[assignment]
            return
        if not self.class_names:
            raise ValueError(f"method {self.config.method!r} needs names: set `class_names` before the model is built")
        names = [name.replace("_", " ") for name in self.class_names]
        text = load_text(model.backbone)
        model.head = ClipHead(text, self.sentences(text.tower, names), len(names))  # type: ignore[assignment]

    def sentences(self, tower: TextTower, names: list[str]) -> nn.Module:
        """A module whose call gives the classes' unit vectors."""
        raise NotImplementedError


class ZeroShot(Sentences):
    summary = "CLIP's zero-shot classifier: class names in a sentence, nothing is trained"
    reference = "Radford et al., Learning Transferable Visual Models From Natural Language Supervision, ICML 2021"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if "+" in config.method or self.chosen_tune != "head" or config.devices > 1:
            raise ValueError(
                "'clip' trains nothing: leave out --tune, --devices and what stands behind '+'; "
                "'coop' is the method whose prompt is learned"
            )

    def sentences(self, tower: TextTower, names: list[str]) -> nn.Module:
        with torch.no_grad():
            return Written(tower(tower.tokens([TEMPLATE.format(name) for name in names])))

    def update(self, step: Step) -> None:
        """No step at all; before an evaluation the batch's loss is counted, for the record."""
        if step.number % self.config.eval_every and step.number < self.config.steps - 1:
            return
        for batch in step.batches():
            with torch.no_grad():
                step.note(self.losses(step.forward(batch), batch))


class CoOp(Sentences):
    summary = "CoOp: learned vectors in the place of the words before the class name"
    reference = "Zhou et al., Learning to Prompt for Vision-Language Models, IJCV 2022"
    defaults = {"context": 16}

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        count = self.hparams["context"]
        if count < 1 or count != int(count):
            raise ValueError(f"context is a whole number of vectors, at least 1, not {count:g}; the usual one is 16")

    def sentences(self, tower: TextTower, names: list[str]) -> nn.Module:
        return Learned(tower, names, int(self.hparams["context"]))
