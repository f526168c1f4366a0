"""Each loss against its formula, written as loops over samples, patches and pairs."""

import doctest

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from patchgen.model import losses
from patchgen.model.losses import class_similarity, mask_health, mask_suppression
from patchgen.model.losses import selected_confidence as confidence

targets = st.lists(st.integers(-1, 4), min_size=1, max_size=9)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def slow_confidence(logits: Tensor, target: list[int]) -> float:
    found = []
    for row, label in zip(logits.double(), target, strict=True):
        if label >= 0:
            found.append(float(torch.exp(row[label]) / sum(torch.exp(x) for x in row)))
    return -sum(found) / len(found) if found else 0.0


def slow_similarity(features: Tensor, target: list[int]) -> float:
    per_class = []
    for c in sorted({label for label in target if label >= 0}):
        members = [x.double() for x, label in zip(features, target, strict=True) if label == c]
        cosines = [float(x @ y / (x.norm() * y.norm())) for x in members for y in members]  # self-pairs included
        per_class.append(1 - sum(cosines) / len(members) ** 2)
    return sum(per_class) / len(per_class) if per_class else 0.0


def test_docstring_examples() -> None:
    found = doctest.testmod(losses, extraglobs={"torch": torch})
    assert found.attempted > 0 and found.failed == 0


# L_ms


@given(st.integers(1, 4), st.integers(1, 9), st.sampled_from([0.05, 0.25, 0.6]), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_mask_suppression_is_the_mean_of_the_weak_entries(batch: int, patches: int, tau: float, seed: int) -> None:
    mask = draw(batch, patches, seed=seed).sigmoid()
    weak = [float(m) for row in mask for m in row if m < tau]
    assert float(mask_suppression(mask, tau)) == pytest.approx(sum(weak) / len(weak) if weak else 0.0, abs=1e-6)


def test_mask_suppression_moves_weak_entries_alone() -> None:
    mask = torch.tensor([[0.1, 0.2], [0.3, 0.24]], requires_grad=True)
    mask_suppression(mask).backward()
    assert mask.grad is not None
    torch.testing.assert_close(mask.grad, torch.tensor([[1 / 3, 1 / 3], [0.0, 1 / 3]]))


# L_conf


@given(targets, st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_confidence_is_minus_the_mean_label_probability(target: list[int], seed: int) -> None:
    logits = 3 * draw(len(target), 5, seed=seed)
    loss = confidence(logits, torch.tensor(target))
    assert float(loss) == pytest.approx(slow_confidence(logits, target), abs=1e-6)
    assert -1 <= float(loss) <= 0


def test_confidence_is_computed_in_float32() -> None:
    logits, target = 3 * draw(4, 5), torch.tensor([0, 1, 2, 3])
    coarse = confidence(logits.bfloat16(), target)
    assert coarse.dtype == torch.float32
    assert float(coarse) == pytest.approx(float(confidence(logits, target)), abs=0.02)


# L_sim


@given(targets, st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_similarity_is_the_double_sum_over_pairs(target: list[int], seed: int) -> None:
    features = draw(len(target), 6, seed=seed)
    expected = slow_similarity(features, target)
    assert float(class_similarity(features, torch.tensor(target))) == pytest.approx(expected, abs=1e-5)


@given(targets)
@settings(max_examples=20, deadline=None)
def test_similarity_is_the_same_with_the_number_of_classes_given(target: list[int]) -> None:
    features, label = draw(len(target), 6), torch.tensor(target)
    torch.testing.assert_close(class_similarity(features, label, 5), class_similarity(features, label))
    torch.testing.assert_close(class_similarity(features, label, 50), class_similarity(features, label))


def test_singletons_contribute_zero_but_are_counted() -> None:
    features = draw(3, 6)
    assert float(class_similarity(features, torch.tensor([0, 1, 2]))) == pytest.approx(0, abs=1e-6)
    pair = class_similarity(features[:2], torch.tensor([0, 0]))
    with_singleton = class_similarity(features, torch.tensor([0, 0, 1]))
    torch.testing.assert_close(with_singleton, pair / 2)


@pytest.mark.parametrize("loss", [confidence, class_similarity], ids=["L_conf", "L_sim"])
@pytest.mark.parametrize("size", [3, 0])
def test_nothing_labelled_gives_a_differentiable_zero(loss: object, size: int) -> None:
    inputs = draw(size, 5).requires_grad_()
    value = loss(inputs, torch.full((size,), -1))  # type: ignore[operator]
    value.backward()
    assert value == 0 and inputs.grad is not None and torch.equal(inputs.grad, torch.zeros(size, 5))


def test_a_zero_feature_gives_no_nan() -> None:
    features = torch.zeros(2, 4, requires_grad=True)
    loss = class_similarity(features, torch.tensor([1, 1]))
    loss.backward()
    assert torch.isfinite(loss) and features.grad is not None and torch.isfinite(features.grad).all()


def test_unlabelled_samples_change_neither_value_nor_gradient() -> None:
    features = draw(4, 6).requires_grad_()
    target = torch.tensor([0, 0, -1, -1])
    whole = class_similarity(features, target)
    whole.backward()
    torch.testing.assert_close(whole, class_similarity(features[:2], target[:2]))
    assert features.grad is not None and features.grad[2:].abs().max() == 0 and features.grad[:2].abs().max() > 0


# Mask health


def test_mask_health_of_a_known_mask() -> None:
    health = mask_health(torch.tensor([[0.0, 1.0, 0.5, 0.5], [0.25, 0.25, 0.75, 0.75]]))
    expected = {"mean": [0.5, 0.5], "spread": [0.125**0.5, 0.25], "weak": [0.25, 0.0], "strong": [0.25, 0.0]}
    assert health.keys() == expected.keys()
    for name, values in expected.items():
        torch.testing.assert_close(health[name], torch.tensor(values))
