"""PromptStyler: style words are learned, then a classifier on sentences in all of these styles; no images.

    stage 1, style i after style:  mean_{j<i} |cos(T("a S_i style of a"), T("a S_j style of a"))|
                                   + mean_m CE over n of cos(T("a S_i style of a <class m>"), T("<class n>"))
    stage 2:  ArcFace of a linear layer without bias on the sentences of all styles and classes

S_i is one word vector, drawn from N(0, 0.02^2): `style_steps` steps of SGD at 0.002 with momentum 0.9, which begins
anew with each style; earlier styles are constants. The cosines of stage 1 are not scaled. Stage 2: scale 5, margin 0.5
rad, `epochs` epochs of 128 sentences, SGD at 0.005 with momentum 0.9. Predictions compare unit image vectors with the
unit rows of the layer. All of it happens within the first step of the run: `--steps 1` is enough, and every fold has
the same model. `--hparams styles 20 style_steps 20` is the cheap form, which the paper finds decent.

There is no released code. What the paper leaves open is ours: the layer begins with Xavier's uniform values, and
predictions use cosines, as ArcFace does.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from patchgen.config import Config
from patchgen.methods.clip import SourceFree
from patchgen.model.clip import FIRST_DEVIATION
from patchgen.model.prompts import STYLE
from patchgen.model.text import TextTower

STYLE_RATE, LAYER_RATE, MOMENTUM = 0.002, 0.005, 0.9
SCALE, MARGIN, BATCH = 5.0, 0.5, 128
PLACE = 2  # of the style's word: behind the start and "a"


class PromptStyler(SourceFree):
    summary = "PromptStyler: learned style words, then an ArcFace classifier on styled sentences; no images"
    reference = "Cho et al., PromptStyler: Prompt-driven Style Generation for Source-free DG, ICCV 2023"
    defaults = {"styles": 80, "style_steps": 100, "epochs": 50}

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.whole("styles", "style_steps", "epochs")

    def learn(self, tower: TextTower, names: list[str]) -> tuple[Tensor, float | None]:
        styles, steps, epochs = self.whole("styles", "style_steps", "epochs")
        sentences = learn_styles(tower, names, styles, steps)  # (S, C, E)
        return F.normalize(learn_classes(sentences, epochs), dim=1), math.log(SCALE)


def learn_styles(tower: TextTower, names: list[str], count: int, steps: int) -> Tensor:
    """Stage 1: the sentences of all classes in each learned style (S, C, E)."""
    words = STYLE.format("a")  # any word of one token holds the place
    alone, styled = (tower.tokens(texts).to(tower.device) for texts in ([words], [f"{words} {n}" for n in names]))
    content = tower.read(names)  # (C, E)
    earlier, sentences = content.new_zeros(0, content.shape[1]), []
    for _ in range(count):
        word = (FIRST_DEVIATION * torch.randn(1, tower.dim)).to(content).requires_grad_()
        optimizer = torch.optim.SGD([word], lr=STYLE_RATE, momentum=MOMENTUM)
        for _ in range(steps):
            optimizer.zero_grad()
            style_loss(tower(alone, word, PLACE), tower(styled, word, PLACE), earlier, content).backward()
            optimizer.step()
        with torch.no_grad():
            earlier = torch.cat([earlier, tower(alone, word, PLACE)])
            sentences.append(tower(styled, word, PLACE))
    return torch.stack(sentences)


def style_loss(style: Tensor, styled: Tensor, earlier: Tensor, content: Tensor) -> Tensor:
    """A style (1, E) unlike the earlier ones (i - 1, E), whose sentences (C, E) keep to their contents (C, E)."""
    unlike = (style @ earlier.T).abs().mean() if len(earlier) else style.sum() * 0
    return unlike + F.cross_entropy(styled @ content.T, torch.arange(len(content), device=content.device))


def learn_classes(sentences: Tensor, epochs: int) -> Tensor:
    """Stage 2: the weight (C, E) of the classifier of unit sentences (S, C, E)."""
    styles, classes, dim = sentences.shape
    weight = torch.nn.init.xavier_uniform_(torch.empty(classes, dim)).to(sentences).requires_grad_()
    optimizer = torch.optim.SGD([weight], lr=LAYER_RATE, momentum=MOMENTUM)
    inputs, label = sentences.flatten(0, 1), torch.arange(classes, device=sentences.device).repeat(styles)
    for _ in range(epochs):
        for rows in torch.randperm(len(inputs)).to(label.device).split(BATCH):
            optimizer.zero_grad()
            logits = arcface(inputs[rows] @ F.normalize(weight, dim=1).T, label[rows], SCALE, MARGIN)
            F.cross_entropy(logits, label[rows]).backward()
            optimizer.step()
    return weight.detach()


def arcface(cosines: Tensor, label: Tensor, scale: float, margin: float) -> Tensor:
    """scale * cosines (B, C), with ``margin`` rad added to the angle of the true class."""
    # away from -1 and 1, where the arc cosine has no slope
    angle = cosines.clamp(-1 + 1e-6, 1 - 1e-6).acos()
    own = F.one_hot(label, cosines.shape[1])
    return scale * (angle + margin * own).cos()
