"""The files that `patchgen report` writes.

report.html  report.md  report.tex       all tables; the page includes the figures and is self-contained
tables/NAME.csv  tables/NAME.tex         every cell with its runs, and a fragment with booktabs, xcolor and graphicx
figures/NAME.png  .svg  .csv             one figure per table, with its data
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from html import escape as escape_html
from itertools import groupby
from pathlib import Path

import pandas as pd

from patchgen.common.files import write_csv, write_text
from patchgen.common.text import markdown
from patchgen.draw.plots import Drawn
from patchgen.pages.page import render, write_page
from patchgen.report.ablation import ablation_grids, sensitivity_grids
from patchgen.report.charts import draw
from patchgen.report.table import SPLITS, Grid
from patchgen.report.tables import dataset_grids, discovery_grids, fold_grids, oracle_grids, stream_grids
from patchgen.runs.scores import Skipped, read_runs

CSV_HEADER = (
    "table", "line", "group", "column", "checkpoint", "metric", "value", "standard_error", "seeds", "images", "split",
    "selected_by", "settings_tried", "runs", "paper_value", "paper_error", "paper_rerun", "paper_source", "command",
)  # fmt: skip
inert = partial(escape_html, quote=False)  # class names are arbitrary
BEST = "leads its column by more than the 95 % interval of the difference, paired over seeds"


RECIPES = {  # start of a table's name -> what it shows; the recipe of the paper's runs, and the small one, in configs/
    "mdg": ("unseen domains, fold by fold", "mdg", "mdg-small"),
    "datasets": ("the natural data sets side by side (Table 1)", "mdg", ""),
    "causal": ("causal comparison, full fine-tuning (Table 2)", "causal", "full-finetuning-small"),
    "mdg-histo": ("unseen organs and hospitals (Tables 3, 4)", "histology", "histology-small"),
    "ccd": ("classes over time (Table 5)", "streams", "streams-small"),
    "mdg-gcd": ("unseen domains with unknown classes (Tables 6, 7)", "mdg-gcd", "mdg-gcd-small"),
    "ablation": ("ablation (Table 8)", "ablation", "ablation-small"),
    "full-finetuning": ("LayerNorm against full fine-tuning (Table 9)", "full-finetuning", "full-finetuning-small"),
    "sensitivity": ("loss weights and seeds (Table 10)", "sensitivity", "sensitivity-small"),
    "oracle": ("the oracle suite", "", "classic-small"),
}


@dataclass(frozen=True)
class Report:
    page: Path
    grids: list[Grid]
    runs: int
    skipped: list[Skipped]

    def summary(self) -> str:
        left = f"{len(self.skipped)} folder{'s' * (len(self.skipped) != 1)} left out"
        reasons = [f"  {folder.path}: {folder.reason}" for folder in self.skipped[:20]]
        return "\n".join([f"{len(self.grids)} tables from {self.runs} runs; {left}", *reasons])


def make_grids(scores: pd.DataFrame, part: str) -> list[Grid]:
    """All tables of the runs, each with a unique name."""
    grids = [
        *dataset_grids(scores, part), *fold_grids(scores, part), *discovery_grids(scores, part), *stream_grids(scores),
        *ablation_grids(scores, part), *sensitivity_grids(scores, part), *oracle_grids(scores),
    ]  # fmt: skip
    names: Counter[str] = Counter()
    for i, grid in enumerate(grids):
        names[grid.name] += 1
        if names[grid.name] > 1:
            grids[i] = replace(grid, name=f"{grid.name}-{names[grid.name]}")
    return grids


def write_report(folders: Sequence[Path], out: Path, part: str = "in") -> Report:
    """Read the runs below the folders and write the report into `out`."""
    scores, skipped = read_runs(folders)
    grids, runs = make_grids(scores, part), scores["path"].nunique()
    for name in ("tables", "figures"):
        (out / name).mkdir(parents=True, exist_ok=True)
    figures = {}
    for grid in grids:
        write_csv(out / "tables" / f"{grid.name}.csv", CSV_HEADER, to_rows(grid), people=True)
        write_text(out / "tables" / f"{grid.name}.tex", to_latex(grid))
        if drawn := draw(grid):
            drawn.save(out / "figures")
            figures[grid.name] = drawn
    write_text(out / "report.md", _markdown(grids, figures, runs, skipped))
    write_text(out / "report.tex", PREAMBLE + "\n\\clearpage\n".join(map(to_latex, grids)) + "\\end{document}\n")
    path = write_page(out / "report.html", render_page(grids, figures, runs, skipped, part))
    return Report(path, grids, runs, skipped)


def absent(grids: Sequence[Grid]) -> list[tuple[str, list[str]]]:
    """(description, commands) of the tables without runs; any of the commands makes them."""
    missing = []
    for start, (what, paper, small) in RECIPES.items():
        names = [grid.name for grid in grids if start != "mdg" or not grid.name.startswith("mdg-gcd")]
        if not any(name.startswith(start) for name in names):
            missing.append((what, [f"patchgen sweep {recipe}" for recipe in (small, paper) if recipe]))
    return missing


def _lead(runs: int, skipped: Sequence[Skipped], paper: str) -> str:
    return (
        f"{runs} finished runs; {len(skipped)} folders left out. Every number is a mean over seeds with its "
        f"standard error; in bold what {BEST}. The paper's own numbers are in {paper}: copied, not run here."
    )


def _markdown(grids: Sequence[Grid], figures: dict[str, Drawn], runs: int, skipped: Sequence[Skipped]) -> str:
    parts = ["# Report", "", _lead(runs, skipped, "italics"), ""]
    for grid in grids:
        parts.append(to_markdown(grid))
        if grid.name in figures:
            parts.append(f"![{figures[grid.name].description}](figures/{grid.name}.svg)\n")
    if missing := [f"- {what}: {' or '.join(f'`{way}`' for way in ways)}" for what, ways in absent(grids)]:
        parts += ["## Tables without runs\n", "These recipes train the runs that are missing.\n", *missing, ""]
    if skipped:
        parts.append("## Folders left out\n")
        parts += [f"- `{escape_html(str(folder.path))}`: {escape_html(folder.reason)}" for folder in skipped]
    return "\n".join(parts) + "\n"


def render_page(
    grids: Sequence[Grid], figures: dict[str, Drawn], runs: int, skipped: Sequence[Skipped], part: str
) -> str:
    return render(
        "report.html",
        title="PatchGen: report",
        lead=f"{_lead(runs, skipped, 'grey')} Unless a table says otherwise, scores are on {SPLITS[part]}.",
        grids=grids,
        figures=figures,
        absent=absent(grids),
        skipped=skipped,
    )


# Markdown


def to_markdown(grid: Grid) -> str:
    """The title, the table, its notes, and the commands for missing cells."""
    head = [inert(word).replace("|", "\\|") for word in grid.head]
    labels = [inert(line.title).replace("|", "\\|").replace("*", "\\*") for line in grid.lines]
    rows = [[f"*{label}*" if line.paper else label, *grid.cells(line, "**{}**", "*{}*")]
            for label, line in zip(labels, grid.lines, strict=True)]  # fmt: skip
    text = [f"## {inert(grid.title)}", "", f"*{inert(grid.setup)}*", "", markdown(head, rows), ""]
    text += [f"- {inert(note.replace('Grey', 'Italics'))}" for note in grid.notes]
    text += [f"- Missing [{number}]: `{command}`" for command, number in grid.commands.items()]
    return "\n".join(text) + "\n"


def to_terminal(grid: Grid) -> tuple[list[str], list[list[str]], list[str]]:
    """Heading, rows and the style of each row; `[-]` is a cell that has no run."""
    rows = [[line.title, *grid.cells(line, "{} (best)", "{}" if line.paper else "(paper {})", "[-]")]
            for line in grid.lines]  # fmt: skip
    return grid.head, rows, ["dim" if line.paper else "" for line in grid.lines]


# CSV


def to_rows(grid: Grid) -> Iterator[Sequence[str]]:
    """One row per cell, in the order of `CSV_HEADER`; empty cells of the paper's lines are left out."""
    for line in grid.lines:
        for column, entry in zip(grid.columns, line.entries, strict=True):
            number, paper = entry.number, entry.paper
            if number or paper or entry.missing:
                checkpoint = "swad" if line.label.endswith("+ SWAD") else column.checkpoint
                place = (grid.name, line.title, column.group, column.heading, checkpoint, column.metric)
                ours = (
                    f"{number.mean:.4f}", "" if number.error is None else f"{number.error:.4f}",
                    " ".join(map(str, number.values)), str(number.images), number.split, number.select,
                    str(number.tried), " ".join(number.runs),
                ) if number else ("",) * 8  # fmt: skip
                printed = (
                    f"{paper.value:g}", "" if paper.error is None else f"{paper.error:g}",
                    "yes" if paper.rerun else "no", paper.source,
                ) if paper else ("",) * 4  # fmt: skip
                yield (*place, *ours, *printed, entry.command)


