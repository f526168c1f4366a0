"""CLIPood: tune the image tower with semantic margins; an average of the weights along the way predicts.

    main = CE over c of s (<f, t_c> - margin <t_y, t_c>)         t_c of "a photo of a <name>.", s CLIP's scale
    theta_mean = sum_i w_i theta_i / sum_i w_i,    i = 0 ... N,  w_i the Beta(beta, beta) density at (i + 1/2) / (N + 1)

theta_0 are the pretrained weights, and N is `--steps`; with beta 0.5, both ends of training count most. The image tower
and its projection are trained, by AdamW and a cosine schedule. The release stores the average in 16 bits, where shares
near 1e-4 are lost to rounding; here it has 32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from patchgen.data.loaders import Batch
from patchgen.methods.averages import NamedBuffers
from patchgen.methods.clip import Sentences
from patchgen.methods.method import POSITIVE
from patchgen.model.classifier import Classifier, Output, trained_tensors
from patchgen.model.clip import ClassVectors
from patchgen.model.losses import cross_entropy
from patchgen.model.text import PHOTO, ClipText, sentences


class ClipOod(Sentences):
    summary = "CLIPood: CLIP's image tower tuned with semantic margins; a Beta average of the weights predicts"
    reference = "Shu et al., CLIPood: Generalizing CLIP to Out-of-Distributions, ICML 2023"
    tune = "full"
    optimizer = "adamw"
    lr_schedule = "cosine"
    replaces_main = True
    self_contained = True
    defaults = {"margin": 0.3, "beta": 0.5}
    bounds = {"beta": POSITIVE}
    made: Tensor  # () steps so far
    shares: Tensor  # (steps + 1,) share of the newest weights in the average

    def head(self, model: Classifier, text: ClipText, names: list[str]) -> nn.Module:
        return ClassVectors(text.projection, text.scale, text.tower.read(sentences(PHOTO, names)), tuned=True)

    def setup(self, model: Classifier) -> None:
        super().setup(model)
        self.mean = NamedBuffers(trained_tensors(model), saved=True)
        self.register_buffer("made", torch.tensor(0))
        self.register_buffer("shares", beta_shares(self.config.steps, self.hparams["beta"]), persistent=False)

    def losses(self, out: Output, batch: Batch) -> dict[str, Tensor]:
        head: Any = self.classifier.head
        logits = with_margins(out.logits, batch.label, head.vectors, head.scale.exp() * self.hparams["margin"])
        return super().losses(out, batch) | {"main": cross_entropy(logits, batch.label, self.weights(out, batch))}

    @torch.no_grad()
    def after_step(self, model: Classifier) -> None:
        super().after_step(model)
        self.made += 1
        share, mean = self.shares[self.made.clamp(max=self.config.steps)], self.mean.named()
        for name, tensor in trained_tensors(model).items():
            mean[name].lerp_(tensor, share.to(tensor))

    def predicting(self, model: Classifier) -> Mapping[str, Tensor] | None:
        return self.mean.named()


def with_margins(logits: Tensor, label: Tensor, vectors: Tensor, margin: Tensor) -> Tensor:
    """Logits (B, C) less ``margin`` times the similarity of each class's vector to the true one's."""
    near = vectors @ vectors.T  # (C, C)
    return logits.float() - margin * near[label.clamp(min=0)]


def beta_shares(steps: int, beta: float) -> Tensor:
    """Share of the weights after step i in the average so far, (steps + 1,) for i = 0 ... steps."""
    place = (torch.arange(steps + 1, dtype=torch.float64) + 0.5) / (steps + 1)
    weight = (place * (1 - place)) ** (beta - 1)  # the constant of the density cancels
    return (weight / weight.cumsum(0)).float()
