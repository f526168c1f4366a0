"""Does the classifier read what a ranking calls important? Remove patches and measure the effect on its prediction.

Patches are perturbed at the pixel level, so that a head that reads CLS is treated like any other; for PatchGen also at
the token level. Keeping everything gives the original prediction and keeping nothing that of the perturbed image, bit
for bit: nothing is blended.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from patchgen.model.classifier import Classifier
from patchgen.model.selector import Selector

Probabilities = Callable[[Tensor], Tensor]  # pixels (N,3,S,S) in [0,1] -> (N,C)
Answers = Callable[[Tensor, Tensor], Tensor]  # which image (N,), patches kept (N,P) bool -> (N,C)
THRESHOLD = 0.5  # the paper's: the selected set is {p: m_p >= 0.5}
VIEWS = 96  # perturbed images per forward pass


def blur(images: Tensor, others: Tensor, patch: int) -> Tensor:
    """Gaussian blur with the patch's side as sigma: removes texture and edges, keeps the surrounding colour."""
    from scipy.ndimage import gaussian_filter

    blurred = gaussian_filter(images.cpu().numpy(), (0, 0, patch, patch), mode="mirror", truncate=3)
    return torch.from_numpy(blurred).to(images.device)


# Replacements of patches: (images, other images of any class, side of a patch) -> (B,3,S,S)
OPERATORS: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "blur": blur,
    "mean": lambda images, others, patch: images.mean((2, 3), keepdim=True).expand_as(images),
    "swap": lambda images, others, patch: others,
}


def partners(count: int, seed: int) -> np.ndarray:
    """Another image for each image, each used once: a random cycle."""
    order = np.random.default_rng([seed, count]).permutation(count)
    partner = np.empty(count, dtype=np.int64)
    partner[order] = np.roll(order, 1)
    return partner


def pixel_answers(score: Probabilities, images: Tensor, replacement: Tensor, grid: tuple[int, int]) -> Answers:
    """Perturbs pixels: (B,3,S,S) where a patch is kept, the replacement of the same shape elsewhere."""
    size = images.shape[-2:]

    def answer(index: Tensor, keep: Tensor) -> Tensor:
        cells = keep.unflatten(1, grid)
        for axis, length in enumerate(size, start=1):
            cells = cells.repeat_interleave(length // grid[axis - 1], dim=axis)  # (N,S,S)
        return score(torch.where(cells[:, None], images[index], replacement[index]))

    return answer


def token_answers(classifier: Classifier, images: Tensor) -> dict[str, Answers]:
    """Perturbs tokens of images (B,3,S,S): `token-drop` sets the mask to 0, `token-mean` inserts the mean if it can."""
    in_backbone = isinstance(classifier.select, Selector)
    read = images if in_backbone else classifier.read(images)
    out = classifier(read)
    learned = out.selection() if out.own_mask is None else out.own_mask

    def dropped(index: Tensor, keep: Tensor) -> Tensor:
        return classifier(read[index], mask=learned[index] * keep).logits.float().softmax(1)

    if in_backbone:
        return {"token-drop": dropped}
    mean = read.mean(1, keepdim=True)

    def replaced(index: Tensor, keep: Tensor) -> Tensor:
        return classifier.classify(torch.where(keep[..., None], read[index], mean[index])).logits.float().softmax(1)

    return {"token-mean": replaced, "token-drop": dropped}


@torch.no_grad()
def ask(answers: Answers, keeps: Tensor, views: int = VIEWS) -> Tensor:
    """Probabilities (B,K,C) for K kept sets (B,K,P) of each image; equal sets of an image are computed once."""
    images, sets, _ = keeps.shape
    place = torch.arange(images, device=keeps.device).repeat_interleave(sets)
    rows = torch.cat([place[:, None], keeps.flatten(0, 1).long()], 1)  # (B*K,1+P)
    unique, inverse = torch.unique(rows, dim=0, return_inverse=True)  # sorted by image
    parts = [answers(part[:, 0], part[:, 1:].bool()) for part in unique.split(views)]
    return torch.cat(parts)[inverse].unflatten(0, (images, sets))


def top(order: Tensor, count: Tensor) -> Tensor:
    """(B,P) bool: of each image the first `count` (B,) patches of its order (B,P)."""
    return order.argsort(dim=1) < count[:, None]


def step_sets(order: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """What is kept while the patches of an order (B,P) are inserted and deleted: (B,steps+1,P) bool each."""
    patches = order.shape[1]
    counts = torch.from_numpy(np.round(shares(patches, steps) * patches)).to(order.device)
    inserted = order.argsort(dim=1)[:, None] < counts[:, None]
    return inserted, ~inserted


def shares(patches: int, steps: int) -> np.ndarray:
    """Share of patches at each step: 0, ..., 1; patches are whole, so the steps are only nearly equal."""
    return np.round(np.arange(steps + 1) * patches / steps) / patches


def area(curve: np.ndarray | Sequence[float], patches: int) -> np.ndarray:
    """Area under curves (..., steps+1) over the share of patches."""
    heights = np.asarray(curve)
    return np.trapezoid(heights, shares(patches, heights.shape[-1] - 1), axis=-1)
