"""Methods that learn from sentences alone, in the first step of the run: DUPRG and PromptStyler.

    duprg  t_cd = sentence "a <domain> photo of a <class>", for every class and every word of a bank
           o_cd = unit output of an autoencoder on t_cd,    o_c = mean over d of o_cd,    logits = s <f, o_c>
           L = - mean_cd <t_cd, o_cd> - domains * mean_c |o_c|^2 + classes * mean_d mean_{c != c'} <o_cd, o_c'd>

    promptstyler, stage 1, one style at a time:
           L = mean_{j<i} |cos(T("a S_i style of a"), T("a S_j style of a"))|
               + mean_m CE over n of cos(T("a S_i style of a <class m>"), T("<class n>"))
    stage 2: ArcFace of a linear layer without bias on the sentences of all styles and classes

The bank has 1 word (none), 11 (the release's) or 30; never the data's own domain names, which would include the unseen
one. The optimiser restarts for each style, and earlier styles are constants. All folds have the same model.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchgen.methods.clip import SourceFree
from patchgen.methods.method import COUNT, Bound
from patchgen.model.clip import BANKS, FIRST_DEVIATION, STYLE, TextTower, in_domain

DECAY = 1e-4


class Duprg(SourceFree):
    summary = "DUPRG: class vectors from sentences of many domains through an autoencoder; no images"
    reference = "Niu et al., Domain-Unified Prompt Representations for Source-Free Domain Generalization, 2022"
    defaults = {"bank": 11, "domains": 0.5, "classes": 0.05, "sentence_steps": 2000, "sentence_lr": 0.04}
    bounds = {"bank": Bound(f"one of {', '.join(map(str, BANKS))}", BANKS.__contains__), "sentence_steps": COUNT}

    def learn(self, tower: TextTower, names: list[str]) -> Tensor:
        words = BANKS[int(self.hparams["bank"])]
        texts = [in_domain(word, name) for name in names for word in words]
        sentences = tower.read(texts).unflatten(0, (len(names), len(words)))  # (C, M, E)
        network = autoencoder(sentences.shape[-1]).to(sentences)
        optimizer = torch.optim.AdamW(network.parameters(), lr=self.hparams["sentence_lr"], weight_decay=DECAY)
        for _ in range(int(self.hparams["sentence_steps"])):
            optimizer.zero_grad()
            outputs = F.normalize(network(sentences), dim=-1)
            unified_loss(sentences, outputs, self.hparams["domains"], self.hparams["classes"]).backward()
            optimizer.step()
        return F.normalize(network(sentences), dim=-1).mean(1)  # not normalised again


def autoencoder(dim: int) -> nn.Sequential:
    """Sentences (..., E) -> (..., E), with a bottleneck of width E / 2."""
    return nn.Sequential(
        nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, dim // 2),
        nn.Linear(dim // 2, dim), nn.ReLU(), nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, dim),
    )  # fmt: skip


def unified_loss(sentences: Tensor, outputs: Tensor, domains: float, classes: float) -> Tensor:
    """L for sentences and outputs (C, M, E): outputs stay near their sentences, domains align, classes separate."""
    near = (sentences * outputs).sum(-1).mean()
    together = outputs.mean(1).square().sum(-1).mean()  # mean_cd <o_cd, o_c>
    count = len(outputs)
    pairs = outputs.sum(0).square().sum(-1) - outputs.square().sum((0, -1))  # (M,) over all c != c'
    return -near - domains * together + classes * pairs.mean() / max(count * (count - 1), 1)


STYLE_RATE, LAYER_RATE, MOMENTUM = 0.002, 0.005, 0.9
SCALE, MARGIN, BATCH = 5.0, 0.5, 128
PLACE = 2  # position of the style word: after the start token and "a"


class PromptStyler(SourceFree):
    summary = "PromptStyler: learned style words, then an ArcFace classifier on styled sentences; no images"
    reference = "Cho et al., PromptStyler: Prompt-driven Style Generation for Source-free DG, ICCV 2023"
    defaults = {"styles": 80, "style_steps": 100, "epochs": 50}
    bounds = {"styles": COUNT, "style_steps": COUNT, "epochs": COUNT}
    log_scale = math.log(SCALE)

    def learn(self, tower: TextTower, names: list[str]) -> Tensor:
        styles, steps, epochs = (int(self.hparams[name]) for name in ("styles", "style_steps", "epochs"))
        return F.normalize(learn_classes(learn_styles(tower, names, styles, steps), epochs), dim=1)


def learn_styles(tower: TextTower, names: list[str], count: int, steps: int) -> Tensor:
    """Stage 1: the sentences of all classes in each learned style (S, C, E)."""
    words = STYLE.format("a")  # any word of one token; the learned vector replaces it
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
