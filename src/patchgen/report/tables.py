"""The tables of a report: unseen domains by data set, all data sets, unknown classes, streams, the oracle suite.

The ablation and the sensitivity tables are in `report/ablation.py`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from patchgen.report.reference import TABLES, paper_lines
from patchgen.report.table import SPLITS, Column, Grid, Line, fill, unequal_terms
from patchgen.runs.scores import METRICS, Run

NATURAL = ("PACS", "VLCS", "OfficeHome", "TerraIncognita", "DomainNet")
ORACLE = ("oracle-easy", "oracle-shortcut", "oracle-turned", "oracle-full", "oracle-tiny")
ORDER = ("lp", "lp-ln", "lp-ln@mean", "full")
AKU = {"all": "A", "known": "K", "unknown": "U"}
MASKS = {"auroc": "AUROC", "iou": "IoU at 0.5", "error": "mask error", "kept": "kept", "mean": "mean",
         "spread": "spread", "true mask": "accuracy, true mask", "random mask": "accuracy, random mask"}  # fmt: skip


def by_setup(runs: Iterable[Run]) -> list[list[Run]]:
    """Groups of comparable runs."""
    groups: dict[object, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.setup, []).append(run)
    return list(groups.values())


def by_data(runs: Iterable[Run]) -> Iterator[tuple[str, list[Run]]]:
    """(data set, comparable runs on it)."""
    for group in by_setup(runs):
        for dataset in folds_of(group):
            yield dataset, [run for run in group if run.dataset == dataset]


def labels_of(runs: Sequence[Run]) -> list[str]:
    """The methods: plain baselines first, PatchGen's own last."""

    def rank(label: str) -> tuple[int, str]:
        if label in ORDER:
            return ORDER.index(label), label
        families = ("ablation", "promptccd", "patchgen")
        return len(ORDER) + 1 + next((i for i, f in enumerate(families) if label.startswith(f)), -1), label

    return sorted({run.label for run in runs}, key=rank)


def plain_lines(runs: Sequence[Run], columns: Sequence[Column], part: str) -> tuple[Line, ...]:
    """One line per method, without SWAD, the paper and commands."""
    return tuple(Line(x, fill([run for run in runs if run.label == x], columns, part)) for x in labels_of(runs))


def folds_of(runs: Iterable[Run]) -> dict[str, list[str]]:
    """Data set -> its unseen domains that were run, in the data's order."""
    domains: dict[str, tuple[tuple[str, ...], set[str]]] = {}
    for run in runs:
        _, seen = domains.setdefault(run.dataset, (run.domains, set()))
        seen |= {score.domain for score in run.scores}
    known = [name for name in (*NATURAL, *ORACLE) if name in domains]
    names = [*known, *(name for name in domains if name not in known)]
    return {name: [d for d in domains[name][0] if d in domains[name][1]] for name in names}


def training_command(
    runs: Sequence[Run], everything: Sequence[Run], recipe: str, columns: Sequence[Column]
) -> Callable[[Column], str]:
    """The command that fills a line: its settings with the missing folds of one data set, or the recipe."""

    def command(column: Column) -> str:
        first, lacking = next(iter(runs), None), _lacking(runs, column, columns)
        if first is None or not lacking or first.config.task == "ccd":
            return f"patchgen sweep {recipe} --out {shlex.quote(str(everything[0].path.parent))}"
        dataset, unseen = lacking
        data = shlex.quote(next((run.config.data for run in everything if run.dataset == dataset), dataset))
        config, out = (shlex.quote(str(path)) for path in (first.path / "config.yaml", first.path.parent))
        words = f"--config {config}{' --swad' * (column.checkpoint == 'swad')} --out {out}"
        if len(unseen) == 1:
            return f"patchgen train {data} --unseen {shlex.quote(unseen[0])} {words}"
        loop = " ".join(map(shlex.quote, unseen))
        return f'for unseen in {loop}; do patchgen train {data} --unseen "$unseen" {words}; done'

    return command


def _lacking(runs: Sequence[Run], column: Column, columns: Sequence[Column]) -> tuple[str, list[str]] | None:
    """The first data set of a column for which the line lacks folds, and all folds of it that the table asks for."""
    for dataset in column.folds:
        asked = dict.fromkeys(domain for other in columns for domain in other.folds.get(dataset, ()))
        scored = {score.domain for run in runs if run.dataset == dataset for score in run.scores
                  if (score.metric, score.checkpoint) == (column.metric, column.checkpoint)}  # fmt: skip
        lacking = [domain for domain in asked if domain not in scored]
        if lacking:
            return dataset, lacking
    return None


