"""Moving averages of the weights that predict: SMA and GESTUR. Only trained tensors are averaged.

    sma      theta_mean = mean of theta after the updates n - 1, n, ..., now,   n = int(sma_start * steps)
    gestur   g_out    = theta - theta_g, rescaled to the length gestur * ||g_in||
             gradient = (g_in + g_out) / 2,       for the backbone; g_in the gradient of the losses
             theta_g <- decay * theta_g + (1 - decay) * theta      after every step, for all trained tensors

Lengths are over all tensors together. GESTUR's published command line sets `--ld`, which its code does not read;
`gestur` is its `lda`. Validation, SWAD and the checkpoints use the average.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from patchgen.methods.method import BELOW_ONE, Method
from patchgen.model.classifier import Classifier, trained_tensors


class NamedBuffers(nn.Module):
    """A copy of named tensors on the method's device; ``saved`` with a run's state, unless ``setup`` can restore it."""

    def __init__(self, tensors: Mapping[str, Tensor], *, saved: bool) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            # a buffer's name may not contain a dot
            self.register_buffer(name.replace(".", "/"), tensor.detach().clone(), persistent=saved)

    def named(self) -> dict[str, Tensor]:
        """The tensors themselves, by the model's names."""
        return {name.replace("/", "."): tensor for name, tensor in self.named_buffers()}


class AverageOfSteps(Method):
    """An average of the trained tensors predicts, in which the newest ones have the weight ``share()``."""

    made: Tensor  # () steps so far, without the current one

    def setup(self, model: Classifier) -> None:
        super().setup(model)
        self.mean = NamedBuffers(trained_tensors(model), saved=True)
        self.register_buffer("made", torch.tensor(0))

    def share(self) -> Tensor:
        raise NotImplementedError

    @torch.no_grad()
    def after_step(self, model: Classifier) -> None:
        super().after_step(model)
        share, mean = self.share(), self.mean.named()
        for name, tensor in trained_tensors(model).items():
            mean[name].lerp_(tensor, share.to(tensor))
        self.made += 1

    def predicting(self, model: Classifier) -> Mapping[str, Tensor] | None:
        return self.mean.named()


class Sma(AverageOfSteps):
    summary = "SMA: the mean of the weights over all steps predicts"
    reference = "Arpit et al., Ensemble of Averages: Improving Model Selection and Boosting Performance, NeurIPS 2022"
    addable = True
    defaults = {"sma_start": 0.02}
    bounds = {"sma_start": BELOW_ONE}

    def share(self) -> Tensor:
        first = max(1, int(self.hparams["sma_start"] * self.config.steps))  # the first update in the mean
        return 1 / (self.made - first + 3).clamp(min=1)  # 1 until the mean starts


class Gestur(AverageOfSteps):
    summary = "GESTUR: gradients held near a moving average of the weights, which predicts"
    reference = "Lew et al., Gradient Estimation for Unseen Domain Risk Minimization with Pre-Trained Models, 2023"
    addable = True
    defaults = {"gestur": 0.01, "decay": 0.999}
    bounds = {"decay": BELOW_ONE}

    def share(self) -> Tensor:
        return torch.tensor(1 - self.hparams["decay"])

    @torch.no_grad()
    def adjust_gradients(self, model: Classifier) -> None:
        super().adjust_gradients(model)
        trained, average = trained_tensors(model), self.mean.named()
        inner = {name: tensor.grad for name, tensor in trained.items() if tensor.grad is not None}
        away = {name: trained[name] - average[name] for name in inner if name.startswith("backbone.")}
        if not away:
            return
        length, far = (get_total_norm(list(tensors.values())) for tensors in (inner, away))
        scale = self.hparams["gestur"] * length / far.clamp(min=1e-12)
        for name, outer in away.items():
            inner[name].add_(outer * scale).div_(2)
