"""patchgen diagnose RUN [--against RUN ...]: does the mask decide? Records, figures and one page."""

from __future__ import annotations

import json as to_json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from patchgen.commands import announce, parse, print_table
from patchgen.names import did_you_mean

if TYPE_CHECKING:
    import numpy as np

    from patchgen.diagnose.figures import Drawn, Shown
    from patchgen.diagnose.measure import Plan, Record
    from patchgen.diagnose.subjects import Subject
    from patchgen.train.progress import Progress

SHOWN_IMAGES = 6
SHOWN_MAPS = ("mask", "attention", "grad-cam")
REPEATS = 5  # timed steps of each method in part E


@dataclass(frozen=True)
class DiagnoseArguments:
    """Test whether a run's mask decides: perturbation, insertion and deletion, geometry, maps, cost.

    Every run can be diagnosed, with the rankings it has. Writes records.jsonl, diagnosis.json, index.html, and each
    figure as PNG, SVG and CSV.
    """

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Finished run folder, as `patchgen train` prints it."""
    against: tuple[str, ...] = ()
    """Runs of the same fold to compare with, such as the matched lp-ln."""
    data: str | None = None
    """Where the run's data lie now; where it was trained when left out."""
    images: int = 200
    """Images of the unseen domain, evenly over the classes."""
    steps: int = 8
    """Steps of insertion and deletion."""
    operators: tuple[str, ...] = ("blur", "mean", "swap")
    """What perturbs a patch, of blur, mean and swap; the first also serves insertion and deletion."""
    rankings: tuple[str, ...] = ()
    """Rankings of the patches; all that each run has when left out."""
    projection: Literal["auto", "umap", "pca"] = "auto"
    """Picture of the features; `auto` is UMAP where it is installed."""
    out: str | None = None
    """Folder for everything; `diagnosis` in the run folder when left out."""
    checkpoint: Literal["selected", "swad"] = "selected"
    """The checkpoint chosen on source validation, or the weight average of a run trained with --swad."""
    seed: int = 0
    """Seed of the choice of images and of the swapped partners."""
    json: bool = False
    """Print the diagnosis as JSON instead of a table."""


def main(argv: list[str]) -> int:
    arguments = parse(DiagnoseArguments, "diagnose", argv)
    announce()
    _check(arguments)
    from patchgen.diagnose.subjects import geometry_rows, open_subjects, unseen_rows
    from patchgen.train.progress import Progress

    subjects = open_subjects([arguments.run, *arguments.against], arguments.data, arguments.checkpoint)
    fold = subjects[0].fold
    rows = unseen_rows(fold, arguments.images, arguments.seed)
    around = geometry_rows(fold, arguments.images, arguments.seed)
    plans = [_plan(subject, arguments, asked=subject is subjects[0]) for subject in subjects]
    out = Path(arguments.out or Path(arguments.run) / "diagnosis")
    out.mkdir(parents=True, exist_ok=True)
    with Progress("diagnosing", len(subjects) * len(rows) + 1) as bar:
        found, records, figures = _diagnose(subjects, plans, rows, around, arguments, bar)
    _write(out, found, records, figures)
    if arguments.json:
        print(to_json.dumps(found, indent=2))
    else:
        _print(found)
        print((out / "index.html").resolve())
    return 0


def _check(arguments: DiagnoseArguments) -> None:
    from patchgen.diagnose.faithfulness import OPERATORS

    for name, least in (("images", 2), ("steps", 1), ("seed", 0)):
        if getattr(arguments, name) < least:
            raise ValueError(f"--{name} must be at least {least}, not {getattr(arguments, name)}")
    if not arguments.operators:
        raise ValueError(f"--operators needs at least one of {', '.join(OPERATORS)}")
    for name in arguments.operators:
        if name not in OPERATORS:
            hint = did_you_mean(name, OPERATORS)
            raise ValueError(f"--operators has no {name!r}{hint} (known: {', '.join(OPERATORS)})")
    if arguments.out and Path(arguments.out).exists() and not Path(arguments.out).is_dir():
        raise ValueError(f"--out must be a folder, but {arguments.out} is a file")


def _plan(subject: Subject, arguments: DiagnoseArguments, asked: bool) -> Plan:
    """All rankings of the run, or those asked for; a run of --against has those of them that it can have."""
    from patchgen.diagnose.attribution import available, check_rankings
    from patchgen.diagnose.measure import Plan

    if arguments.steps > subject.patches:
        raise ValueError(f"--steps must be at most the {subject.patches} patches of an image, not {arguments.steps}")
    has = available(subject.model)
    if asked:
        check_rankings(subject.model, arguments.rankings, f"{subject.name} ({subject.run})")
    names = tuple(name for name in has if name in arguments.rankings) if arguments.rankings else has
    return Plan(names or ("random",), tuple(dict.fromkeys(arguments.operators)), arguments.steps, arguments.seed)


