"""Rankings of an image's patches by importance (higher is more important), from a method or a control.

scores = RANKINGS["rollout"](classifier, images, target)   # normalised images (B,3,S,S), class ids (B,) -> (B,P)
order = descending(scores, ties=RANKINGS["random"](classifier, images, target))
"""

import zlib
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from patchgen.common.text import did_you_mean
from patchgen.model.classifier import Classifier
from patchgen.model.generic import on_input
from patchgen.model.selector import Selector
from patchgen.model.tuning import attention_maps

Ranking = Callable[[Classifier, Tensor, Tensor], Tensor]
CONTROLS = ("random", "centre")  # independent of the model


def learned_mask(classifier: Classifier, images: Tensor, target: Tensor) -> Tensor:
    """PatchGen's mask m, which does not depend on the target."""
    with torch.no_grad():
        return classifier(images).selection().float()


def last_attention(classifier: Classifier, images: Tensor, target: Tensor) -> Tensor:
    """Attention of the last block, mean over heads, from the tokens that the head reads to each patch."""
    return _to_patches(classifier, attention_maps(classifier.backbone, images, last=True)[-1])


def attention_rollout(classifier: Classifier, images: Tensor, target: Tensor) -> Tensor:
    """Product over the blocks of (A + I) / 2, A the mean over heads: attention followed through the residuals."""
    maps = attention_maps(classifier.backbone, images)
    eye = torch.eye(maps[0].shape[-1], device=images.device)
    rolled = eye.expand_as(maps[0])
    for attention in maps:
        rolled = (attention + eye) / 2 @ rolled  # rows stay sums of one
    return _to_patches(classifier, rolled)


def grad_cam(classifier: Classifier, images: Tensor, target: Tensor) -> Tensor:
    """sum_d w_d z_pd, w the target logit's gradient averaged over the patches, on the tokens that enter the last block.

    After that block, a head that reads CLS has no gradient at the patches. Without Grad-CAM's ReLU, which creates ties.
    """
    tokens, gradient = token_gradient(classifier, images, target, block=-1)
    return (tokens * gradient.mean(1, keepdim=True)).sum(-1)


def gradient_x_input(classifier: Classifier, images: Tensor, target: Tensor) -> Tensor:
    """sum_d z_pd dlogit/dz_pd on the tokens that enter the first block (the last map of a convolutional net)."""
    tokens, gradient = token_gradient(classifier, images, target, block=0)
    return (tokens * gradient).sum(-1)


def random_order(classifier: Classifier, images: Tensor, target: Tensor) -> Tensor:
    """A uniformly random order of the patches, seeded by the image's pixels: independent of batch and position."""
    patches, orders = classifier.grid[0] * classifier.grid[1], []
    for image in images:
        seed = zlib.crc32(image.detach().cpu().contiguous().numpy().tobytes())
        orders.append(torch.randperm(patches, generator=torch.Generator().manual_seed(seed)).float())
    return torch.stack(orders).to(images.device)


def centre_first(classifier: Classifier, images: Tensor, target: Tensor) -> Tensor:
    """Closeness to the centre of the image, where photographs usually have their object."""
    height, width = classifier.grid
    y, x = (torch.linspace(-1 + 1 / n, 1 - 1 / n, n) for n in (height, width))
    near = -(y[:, None] ** 2 + x[None] ** 2).flatten()
    return near.expand(len(images), -1).to(images.device)


RANKINGS: dict[str, Ranking] = {
    "mask": learned_mask,
    "attention": last_attention,
    "rollout": attention_rollout,
    "grad-cam": grad_cam,
    "gradient-x-input": gradient_x_input,
    "random": random_order,
    "centre": centre_first,
}


def relative_map(classifier: Classifier, image: Tensor, name: str) -> np.ndarray:
    """A ranking of an image (1, 3, S, S) for its predicted class as a map (h, w) in [0, 1]; Grad-CAM is cut at 0."""
    with torch.no_grad():
        target = classifier(image).logits.argmax(1)
    scores = RANKINGS[name](classifier, image, target)[0].detach().float()
    scores = scores.clamp(min=0) if name == "grad-cam" else scores - scores.min()
    values: np.ndarray = (scores / scores.max().clamp(min=1e-12)).view(classifier.grid).cpu().numpy()
    return values


def available(classifier: Classifier) -> tuple[str, ...]:
    """The rankings that this classifier supports."""
    names = {name.rpartition(".")[2] for name, _ in classifier.backbone.blocks.named_modules()}
    attention = {"q_proj", "k_proj"} <= names  # convolutional networks have none
    present = {"mask": classifier.has_mask, "attention": attention, "rollout": attention}
    return tuple(name for name in RANKINGS if present.get(name, True))


def check_rankings(classifier: Classifier, names: tuple[str, ...], whose: str) -> None:
    """ValueError when a ranking is unknown, or unavailable for this classifier."""
    for name in names:
        if name not in RANKINGS:
            known = ", ".join(RANKINGS)
            raise ValueError(f"no ranking is called {name!r}{did_you_mean(name, RANKINGS)} (known: {known})")
        if name not in (present := available(classifier)):
            raise ValueError(f"{whose} has no ranking {name!r}; it has {', '.join(present)}")


def descending(scores: Tensor, ties: Tensor) -> Tensor:
    """Patches (B,P) from most to least important; equal scores are ordered by `ties`, never by position."""
    first = ties.argsort(dim=1, descending=True)
    return first.gather(1, scores.gather(1, first).argsort(dim=1, descending=True, stable=True))


def _to_patches(classifier: Classifier, attention: Tensor) -> Tensor:
    """(B,T,T) -> (B,P): the row of CLS if the head reads it, else the mean row of the patches."""
    prefix = classifier.backbone.num_prefix_tokens
    row = attention[:, 0] if classifier.pool in ("cls", "select") else attention[:, prefix:].mean(1)
    return row[:, prefix:]


@torch.enable_grad()
def token_gradient(classifier: Classifier, images: Tensor, target: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Patch tokens (B,P,D) that enter a block (a convolutional net's map), and the target logit's gradient there."""
    if classifier.backbone.family.convolutional:
        tokens = classifier.backbone(images).patches.detach().requires_grad_()
        if isinstance(classifier.select, Selector):
            mask = classifier.select(classifier.backbone, images).mask
            weight = (mask**classifier.select.gain).detach()
            logits = classifier.head((weight.unsqueeze(-1) * tokens).sum(1) / weight.sum(1, keepdim=True))
        else:
            logits = classifier.classify(tokens if classifier.pool == "patchgen" else tokens.mean(1)).logits
        return tokens.detach(), _gradient(logits, target, tokens)
    entered: list[Tensor] = []

    def cut(tokens: Tensor) -> Tensor:
        entered.append(tokens.detach().requires_grad_())  # a leaf: no graph before it
        return entered[-1]

    with on_input(classifier.backbone.blocks[block], cut):
        logits = classifier(images).logits
    prefix = classifier.backbone.num_prefix_tokens
    return entered[0].detach()[:, prefix:], _gradient(logits, target, entered[0])[:, prefix:]


def _gradient(logits: Tensor, target: Tensor, leaf: Tensor) -> Tensor:
    return torch.autograd.grad(logits.gather(1, target[:, None]).sum(), leaf)[0]
