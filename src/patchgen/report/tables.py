"""The tables of a report: unseen domains by data set, all data sets, unknown classes, streams, the oracle suite.

The ablation and the sensitivity tables are in `report/ablation.py`.
"""

import re
import shlex
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import pandas as pd

from patchgen.common.text import name_key
from patchgen.report.reference import TABLES, Row, read_reference
from patchgen.report.table import SPLITS, Column, Entry, Grid, Line, fill, unequal_terms
from patchgen.runs.scores import METRICS, paper_backbone

NATURAL = ("PACS", "VLCS", "OfficeHome", "TerraIncognita", "DomainNet")
ORACLE = ("oracle-easy", "oracle-shortcut", "oracle-turned", "oracle-full", "oracle-tiny")
ORDER = ("lp", "lp-ln", "lp-ln@mean", "full")
FAMILIES = ("ablation", "promptccd", "patchgen")
AKU = {"all": "A", "known": "K", "unknown": "U"}
MASKS = {"auroc": "AUROC", "iou": "IoU at 0.5", "error": "mask error", "kept": "kept", "mean": "mean",
         "spread": "spread", "true mask": "accuracy, true mask", "random mask": "accuracy, random mask"}  # fmt: skip
NAMES = {  # our label -> the paper's words
    "lp": ("LP",), "lp-ln": ("LP+LN", "Baseline"), "full": ("LP+full",),
    "patchgen": ("PatchGen",), "patchgen@full": ("PatchGen",),
    "patchgen+lreg": ("PatchGen",),  # of unknown classes, where the paper's host is L-Reg
    "miro": ("MIRO", "Baseline+MIRO"), "gmdg": ("GMDG", "Baseline+GMDG"), "lreg": ("L-Reg",),
    "full+gestur": ("GESTUR",), "full+miro": ("MIRO",), "full+gmdg": ("GMDG",), "full+lreg": ("L-Reg",),
}  # fmt: skip


def make_grid(
    kind: str, title: str, scores: pd.DataFrame, columns: Sequence[Column], lines: Sequence[Line], part: str, *,
    data: str = "", reference: str = "", figure: str = "",
) -> Grid:  # fmt: skip
    """A table with its notes; `reference` is the paper's table in it."""
    plain = re.sub(r" \((\d+)\)$", r"_\1", data.lower())  # `data (2)`: brackets end a link in Markdown
    name = "-".join(filter(None, (kind, plain.replace(", ", "-").replace(" ", "-"))))
    grid = Grid(name, title, scores["setup_text"].iloc[0], tuple(columns), tuple(lines), kind=figure)
    notes = [f"Accuracy in per cent on {SPLITS[part]}. {grid.error_note()}".strip()]
    if reference:
        table = TABLES[reference]
        notes.append(f"Grey: the paper's numbers (its Table {table.number}); * marks what its authors ran again.")
        notes.append(f"About those numbers: {table.note}")
    notes += unequal_terms([line.label for line in lines if not line.paper])
    places = dict(scores.loc[scores["place"] != "", ["data", "place"]].drop_duplicates().to_numpy())
    notes += [f"Several data sets have this name; {name} are the images of {place}." for name, place in places.items()]
    return replace(grid, notes=tuple(notes))


# Runs


def by_setup(scores: pd.DataFrame) -> "Iterator[pd.DataFrame]":
    """Groups of comparable runs."""
    return (group for _, group in scores.groupby("setup", sort=False))


def by_data(scores: pd.DataFrame) -> "Iterator[tuple[str, pd.DataFrame]]":
    """(data set, comparable runs on it)."""
    return ((data, group[group["data"] == data]) for group in by_setup(scores) for data in folds_of(group))


def folds_of(scores: pd.DataFrame) -> dict[str, list[str]]:
    """Data set -> its unseen domains that were run, in the data's order."""
    domains = dict(scores[["data", "domains"]].drop_duplicates("data").to_numpy())
    run = set(zip(scores["data"], scores["unseen"], strict=True))
    names = dict.fromkeys([*(name for name in (*NATURAL, *ORACLE) if name in domains), *domains])
    return {name: [domain for domain in domains[name] if (name, domain) in run] for name in names}


