"""A whole diagnosis: `examine(prepare(["runs/4f2a9c01b7de"], options=Options(images=50))).write("diagnosis")`."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from patchgen.common.files import write_text
from patchgen.common.text import json_text, number_text, plus_minus, printable
from patchgen.diagnose import figures, geometry
from patchgen.diagnose.claims import claims
from patchgen.diagnose.cost import compare_steps, of_module
from patchgen.diagnose.faithfulness import THRESHOLD
from patchgen.diagnose.measure import Options, Record, measure, rank_all, summarise
from patchgen.draw.plots import Drawn
from patchgen.predict.attribution import available, check_rankings
from patchgen.predict.embed import write_columns
from patchgen.predict.fold_runs import Subject, geometry_rows, open_subjects, unseen_rows
from patchgen.runs.scores import recorded_mask

SHOWN_IMAGES = 6
SHOWN_MAPS = ("mask", "attention", "grad-cam")  # of part D
VERDICTS = {"yes": "right", "no": "wrong"}  # colours of the page
MASKS = {"accuracy": "accuracy %", "selected": "selected %", "min": "mask min", "mean": "mean", "max": "max",
         "auroc": "AUROC", "iou": "IoU", "error": "error", "kept": "kept %"}  # fmt: skip
Say = Callable[[str], None]
Tick = Callable[[int], None]


class Opened(NamedTuple):
    """Opened runs with the rankings to measure; nothing is measured yet."""

    subjects: list[Subject]  # the first is the run to diagnose
    rankings: list[tuple[str, ...]]  # of each subject
    rows: np.ndarray  # (N,) unseen images that are perturbed
    around: np.ndarray  # (M,) images of all domains for the geometry
    options: Options

    @property
    def work(self) -> int:
        """Total ticks of `examine`: every image of every run, and the cost."""
        return len(self.subjects) * len(self.rows) + 1


class Diagnosis(NamedTuple):
    facts: dict[str, Any]  # the content of diagnosis.json
    records: dict[str, list[Record]]  # run -> one record per image
    figures: dict[str, Drawn]
    features: dict[str, dict[str, np.ndarray]]  # run -> columns path, domain, label, features, x, y, as drawn

    def write(self, out: str | Path) -> Path:
        """Write everything to one folder; returns the page."""
        from patchgen.pages.page import write_page

        folder = Path(out)
        folder.mkdir(parents=True, exist_ok=True)
        lines = [json_text(record, None) for of_run in self.records.values() for record in of_run]
        write_text(folder / "records.jsonl", "\n".join(lines) + "\n")
        write_text(folder / "diagnosis.json", json_text(self.facts) + "\n")
        for drawn in self.figures.values():
            drawn.save(folder)
        for number, columns in enumerate(self.features.values(), 1):
            write_columns(folder / f"features-{number}.npz", columns)
        return write_page(folder / "index.html", render_page(self.facts, self.figures))


def prepare(runs: Sequence[str], data: str | None = None, options: Options | None = None, **device: Any) -> Opened:
    """Open the run to diagnose and those to compare it with, and choose images and rankings."""
    options = options or Options()
    subjects = open_subjects(runs, data, options.checkpoint, **device)
    main, rankings = subjects[0], []
    check_rankings(main.model, options.rankings, f"{main.name} ({main.folder.path.resolve().name})")
    for subject in subjects:
        if options.steps > subject.patches:
            raise ValueError(f"--steps must be at most the {subject.patches} patches of an image, not {options.steps}")
        supported = available(subject.model)
        asked = tuple(name for name in supported if name in options.rankings) if options.rankings else supported
        rankings.append(asked or ("random",))
    rows = unseen_rows(main.fold, options.images, options.seed)
    return Opened(subjects, rankings, rows, geometry_rows(main.fold, options.images, options.seed), options)


def examine(opened: Opened, say: Say = lambda text: None, tick: Tick = lambda count: None) -> Diagnosis:
    """Measure, judge and draw; `say` is called for each run, `tick` with the number of completed images."""
    subjects, options, main = opened.subjects, opened.options, opened.subjects[0]
    fold = main.fold
    share, rule = selection_share(subjects, opened.rows)
    label = np.array(fold.classes)[fold.truth[opened.around]]
    domain = np.array(fold.table.domains)[fold.table.domain[opened.around]]
    path = np.array([printable(fold.table.paths[row]) for row in opened.around])
    records, points, exported, runs, way = {}, {}, {}, {}, ""
    for subject, rankings in zip(subjects, opened.rankings, strict=True):
        say(f"{subject.name}: {', '.join(rankings)}")
        records[subject.name] = list(measure(subject, opened.rows, rankings, options, share, tick))
        features = subject.predictor.read(subject.store, opened.around)[1].float().numpy()
        points[subject.name], way = geometry.flat(features, options.projection, options.seed)
        plane = {"x": points[subject.name][:, 0], "y": points[subject.name][:, 1]}
        exported[subject.name] = {"path": path, "domain": domain, "label": label, "features": features, **plane}
        runs[subject.name] = {
            "run": subject.folder.path.resolve().name,
            **summarise(records[subject.name], subject.patches),
            "untrained": {name: pair["untrained"] for name, pair in recorded_mask(subject.folder.path).items()},
            "geometry": {**geometry.numbers(features, label, domain, fold.unseen), "projection": way},
        }
    config = main.predictor.config
    method = {"select": "patchgen-select", "patchgen-cls": "patchgen-cls"}.get(main.model.pool, "patchgen")
    cost = compare_steps(config.backbone, method, config.image_size)
    tick(1)
    facts = {
        "main": main.name, "unseen": fold.unseen, "images": len(opened.rows), "checkpoint": options.checkpoint,
        "classes": len(fold.classes), "seed": options.seed, "steps": options.steps,
        "operators": list(options.operators), "size_rule": rule, "runs": runs, "cost": cost,
    }  # fmt: skip
    facts["claims"] = claims(facts, records, main.name)
    drawn = [
        *(figures.perturbation(name, run, f"perturbation-{i}") for i, (name, run) in enumerate(runs.items(), 1)),
        figures.curves(runs, options.operators[0]),
        maps_side_by_side(subjects, opened.rankings, opened.rows[:SHOWN_IMAGES]),
        figures.costs(cost),
        figures.geometry(points, label, domain, fold.unseen, way),
    ]
    return Diagnosis(facts, records, {each.name: each for each in drawn}, exported)


def maps_side_by_side(subjects: Sequence[Subject], rankings: Sequence[Sequence[str]], rows: np.ndarray) -> Drawn:
    """Part D: the images of these rows with the maps of every run, as far as they are among its rankings."""
    maps: list[dict[str, Any]] = [{} for _ in rows]
    predicted: list[dict[str, str]] = [{} for _ in rows]
    fold = subjects[0].fold
    for subject, names in zip(subjects, rankings, strict=True):
        pixels = subject.pixels(rows)
        target = subject.probabilities(pixels).argmax(1)
        shown = [name for name in SHOWN_MAPS if name in names]
        scores = rank_all(subject, pixels, rows, target, shown)
        columns = {"truth": "truth"} if subject is subjects[0] and "truth" in scores else {}
        columns |= {f"{subject.name}: {name}": name for name in shown}
        for i in range(len(rows)):
            predicted[i][subject.name] = fold.classes[int(target[i])]
            for column, name in columns.items():
                maps[i][column] = scores[name][i].detach().unflatten(0, subject.model.grid).cpu().numpy()
    pictures = subjects[0].pixels(rows).permute(0, 2, 3, 1).cpu().numpy()
    truth = np.array(fold.classes)[fold.truth[rows]]
    titles = [f"{true}\n{_answers(true, of_runs)}" for true, of_runs in zip(truth, predicted, strict=True)]
    return figures.overlays(pictures, titles, maps)


def _answers(true: str, predicted: dict[str, str]) -> str:
    """The prediction of all runs for an image, or which of them were wrong."""
    if len(set(predicted.values())) == 1:
        return f"predicted {next(iter(predicted.values()))}"
    return f"missed by {', '.join(run for run, answer in predicted.items() if answer != true)}"


def selection_share(subjects: Sequence[Subject], rows: np.ndarray) -> tuple[np.ndarray, str]:
    """Share of patches that a run without a mask selects in each image (N,), and the rule in words."""
    masked = next((subject for subject in subjects if subject.model.has_mask), None)
    mask = masked.predictor.read(masked.store, rows)[2] if masked else None
    if masked is None or mask is None:
        return np.full(len(rows), 0.5), "No run here has a mask: half of the patches are selected."
    share = (mask >= THRESHOLD).float().mean(1).numpy()
    return share, f"A run without a mask selects the share of patches that {masked.name} selects in the same image."


# The page


def render_page(diagnosis: Mapping[str, Any], figures_by_name: Mapping[str, Drawn]) -> str:
    """The self-contained page with the five parts; `diagnosis` is the content of diagnosis.json."""
    from patchgen.pages.page import Cell, data_address, render

    runs = diagnosis["runs"]
    others = ", ".join(name for name in runs if name != diagnosis["main"])
    mask_head, masks = _mask_table(runs)
    return render(
        "diagnosis.html",
        title=f"Does the mask decide? {diagnosis['main']}" + (f" against {others}" if others else ""),
        diagnosis=diagnosis,
        figures=figures_by_name,
        claims=[
            (claim["part"], claim["claim"], Cell(claim["verdict"], f"whole {VERDICTS.get(claim['verdict'], '')}"),
             claim["measured"]) for claim in diagnosis["claims"]
        ],
        masks=masks,
        mask_head=mask_head,
        areas=[
            [name, ranking, *(_with_error(curve[f"{way}_auc"][which]) for which in ("predicted", "true")
                              for way in ("insertion", "deletion"))]
            for name, run in runs.items() for ranking, curve in run["curves"].items()
        ],
        geometry=[_geometry_row(name, run["geometry"]) for name, run in runs.items()],
        notice=figures.NOTICE.capitalize(),
        overlays=data_address(figures_by_name["overlays"]),
        module=of_module(diagnosis["cost"]),
    )  # fmt: skip


def _with_error(value: Mapping[str, float] | None, percent: bool = False) -> str:
    if value is None:
        return "-"
    scale, digits = (100, 1) if percent else (1, 3)
    return plus_minus(scale * value["mean"], scale * value["error"], digits)


def _mask_table(runs: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Head and rows; what is recorded of the untrained masks stands beside the trained ones."""
    recorded = {name for run in runs.values() for name in run["untrained"]}
    columns = [(name, untrained) for name in MASKS for untrained in (False, True) if not untrained or name in recorded]
    rows = []
    for label, run in runs.items():
        means = {**(run["mask"] or {}), "accuracy": run["accuracy"], "auroc": (run["auroc"] or {}).get("mask")}
        means |= {"selected": run["selected"]} if run["mask"] else {}
        cells = []
        for name, untrained in columns:
            value, percent = means.get(name), MASKS[name].endswith("%")
            if untrained:
                cells.append(number_text(run["untrained"].get(name), percent))
            elif value and name in ("accuracy", "selected"):
                cells.append(_with_error(value, percent))
            else:
                cells.append(number_text(value and value["mean"], percent))
        rows.append([label, *cells])
    return ["run", *(MASKS[name] + ", untrained" * untrained for name, untrained in columns)], rows


def _geometry_row(name: str, numbers: Mapping[str, Any]) -> list[str]:
    apart, knn = numbers["domain_separability"], numbers["knn_across_domains"]
    return [
        name,
        number_text(numbers["silhouette_by_class"]),
        number_text(numbers["silhouette_by_domain"]),
        f"{100 * apart['accuracy']:.1f} (chance {100 * apart['chance']:.1f})" if apart else "-",
        number_text(knn and knn["unseen"], True),
        number_text(knn and knn["mean"], True),
    ]
