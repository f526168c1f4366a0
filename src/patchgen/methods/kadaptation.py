"""KAdaptation: updates of the attention layers of a frozen backbone as sums of Kronecker products.

    y = W x + b0 + x H + b,    H = sum_{i=1..t} A_i (x) B_i,    A_i = a_i b_i^T (t x t),    B_i = U_i V_i of rank r

t is `rules`. The A_i are shared between layers; each has its own B_i and b. Half of H's elements are dropped in a
training pass. A_i (x) B_i = (a_i (x) U_i) (b_i (x) V_i)^T, so H is one product of rank t r, as in LoRA.

    kadaptation        query, key, value and output of every block, rank `rank`; one set of A for each of the four.
                       **Our reading**: the publication states 0.14 M parameters, not the layers; ours has 143,360.
    kadaptation-moa    the mixture of adapters: the fused query-key-value layer of every second block, four such
                       updates of rank 1, 2, 4, 8, of which a router chooses one per token; each layer adds the loss
                       balance * 1/2 (CV^2 of sum p + CV^2 of sum Phi(4 (p - p_best))),   p_best the winner's with noise
"""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchgen.data.loaders import Batch
from patchgen.methods.method import COUNT, Method, take
from patchgen.model.backbone import Backbone
from patchgen.model.classifier import Classifier, Output
from patchgen.model.tuning import attention_layers

RANKS = (1, 2, 4, 8)  # of the experts
DROPOUT = 0.5  # of the elements of H
ROUTER_WIDTH = 256
NOISE = 1 / len(RANKS)


class KAdaptation(Method):
    summary = "KAdaptation, our reading: Kronecker updates of the attention layers of a frozen ViT"
    reference = "He et al., Parameter-Efficient Model Adaptation for ViTs, AAAI 2023; Lee et al., WACV 2025"
    tune = "head"
    compared = False
    defaults = {"rules": 64, "rank": 1}
    bounds = {"rules": COUNT, "rank": COUNT}

    def extend(self, model: Classifier) -> None:
        super().extend(model)
        rules, dim = int(self.hparams["rules"]), model.backbone.dim
        if dim % rules:
            fit = math.gcd(dim, rules)
            raise ValueError(f"the backbone's width {dim} has no {rules} equal parts; try --hparams rules {fit}")
        model.backbone.adapters = self.adapters(model.backbone, rules)

    def adapters(self, backbone: Backbone, size: int) -> nn.Module:
        """The updates, each hooked to its layer; the network itself, and so its digest, does not change."""
        updates, rank = nn.ModuleList(), int(self.hparams["rank"])
        layers = [[*block.inputs, block.out] for block in attention_layers(backbone)]
        rules = [Rules(size) for _ in layers[0]]  # of query, key, value, output
        for block in layers:
            for shared, layer in zip(rules, block, strict=True):
                update = KroneckerUpdate(shared, layer.in_features, layer.out_features, rank, bias=True)
                layer.register_forward_hook(update.add)
                updates.append(update)
        return updates


class KAdaptationMoa(KAdaptation):
    summary = "KAdaptation-MoA: a mixture of Kronecker updates in every second block of a frozen ViT"
    reference = "Lee et al., Domain Generalization using Large Pretrained Models with Mixture-of-Adapters, WACV 2025"
    defaults = {"balance": 0.01}

    @classmethod
    def all_defaults(cls) -> dict[str, float]:
        return {name: value for name, value in super().all_defaults().items() if name != "rank"}

    def adapters(self, backbone: Backbone, size: int) -> nn.Module:
        rules, mixtures = Rules(size), nn.ModuleList()
        for block in attention_layers(backbone)[::2]:
            mixture = Mixture(rules, block.inputs[0].in_features, sum(layer.out_features for layer in block.inputs))
            for i, layer in enumerate(block.inputs):
                layer.register_forward_hook(partial(mixture.add, i, len(block.inputs)))
            mixtures.append(mixture)
        return mixtures

    def losses(self, out: Output, batch: Batch) -> dict[str, Tensor]:
        mixtures: Any = self.classifier.backbone.adapters
        unequal = torch.stack([take(mixture, "imbalance") for mixture in mixtures]).sum()
        return super().losses(out, batch) | {"L_balance": self.hparams["balance"] * unequal}


