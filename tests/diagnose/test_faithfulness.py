"""Perturbation and curves on models whose answer is known by hand: extremes, a planted mask, a random order."""

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from patchgen.diagnose import faithfulness as faith
from patchgen.model.backbone import load_backbone
from patchgen.model.classifier import Classifier
from patchgen.predict.attribution import descending

GRID, PATCH = (4, 4), 6


def pixels(count: int = 5) -> Tensor:
    return torch.rand(count, 3, 4 * PATCH, 4 * PATCH, generator=torch.Generator().manual_seed(0))


def patch_means(images: Tensor) -> Tensor:
    """(N,16): brightness of each patch."""
    return torch.nn.functional.avg_pool2d(images.mean(1, keepdim=True), PATCH).flatten(1)


def additive(weights: Tensor) -> faith.Answers:
    """An answer that is the sum of the kept patches' weights (B,P); two classes."""

    def answer(index: Tensor, keep: Tensor) -> Tensor:
        value = (weights[index] * keep).sum(1)
        return torch.stack([value, 1 - value], 1)

    return answer


def areas(weights: Tensor, order: Tensor, steps: int = 8) -> tuple[np.ndarray, np.ndarray]:
    """Insertion and deletion AUC (B,) of the additive model."""
    sets = faith.step_sets(order, steps)
    curves = [faith.ask(additive(weights), keep)[..., 0].numpy() for keep in sets]
    return faith.area(curves[0], order.shape[1]), faith.area(curves[1], order.shape[1])


# Extremes


@pytest.mark.parametrize("operator", faith.OPERATORS)
def test_perturbing_nothing_and_everything_gives_the_extremes_bit_for_bit(operator: str) -> None:
    images = pixels()
    replacement = faith.OPERATORS[operator](images, images.roll(1, 0), PATCH)
    answers = faith.pixel_answers(patch_means, images, replacement, GRID)
    whole = torch.ones(5, 1, 16, dtype=torch.bool)
    assert torch.equal(faith.ask(answers, whole)[:, 0], patch_means(images))
    assert torch.equal(faith.ask(answers, ~whole)[:, 0], patch_means(replacement))
    assert not torch.allclose(patch_means(images), patch_means(replacement))


def test_only_the_patches_outside_the_kept_set_change() -> None:
    images = pixels()
    answers = faith.pixel_answers(patch_means, images, torch.zeros_like(images), GRID)
    keep = torch.rand(5, 7, 16, generator=torch.Generator().manual_seed(2)) < 0.4
    torch.testing.assert_close(faith.ask(answers, keep), patch_means(images)[:, None] * keep)


@torch.no_grad()
def test_extremes_at_the_tokens_of_patchgen() -> None:
    torch.manual_seed(0)
    model = Classifier(load_backbone("tiny"), 3, image_size=56).eval()
    images = torch.randn(2, 3, 56, 56)
    tokens = model.read(images)
    whole = torch.ones(2, 1, 16, dtype=torch.bool)
    own = model.classify(tokens).logits.softmax(1)
    mean = model.classify(tokens.mean(1, keepdim=True).expand_as(tokens)).logits.softmax(1)
    none = model.classify(tokens, mask=torch.zeros(2, 16)).logits.softmax(1)
    found = faith.token_answers(model, images)
    for name, nothing_kept in (("token-mean", mean), ("token-drop", none)):
        torch.testing.assert_close(faith.ask(found[name], whole)[:, 0], own)
        torch.testing.assert_close(faith.ask(found[name], ~whole)[:, 0], nothing_kept)
    half = torch.arange(16).expand(2, 1, -1) < 8
    learned = model.classify(tokens).selection()
    expected = model.classify(tokens, mask=learned * half[:, 0]).logits.softmax(1)
    torch.testing.assert_close(faith.ask(found["token-drop"], half)[:, 0], expected)


@torch.no_grad()
def test_extremes_of_a_selection_inside_the_backbone() -> None:
    """Everything kept is the classifier's own answer, whatever the level of the mask that is shown."""
    torch.manual_seed(0)
    model = Classifier(load_backbone("tiny"), 3, image_size=56, pool="select").eval()
    images = torch.randn(2, 3, 56, 56)
    model.start(images)
    model.select.level.copy_(torch.tensor([5.0, 1.0]))  # type: ignore[union-attr]
    found, whole = faith.token_answers(model, images), torch.ones(2, 1, 16, dtype=torch.bool)
    assert set(found) == {"token-drop"}
    torch.testing.assert_close(faith.ask(found["token-drop"], whole)[:, 0], model(images).logits.softmax(1))
    half = torch.arange(16).expand(2, 1, -1) < 8
    expected = model(images, mask=model(images).own_mask * half[:, 0]).logits.softmax(1)
    torch.testing.assert_close(faith.ask(found["token-drop"], half)[:, 0], expected)


