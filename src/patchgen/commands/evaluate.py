"""patchgen evaluate MODEL DATA --out DIR: score a model or run on labelled images; a page, a CSV and a JSON file.

`patchgen evaluate RUN RUN...` scores the mean of several runs' probabilities on the domain that all left out.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from patchgen.commands import check_file, check_folder, print_table
from patchgen.commands.options import RuntimeOptions, StrictOptions, report_unreadable
from patchgen.common.files import expanded
from patchgen.common.text import json_text, printable
from patchgen.common.untrusted import read_json

if TYPE_CHECKING:
    from patchgen.predict.fold_runs import Ensemble, Scored


@dataclass(frozen=True, kw_only=True)
class EvaluateArguments(StrictOptions, RuntimeOptions):
    """Score a trained model on labelled images: metrics with intervals, per site and per patient, and its mistakes.

    With several runs of one fold instead of DATA: the mean of their probabilities, scored on the domain that all left
    out, next to the single runs (EoA for `+sma` runs).
    """

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
    batch: int = 64
    """Images per forward pass."""


def evaluate_model(arguments: EvaluateArguments) -> int:
    if all(_is_run(word) for word in arguments.targets):
        return _evaluate_ensemble(arguments)
    if len(arguments.targets) > 1:
        other = next(word for word in arguments.targets if not _is_run(word))
        raise ValueError(f"{other} is no run folder; give one model and one data set, or several runs of a fold")
    if arguments.data is not None:
        raise ValueError("--data is for several runs, whose data has another path now; leave it out")
    [data], out = arguments.targets, check_folder(arguments.out or "evaluation")
    from patchgen.common.progress import Progress
    from patchgen.data.table import read_table
    from patchgen.predict.answers import collect, rows_of_sites, training_sites
    from patchgen.predict.evaluate import check_options, evaluate
    from patchgen.report.evaluation import write_evaluation
    from patchgen.runs.folder import MODEL_CONFIG, is_model_folder
    from patchgen.runs.scores import recorded_mask

    table = read_table(data, for_scoring=True)
    rows = rows_of_sites(table, arguments.sites)
    predictor = arguments.load(len(rows))
    check_options(arguments.positive, arguments.resamples, predictor.classes)
    with Progress("scoring", int((table.label[rows] >= 0).sum())) as bar:
        answers = collect(predictor, table, rows, arguments.batch, bar.tick)
    sites, expected = training_sites(arguments.model)
    with Progress("intervals", max(arguments.resamples, 1)) as bar:
        scored = evaluate(answers, arguments.positive, arguments.resamples, sites, bar.advance, expected)
    checkpoint = arguments.checkpoint
    if is_model_folder(arguments.model):  # it has a single model, and records which one
        checkpoint = read_json(Path(arguments.model) / MODEL_CONFIG).get("checkpoint", checkpoint)
    metrics = {
        "model": Path(arguments.model).resolve().name, "method": predictor.config.method, "checkpoint": checkpoint,
        "runtime": predictor.variant or "torch", "mask": recorded_mask(arguments.model), "data": data, **scored,
    }  # fmt: skip
    write_evaluation(metrics, answers, predictor, out, arguments.wrong)
    if arguments.json:
        print((out / "metrics.json").read_text(encoding="utf-8"), end="")
    else:
        _print(metrics)
        print(out / "index.html")
    return report_unreadable(answers.unreadable, len(answers.rows) + len(answers.unreadable), arguments.strict)


def _is_run(word: str) -> bool:
    return (expanded(word) / "config.yaml").is_file()


def _print(metrics: dict[str, Any]) -> None:
    from patchgen.predict.evaluate import METRICS
    from patchgen.report.evaluation import BINARY, shown, span

    rows = [(METRICS[name], shown(value), span(metrics["intervals"].get(name)))
            for name, value in metrics["metrics"].items()]  # fmt: skip
    if binary := metrics["binary"]:
        spans = metrics["binary_intervals"]
        rows += [(f"{metrics['positive']}: {title}", shown(binary[name]), span(spans.get(name)))
                 for name, title in BINARY.items()]  # fmt: skip
    print_table((f"{metrics['images']['scored']:,} images", "value", "95 % interval"), rows)
    if len(metrics["sites"]) > 1:
        sites = [
            (name, f"{site['images']:,}", shown(site["accuracy"]), span(site["accuracy_interval"]),
             shown(site["balanced_accuracy"]), shown(site["auroc"])) for name, site in metrics["sites"].items()
        ]  # fmt: skip
        print_table(("site", "images", "accuracy", "95 % interval", "balanced accuracy", "AUROC"), sites)
    for note in metrics["notes"]:
        print(printable(note))


# Several runs of one fold


def _evaluate_ensemble(arguments: EvaluateArguments) -> int:
    """Score the mean of the runs' probabilities next to the single runs."""
    out = check_file(arguments.out, "--out", ".csv") if arguments.out else None
    from patchgen.common.files import write_csv
    from patchgen.predict.fold_runs import score_ensemble

    folders = (arguments.model, *arguments.targets)
    ensemble = score_ensemble(folders, arguments.data, arguments.checkpoint, **arguments.how)
    fold = ensemble.fold
    if out:
        header = ["path", "part", "truth", "label", "confidence", *(f"p_{name}" for name in fold.classes)]
        write_csv(out, header, _ensemble_lines(ensemble), people=True)
    if arguments.json:
        scores = {"part": ensemble.part, "whole": ensemble.whole}
        runs = [asdict(member) for member in ensemble.members]
        about = {"unseen": fold.unseen, "checkpoint": arguments.checkpoint}
        print(json_text({**about, "runs": runs, "ensemble": scores, "gain": ensemble.gain}))
    else:
        _print_ensemble(ensemble)
        if out:
            print(out)
    return 0


def _print_ensemble(ensemble: "Ensemble") -> None:
    def numbers(scored: "Scored | Ensemble") -> tuple[float, ...]:
        return scored.part["accuracy"], scored.whole["accuracy"], scored.whole["f1"]

    rows = [(f"{member.name} {member.run}", numbers(member)) for member in ensemble.members]
    mean = tuple(sum(column) / len(rows) for column in zip(*(values for _, values in rows), strict=True))
    rows += [("mean of the runs", mean), ("ensemble", numbers(ensemble))]
    header = (f"{ensemble.fold.unseen} unseen", "accuracy, 80 % part", "accuracy, whole", "F1, whole")
    styles = [""] * (len(rows) - 1) + ["bold"]
    print_table(header, [(name, *(f"{value:.4f}" for value in values)) for name, values in rows], styles)
    gain = f"{100 * ensemble.gain:+.2f}"
    print(f"{ensemble.whole['images']} images; the ensemble is {gain} points from the mean of its runs")


def _ensemble_lines(ensemble: "Ensemble") -> Iterator[list[str]]:
    """One line per image."""
    fold, inside = ensemble.fold, set(ensemble.fold.test["in"].tolist())
    for row, probabilities in zip(ensemble.rows.tolist(), ensemble.probabilities, strict=True):
        best = int(probabilities.argmax())
        about = [fold.table.paths[row], "in" if row in inside else "out", fold.table.label_name(row)]
        yield [*about, fold.classes[best], *(f"{p:.6f}" for p in (probabilities[best], *probabilities))]


COMMAND = evaluate_model
