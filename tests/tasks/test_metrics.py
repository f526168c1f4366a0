"""Scores of confusion matrices and probabilities against scikit-learn called on the images themselves."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as sk
from sklearn.calibration import calibration_curve

from patchgen.tasks import metrics


def labels(classes: int, seed: int, n: int = 60) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    true = rng.integers(0, classes, n)
    return true, np.where(rng.random(n) < 0.6, true, rng.integers(0, classes, n))


def answers(classes: int, seed: int, n: int = 80) -> tuple[np.ndarray, np.ndarray]:
    """Labels (N,) and probabilities (N, C), some of them tied."""
    rng = np.random.default_rng(seed)
    label = rng.integers(0, classes, n)
    logits = rng.normal(size=(n, classes)).round(1)
    logits[np.arange(n), label] += 1
    probabilities = np.exp(logits)
    return label, (probabilities / probabilities.sum(1, keepdims=True)).astype(np.float32)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("classes", [2, 3, 7])
def test_scores_equal_scikit_learn(classes: int, seed: int) -> None:
    true, predicted = labels(classes, seed)
    confusion = sk.confusion_matrix(true, predicted, labels=range(classes))
    found = metrics.scores(confusion)
    assert found["accuracy"] == pytest.approx(sk.accuracy_score(true, predicted))
    assert found["balanced_accuracy"] == pytest.approx(sk.balanced_accuracy_score(true, predicted))
    assert found["macro_f1"] == pytest.approx(sk.f1_score(true, predicted, average="macro")) == found["f1"]
    for positive in range(classes):
        own = sk.f1_score(true == positive, predicted == positive)
        assert metrics.scores(confusion, positive) == found | {"f1": pytest.approx(own)}


def test_each_class_against_the_rest_equals_scikit_learn() -> None:
    true, predicted = labels(4, 3)
    found = metrics.class_counts(sk.confusion_matrix(true, predicted, labels=range(4)))
    for c in range(4):
        own, said = true == c, predicted == c
        assert found["precision"][c] == pytest.approx(sk.precision_score(own, said))
        assert found["recall"][c] == pytest.approx(sk.recall_score(own, said))
        assert found["specificity"][c] == pytest.approx(sk.recall_score(own, said, pos_label=False))
        assert found["f1"][c] == pytest.approx(sk.f1_score(own, said))


def test_classes_that_never_occur_do_not_count() -> None:
    true, predicted = np.array([0, 0, 2, 2, 2]), np.array([0, 2, 2, 2, 4])
    confusion = sk.confusion_matrix(true, predicted, labels=range(6))
    # scikit-learn takes the classes that are true or predicted: 0, 2 and 4
    found = metrics.scores(confusion)
    assert found["f1"] == pytest.approx(sk.f1_score(true, predicted, average="macro")) == (2 / 3 + 2 / 3 + 0) / 3
    assert found["balanced_accuracy"] == pytest.approx((1 / 2 + 2 / 3) / 2)
    counts = metrics.class_counts(confusion)
    assert counts["recall"][:3] == [0.5, None, pytest.approx(2 / 3)]
    assert counts["recall"][4] is None and counts["precision"][4] == 0 and counts["f1"][4] == 0
    assert counts["precision"][1] is counts["recall"][1] is counts["f1"][1] is None and counts["specificity"][1] == 1


@pytest.mark.parametrize("classes", [2, 3])
def test_nothing_scored_is_zero_and_says_so(classes: int) -> None:
    found = metrics.scores(np.zeros((classes, classes), dtype=np.int64))
    assert found["images"] == 0 and set(found.values()) == {0}
    assert metrics.scores(np.array([[5, 0], [0, 0]]), 1)["f1"] == 0.0  # no positive case


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("classes", [2, 3, 6])
def test_ranking_equals_scikit_learn(classes: int, seed: int) -> None:
    label, probabilities = answers(classes, seed)
    found = metrics.probability_scores(label, probabilities)
    kind = {"multi_class": "ovr", "average": "macro"} if classes > 2 else {}
    expected = sk.roc_auc_score(label, probabilities if classes > 2 else probabilities[:, 1], **kind)
    assert found["auroc"] == pytest.approx(expected)
    one_hot = np.eye(classes)[label]
    assert found["average_precision"] == pytest.approx(
        sk.average_precision_score(one_hot, probabilities, average="macro")
    )
    each = metrics.class_ranking(metrics.falling(label, probabilities))
    for c in range(classes):
        assert each["auroc"][c] == pytest.approx(sk.roc_auc_score(label == c, probabilities[:, c]))
        assert each["average_precision"][c] == pytest.approx(
            sk.average_precision_score(label == c, probabilities[:, c])
        )


@pytest.mark.parametrize("classes", [2, 3])
def test_a_weight_counts_an_image_again(classes: int) -> None:
    label, probabilities = answers(classes, 5)
    rng, ranked = np.random.default_rng(1), list(metrics.falling(label, probabilities))
    for most in (4, 2):
        weights = rng.integers(0, most, len(label))
        again = np.repeat(np.arange(len(label)), weights)
        expected = metrics.class_ranking(metrics.falling(label[again], probabilities[again]))
        for name, values in metrics.class_ranking(ranked, weights).items():
            assert values == pytest.approx(expected[name])


def test_a_ranking_without_two_classes_is_undefined() -> None:
    _, probabilities = answers(3, 0)
    found = metrics.probability_scores(np.ones(80, dtype=int), probabilities)
    assert found["auroc"] is found["average_precision"] is None
    label, _ = answers(2, 0)
    each = metrics.class_ranking(metrics.falling(label, probabilities))  # class 2 has no image
    assert each["auroc"][2] is None and each["average_precision"][2] is None and each["auroc"][0] is not None
    assert metrics.probability_scores(label, probabilities)["auroc"] == pytest.approx(np.mean(each["auroc"][:2]))
    only = metrics.class_ranking(
        metrics.falling(label, probabilities), np.where(label == 1, 1, 0)
    )  # class 1 alone is drawn
    assert only["auroc"] == [None] * 3


@pytest.mark.parametrize("seed", range(3))
def test_reliability_equals_scikit_learns_curve(seed: int) -> None:
    label, probabilities = answers(4, seed)
    confidence, right = probabilities.max(1), probabilities.argmax(1) == label
    accuracies, means = calibration_curve(right, confidence, n_bins=metrics.BINS)
    filled = [one for one in metrics.reliability(confidence, right) if one.images]
    assert [one.accuracy for one in filled] == pytest.approx(accuracies)
    assert [one.confidence for one in filled] == pytest.approx(means)
    assert sum(one.images for one in filled) == len(label)
    images = np.array([one.images for one in filled])
    assert metrics.calibration_error(probabilities, label) == pytest.approx(
        np.average(abs(accuracies - means), weights=images)
    )


def test_calibration_error_of_cases_by_hand() -> None:
    sure = np.array([[0.9, 0.1]] * 10)
    assert metrics.calibration_error(sure, np.array([0] * 9 + [1])) == pytest.approx(0)
    assert metrics.calibration_error(sure, np.array([0] * 5 + [1] * 5)) == pytest.approx(0.4)
    empty = metrics.reliability(np.array([1.0]), np.array([True]))
    assert empty[-1].images == 1 and empty[0] == (0, pytest.approx(1 / 15), 0, None, None)


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 7), st.integers(0, 2**32 - 1))
def test_mask_recovery_equals_the_plain_definitions(inside: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    mask = rng.integers(0, 5, (3, 8)) / 4  # ties, and values at the threshold
    truth = np.stack([rng.permutation(8) < inside for _ in range(3)])
    found = metrics.mask_recovery(mask, truth)
    for i in range(3):
        assert found["auroc"][i] == pytest.approx(sk.roc_auc_score(truth[i], mask[i]))
        chosen, true = {p for p in range(8) if mask[i, p] >= 0.5}, set(np.flatnonzero(truth[i]))
        assert found["iou"][i] == pytest.approx(len(chosen & true) / len(chosen | true))
        assert found["kept"][i] == pytest.approx(len(chosen & true) / len(true))
        assert found["error"][i] == pytest.approx(sum(abs(mask[i, p] - (p in true)) for p in range(8)) / 8)


def test_a_ranking_of_all_patches_is_undefined() -> None:
    assert np.isnan(metrics.mask_recovery(np.full((1, 4), 0.7), np.ones((1, 4), dtype=bool))["auroc"]).all()
