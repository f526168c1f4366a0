"""A whole diagnosis: open the runs, perturb images, analyse features, measure cost, judge the claims, draw figures.

opened = prepare(["runs/4f2a9c01b7de", "runs/90be2f11c3aa"], options=Options(images=50))
made = examine(opened)
made.found["claims"], made.figures["curves"].figure
made.write("diagnosis")                       # records.jsonl, diagnosis.json, index.html, figures, features-1.npz
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from patchgen.common.files import write_text
from patchgen.common.text import did_you_mean, printable
from patchgen.diagnose import figures, geometry
from patchgen.diagnose.claims import Finding, claims
from patchgen.diagnose.cost import count_step
from patchgen.diagnose.faithfulness import OPERATORS
from patchgen.diagnose.measure import Measurements, Record, measure, rank_all
from patchgen.diagnose.summary import summarise
from patchgen.draw.plots import Drawn
from patchgen.predict.attribution import available, check_rankings
from patchgen.predict.embed import write_columns
from patchgen.predict.fold_runs import Subject, geometry_rows, open_subjects, unseen_rows
from patchgen.predict.predictor import Checkpoint
from patchgen.runs.scores import score_record

SHOWN_IMAGES = 6
SHOWN_MAPS = ("mask", "attention", "grad-cam")  # of part D
BATCH = 4  # images per step in part E
PART = 32  # images per forward pass
Say = Callable[[str], None]
Tick = Callable[[int], None]


@dataclass(frozen=True)
class Options:
    """The options of a diagnosis, as in `patchgen diagnose --help`."""

    images: int = 200
    steps: int = 8
    operators: tuple[str, ...] = tuple(OPERATORS)
    rankings: tuple[str, ...] = ()
    projection: Literal["auto", "umap", "pca"] = "auto"
    checkpoint: Checkpoint = "selected"
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("images", 2), ("steps", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"--{name} must be at least {least}, not {getattr(self, name)}")
        if not self.operators:
            raise ValueError(f"--operators needs at least one of {', '.join(OPERATORS)}")
        for name in self.operators:
            if name not in OPERATORS:
                hint = did_you_mean(name, OPERATORS)
                raise ValueError(f"--operators has no {name!r}{hint} (known: {', '.join(OPERATORS)})")


class Opened(NamedTuple):
    """Opened runs with their plans; nothing is measured yet."""

    subjects: list[Subject]  # the first is the run to diagnose
    plans: list[Measurements]  # one per subject
    rows: np.ndarray  # (N,) unseen images that are perturbed
    around: np.ndarray  # (M,) images of all domains for the geometry
    options: Options

    @property
    def work(self) -> int:
        """Total ticks of `examine`: every image of every run, and the cost."""
        return len(self.subjects) * len(self.rows) + 1


class Diagnosis(NamedTuple):
    found: dict[str, Any]  # the content of diagnosis.json
    records: dict[str, list[Record]]  # run -> one record per image
    figures: dict[str, Drawn]
    features: dict[str, dict[str, np.ndarray]]  # run -> columns path, domain, label, features, x, y, as drawn

    def write(self, out: str | Path) -> Path:
        """Write everything to one folder; returns the page."""
        from patchgen.diagnose.webpage import render_page
        from patchgen.pages.page import write_page

        folder = Path(out)
        folder.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(record) for of_run in self.records.values() for record in of_run]
        write_text(folder / "records.jsonl", "\n".join(lines) + "\n")
        write_text(folder / "diagnosis.json", json.dumps(self.found, indent=2) + "\n")
        for drawn in self.figures.values():
            drawn.save(folder)
        for number, columns in enumerate(self.features.values(), 1):
            write_columns(folder / f"features-{number}.npz", columns)
        judged = [Finding(**claim) for claim in self.found["claims"]]
        return write_page(folder / "index.html", render_page(self.found, judged, self.figures))


def prepare(runs: Sequence[str], data: str | None = None, options: Options | None = None, **device: Any) -> Opened:
    """Open the runs and choose images and rankings; raises for runs that cannot be diagnosed.

    Args:
        runs: The run to diagnose, then those to compare it with.
        data: Current path of the data, if it has changed.
        device: `accelerator` and `precision` of the predictors.

    Raises:
        ValueError: runs that are not finished, do not belong together, or do not support the options.
    """
    options = options or Options()
    subjects = open_subjects(runs, data, options.checkpoint, **device)
    fold = subjects[0].fold
    rows = unseen_rows(fold, options.images, options.seed)
    around = geometry_rows(fold, options.images, options.seed)
    plans = [_plan(subject, options, asked=subject is subjects[0]) for subject in subjects]
    return Opened(subjects, plans, rows, around, options)


def _plan(subject: Subject, options: Options, asked: bool) -> Measurements:
    """All rankings of the run, or the requested ones; a run to compare with uses those that it supports."""
    if options.steps > subject.patches:
        raise ValueError(f"--steps must be at most the {subject.patches} patches of an image, not {options.steps}")
    has = available(subject.model)
    if asked:
        check_rankings(subject.model, options.rankings, f"{subject.name} ({subject.run})")
    names = tuple(name for name in has if name in options.rankings) if options.rankings else has
    return Measurements(names or ("random",), tuple(dict.fromkeys(options.operators)), options.steps, options.seed)


def examine(opened: Opened, say: Say = lambda text: None, tick: Tick = lambda count: None) -> Diagnosis:
    """Measure, judge and draw; `say` is called for each run, `tick` with the number of completed images."""
    subjects, options, fold = opened.subjects, opened.options, opened.subjects[0].fold
    share, rule = selection_share(subjects, opened.rows)
    label = np.array(fold.classes)[fold.truth[opened.around]]
    domain = np.array(fold.table.domains)[fold.table.domain[opened.around]]
    path = np.array([printable(fold.table.paths[row]) for row in opened.around])
    records, points, exported, runs, way = {}, {}, {}, {}, ""
    for subject, plan in zip(subjects, opened.plans, strict=True):
        say(f"{subject.name}: {', '.join(plan.rankings)}")
        records[subject.name] = list(measure(subject, opened.rows, plan, share, tick))
        features = np.concatenate([subject.features(part) for part in _parts(opened.around)])
        points[subject.name], way = geometry.flat(features, options.projection, options.seed)
        plane = {"x": points[subject.name][:, 0], "y": points[subject.name][:, 1]}
        exported[subject.name] = {"path": path, "domain": domain, "label": label, "features": features, **plane}
        runs[subject.name] = {
            "run": subject.run,
            **summarise(records[subject.name], subject.patches),
            "untrained": untrained_mask(subject),
            "geometry": {**geometry.numbers(features, label, domain, fold.unseen), "projection": way},
        }
    config = subjects[0].predictor.config
    method = {"select": "patchgen-select", "patchgen-cls": "patchgen-cls"}.get(subjects[0].model.pool, "patchgen")
    cost = count_step(config.backbone, image_size=config.image_size, batch=BATCH, measured=(method,))
    tick(1)
    found = {**_asked(opened), "size_rule": rule, "runs": runs, "cost": cost}
    found["claims"] = [claim._asdict() for claim in claims(found, records, subjects[0].name)]
    drawn = [*_charts(opened, found), figures.geometry(points, label, domain, fold.unseen, way)]
    return Diagnosis(found, records, {one.name: one for one in drawn}, exported)


def _asked(opened: Opened) -> dict[str, Any]:
    options, first = opened.options, opened.subjects[0]
    return {
        "main": first.name, "unseen": first.fold.unseen, "images": len(opened.rows), "checkpoint": options.checkpoint,
        "classes": len(first.fold.classes),
        "seed": options.seed, "steps": options.steps, "operators": list(opened.plans[0].operators),
    }  # fmt: skip


def _charts(opened: Opened, found: dict[str, Any]) -> list[Drawn]:
    """The figures of parts A, B, D and E."""
    runs = found["runs"]
    return [
        *(figures.perturbation(name, run, f"perturbation-{i}") for i, (name, run) in enumerate(runs.items(), 1)),
        figures.curves(runs, opened.plans[0].operators[0]),
        figures.overlays(shown_images(opened.subjects, opened.plans, opened.rows[:SHOWN_IMAGES])),
        figures.costs(found["cost"]),
    ]


def shown_images(subjects: Sequence[Subject], plans: Sequence[Measurements], rows: np.ndarray) -> list[figures.Shown]:
    """Part D: the images of these rows with the maps of every run, as far as its plan has them."""
    maps: list[dict[str, Any]] = [{} for _ in rows]
    said: list[dict[str, str]] = [{} for _ in rows]
    fold = subjects[0].fold
    pictures = subjects[0].pixels(rows).permute(0, 2, 3, 1).cpu().numpy()
    for number, (subject, plan) in enumerate(zip(subjects, plans, strict=True)):
        pixels = subject.pixels(rows)
        target = subject.probabilities(pixels).argmax(1)
        names = [name for name in SHOWN_MAPS if name in plan.rankings]
        scores = rank_all(subject, pixels, rows, target, names)
        wanted = ["truth"] * (number == 0 and "truth" in scores) + names
        for i in range(len(rows)):
            said[i][subject.name] = fold.classes[int(target[i])]
            for name in wanted:
                column = name if name == "truth" else f"{subject.name}: {name}"
                maps[i][column] = scores[name][i].detach().unflatten(0, subject.model.grid).cpu().numpy()
    truth = np.array(fold.classes)[fold.truth[rows]]
    titles = [f"{true}\n{_answers(true, of)}" for true, of in zip(truth, said, strict=True)]
    return [figures.Shown(*one) for one in zip(pictures, titles, maps, strict=True)]


def _answers(true: str, said: dict[str, str]) -> str:
    """The prediction of all runs for an image, or which of them were wrong."""
    if len(set(said.values())) == 1:
        return f"predicted {next(iter(said.values()))}"
    return f"missed by {', '.join(run for run, answer in said.items() if answer != true)}"


def selection_share(subjects: Sequence[Subject], rows: np.ndarray) -> tuple[np.ndarray, str]:
    """Share of patches that a run without a mask selects in each image (N,), and the rule in words."""
    masked = next((subject for subject in subjects if subject.has_mask), None)
    if masked is None:
        return np.full(len(rows), 0.5), "No run here has a mask: half of the patches are selected."
    share = np.concatenate([masked.selected_share(part) for part in _parts(rows)])
    return share, f"A run without a mask selects the share of patches that {masked.name} selects in the same image."


def untrained_mask(subject: Subject) -> dict[str, float]:
    """Statistics of the run's mask before its first step, on the whole unseen domain; {} if none are recorded."""
    mask = score_record(subject.folder).get("mask", {})
    return {name.removeprefix("untrained_"): mask[name] for name in mask if name.startswith("untrained_")}


def _parts(rows: np.ndarray) -> list[np.ndarray]:
    return [rows[start : start + PART] for start in range(0, len(rows), PART)]
