"""MIRO: features at several depths stay near those of the pretrained backbone, with one learned variance per channel.

    L_miro = miro * sum_l 1/2 mean[ (z_l - z0_l)^2 / v_l + log v_l ]

z_l is the output of tap l in training, z0_l its output with the pretrained weights, and v_l a learned variance per
channel, initially 0.1. Taps: the stem (the patch convolution of a ViT) and four evenly spaced blocks.

There is no second copy of the pretrained network, as in the release: the same backbone runs a second time with the
pretrained values of the trained tensors. A tap without trained tensors before it (the stem, with LayerNorm tuning)
cannot drift and is left out. With `miro` 0 none of this is computed.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import softplus

from patchgen.data.loaders import Batch
from patchgen.methods.averages import NamedBuffers
from patchgen.methods.method import Method
from patchgen.model.backbone import Backbone
from patchgen.model.classifier import Classifier, Output
from patchgen.model.generic import on_tensor

LEAST_VARIANCE = 1e-5
FIRST_VARIANCE = 0.1
NUM_BLOCKS = 4


class Miro(Method):
    summary = "MIRO: intermediate features stay near the pretrained ones"
    reference = "Cha et al., Domain Generalization by Mutual-Information Regularization with Pre-trained Models, 2022"
    addable = True
    defaults = {"miro": 0.1, "miro_lr_mult": 10.0}
    learned = {"variances": "miro_lr_mult"}
    backbone_term = "miro"

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
        if self.hparams["miro"]:
            terms["L_miro"] = self.hparams["miro"] * self._drift(batch.image)
        return terms

    def _drift(self, images: Tensor) -> Tensor:
        now, backbone, weights = self._taps.take(), self.classifier.backbone, self.pretrained.named()
        half = self.config.precision == "bf16-mixed"
        with torch.no_grad(), torch.autocast(images.device.type, torch.bfloat16, enabled=half):
            then = outputs_of(self._taps.modules, lambda: functional_call(backbone, weights, images))
        terms = [gaussian_nll(z, z0, variance()) for z, z0, variance in zip(now, then, self.variances, strict=True)]
        return torch.stack(terms).sum()


class ChannelVariance(nn.Module):
    """One learned variance per channel, shared by all samples and positions."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        start = math.log(math.expm1(FIRST_VARIANCE - LEAST_VARIANCE))  # its softplus is the initial variance
        self.bias = nn.Parameter(torch.full((channels,), start))

    def forward(self) -> Tensor:
        """(channels,)"""
        return softplus(self.bias) + LEAST_VARIANCE


def gaussian_nll(z: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """1/2 mean[(z - mean)^2 / v + log v], for tokens (B, T, D), vectors (B, D) or maps (B, D, h, w), and v (D,)."""
    of_channel = variance.view(-1, 1, 1) if z.ndim == 4 else variance
    return ((z.float() - mean.float()).square() / of_channel).mean() / 2 + variance.log().mean() / 2


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
    """Records the outputs of modules in training passes, those with gradients."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = modules
        self._seen: list[Tensor] = []
        for i, module in enumerate(modules):
            on_tensor(module, partial(self._note, i))

    def _note(self, i: int, output: Tensor) -> None:
        if torch.is_grad_enabled():
            self._seen[i:] = [output]  # a new pass begins with the first tap

    def take(self) -> list[Tensor]:
        """Outputs of the last pass; can be taken once, so that its graph is freed."""
        seen, self._seen = self._seen, []
        return seen