def labels_of(scores: pd.DataFrame) -> list[str]:
    """The methods: plain baselines first, PatchGen's own last."""

    def rank(label: str) -> tuple[int, str]:
        if label in ORDER:
            return ORDER.index(label), label
        return len(ORDER) + next((i for i, f in enumerate(FAMILIES, 1) if label.startswith(f)), 0), label

    return sorted(scores["method"].unique(), key=rank)


def plain_lines(scores: pd.DataFrame, columns: Sequence[Column], part: str) -> list[Line]:
    """One line per method, without SWAD, the paper and commands."""
    by_method = dict(iter(scores.groupby("method")))
    return [Line(label, fill(by_method[label], columns, part)) for label in labels_of(scores)]


def method_lines(
    scores: pd.DataFrame, columns: Sequence[Column], part: str, reference: str, recipe: str, labels: Sequence[str] = ()
) -> list[Line]:
    """One line per method, one more with SWAD if it was run, and the paper's lines below."""
    lines: list[Line] = []
    by_method = dict(iter(scores.groupby("method")))
    for swad in (False, True):
        shown = [replace(column, checkpoint="swad") for column in columns] if swad else columns
        for label in labels or labels_of(scores):
            of_method = by_method[label]
            if swad and not (of_method["checkpoint"] == "swad").any():
                continue
            command = training_command(of_method, scores, recipe, shown)
            lines.append(Line(label + " + SWAD" * swad, fill(of_method, shown, part, command)))
            if reference:
                lines += paper_lines(reference, label, of_method["backbone"].iloc[0], shown, swad)
    return lines


def paper_lines(reference: str, label: str, backbone: str, columns: Sequence[Column], swad: bool) -> list[Line]:
    """The lines of a reference table that show this method, with or without SWAD; those with our backbone, if any."""
    names = NAMES.get(label)
    rows = [row for row in read_reference(reference) if row.swad == swad
            and (row.method in names if names else name_key(row.method) == name_key(label.removesuffix("@full")))
            and (label != "patchgen@full" or row.tuning == "full")]  # fmt: skip
    same = [row for row in rows if (row.backbone, row.pretraining) == paper_backbone(backbone)]
    printed: dict[tuple[str, ...], list[Row]] = defaultdict(list)  # sessions of a stream are several lines there
    for row in same or rows:
        printed[row.method, row.backbone, row.pretraining, row.tuning].append(row)
    lines = []
    for (method, architecture, pretraining, _), group in printed.items():
        entries = tuple(Entry(paper=column.printed(group)) for column in columns)
        if any(entry.paper for entry in entries):
            weights = " ".join(filter(None, (pretraining, architecture)))
            text = f"{method}{' + SWAD' * (swad and method != 'SWAD')}, {weights}"
            lines.append(Line(text, entries, paper=True, rerun=group[0].rerun))
    return lines


def training_command(
    scores: pd.DataFrame, group: pd.DataFrame, recipe: str, columns: Sequence[Column]
) -> Callable[[Column], str]:
    """The command that fills a line with these scores: its settings with the missing folds, or the recipe."""

    def command(column: Column) -> str:
        has = scores[(scores["metric"] == column.metric) & (scores["checkpoint"] == column.checkpoint)]
        run = set(zip(has["data"], has["unseen"], strict=True))
        asked = {name: dict.fromkeys(domain for other in columns for domain in other.folds.get(name, ()))
                 for name in column.folds}  # fmt: skip
        lacking = ((name, unseen) for name in asked if (unseen := [d for d in asked[name] if (name, d) not in run]))
        dataset, unseen = next(lacking, ("", []))
        if scores.empty or not unseen or scores["task"].iloc[0] == "ccd":
            return f"patchgen sweep {recipe} --out {shlex.quote(str(group['path'].iloc[0].parent))}"
        path = scores["path"].iloc[0]
        data = shlex.quote(next((config.data for config in group.loc[group["data"] == dataset, "config"]), dataset))
        config, out = shlex.quote(str(path / "config.yaml")), shlex.quote(str(path.parent))
        words = f"--config {config}{' --swad' * (column.checkpoint == 'swad')} --out {out}"
        if len(unseen) == 1:
            return f"patchgen train {data} --unseen {shlex.quote(unseen[0])} {words}"
        loop = " ".join(map(shlex.quote, unseen))
        return f'for unseen in {loop}; do patchgen train {data} --unseen "$unseen" {words}; done'

    return command