def method_lines(
    runs: Sequence[Run], columns: Sequence[Column], part: str, reference: str, recipe: str, labels: Sequence[str] = ()
) -> tuple[Line, ...]:
    """One line per method, one more with SWAD if it was run, and the paper's lines below."""
    lines: list[Line] = []
    for swad in (False, True):
        for label in labels or labels_of(runs):
            mine = [run for run in runs if run.label == label]
            if swad and not any(score.checkpoint == "swad" for run in mine for score in run.scores):
                continue
            chosen = [replace(column, checkpoint="swad") for column in columns] if swad else list(columns)
            command = training_command(mine, runs, recipe, chosen)
            lines.append(Line(label + " + SWAD" * swad, fill(mine, chosen, part, command)))
            if reference:
                backbone = mine[0].backbone if mine else ""
                lines += paper_lines(reference, label, backbone, chosen, swad)
    return tuple(lines)


# Unseen domains


def fold_grids(runs: Sequence[Run], part: str) -> list[Grid]:
    """One table per data set and setup: unseen domains across, and their average."""
    grids = []
    for dataset, mine in by_data(run for run in runs if run.config.task == "mdg" and not _oracle(run)):
        reference = dataset.lower() if dataset.lower() in TABLES else "mdg" if dataset in NATURAL else ""
        domains = mine[0].domains
        columns = [Column(d, {dataset: [d]}, key=(dataset, d)) for d in domains]
        columns.append(Column("average", {dataset: domains}, key=(dataset, "average")))
        recipe = "configs/paper/mdg.yaml" if dataset in NATURAL else "configs/paper/histology.yaml"
        lines = method_lines(mine, columns, part, reference, recipe)
        title = TABLES[reference].title if reference not in ("", "mdg") else f"Unseen domains: {dataset}"
        grids.append(make_grid("mdg", dataset, title, mine, columns, lines, part, reference, "bars"))
        grids += metric_grids(dataset, mine, part)
    return grids


def metric_grids(dataset: str, runs: Sequence[Run], part: str) -> list[Grid]:
    """The other scores of a data set, means over the unseen domains that were run; none if no run has them."""
    scored = [run for run in runs if any(score.metric in METRICS for score in run.scores)]
    if not scored:
        return []
    domains = folds_of(scored)[dataset]
    columns = [Column(heading, {dataset: domains}, metric) for metric, heading in METRICS.items()]
    lines = plain_lines(scored, columns, part)
    grid = make_grid("scores", dataset, f"Other scores: {dataset} (times 100)", scored, columns, lines, part)
    first = f"Mean over {', '.join(domains)}, on {SPLITS[part]}. {grid.error_note()}".strip()
    return [replace(grid, notes=(first, *grid.notes[1:]))]


def dataset_grids(runs: Sequence[Run], part: str) -> list[Grid]:
    """The natural data sets side by side (Table 1), and LayerNorm against full fine-tuning (Table 9)."""
    grids = []
    for group in by_setup(run for run in runs if run.config.task == "mdg" and run.dataset in NATURAL):
        columns = dataset_columns(group)
        if len(folds_of(group)) > 1:
            lines = method_lines(group, columns, part, "mdg", "configs/paper/mdg.yaml")
            grids.append(make_grid("datasets", "", TABLES["mdg"].title, group, columns, lines, part, "mdg", "bars"))
        if any(run.label in ("full", "patchgen@full") for run in group):
            labels = [x for x in ("lp", "lp-ln", "full", "patchgen", "patchgen@full") if x in labels_of(group)]
            name, title = "full_finetuning", TABLES["full_finetuning"].title
            lines = method_lines(group, columns, part, name, "configs/paper/full-finetuning.yaml", labels)
            grids.append(make_grid("full-finetuning", "", title, group, columns, lines, part, name, "bars"))
        if any(run.label == "patchgen@full" for run in group):
            lines = _causal_lines(group, columns, part)
            title = TABLES["mdg_causal"].title
            grids.append(make_grid("causal", "", title, group, columns, lines, part, "mdg_causal", "bars"))
    return grids


def _causal_lines(runs: Sequence[Run], columns: Sequence[Column], part: str) -> tuple[Line, ...]:
    """Ours, then every line of the paper's table."""
    rivals = [paper_lines("mdg_causal", name, "", columns, False) for name in ("CI-DGA", "SMIDG", "BFMix", "CauRDG")]
    own = method_lines(runs, columns, part, "mdg_causal", "configs/paper/causal.yaml", ["patchgen@full"])
    return (*(line for group in rivals for line in group), *own)


def dataset_columns(runs: Sequence[Run], checkpoint: str = "selected", group: str = "") -> list[Column]:
    """One column per data set, averaged over the folds that were run, and the average of the data sets."""
    folds, columns = folds_of(runs), []
    for dataset, domains in folds.items():
        whole = set(next(run.domains for run in runs if run.dataset == dataset)) == set(domains)
        heading = dataset if whole or dataset.startswith("oracle-") else f"{dataset}: {', '.join(domains)}"
        key = (dataset, "average") if whole else ("", "")
        columns.append(Column(heading, {dataset: domains}, "accuracy", checkpoint, group, key))
    if len(folds) > 1:
        key = ("average", "average") if set(folds) == set(NATURAL) else ("", "")
        columns.append(Column("average", folds, "accuracy", checkpoint, group, key))
    return columns