# Rankings


def test_a_planted_mask_wins_against_every_order() -> None:
    """The logit is the sum of two of five patches: no permutation does better, and the value is the analytic one."""
    weights = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]])
    orders = torch.tensor(list(itertools.permutations(range(5))))
    insertion, deletion = areas(weights.expand(len(orders), -1), orders, steps=5)
    mask = descending(weights, torch.rand(1, 5))
    best = areas(weights, mask, steps=5)
    # heights 0, 1/2, 1, 1, 1, 1 at shares 0, .2, ..., 1; deletion is the mirror image
    assert best[0][0] == pytest.approx(0.8) and best[1][0] == pytest.approx(0.2)
    assert insertion.max() == pytest.approx(best[0][0]) and deletion.min() == pytest.approx(best[1][0])
    planted_first = np.array([set(order[:2]) == {1, 3} for order in orders.tolist()])
    assert (insertion[~planted_first] < best[0][0] - 0.01).all()
    assert (deletion[~planted_first] > best[1][0] + 0.01).all()


def test_a_random_order_gives_the_expected_area() -> None:
    """An additive answer rises by the same amount for each patch on average: E[AUC] = (f(nothing) + f(all)) / 2."""
    count = 4000
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(1, 12, generator=generator).expand(count, -1) / 12
    insertion, deletion = areas(weights, torch.rand(count, 12, generator=generator).argsort(1), steps=5)
    expected = float(weights[0].sum()) / 2
    for found in (insertion, deletion):
        assert abs(found.mean() - expected) < 4 * found.std() / count**0.5
        assert found.std() > 0.001


# Parts


def test_area_by_hand_where_steps_are_uneven() -> None:
    # 5 patches in 2 steps: after 0, 2 (half to even) and 5 patches
    assert faith.shares(5, 2).tolist() == [0, 0.4, 1]
    assert faith.area(np.array([0, 1, 0.5]), 5) == pytest.approx(0.4 * 0.5 + 0.6 * 0.75)


def test_equal_sets_are_computed_once() -> None:
    asked: list[tuple[int, tuple[bool, ...]]] = []
    weights = torch.rand(3, 4)

    def answer(index: Tensor, keep: Tensor) -> Tensor:
        asked.extend(zip(index.tolist(), map(tuple, keep.tolist()), strict=True))
        return additive(weights)(index, keep)

    keeps = torch.rand(3, 40, 4, generator=torch.Generator().manual_seed(0)) < 0.5
    found = faith.ask(answer, keeps, views=7)
    for b in range(3):
        for k in range(40):
            assert float(found[b, k, 0]) == pytest.approx(float((weights[b] * keeps[b, k]).sum()))
    assert len(asked) == len(set(asked)) <= 3 * 16
    assert [index for index, _ in asked] == sorted(index for index, _ in asked)


def test_every_image_gets_another_ones_patches() -> None:
    for count in (2, 3, 10):
        found = faith.partners(count, seed=1)
        assert sorted(found) == list(range(count)) and (found != np.arange(count)).all()


def test_blur_by_loops_and_colours_kept() -> None:
    image = torch.rand(1, 3, 8, 8, dtype=torch.float64)
    found = faith.blur(image, image, 2)
    weight = {r: float(np.exp(-(r**2) / 8)) for r in range(-6, 7)}

    def mirrored(i: int) -> int:
        return abs(i) if i < 8 else 14 - i

    total = sum(weight.values()) ** 2
    slow = sum(weight[r] * weight[s] * image[0, :, mirrored(3 + r), mirrored(6 + s)] for r in weight for s in weight)
    torch.testing.assert_close(found[0, :, 3, 6], slow / total)
    flat = torch.full((1, 3, 8, 8), 0.3)
    torch.testing.assert_close(faith.blur(flat, flat, 2), flat)
    assert torch.equal(faith.OPERATORS["mean"](image, image, 2)[0, :, 5, 5], image[0].mean((1, 2)))
