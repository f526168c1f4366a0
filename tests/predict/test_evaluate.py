"""The numbers of `evaluate` on planted answers, against scikit-learn; draws of patients; and what cannot be scored."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import balanced_accuracy_score, confusion_matrix, f1_score, recall_score, roc_auc_score

from patchgen.data.table import Table
from patchgen.predict.answers import Answers, check_classes
from patchgen.predict.evaluate import bootstrap, check_options, evaluate, most_wrong

CLASSES = ("cat", "dog", "owl")


def planted(
    label: Any,
    probabilities: Any,
    classes: tuple[str, ...] = CLASSES,
    group: Any = None,
    sites: Any = None,
    **more: Any,
) -> Answers:
    """Answers about images that do not exist; -1 is a class that the model does not know."""
    label, n = np.array(label), len(label)
    site = np.zeros(n, dtype=np.int64) if sites is None else np.array(sites)
    names, own = tuple(f"{i}.png" for i in range(n)), np.where(label < 0, len(classes), label)
    patients = None if group is None else tuple(map(str, group))
    table = Table(Path("photos"), names, ("berlin", "lyon"), (*classes, "fox"), site, own, patients)
    facts = {"unlike": None, "unlabelled": 0, "unreadable": (), **more}
    return Answers(table, classes, np.arange(n), label, np.array(probabilities, dtype=np.float32), **facts)


def drawn(classes: int = 3, n: int = 90, seed: int = 0, **more: Any) -> Answers:
    rng = np.random.default_rng(seed)
    label = rng.integers(0, classes, n)
    weights = rng.random((n, classes)).round(2) + 0.01
    weights[np.arange(n), label] += 0.3
    return planted(label, weights / weights.sum(1, keepdims=True), CLASSES[:classes], **more)


def test_every_number_equals_scikit_learn() -> None:
    answers = drawn(sites=np.arange(90) % 2)
    found = evaluate(answers, positive="dog", resamples=0)
    label, said = answers.label, answers.probabilities.argmax(1)
    assert found["metrics"]["accuracy"] == pytest.approx((label == said).mean())
    assert found["metrics"]["balanced_accuracy"] == pytest.approx(balanced_accuracy_score(label, said))
    assert found["metrics"]["macro_f1"] == pytest.approx(f1_score(label, said, average="macro"))
    assert found["metrics"]["auroc"] == pytest.approx(roc_auc_score(label, answers.probabilities, multi_class="ovr"))
    assert found["confusion"] == confusion_matrix(label, said).tolist()
    dog = label == 1, said == 1
    assert found["binary"]["f1"] == pytest.approx(f1_score(*dog)) == found["per_class"]["dog"]["f1"]
    assert found["binary"]["specificity"] == pytest.approx(recall_score(*dog, pos_label=False))
    assert found["binary"]["prevalence"] == pytest.approx(dog[0].mean())
    for i, site in enumerate(("berlin", "lyon")):
        own = np.arange(90) % 2 == i
        assert found["sites"][site]["macro_f1"] == pytest.approx(f1_score(label[own], said[own], average="macro"))
        assert found["sites"][site]["images"] == 45
    assert sum(one["images"] for one in found["reliability"]) == 90
    assert found["intervals"] == {} and "No intervals: --resamples 0." in found["notes"]
    json.dumps(found, allow_nan=False)


def test_patients_are_drawn_whole() -> None:
    """Ten patients of ten images, all right or all wrong: the interval is that of ten draws, not of a hundred."""
    right = np.repeat(np.arange(10) < 6, 10)
    probabilities = np.where(right[:, None], [0.8, 0.2], [0.3, 0.7])
    label = np.zeros(100, dtype=int)
    by_patient = evaluate(planted(label, probabilities, CLASSES[:2], group=np.repeat(np.arange(10), 10)), resamples=400)
    by_image = evaluate(planted(label, probabilities, CLASSES[:2]), resamples=400)
    low, high = by_patient["intervals"]["accuracy"]
    assert (low, high) == pytest.approx((0.3, 0.9), abs=0.1)  # binomial of 10 at 0.6: 3 to 9 right
    assert by_image["intervals"]["accuracy"] == pytest.approx((0.5, 0.7), abs=0.03)
    assert by_patient["bootstrap"]["unit"] == "patients" and by_patient["bootstrap"]["units"] == 10
    assert by_patient["intervals"]["patient_accuracy"] == [low, high]  # patients of equal size
    assert "patient_accuracy" not in by_image["intervals"]
    assert any("No patient or slide is known" in note for note in by_image["notes"])
    assert by_patient["patients"]["each"]["9"] == {"images": 10, "accuracy": 0.0, "labels": ["cat"], "label": "dog"}


def test_each_patient_counts_once_in_its_mean() -> None:
    found = evaluate(planted([0, 0, 0, 0], [[0.9, 0.1]] * 3 + [[0.1, 0.9]], CLASSES[:2], group="aaab"), resamples=100)
    assert found["metrics"]["accuracy"] == 0.75 and found["patients"]["accuracy"] == 0.5
    assert found["intervals"]["accuracy"] == [0.0, 1.0]
    assert any("2 patients are few" in note for note in found["notes"])


def test_one_patient_has_no_interval() -> None:
    found = evaluate(drawn(group=["p1"] * 90), resamples=200)
    assert found["intervals"] == {} and found["bootstrap"]["resamples"] == 0
    assert "A single patient was scored: there is no interval." in found["notes"]
    assert found["sites"]["berlin"]["accuracy_interval"] is None
    alone = evaluate(planted([0], [[0.7, 0.2, 0.1]]), resamples=200)
    assert "A single image was scored: there is no interval." in alone["notes"]


def test_a_single_class_has_no_auroc_and_says_so() -> None:
    found = evaluate(planted([1, 1, 1], [[0.2, 0.7, 0.1]] * 2 + [[0.6, 0.3, 0.1]]), "dog", resamples=100)
    assert found["metrics"]["auroc"] is found["metrics"]["average_precision"] is None
    assert found["metrics"]["balanced_accuracy"] == pytest.approx(2 / 3)
    assert found["binary"]["specificity"] is None and found["binary"]["recall"] == pytest.approx(2 / 3)
    assert found["intervals"]["auroc"] is None and found["intervals"]["accuracy"] is not None
    text = " ".join(found["notes"])
    assert "AUROC (one against rest) is undefined: all scored images are of class 'dog'" in text
    assert "No image is of class cat, owl" in text
    json.dumps(found, allow_nan=False)


def test_unknown_classes_are_counted_and_left_out() -> None:
    answers = planted([0, 1, -1, -1], [[0.9, 0.1, 0], [0.2, 0.8, 0], [0.5, 0.4, 0.1], [0, 1, 0]], unlabelled=3)
    found = evaluate(answers, resamples=0)
    assert found["images"] == {"scored": 2, "unknown_class": 2, "unknown_classes": ["fox"], "unlabelled": 3,
                               "unreadable": 0}  # fmt: skip
    assert found["metrics"]["accuracy"] == 1.0 and np.sum(found["confusion"]) == 2
    text = " ".join(found["notes"])
    assert "does not know (fox), 2;" in text and "make the accuracy 0.500" in text and "without a label, 3." in text


def test_sites_of_training_are_named() -> None:
    found = evaluate(drawn(sites=np.arange(90) % 2), resamples=0, trained_on=["lyon", "turin"])
    assert found["sites"]["lyon"]["in_training"] and not found["sites"]["berlin"]["in_training"]
    assert any("trained on sites of the same name (lyon)" in note for note in found["notes"])


def test_the_surest_mistakes_come_first() -> None:
    answers = planted([0, 0, 0, 1], [[0.1, 0.9, 0], [0.6, 0.4, 0], [0.05, 0, 0.95], [0.5, 0.3, 0.2]])
    assert most_wrong(answers, 2).tolist() == [2, 0] and most_wrong(answers, 9).tolist() == [2, 0, 3]


def test_a_large_table_gets_no_interval_for_rankings(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = drawn()
    monkeypatch.setattr("patchgen.predict.evaluate.WORK", 90 * 3 * 150)
    assert "auroc" in evaluate(answers, resamples=150)["intervals"]
    found = evaluate(answers, resamples=151)
    assert "auroc" not in found["intervals"] and "accuracy" in found["intervals"]
    assert any("have no interval: too many images" in note for note in found["notes"])


def test_options_and_data_that_cannot_be_scored_are_refused() -> None:
    with pytest.raises(ValueError, match="--positive 'dgo' is not a class of the model; did you mean 'dog'"):
        check_options("dgo", 0, CLASSES)
    for number in (-1, 7):
        with pytest.raises(ValueError, match="--resamples must be 0 .* or at least 100"):
            check_options(None, number, CLASSES)
    table = planted([-1, -1], [[1, 0, 0]] * 2).table
    with pytest.raises(ValueError, match="knows none of the data's classes \\(fox\\); its own are cat, dog, owl"):
        check_classes(table, np.arange(2), CLASSES)


def test_the_bootstrap_of_a_mean_is_near_its_standard_error() -> None:
    values = np.random.default_rng(2).normal(size=400)
    found = bootstrap(lambda w: {"mean": float(w @ values / w.sum()), "never": None}, np.arange(400), 1000)
    low, high = found["mean"] or (0, 0)
    assert (high - low) / 2 == pytest.approx(1.96 * values.std() / 20, rel=0.1) and found["never"] is None
    assert bootstrap(lambda w: {"mean": 1.0}, np.zeros(5, dtype=int), 10) == {}


def test_what_fit_expected_stands_beside_what_was_measured() -> None:
    answers = drawn(sites=np.arange(90) % 2)
    lyon = float(answers.right[1::2].mean())
    expected = {"mean": 0.8, "new_site": [lyon - 0.1, lyon + 0.1], "interval": None}
    found = evaluate(answers, resamples=0, trained_on=["berlin"], expected=expected)
    assert found["expected"]["sites"] == {"lyon": {"accuracy": pytest.approx(lyon), "verdict": "inside"}}
    line = f"fit expected {lyon - 0.1:.2f} to {lyon + 0.1:.2f} at a new site; measured {lyon:.3f} at lyon: inside."
    assert found["notes"][0] == line
    spans = ([lyon + 0.1, 1.0], "below"), ([0.0, lyon - 0.1], "above"), (None, None)
    for span, verdict in spans:
        found = evaluate(answers, resamples=0, trained_on=["berlin"], expected=expected | {"new_site": span})
        assert found["expected"]["sites"]["lyon"]["verdict"] == verdict
    assert "fit expected 0.80 (without an interval) at a new site; measured" in found["notes"][0]
    found = evaluate(answers, resamples=0, trained_on=["berlin", "lyon"], expected=expected)
    assert "no scored site is new to the model" in found["notes"][0]
    assert evaluate(answers, resamples=0)["expected"] is None


def test_identical_images_are_named() -> None:
    answers = planted([0, 1, 2], [[0.5, 0.3, 0.2]] * 3)
    assert any("All images get the same probabilities" in note for note in evaluate(answers, resamples=0)["notes"])
    assert not any("the same probabilities" in note for note in evaluate(drawn(), resamples=0)["notes"])
