"""The files that `patchgen report` writes.

report.html  report.md  report.tex       all tables; the page includes the figures and is self-contained
tables/NAME.csv  tables/NAME.tex         one file per table: every cell with its runs, and a LaTeX fragment
figures/NAME.png  .svg  .csv             one figure per table, with its data
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from patchgen.common.files import write_csv, write_text
from patchgen.draw.plots import Drawn
from patchgen.pages.page import render, write_page
from patchgen.report.ablation import ablation_grids, sensitivity_grids
from patchgen.report.charts import draw
from patchgen.report.render import BEST, CSV_HEADER, latex_document, to_latex, to_markdown, to_rows
from patchgen.report.table import SPLITS, Grid
from patchgen.report.tables import dataset_grids, discovery_grids, fold_grids, oracle_grids, stream_grids
from patchgen.runs.scores import Skipped, read_runs

if TYPE_CHECKING:
    import pandas as pd

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


def make_grids(scores: "pd.DataFrame", part: str) -> list[Grid]:
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
    write_text(out / "report.tex", latex_document(grids))
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
        parts += [f"- `{escape(str(folder.path))}`: {escape(folder.reason)}" for folder in skipped]
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
