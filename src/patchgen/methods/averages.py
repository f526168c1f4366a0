"""SMA: predict with the mean of the weights over all steps.

    theta_mean = mean of theta after the updates n - 1, n, ..., now,   n = int(sma_start * steps)

Before that, the current weights predict. Validation, SWAD and the checkpoints use the mean, which starts at 0.02 of the
steps: of the usual 5001 steps, the 100th update is averaged with the weights before it, as in the release.
`patchgen evaluate RUN RUN...` averages the predictions of several such runs (EoA).

Difference from the released code: only trained tensors are averaged.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from patchgen.methods.buffers import NamedBuffers
from patchgen.methods.method import BELOW_ONE, Method
from patchgen.model.classifier import Classifier, trained_tensors


class Sma(Method):
    summary = "SMA: the mean of the weights over all steps predicts"
    reference = "Arpit et al., Ensemble of Averages: Improving Model Selection and Boosting Performance, NeurIPS 2022"
    addable = True
    defaults = {"sma_start": 0.02}
    bounds = {"sma_start": BELOW_ONE}
    made: Tensor  # () steps so far

    def setup(self, model: Classifier) -> None:
        super().setup(model)
        self.mean = NamedBuffers(trained_tensors(model), saved=True)
        self.register_buffer("made", torch.tensor(0))

    @torch.no_grad()
    def after_step(self, model: Classifier) -> None:
        super().after_step(model)
        first = max(1, int(self.hparams["sma_start"] * self.config.steps))  # the first update in the mean
        share = 1 / (self.made - first + 3).clamp(min=1)  # weight of the newest weights; 1 until the mean starts
        mean = self.mean.named()
        for name, tensor in trained_tensors(model).items():
            mean[name].lerp_(tensor, share.to(tensor))
        self.made += 1

    def predicting(self, model: Classifier) -> Mapping[str, Tensor] | None:
        return self.mean.named()