# Unknown classes


def discovery_grids(runs: Sequence[Run], part: str) -> list[Grid]:
    """All / known / unknown accuracy with an unseen domain, one table per data set and setup."""
    grids = []
    for dataset, mine in by_data(run for run in runs if run.config.task == "mdg_gcd"):
        domains = list(mine[0].domains) if not _oracle(mine[0]) else folds_of(mine)[dataset]
        reference = "mdg_gcd" if dataset in NATURAL else ""
        columns = _aku_columns(dataset, domains)
        lines = method_lines(mine, columns, part, reference, "configs/paper/mdg-gcd.yaml")
        title = f"Unseen domains with unknown classes: {dataset}"
        grids.append(make_grid("mdg-gcd", dataset, title, mine, columns, lines, part, reference, "bars"))
    return grids


def stream_grids(runs: Sequence[Run]) -> list[Grid]:
    """All / known / unknown accuracy of each session of a stream, one table per stream and setup."""
    grids = []
    for dataset, mine in by_data(run for run in runs if run.config.task == "ccd"):
        paper = dataset.partition(",")[0]
        columns = _aku_columns(dataset, folds_of(mine)[dataset], paper)
        reference = "ccd" if paper in ("CIFAR-100", "CUB") else ""
        lines = method_lines(mine, columns, "transductive", reference, "configs/paper/streams.yaml")
        title = f"Classes over time: {dataset}"
        grids.append(make_grid("ccd", dataset, title, mine, columns, lines, "transductive", reference, "stages"))
    return grids


def _aku_columns(dataset: str, domains: Sequence[str], paper: str = "") -> list[Column]:
    parts = {**{domain: [domain] for domain in domains}, **({"average": domains} if len(domains) > 1 else {})}
    return [
        Column(letter, {dataset: over}, metric, group=name, key=(paper or dataset, name))
        for name, over in parts.items()
        for metric, letter in AKU.items()
    ]


# The oracle suite


def oracle_grids(runs: Sequence[Run]) -> list[Grid]:
    """Oracle sets across; then the quality of the masks, if the predictive patches are known.

    The paper has no such numbers, so both are of the whole unseen domain, as in the demo.
    """
    grids = []
    for group in by_setup(run for run in runs if run.config.task == "mdg" and _oracle(run)):
        folds = folds_of(group)
        columns = [Column(name.removeprefix("oracle-"), {name: domains}) for name, domains in folds.items()]
        lines = method_lines(group, columns, "all", "", "configs/small/classic-small.yaml")
        grids.append(make_grid("oracle", "", "The oracle suite", group, columns, lines, "all", "", "bars"))
        for name, domains in folds.items():
            masked = [run for run in group if any(s.metric == "mask: iou" for s in run.scores) and run.dataset == name]
            if masked:
                columns = mask_columns(masked, {name: domains})
                lines = plain_lines(masked, columns, "all")
                title = f"Masks against the known predictive patches: {name} (times 100)"
                grids.append(make_grid("masks", name, title, masked, columns, lines, "all"))
    return grids


def mask_columns(runs: Iterable[Run], folds: Mapping[str, Sequence[str]]) -> list[Column]:
    """The mask's statistics, each beside that of the same mask before training, if it is recorded."""
    recorded = {score.metric for run in runs for score in run.scores}
    columns = []
    for name, text in MASKS.items():
        columns.append(Column(text, folds, f"mask: {name}"))
        if f"mask: untrained_{name}" in recorded:
            columns.append(Column(f"{text}, untrained", folds, f"mask: untrained_{name}"))
    return columns


def _oracle(run: Run) -> bool:
    return run.dataset.startswith("oracle-")


def make_grid(
    kind: str, dataset: str, title: str, runs: Sequence[Run], columns: Sequence[Column], lines: Sequence[Line],
    part: str, reference: str = "", figure: str = "",
) -> Grid:  # fmt: skip
    plain = re.sub(r" \((\d+)\)$", r"_\1", dataset.lower())  # `data (2)`: brackets end a link in Markdown
    name = "-".join(filter(None, (kind, plain.replace(", ", "-").replace(" ", "-"))))
    grid = Grid(name, title, runs[0].setup_text(), tuple(columns), tuple(lines), part, kind=figure)
    notes = [f"Accuracy in per cent on {SPLITS[part]}. {grid.error_note()}".strip()]
    if reference:
        table = TABLES[reference]
        notes.append(f"Grey: the paper's numbers (its Table {table.number}); * marks what its authors ran again.")
        notes.append(f"About those numbers: {table.note}")
    notes += unequal_terms([line.label for line in lines if not line.paper])
    places = {run.dataset: run.place for run in runs if run.place}
    notes += [f"Several data sets have this name; {name} are the images of {place}." for name, place in places.items()]
    return replace(grid, notes=tuple(notes))