# Unseen domains


def fold_grids(scores: pd.DataFrame, part: str) -> Iterator[Grid]:
    """One table per data set and setup: unseen domains across, and their average; then the other scores."""
    for dataset, group in by_data(scores[(scores["task"] == "mdg") & ~_oracle(scores)]):
        reference = dataset.lower() if dataset.lower() in TABLES else "mdg" if dataset in NATURAL else ""
        domains = group["domains"].iloc[0]
        columns = [Column(d, {dataset: [d]}, key=(dataset, d)) for d in domains]
        columns.append(Column("average", {dataset: domains}, key=(dataset, "average")))
        recipe = "configs/paper/mdg.yaml" if dataset in NATURAL else "configs/paper/histology.yaml"
        lines = method_lines(group, columns, part, reference, recipe)
        title = TABLES[reference].title if reference not in ("", "mdg") else f"Unseen domains: {dataset}"
        yield make_grid("mdg", title, group, columns, lines, part, data=dataset, reference=reference, figure="bars")
        yield from metric_grids(dataset, group, part)


def metric_grids(dataset: str, scores: pd.DataFrame, part: str) -> Iterator[Grid]:
    """The other scores of a data set, means over the unseen domains that were run; none if no run has them."""
    scored = scores[scores["path"].isin(scores.loc[scores["metric"].isin(METRICS), "path"])]
    if not scored.empty:
        domains = folds_of(scored)[dataset]
        columns = [Column(heading, {dataset: domains}, metric) for metric, heading in METRICS.items()]
        lines, title = plain_lines(scored, columns, part), f"Other scores: {dataset} (times 100)"
        grid = make_grid("scores", title, scored, columns, lines, part, data=dataset)
        first = f"Mean over {', '.join(domains)}, on {SPLITS[part]}. {grid.error_note()}".strip()
        yield replace(grid, notes=(first, *grid.notes[1:]))


def dataset_grids(scores: pd.DataFrame, part: str) -> Iterator[Grid]:
    """The natural data sets side by side (Table 1), LayerNorm against full fine-tuning (Table 9), and Table 2."""

    def grid(kind: str, reference: str, recipe: str, shown: Sequence[str] = (), rivals: Sequence[str] = ()) -> Grid:
        lines = [line for name in rivals for line in paper_lines(reference, name, "", columns, False)]
        lines += method_lines(group, columns, part, reference, f"configs/paper/{recipe}.yaml", shown)
        title = TABLES[reference].title
        return make_grid(kind, title, group, columns, lines, part, reference=reference, figure="bars")

    for group in by_setup(scores[(scores["task"] == "mdg") & scores["data"].isin(NATURAL)]):
        columns, labels = dataset_columns(group), labels_of(group)
        if len(folds_of(group)) > 1:
            yield grid("datasets", "mdg", "mdg")
        if "full" in labels or "patchgen@full" in labels:
            shown = [label for label in ("lp", "lp-ln", "full", "patchgen", "patchgen@full") if label in labels]
            yield grid("full-finetuning", "full_finetuning", "full-finetuning", shown)
        if "patchgen@full" in labels:  # below every line of the paper's table
            yield grid("causal", "mdg_causal", "causal", ["patchgen@full"], ("CI-DGA", "SMIDG", "BFMix", "CauRDG"))


def dataset_columns(scores: pd.DataFrame, checkpoint: str = "selected", group: str = "") -> list[Column]:
    """One column per data set, averaged over the folds that were run, and the average of the data sets."""
    folds, columns = folds_of(scores), []
    all_domains = dict(scores[["data", "domains"]].drop_duplicates("data").to_numpy())
    for dataset, domains in folds.items():
        whole = set(all_domains[dataset]) == set(domains)
        heading = dataset if whole or dataset.startswith("oracle-") else f"{dataset}: {', '.join(domains)}"
        key = (dataset, "average") if whole else ("", "")
        columns.append(Column(heading, {dataset: domains}, "accuracy", checkpoint, group, key))
    if len(folds) > 1:
        key = ("average", "average") if set(folds) == set(NATURAL) else ("", "")
        columns.append(Column("average", folds, "accuracy", checkpoint, group, key))
    return columns


