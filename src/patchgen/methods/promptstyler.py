"""PromptStyler: learn style words, then a classifier on sentences in all of these styles; no images.

    stage 1, one style at a time:  mean_{j<i} |cos(T("a S_i style of a"), T("a S_j style of a"))|
                                   + mean_m CE over n of cos(T("a S_i style of a <class m>"), T("<class n>"))
    stage 2:  ArcFace of a linear layer without bias on the sentences of all styles and classes

S_i is one word vector, drawn from N(0, 0.02^2) and trained for `style_steps` steps of SGD at 0.002 with momentum 0.9,
which restarts for each style; earlier styles are constants. The cosines of stage 1 are not scaled. Stage 2: scale 5,
margin 0.5 rad, `epochs` epochs in batches of 128 sentences, SGD at 0.005 with momentum 0.9. Predictions compare unit
image vectors with the unit rows of the layer. Everything happens within the first step of the run: `--steps 1` is
enough, and all folds have the same model. `--hparams styles 20 style_steps 20` is a cheaper variant, which works
decently according to the paper.

There is no released code. Our choices where the paper leaves details open: Xavier uniform initialisation of the layer,
and predictions by cosines, as in ArcFace.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from patchgen.methods.clip import SourceFree
from patchgen.methods.method import COUNT
from patchgen.model.clip import FIRST_DEVIATION
from patchgen.model.text import STYLE, TextTower

STYLE_RATE, LAYER_RATE, MOMENTUM = 0.002, 0.005, 0.9
SCALE, MARGIN, BATCH = 5.0, 0.5, 128
PLACE = 2  # position of the style word: after the start token and "a"


class PromptStyler(SourceFree):
    summary = "PromptStyler: learned style words, then an ArcFace classifier on styled sentences; no images"
    reference = "Cho et al., PromptStyler: Prompt-driven Style Generation for Source-free DG, ICCV 2023"
    defaults = {"styles": 80, "style_steps": 100, "epochs": 50}
    bounds = {"styles": COUNT, "style_steps": COUNT, "epochs": COUNT}

    def learn(self, tower: TextTower, names: list[str]) -> tuple[Tensor, float | None]:
        styles, steps, epochs = (int(self.hparams[name]) for name in ("styles", "style_steps", "epochs"))
        sentences = learn_styles(tower, names, styles, steps)  # (S, C, E)
        return F.normalize(learn_classes(sentences, epochs), dim=1), math.log(SCALE)


def learn_styles(tower: TextTower, names: list[str], count: int, steps: int) -> Tensor:
    """Stage 1: the sentences of all classes in each learned style (S, C, E)."""
    words = STYLE.format("a")  # placeholder: any word of one token
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
    """Loss for a style (1, E): unlike the earlier ones (i - 1, E), with sentences (C, E) near their content (C, E)."""
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
    # away from -1 and 1, where the arc cosine is not differentiable
    angle = cosines.clamp(-1 + 1e-6, 1 - 1e-6).acos()
    own = F.one_hot(label, cosines.shape[1])
    return scale * (angle + margin * own).cos()
