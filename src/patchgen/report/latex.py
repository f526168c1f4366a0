r"""Grids as LaTeX: one `table` each, booktabs rules, the paper's numbers in grey; and a document of all.

A fragment needs \usepackage{booktabs}, \usepackage{xcolor} and \usepackage{graphicx}.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from patchgen.report.grid import Entry, Grid, Line
from patchgen.report.render import footnotes, label_text, number_text, paper_text

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
WIDE = 7  # columns from which on a table is scaled to the line


def escape(text: str) -> str:
    """Text as LaTeX prints it; letters beyond the European ones, which need other fonts, become question marks."""
    return "".join(SPECIAL.get(letter, letter if ord(letter) < 0x250 else "?") for letter in text)


def grey(text: str) -> str:
    return rf"\textcolor{{gray}}{{{text}}}" if text else ""


def to_latex(grid: Grid) -> str:
    """One `table` environment."""
    marks = footnotes(grid)
    inner = [rf"\begin{{tabular}}{{l{'c' * len(grid.columns)}}}", r"\toprule", *_head(grid), r"\midrule"]
    for number, (_, lines) in enumerate(groupby(grid.lines, key=lambda line: line.block)):
        inner += [r"\midrule"] if number else []
        inner += [_row(grid, line, marks) for line in lines]
    inner += [r"\bottomrule", r"\end{tabular}"]
    if len(grid.columns) >= WIDE:
        inner = [r"\resizebox{\linewidth}{!}{%", *inner, "}"]
    caption = escape(" ".join([f"{grid.title}. {grid.setup}.", *grid.notes[:2]]))
    missing = [rf"\par\smallskip{{\scriptsize {escape(f'[{n}]')} \texttt{{{_code(c)}}}}}" for c, n in marks.items()]
    parts = [r"\begin{table}[htbp]", r"\centering\small", rf"\caption{{{caption}}}", rf"\label{{tab:{grid.name}}}"]
    return "\n".join([*parts, *inner, *missing, r"\end{table}"]) + "\n"


def document(grids: Sequence[Grid]) -> str:
    """A whole document, ready for pdflatex."""
    return PREAMBLE + "\n\\clearpage\n".join(map(to_latex, grids)) + "\\end{document}\n"


def _head(grid: Grid) -> list[str]:
    names = " & ".join([escape(grid.first), *(escape(column.heading) for column in grid.columns)]) + r" \\"
    if not any(column.group for column in grid.columns):
        return [names]
    above, rules, place = [""], [], 2
    for name, columns in groupby(grid.columns, key=lambda column: column.group):
        width = len(list(columns))
        above.append(rf"\multicolumn{{{width}}}{{c}}{{{escape(name)}}}")
        rules.append(rf"\cmidrule(lr){{{place}-{place + width - 1}}}")
        place += width
    return [" & ".join(above) + r" \\", "".join(rules), names]


def _row(grid: Grid, line: Line, marks: dict[str, int]) -> str:
    label = escape(label_text(line))
    cells = [grey(label) if line.paper else label, *(_cell(grid, entry, marks) for entry in line.entries)]
    return " & ".join(cells) + r" \\"


def _cell(grid: Grid, entry: Entry, marks: dict[str, int]) -> str:
    ours = escape(f"[{marks[entry.command]}]") if entry.missing else escape(number_text(entry, grid.seeds))
    ours = rf"\textbf{{{ours}}}" if grid.is_best(entry) else ours
    return " ".join(filter(None, (ours, grey(escape(paper_text(entry))))))


def _code(command: str) -> str:
    """A command in typewriter letters: two hyphens stay two, and lines may break at blanks."""
    return escape(command).replace("--", "-{}-")
