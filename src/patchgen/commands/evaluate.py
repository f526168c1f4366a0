"""patchgen evaluate MODEL DATA --out DIR: score a model or run on labelled images; a page, a CSV and a JSON file.

`patchgen evaluate RUN RUN...` (`evaluate_runs.py`) scores the mean of several runs' probabilities.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from patchgen.commands import announce, check_folder, parse, print_table, require_data
from patchgen.commands.inputs import report_unreadable
from patchgen.commands.options import RuntimeOptions
from patchgen.common.files import check_writable, expanded, write_text
from patchgen.common.text import json_text, printable
from patchgen.common.untrusted import read_json

if TYPE_CHECKING:
    from patchgen.predict.answers import Answers
    from patchgen.predict.predictor import Predictor


@dataclass(frozen=True)
class EvaluateArguments(RuntimeOptions):
    """Score a trained model on labelled images: metrics with intervals, per site and per patient, and its mistakes.

    With several runs of one fold instead of DATA: the mean of their probabilities, scored on the domain that all left
    out, next to the single runs (EoA for `+sma` runs).
    """

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """Model folder of `patchgen fit`, or run folder of `patchgen train`."""
    targets: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="DATA|RUN...")]
    """Folder `site/class/*.jpg` or `class/*.jpg`, or CSV manifest (path, domain, label, optional group); or runs."""
    out: str | None = None
    """Folder for index.html, images.csv, metrics.json and the figures, `evaluation` by default; of several runs a .csv
    file with path, part, truth, label, confidence and a column p_CLASS for each class."""
    data: str | None = None
    """Of several runs: the path of their data, if it has changed."""
    sites: tuple[str, ...] = ()
    """Score only these sites of the data; all by default."""
    positive: str | None = None
    """Also score this class against all others: sensitivity, specificity, precision, F1, AUROC."""
    resamples: int = 1000
    """Bootstrap resamples, over patients if the data has groups, else over images; 0: no intervals."""
    wrong: int = 12
    """Number of most confidently wrong images to show."""
    json: bool = False
    """Print metrics.json instead of a table."""
    strict: bool = False
    """Exit with code 1 if any image could not be read."""
    batch: int = 64
    """Images per forward pass."""


COMMAND = EvaluateArguments


def main(argv: list[str]) -> int:
    arguments = parse(EvaluateArguments, "evaluate", argv)
    if _are_runs(arguments):
        from patchgen.commands.evaluate_runs import evaluate_runs

        return evaluate_runs(arguments)
    out, data = _check(arguments)
    announce()
    from patchgen.common.progress import Progress
    from patchgen.data.table import read_table
    from patchgen.predict.answers import check_classes, chosen_rows, collect, training_sites
    from patchgen.predict.evaluate import bootstrap_draws, check_options, evaluate

    table = read_table(data, for_scoring=True)
    rows = chosen_rows(table, arguments.sites)
    predictor = arguments.load(arguments.run, len(rows))
    check_options(arguments.positive, arguments.resamples, predictor.classes)
    check_classes(table, rows, predictor.classes)
    out.mkdir(parents=True, exist_ok=True)
    with Progress("scoring", int((table.label[rows] >= 0).sum())) as bar:
        answers = collect(predictor, table, rows, arguments.batch, bar.tick)
    sites, expected = training_sites(arguments.run)
    with Progress("intervals", max(bootstrap_draws(answers, arguments.resamples), 1)) as bar:
        if bar.total > 1:
            bar.say(f"{arguments.resamples:,} resamples for the intervals")
        scored = evaluate(answers, arguments.positive, arguments.resamples, sites, bar.advance, expected)
    found = {**_facts(arguments, predictor), **scored}
    _write(found, answers, predictor, out, arguments.wrong)
    if arguments.json:
        print((out / "metrics.json").read_text(encoding="utf-8"), end="")
    else:
        _print(found)
        print(out / "index.html")
    return report_unreadable(answers.unreadable, len(answers.rows) + len(answers.unreadable), arguments.strict)


def _are_runs(arguments: EvaluateArguments) -> bool:
    """Whether the words are run folders, not a model and its data."""
    return all((expanded(word) / "config.yaml").is_file() for word in arguments.targets)


def _check(arguments: EvaluateArguments) -> tuple[Path, str]:
    """The output folder and the data; checks before any work what would otherwise fail at its end."""
    if len(arguments.targets) > 1:
        odd = next(word for word in arguments.targets if not (expanded(word) / "config.yaml").is_file())
        raise ValueError(f"{odd} is no run folder; give one model and one data set, or several runs of a fold")
    [data] = arguments.targets
    require_data(data)
    if arguments.data is not None:
        raise ValueError("--data is for several runs, whose data has another path now; leave it out")
    out = expanded(arguments.out or "evaluation")
    check_folder(out)
    check_writable(out, "--out")
    for name in ("batch", "wrong"):
        least = 1 if name == "batch" else 0
        if getattr(arguments, name) < least:
            raise ValueError(f"--{name} must be at least {least}, not {getattr(arguments, name)}")
    return out, data


def _facts(arguments: EvaluateArguments, predictor: Predictor) -> dict[str, Any]:
    """The model and the data that were evaluated."""
    from patchgen.runs.folder import MODEL_CONFIG, is_model_folder
    from patchgen.runs.scores import recorded_mask

    checkpoint = arguments.checkpoint
    if is_model_folder(arguments.run):  # it has a single model, and records which one
        checkpoint = read_json(Path(arguments.run) / MODEL_CONFIG).get("checkpoint", checkpoint)
    return {
        "model": Path(arguments.run).resolve().name,
        "method": predictor.config.method,
        "checkpoint": checkpoint,
        "runtime": predictor.variant or "torch",
        "mask": recorded_mask(arguments.run),
        "data": arguments.targets[0],
    }


def _write(found: dict[str, Any], answers: Answers, predictor: Predictor, out: Path, count: int) -> None:
    """All files of the output folder; adds the lists of wrong and of unreadable images to `found`."""
    from patchgen.common.files import write_csv
    from patchgen.pages.page import write_page
    from patchgen.report.evaluation import confusion_figure, reliability_figure, render_page

    found["most_wrong"], pictures = _wrong_images(answers.known(), predictor, count)
    found["unreadable"] = [{"path": str(one.path), "reason": one.reason} for one in answers.unreadable]
    drawn = confusion_figure(found["classes"], found["confusion"]), reliability_figure(found["reliability"])
    for figure in drawn:
        figure.save(out)
    write_csv(out / "images.csv", _header(answers), _lines(answers), people=True)
    write_text(out / "metrics.json", json_text(found) + "\n")
    write_page(out / "index.html", render_page(found, {figure.name: figure for figure in drawn}, pictures))


def _wrong_images(answers: Answers, predictor: Predictor, count: int) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The most confident mistakes with their masks, and path -> picture; masks are recomputed only for these."""
    from patchgen.draw.overlay import mask_reading
    from patchgen.predict.evaluate import most_wrong
    from patchgen.predict.predictor import Unreadable
    from patchgen.report.evaluation import picture

    places = most_wrong(answers, count).tolist()
    table, entries, pictures = answers.table, list[dict[str, Any]](), dict[str, str]()
    files = [table.file(int(answers.rows[i])) for i in places]
    for i, file, again in zip(places, files, predictor.predict(files), strict=True):
        if isinstance(again, Unreadable):  # removed since it was scored
            continue
        row = int(answers.rows[i])
        entries.append({
            "path": table.paths[row],
            "site": table.domains[table.domain[row]],
            "group": table.group[row] if table.group else "",
            "truth": table.label_name(row),
            "truth_probability": float(answers.probabilities[i, answers.label[i]]),
            "label": answers.classes[answers.predicted[i]],
            "confidence": float(answers.confidence[i]),
            "selection": None if again.mask is None else mask_reading(again.mask),
        })  # fmt: skip
        pictures[table.paths[row]] = picture(file, again.mask)
    return entries, pictures