class Rules(nn.Module):
    """A_i = a_i b_i^T, i = 1 ... t: (t, t) each."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.left, self.right = (nn.Parameter(torch.empty(size, size).uniform_(-0.01, 0.01)) for _ in range(2))


class KroneckerUpdate(nn.Module):
    """x (..., d_in) -> x H + b (..., d_out)."""

    def __init__(self, rules: Rules, d_in: int, d_out: int, rank: int, *, bias: bool) -> None:
        super().__init__()
        size = len(rules.left)
        self.rules = rules  # shared: counted and saved once
        self.left = nn.Parameter(torch.stack([_glorot(d_in // size, rank) for _ in range(size)]))  # (t, d_in / t, r)
        self.right = nn.Parameter(torch.stack([_glorot(rank, d_out // size) for _ in range(size)]))  # (t, r, d_out / t)
        self.bias = nn.Parameter(torch.zeros(d_out)) if bias else None

    def factors(self) -> tuple[Tensor, Tensor]:
        """(d_in, t r) and (t r, d_out), whose product is H."""
        left = torch.einsum("ia,ipr->apir", self.rules.left, self.left)
        right = torch.einsum("ib,irq->irbq", self.rules.right, self.right)
        return left.flatten(2).flatten(0, 1), right.flatten(2).flatten(0, 1)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.factors()
        y = x @ F.dropout(left @ right, DROPOUT) if _drops(self) else (x @ left) @ right
        return y if self.bias is None else y + self.bias

    def add(self, layer: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        return output + self(inputs[0]).to(output.dtype)


class Mixture(nn.Module):
    """x (B, T, d_in) -> (B, T, d_out): for each token, the update that the router chooses."""

    def __init__(self, rules: Rules, d_in: int, d_out: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(KroneckerUpdate(rules, d_in, d_out, rank, bias=False) for rank in RANKS)
        self.bias = nn.Parameter(torch.zeros(d_out))
        self.project = nn.Linear(d_in, ROUTER_WIDTH)
        self.directions = nn.Parameter(0.01 * torch.randn(ROUTER_WIDTH, len(RANKS)))
        self.log_scale = nn.Parameter(torch.tensor([math.log(2.0)]))
        self.imbalance: Tensor | None = None  # in the last pass with gradients
        self._said: tuple[Tensor, Tensor, int] | None = None  # input, output and number of uses in this pass

    def route(self, x: Tensor) -> Tensor:
        """Logits of the experts (..., 4), without noise."""
        cosines = F.normalize(self.project(x), dim=-1) @ F.normalize(self.directions, dim=0)
        return cosines * self.log_scale.clamp(max=math.log(100)).exp()

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)  # (N, d_in)
        logits = self.route(tokens).float()
        noisy = logits + NOISE * torch.randn_like(logits) if _drops(self) else logits
        best, choice = noisy.softmax(-1).max(-1)  # (N,) each
        if torch.is_grad_enabled():
            self.imbalance = imbalance(logits.softmax(-1), best)
        mixed = best.new_zeros(tokens.shape[0], self.bias.shape[0])
        for i, expert in enumerate(self.experts):
            mine = choice == i
            if _drops(self):  # only its own tokens: dropout needs the full H
                mixed[mine] = best[mine].unsqueeze(1) * expert(tokens[mine])
            else:  # fixed shapes, for exports
                mixed = mixed + (best * mine).unsqueeze(1) * expert(tokens)
        return mixed.unflatten(0, x.shape[:-1]) + self.bias

    def add(self, part: int, parts: int, layer: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        """The hook on the query, key and value layers, or on the fused one."""
        if self._said is None or self._said[0] is not inputs[0]:
            self._said = inputs[0], self(inputs[0]), 0
        x, y, used = self._said
        self._said = (x, y, used + 1) if used + 1 < parts else None  # lets the graph be freed
        return output + y.chunk(parts, -1)[part].to(output.dtype)


def imbalance(shares: Tensor, best: Tensor) -> Tensor:
    """1/2 (CV^2 of importance + CV^2 of load), for probabilities (N, 4) and the noisy winner's (N,)."""
    load = torch.special.ndtr((shares - best.unsqueeze(1)) / NOISE).sum(0)
    variations = [values.var() / (values.mean().square() + 1e-10) for values in (shares.sum(0), load)]
    return torch.stack(variations).mean()


def _glorot(rows: int, columns: int) -> Tensor:
    return nn.init.xavier_uniform_(torch.empty(rows, columns), gain=math.sqrt(2))


def _drops(module: nn.Module) -> bool:
    """Whether dropout acts: only in training passes, those with gradients."""
    return module.training and torch.is_grad_enabled()
