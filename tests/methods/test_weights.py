"""Weights of images in the main loss: balance against loops, `--class-weights balanced` against torch."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from patchgen.config import Config
from patchgen.data.loaders import Batch
from patchgen.methods import make_method
from patchgen.methods.patchgen import balanced
from patchgen.model.classifier import Output
from patchgen.model.losses import generalized_cross_entropy
from patchgen.tasks import make_fold
from patchgen.train.lifecycle import train

LABEL = torch.tensor([0, 2, 2, 1, -1])


def test_weights_and_the_main_loss_are_those_of_the_formula(scene: Callable[..., Any]) -> None:
    s = scene("lp-ln+balance")
    label = torch.tensor([0] * 9 + [1, 1, 2] + [-1])
    image = torch.randn(len(label), 3, 28, 28, generator=torch.Generator().manual_seed(3))
    batch = Batch(image, label, torch.zeros_like(label), torch.arange(len(label)))
    with torch.no_grad():
        s.method.expert.weight.mul_(0.1)
        s.method.expert.bias.copy_(torch.tensor([2.0, 0.0, -1.0]))  # believes in class 0, so three images contradict
    out = s.model(image)
    belief, p = s.method.expert(out.context).softmax(1).tolist(), out.logits.softmax(1).tolist()
    c = [1 - row[y] / max(row) for row, y in zip(belief, label.tolist(), strict=True) if y >= 0]
    q, share = sum(c) / len(c), 0.3
    assert 0.1 < q < share
    expected = [1 + x * p[i][label[i]] * (share / q - 1) for i, x in enumerate(c)] + [1.0]
    weight = s.method.weights(out, batch)
    torch.testing.assert_close(weight, torch.tensor(expected), rtol=1e-4, atol=1e-5)
    assert not weight.requires_grad and max(expected) > 1.1
    torch.testing.assert_close(float(s.method.contradiction), q, rtol=1e-4, atol=1e-6)
    losses = s.method.losses(out, batch)
    torch.testing.assert_close(float(s.method.contradiction), q, rtol=1e-4, atol=1e-6)  # of equal batches it stays
    log_p = out.logits.detach().log_softmax(1)
    by_hand = -sum(w * float(log_p[i, label[i]]) for i, w in enumerate(expected[:-1])) / 12
    assert set(losses) == {"main", "expert"}
    assert float(losses["main"].detach()) == pytest.approx(by_hand, rel=1e-4)
    torch.testing.assert_close(losses["expert"], generalized_cross_entropy(s.method.expert(out.context), label, 0.7))


def test_contradicting_images_have_their_share_once_their_class_is_read() -> None:
    c, right = torch.tensor([1.0] * 3 + [0.0] * 97), torch.ones(100)
    weight = balanced(c, right, c.mean(), 0.3)
    torch.testing.assert_close(weight[:3].sum() / 100, torch.tensor(0.3))
    assert weight[3:].eq(1).all()
    assert balanced(c, 1 - right, c.mean(), 0.3).eq(1).all()  # hard images: no evidence against the context
    often = torch.tensor([1.0] * 40 + [0.0] * 60)
    assert balanced(often, right, often.mean(), 0.3).eq(1).all()  # they have their share anyway
    assert balanced(c, right, c.mean(), 0.0).eq(1).all()  # plain cross-entropy
    assert balanced(torch.zeros(4), right[:4], torch.tensor(0.0), 0.3).isfinite().all()


@pytest.mark.parametrize("q", [0.1, 0.7, 1.0])
def test_generalised_cross_entropy(q: float) -> None:
    logits = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    p = logits.softmax(1)
    by_hand = sum((1 - float(p[i, y]) ** q) / q for i, y in enumerate(LABEL.tolist()) if y >= 0) / 4
    torch.testing.assert_close(float(generalized_cross_entropy(logits, LABEL, q)), by_hand, rtol=1e-5, atol=1e-6)


def test_recomputed_activations_are_refused_for_a_mask_inside_the_backbone(tiny_run: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="'patchgen-select' reads or changes activations inside the backbone"):
        tiny_run("patchgen-select", checkpoint_activations=True, seed=9)  # a run of its own: a finished one is kept


# Of classes


@pytest.fixture(scope="module")
def uneven(image_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In `clinic` a class has three images instead of ten; `field` has none of another."""
    root = tmp_path_factory.mktemp("uneven") / "photos"
    shutil.copytree(image_folder, root)
    for file in sorted((root / "clinic" / "circle").iterdir())[3:]:
        file.unlink()
    shutil.rmtree(root / "field" / "cross")
    return root


def test_weights_are_those_of_a_count_over_balanced_batches(uneven: Path) -> None:
    fold = make_fold(Config(data=str(uneven), unseen="studio"))
    weights = fold.balanced_weights()
    drawn = []  # the class of images drawn as batches are: as many of each domain
    for rows in fold.train.values():
        counts = np.bincount(fold.target[rows], minlength=3)
        drawn.append(counts / counts.sum())
    share = np.mean(drawn, 0)
    assert weights * share == pytest.approx(np.full(3, 1 / 3))  # equal shares, and a mean weight of 1
    assert weights.argmax() == int(share.argmin()) and weights.max() > 1.2


def test_the_main_loss_is_torchs_weighted_one() -> None:
    method = make_method(Config(data="x", unseen="a", method="lp-ln", class_weights="balanced"))
    weight = torch.tensor([0.5, 1.0, 3.0])
    method.register_buffer("class_weights", weight, persistent=False)
    logits, label = torch.randn(6, 3), torch.tensor([0, 1, 2, 2, -1, 0])
    batch = Batch(image=torch.zeros(6, 1), label=label, domain=torch.zeros(6, dtype=torch.long), index=torch.arange(6))
    sums = nn.functional.cross_entropy(logits, label, weight=weight, ignore_index=-1, reduction="sum")
    assert method.losses(Output(logits, logits), batch)["main"] == pytest.approx(float(sums) / 5)
    images = torch.rand(9)  # by row of the table
    method.use_sample_weights(images.numpy())
    each = nn.functional.cross_entropy(logits, label, weight=weight, ignore_index=-1, reduction="none")
    assert method.losses(Output(logits, logits), batch)["main"] == pytest.approx(float((images[:6] * each).sum()) / 5)


def test_a_run_uses_them(uneven: Path, tiny_settings: dict[str, Any], tmp_path: Path) -> None:
    changes = {"data": str(uneven), "method": "patchgen-select", "image_size": 28, "swad": False, "steps": 3}
    runs = [train(Config(**tiny_settings | changes, class_weights=w), tmp_path, quiet=True) for w in (None, "balanced")]
    plain, weighted = (run.records("evaluation")[0]["train"] for run in runs)
    assert plain["expert"] == weighted["expert"] and plain["main"] != weighted["main"]