def _header(answers: Answers) -> list[str]:
    flag = [] if answers.unlike is None else ["unlike_training"]
    names = ["path", "site", "group", "truth", "label", "right", "confidence", *flag]
    return [*names, *(f"p_{printable(name)}" for name in answers.classes), "note"]


def _lines(answers: Answers) -> Iterator[list[str]]:
    """One line per image that was read, then one per image that could not be."""
    table, predicted, right, confidence = answers.table, answers.predicted, answers.right, answers.confidence
    for i, row in enumerate(answers.rows.tolist()):
        flag = [] if answers.unlike is None else [str(bool(answers.unlike[i])).lower()]
        note = "" if answers.label[i] >= 0 else "not scored: the model does not know this class"
        about = [table.paths[row], table.domains[table.domain[row]], table.group[row] if table.group else ""]
        said = [
            table.label_name(row),
            answers.classes[predicted[i]],
            str(bool(right[i])).lower(),
            f"{confidence[i]:.6f}",
        ]
        cells = [*about, *said, *flag, *(f"{p:.6f}" for p in answers.probabilities[i]), note]
        yield [printable(cell) for cell in cells]
    empty = len(_header(answers)) - 2
    for one in answers.unreadable:
        yield [printable(one.path), *[""] * empty, printable(f"not scored: {one.reason}")]


def _sites(found: dict[str, Any]) -> Iterator[list[str]]:
    from patchgen.report.evaluation import shown, span

    for name, one in found["sites"].items():
        accuracy = [shown(one["accuracy"]), span(one["accuracy_interval"])]
        yield [name, f"{one['images']:,}", *accuracy, shown(one["balanced_accuracy"]), shown(one["auroc"])]


def _print(found: dict[str, Any]) -> None:
    from patchgen.predict.evaluate import METRICS
    from patchgen.report.evaluation import BINARY, shown, span

    rows = [
        (METRICS[name], shown(value), span(found["intervals"].get(name))) for name, value in found["metrics"].items()
    ]
    if found["binary"]:
        own, spans = found["binary"], found["binary_intervals"]
        rows += [(f"{found['positive']}: {t}", shown(own[n]), span(spans.get(n))) for n, t in BINARY.items()]
    print_table((f"{found['images']['scored']:,} images", "value", "95 % interval"), rows)
    if len(found["sites"]) > 1:
        print_table(("site", "images", "accuracy", "95 % interval", "balanced accuracy", "AUROC"), _sites(found))
    for note in found["notes"]:
        print(printable(note))
