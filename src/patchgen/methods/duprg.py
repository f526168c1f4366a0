"""DUPRG: one representation per class from sentences of many domains, without images.

    t_cd = sentence "a <domain> photo of a <class>", for every class and every word of a bank
    o_cd = unit output of an autoencoder on t_cd,    o_c = mean over d of o_cd,    logits = s <f, o_c>

    L = - mean_cd <t_cd, o_cd> - domains * mean_c |o_c|^2 + classes * mean_d mean_{c != c'} <o_cd, o_c'd>

The sentences form one batch; AdamW at `sentence_lr`, weight decay 1e-4, `sentence_steps` steps, all within the first
step of the run. `bank` is the number of domain words: 1 (none), 11 (the release's default) or 30. Nothing is left to
train after that: `--steps 1` is enough, and all folds have the same model.

Differences from the released code: the result is that of the last step. The release prints the best accuracy **on the
target's test images** over all steps. `_` in class names is read as a space. The bank of the data's own domain names is
left out, because it would include the unseen one.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchgen.methods.clip import SourceFree
from patchgen.methods.method import COUNT, Bound
from patchgen.model.text import BANKS, TextTower, in_domain

DECAY = 1e-4


class Duprg(SourceFree):
    summary = "DUPRG: class vectors from sentences of many domains through an autoencoder; no images"
    reference = "Niu et al., Domain-Unified Prompt Representations for Source-Free Domain Generalization, 2022"
    defaults = {"bank": 11, "domains": 0.5, "classes": 0.05, "sentence_steps": 2000, "sentence_lr": 0.04}
    bounds = {"bank": Bound(f"one of {', '.join(map(str, BANKS))}", BANKS.__contains__), "sentence_steps": COUNT}

    def learn(self, tower: TextTower, names: list[str]) -> tuple[Tensor, float | None]:
        words = BANKS[int(self.hparams["bank"])]
        texts = [in_domain(word, name) for name in names for word in words]
        sentences = tower.read(texts).unflatten(0, (len(names), len(words)))  # (C, M, E)
        network = Autoencoder(sentences.shape[-1]).to(sentences)
        optimizer = torch.optim.AdamW(network.parameters(), lr=self.hparams["sentence_lr"], weight_decay=DECAY)
        for _ in range(int(self.hparams["sentence_steps"])):
            optimizer.zero_grad()
            unified_loss(sentences, network(sentences), self.hparams["domains"], self.hparams["classes"]).backward()
            optimizer.step()
        return network(sentences).mean(1), None  # not normalised again


class Autoencoder(nn.Module):
    """Sentences (..., E) -> unit vectors (..., E), with a bottleneck of width E / 2."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, dim // 2),
            nn.Linear(dim // 2, dim), nn.ReLU(), nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, dim),
        )  # fmt: skip

    def forward(self, sentences: Tensor) -> Tensor:
        return F.normalize(self.layers(sentences), dim=-1)


def unified_loss(sentences: Tensor, outputs: Tensor, domains: float, classes: float) -> Tensor:
    """L for sentences and outputs (C, M, E): outputs stay near their sentences, domains align, classes separate."""
    near = (sentences * outputs).sum(-1).mean()
    together = outputs.mean(1).square().sum(-1).mean()  # mean_cd <o_cd, o_c>
    count = len(outputs)
    pairs = outputs.sum(0).square().sum(-1) - outputs.square().sum((0, -1))  # (M,) over all c != c'
    return -near - domains * together + classes * pairs.mean() / max(count * (count - 1), 1)
