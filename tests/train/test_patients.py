"""Results a patient: by hand, in parts, and in a whole run whose patients stay on one side of the split."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from patchgen.config import Config
from patchgen.data.table import Table
from patchgen.predict.predictor import Prediction, load_run
from patchgen.tasks.mdg import make_fold
from patchgen.train.evaluate import patient_scores
from patchgen.train.lifecycle import train


def probabilities(p: list[float]) -> np.ndarray:
    """(N, 2) from the probability of class 1."""
    return np.stack([1 - np.array(p), p], 1)


def test_shares_and_votes_by_hand() -> None:
    names = ("ann", "ann", "ann", "bob", "bob", "cy", "cy", "cy")
    label, p = np.array([0, 0, 0, 1, 1, 0, 1, 1]), [0.6, 0.55, 0.01, 0.9, 0.4, 0.2, 0.7, 0.6]
    record = patient_scores(names, label, probabilities(p))
    assert record["patients"] == 3
    assert record["accuracy"] == pytest.approx((1 / 3 + 1 / 2 + 1) / 3) and record["worst"] == pytest.approx(1 / 3)
    # ann: two of three images say 1 (wrong), the mean probability of 1 is 0.387; bob: a tie, mean 0.65; cy has both
    assert record["one_label"] == {"patients": 2, "majority": 0.5, "mean_probability": 1.0}
    several = patient_scores(("a", "a"), np.array([0, 1]), probabilities([0.1, 0.9]))
    assert several == {"patients": 1, "accuracy": 1.0, "worst": 1.0}  # two labels: no vote


@pytest.fixture(scope="module")
def manifest(image_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shared images with five patients a domain; in `studio` each patient has a single class."""
    file = tmp_path_factory.mktemp("manifest") / "tiles.csv"
    with file.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["path", "domain", "label", "group"])
        for path in sorted(image_folder.rglob("*.png")):
            domain, label = path.parts[-3:-1]
            person = f"{label}-{int(path.stem) % 2}" if domain == "studio" else f"{domain}-{int(path.stem) % 5}"
            writer.writerow([path, domain, label, person])
    return file


def test_a_run_by_patients_from_end_to_end(manifest: Path, tiny_settings: dict[str, Any], tmp_path: Path) -> None:
    config = Config(**{**tiny_settings, "data": str(manifest), "split": "group"})
    run = train(config, tmp_path, quiet=True)
    sides: dict[tuple[str, str], set[str]] = {}
    with (run.path / "splits.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    for row in rows:
        sides.setdefault((row["domain"], row["group"]), set()).add(row["part"])
    assert all(len(parts) == 1 for parts in sides.values()) and {"in", "out"} == set.union(*sides.values())

    record = next(r for r in run.records("test") if r["checkpoint"] == "selected")
    studio = [row for row in rows if row["domain"] == "studio"]
    predictor = load_run(run.path)
    found = [p for p in predictor.predict([row["path"] for row in studio]) if isinstance(p, Prediction)]
    people = sorted({row["group"] for row in studio})
    shares, majority, mean = [], [], []
    for person in people:  # the obvious version
        mine = [(p, row["label"]) for p, row in zip(found, studio, strict=True) if row["group"] == person]
        shares.append(np.mean([p.label == label for p, label in mine]))
        total = sum(p.probabilities for p, _ in mine)
        votes = [sum(p.label == name for p, _ in mine) for name in predictor.classes]
        winner = max(range(len(votes)), key=lambda i: (votes[i], total[i]))
        majority.append(predictor.classes[winner] == mine[0][1])
        mean.append(predictor.classes[int(total.argmax())] == mine[0][1])
    patients = record["patients"]
    assert patients["patients"] == len(people) == 6
    assert patients["accuracy"] == pytest.approx(np.mean(shares)) and patients["worst"] == pytest.approx(min(shares))
    assert patients["one_label"] == {
        "patients": 6,
        "majority": pytest.approx(np.mean(majority)),
        "mean_probability": pytest.approx(np.mean(mean)),
    }
    summary = (run.path / "summary.md").read_text()
    assert f"selected, by patient: mean accuracy {patients['accuracy']:.4f} over 6 patients" in summary
    assert "of 6 patients with one label" in summary and "swad, by patient" in summary


@pytest.mark.parametrize("seed", range(3))
def test_torn_patients_are_those_of_the_runs_own_split(seed: int) -> None:
    group = tuple(f"{domain}{max(image, 1)}" for domain in "abc" for image in range(10))  # one patient has two images
    paths, domain, label = tuple(f"{i}.png" for i in range(30)), np.repeat([0, 1, 2], 10), np.arange(30) % 2
    table = Table(Path("x"), paths, ("a", "b", "c"), ("no", "yes"), domain, label, group)
    fold = make_fold(Config(data="x", unseen="c", seed=seed), table)
    sides = [{group[row] for row in rows} for rows in (*fold.train.values(), *fold.validation.values())]
    torn = len(sides[0] & sides[2]) + len(sides[1] & sides[3])
    assert [note.startswith(f"the split puts {torn} groups on both sides") for note in fold.notes] == [True] * bool(
        torn
    )


def test_a_patient_of_two_domains_is_named() -> None:
    group = ("p1", "p2", "p3", "p4", "p5", "p6") * 2 + ("p1", "q2", "q3", "q4", "q5", "q6")
    paths, domain, label = tuple(f"{i}.png" for i in range(18)), np.repeat([0, 1, 2], 6), np.arange(18) % 2
    table = Table(Path("x"), paths, ("a", "b", "c"), ("no", "yes"), domain, label, group)
    [unseen, sides] = make_fold(Config(data="x", unseen="c", split="group", holdout=0.4), table).notes
    assert unseen.startswith("1 of 6 groups of c also occur in the sources (p1)")
    assert "are trained on in one source and validated on in another" in sides