# LaTeX

SPECIAL = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "–": "--", "’": "'", "…": r"\ldots{}",
    "[": "{[}", "]": "{]}",
    "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", '"': r"\textquotedbl{}", "×": r"$\times$",
}  # fmt: skip
PREAMBLE = r"""\documentclass{article}
\usepackage[T1]{fontenc}
\usepackage[utf8]{inputenc}
\usepackage[a4paper,landscape,margin=15mm]{geometry}
\usepackage{booktabs}
\usepackage{xcolor}
\usepackage{graphicx}
\begin{document}
"""
GREY = r"\textcolor{{gray}}{{{}}}"
WIDE = 7  # columns from which on a table is scaled to the line


def escape(text: str) -> str:
    """Text as LaTeX prints it; letters beyond the European ones, which need other fonts, become question marks."""
    return "".join(SPECIAL.get(letter, letter if ord(letter) < 0x250 else "?") for letter in text)


def to_latex(grid: Grid) -> str:
    """One `table` environment."""
    inner = [rf"\begin{{tabular}}{{l{'c' * len(grid.columns)}}}", r"\toprule", *_latex_head(grid)]
    for _, lines in groupby(grid.lines, key=lambda line: line.block):
        inner.append(r"\midrule")
        for line in lines:
            label, cells = escape(line.title), grid.cells(line, r"\textbf{{{}}}", GREY, escape=escape)
            inner.append(" & ".join([GREY.format(label) if line.paper else label, *cells]) + r" \\")
    inner += [r"\bottomrule", r"\end{tabular}"]
    if len(grid.columns) >= WIDE:
        inner = [r"\resizebox{\linewidth}{!}{%", *inner, "}"]
    caption = escape(" ".join([f"{grid.title}. {grid.setup}.", *grid.notes[:2]]))
    # two hyphens of a command stay two
    missing = [rf"\par\smallskip{{\scriptsize {escape(f'[{n}]')} \texttt{{{escape(code).replace('--', '-{}-')}}}}}"
               for code, n in grid.commands.items()]  # fmt: skip
    parts = [r"\begin{table}[htbp]", r"\centering\small", rf"\caption{{{caption}}}", rf"\label{{tab:{grid.name}}}"]
    return "\n".join([*parts, *inner, *missing, r"\end{table}"]) + "\n"


def _latex_head(grid: Grid) -> list[str]:
    names = " & ".join([escape(grid.first), *(escape(column.heading) for column in grid.columns)]) + r" \\"
    if not any(column.group for column in grid.columns):
        return [names]
    above, rules, place = [""], "", 2
    for name, width in grid.groups:
        above.append(rf"\multicolumn{{{width}}}{{c}}{{{escape(name)}}}")
        rules += rf"\cmidrule(lr){{{place}-{place + width - 1}}}"
        place += width
    return [" & ".join(above) + r" \\", rules, names]
