"""Part D: some images with the maps of every run beside them, ready to be drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from patchgen.diagnose.figures import Shown
from patchgen.diagnose.measure import Plan, rank_all
from patchgen.predict.subjects import Subject

MAPS = ("mask", "attention", "grad-cam")


def shown(subjects: Sequence[Subject], plans: Sequence[Plan], rows: np.ndarray) -> list[Shown]:
    """The images of these rows with the maps of every run, as far as its plan has them."""
    maps: list[dict[str, Any]] = [{} for _ in rows]
    said: list[dict[str, str]] = [{} for _ in rows]
    fold = subjects[0].fold
    pictures = subjects[0].pixels(rows).permute(0, 2, 3, 1).cpu().numpy()
    for number, (subject, plan) in enumerate(zip(subjects, plans, strict=True)):
        pixels = subject.pixels(rows)
        target = subject.probabilities(pixels).argmax(1)
        names = [name for name in MAPS if name in plan.rankings]
        scores = rank_all(subject, pixels, rows, target, names)
        wanted = ["truth"] * (number == 0 and "truth" in scores) + names
        for i in range(len(rows)):
            said[i][subject.name] = fold.classes[int(target[i])]
            for name in wanted:
                column = name if name == "truth" else f"{subject.name}: {name}"
                maps[i][column] = scores[name][i].detach().unflatten(0, subject.model.grid).cpu().numpy()
    truth = np.array(fold.classes)[fold.truth[rows]]
    titles = [f"{true}\n{_answers(true, of)}" for true, of in zip(truth, said, strict=True)]
    return [Shown(*one) for one in zip(pictures, titles, maps, strict=True)]


def _answers(true: str, said: dict[str, str]) -> str:
    """What all runs said of an image, or which of them were wrong."""
    if len(set(said.values())) == 1:
        return f"said {next(iter(said.values()))}"
    return f"missed by {', '.join(run for run, answer in said.items() if answer != true)}"