# Unknown classes


def discovery_grids(scores: pd.DataFrame, part: str) -> Iterator[Grid]:
    """All / known / unknown accuracy with an unseen domain, one table per data set and setup."""
    for dataset, group in by_data(scores[scores["task"] == "mdg_gcd"]):
        domains = folds_of(group)[dataset] if dataset.startswith("oracle-") else group["domains"].iloc[0]
        title, reference = f"Unseen domains with unknown classes: {dataset}", "mdg_gcd" if dataset in NATURAL else ""
        yield _aku_grid("mdg-gcd", title, dataset, group, domains, dataset, part, reference, "bars")


def stream_grids(scores: pd.DataFrame) -> Iterator[Grid]:
    """All / known / unknown accuracy of each session of a stream, on its own images, per stream and setup."""
    for dataset, group in by_data(scores[scores["task"] == "ccd"]):
        paper, title = dataset.partition(",")[0], f"Classes over time: {dataset}"
        reference, sessions = "ccd" if paper in ("CIFAR-100", "CUB") else "", folds_of(group)[dataset]
        yield _aku_grid("ccd", title, dataset, group, sessions, paper, "transductive", reference, "stages")


def _aku_grid(
    kind: str, title: str, dataset: str, group: pd.DataFrame, domains: Sequence[str], paper: str, part: str,
    reference: str, figure: str,
) -> Grid:  # fmt: skip
    parts = {**{domain: [domain] for domain in domains}, **({"average": domains} if len(domains) > 1 else {})}
    columns = [Column(letter, {dataset: over}, metric, group=name, key=(paper, name))
               for name, over in parts.items() for metric, letter in AKU.items()]  # fmt: skip
    recipe = "streams" if kind == "ccd" else kind
    lines = method_lines(group, columns, part, reference, f"configs/paper/{recipe}.yaml")
    return make_grid(kind, title, group, columns, lines, part, data=dataset, reference=reference, figure=figure)


# The oracle suite


def oracle_grids(scores: pd.DataFrame) -> Iterator[Grid]:
    """Oracle sets across, on the whole unseen domain, as in the demo; then the masks, if the truth is known."""
    part = "all"
    for group in by_setup(scores[(scores["task"] == "mdg") & _oracle(scores)]):
        folds = folds_of(group)
        columns = [Column(name.removeprefix("oracle-"), {name: domains}) for name, domains in folds.items()]
        lines = method_lines(group, columns, part, "", "configs/small/classic-small.yaml")
        yield make_grid("oracle", "The oracle suite", group, columns, lines, part, figure="bars")
        for name, domains in folds.items():
            with_truth = group.loc[(group["metric"] == "mask: iou") & (group["data"] == name), "path"]
            masked = group[group["path"].isin(with_truth)]
            if not masked.empty:
                columns = mask_columns(masked, {name: domains})
                title = f"Masks against the known predictive patches: {name} (times 100)"
                yield make_grid("masks", title, masked, columns, plain_lines(masked, columns, part), part, data=name)


def mask_columns(scores: pd.DataFrame, folds: Mapping[str, Sequence[str]]) -> list[Column]:
    """The mask's statistics, each beside that of the same mask before training, if it is recorded."""
    names = {f"{prefix}{name}": text + after for name, text in MASKS.items()
             for prefix, after in (("", ""), ("untrained_", ", untrained"))}  # fmt: skip
    recorded = set(scores["metric"])
    return [Column(text, folds, f"mask: {name}") for name, text in names.items()
            if name in MASKS or f"mask: {name}" in recorded]  # fmt: skip


def _oracle(scores: pd.DataFrame) -> pd.Series:
    return scores["data"].str.startswith("oracle-")