def _diagnose(
    subjects: Sequence[Subject],
    plans: Sequence[Plan],
    rows: np.ndarray,
    around: np.ndarray,
    arguments: DiagnoseArguments,
    bar: Progress,
) -> tuple[dict[str, Any], dict[str, list[Record]], dict[str, Drawn]]:
    """What diagnosis.json holds, each run's records, and the figures."""
    from patchgen.commands.predict import ticker
    from patchgen.diagnose import claims, figures, geometry
    from patchgen.diagnose.efficiency import efficiency
    from patchgen.diagnose.measure import measure
    from patchgen.diagnose.summary import summarise

    fold, main_run = subjects[0].fold, subjects[0].name
    share, rule = selection_share(subjects, rows)
    found: dict[str, Any] = {
        "main": main_run, "unseen": fold.unseen, "images": len(rows), "checkpoint": arguments.checkpoint,
        "seed": arguments.seed, "steps": arguments.steps, "operators": list(plans[0].operators), "size_rule": rule,
        "runs": {},
    }  # fmt: skip
    label = _class_names(fold, around)
    domain = _names(fold.table.domains, fold.table.domain[around])
    records, points, way = {}, {}, ""
    for subject, plan in zip(subjects, plans, strict=True):
        bar.say(f"{subject.name}: {', '.join(plan.rankings)}")
        records[subject.name] = list(measure(subject, rows, plan, share, ticker(bar)))
        features = _features(subject, around)
        points[subject.name], way = geometry.flat(features, arguments.projection, arguments.seed)
        found["runs"][subject.name] = {
            "run": subject.run,
            **summarise(records[subject.name], subject.patches),
            "geometry": {**geometry.numbers(features, label, domain, fold.unseen), "projection": way},
        }
    found["cost"] = efficiency(subjects[0].predictor.config, repeats=REPEATS)
    bar.advance()
    found["claims"] = [claim._asdict() for claim in claims.claims(found, records, main_run)]
    drawn = [
        *(
            figures.perturbation(name, run, f"perturbation-{i}")
            for i, (name, run) in enumerate(found["runs"].items(), 1)
        ),
        figures.curves(found["runs"], plans[0].operators[0]),
        figures.geometry(points, label, domain, fold.unseen, way),
        figures.overlays(_shown(subjects, plans, rows[:SHOWN_IMAGES])),
        figures.costs(found["cost"]),
    ]
    return found, records, {one.name: one for one in drawn}


def selection_share(subjects: Sequence[Subject], rows: np.ndarray) -> tuple[np.ndarray, str]:
    """How many patches a run without a mask selects in each image (N,), as a share, and the rule in words."""
    import numpy as np

    masked = next((subject for subject in subjects if subject.has_mask), None)
    if masked is None:
        return np.full(len(rows), 0.5), "No run here has a mask: half of the patches are selected."
    share = np.concatenate([masked.selected_share(part) for part in _parts(rows)])
    return share, f"A run without a mask selects the share of patches that {masked.name} selects in the same image."


def _parts(rows: np.ndarray, size: int = 32) -> list[np.ndarray]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def _features(subject: Subject, rows: np.ndarray) -> np.ndarray:
    import numpy as np

    return np.concatenate([subject.features(part) for part in _parts(rows)])


def _names(names: Sequence[str], ids: np.ndarray) -> np.ndarray:
    import numpy as np

    return np.array(names)[ids]


def _class_names(fold: Any, rows: np.ndarray) -> np.ndarray:
    return _names(fold.classes, fold.truth[rows])


def _shown(subjects: Sequence[Subject], plans: Sequence[Plan], rows: np.ndarray) -> list[Shown]:
    """The first images with the maps of every run, as far as they were asked for."""
    from patchgen.diagnose.figures import Shown
    from patchgen.diagnose.measure import rank_all

    maps: list[dict[str, Any]] = [{} for _ in rows]
    said: list[dict[str, str]] = [{} for _ in rows]
    pictures = subjects[0].pixels(rows).permute(0, 2, 3, 1).cpu().numpy()
    for number, (subject, plan) in enumerate(zip(subjects, plans, strict=True)):
        pixels = subject.pixels(rows)
        target = subject.probabilities(pixels).argmax(1)
        names = [name for name in SHOWN_MAPS if name in plan.rankings]
        scores = rank_all(subject, pixels, rows, target, names)
        wanted = ["truth"] * (number == 0 and "truth" in scores) + names
        for i in range(len(rows)):
            said[i][subject.name] = subject.fold.classes[int(target[i])]
            for name in wanted:
                column = name if name == "truth" else f"{subject.name}: {name}"
                maps[i][column] = scores[name][i].detach().unflatten(0, subject.model.grid).cpu().numpy()
    truth = _class_names(subjects[0].fold, rows)
    titles = [f"{true}\n{_answers(true, of)}" for true, of in zip(truth, said, strict=True)]
    return [Shown(*one) for one in zip(pictures, titles, maps, strict=True)]


def _answers(true: str, said: dict[str, str]) -> str:
    """What all runs said of an image, or which of them were wrong."""
    if len(set(said.values())) == 1:
        return f"said {next(iter(said.values()))}"
    return f"missed by {', '.join(run for run, answer in said.items() if answer != true)}"


def _write(out: Path, found: dict[str, Any], records: dict[str, list[Record]], figures: dict[str, Drawn]) -> None:
    from patchgen.diagnose.claims import Claim
    from patchgen.diagnose.webpage import render
    from patchgen.report.page import write_page
    from patchgen.train.records import write_text

    lines = [to_json.dumps(record) for of_run in records.values() for record in of_run]
    write_text(out / "records.jsonl", "\n".join(lines) + "\n")
    write_text(out / "diagnosis.json", to_json.dumps(found, indent=2) + "\n")
    for drawn in figures.values():
        drawn.save(out)
    write_page(out / "index.html", render(found, [Claim(**claim) for claim in found["claims"]], figures))


def _print(found: dict[str, Any]) -> None:
    for name, run in found["runs"].items():
        mask = run["mask"]["verdict"] if run["mask"] else "no mask"
        print(f"{name}: accuracy {run['accuracy']['mean']:.1%} on {run['images']} images; {mask}")
    print_table(("part", "claim", "appears", "measured"), [list(claim.values()) for claim in found["claims"]])
