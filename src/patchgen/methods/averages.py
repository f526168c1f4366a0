"""SMA: the mean of the weights over all steps predicts.

    theta_mean = mean of theta after the updates n - 1, n, ..., now,   n = int(sma_start * steps)

Before that the current weights predict. Validation, SWAD and the checkpoints use the mean, which begins at 0.02 of the
steps: the 100th update of the field's 5001 is averaged with the weights that it finds, as in the release. Predictions
of several such runs are averaged by `patchgen ensemble` (EoA).

What differs from the released code: the mean is kept of trained tensors only.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from patchgen.config import Config
from patchgen.methods.buffers import NamedBuffers
from patchgen.methods.method import Method
from patchgen.model.classifier import Classifier, trained_tensors


class Sma(Method):
    summary = "SMA: the mean of the weights over all steps predicts"
    reference = "Arpit et al., Ensemble of Averages: Improving Model Selection and Boosting Performance, NeurIPS 2022"
    addable = True
    defaults = {"sma_start": 0.02}
    made: Tensor  # () steps so far

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if not self.hparams["sma_start"] < 1:
            raise ValueError(f"sma_start is a share of the steps from 0 to below 1, not {self.hparams['sma_start']}")

    def setup(self, model: Classifier) -> None:
        super().setup(model)
        self.mean = NamedBuffers(trained_tensors(model), saved=True)
        self.register_buffer("made", torch.tensor(0))

    @torch.no_grad()
    def after_step(self, model: Classifier) -> None:
        super().after_step(model)
        first = max(1, int(self.hparams["sma_start"] * self.config.steps))  # the update that the mean begins with
        share = 1 / (self.made - first + 3).clamp(min=1)  # of the newest weights; 1 until the mean begins
        mean = self.mean.named()
        for name, tensor in trained_tensors(model).items():
            mean[name].lerp_(tensor, share.to(tensor))
        self.made += 1

    def predicting(self, model: Classifier) -> Mapping[str, Tensor] | None:
        return self.mean.named()
