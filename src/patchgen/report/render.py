r"""A table as Markdown, CSV and LaTeX, and for the terminal; HTML is in `pages/templates/report.html`.

The paper's numbers are set apart in all of them. A LaTeX fragment needs \usepackage{booktabs}, \usepackage{xcolor} and
\usepackage{graphicx}.
"""

from collections.abc import Callable, Iterator, Sequence
from html import escape as escape_html
from itertools import groupby

from patchgen.common.text import markdown
from patchgen.report.table import Grid, Line

CSV_HEADER = (
    "table", "line", "group", "column", "checkpoint", "metric", "value", "standard_error", "seeds", "images", "split",
    "selected_by", "settings_tried", "runs", "paper_value", "paper_error", "paper_rerun", "paper_source", "command",
)  # fmt: skip
BEST = "leads its column by more than the 95 % interval of the difference, paired over seeds"


def _head(grid: Grid) -> list[str]:
    return [grid.first, *(column.title for column in grid.columns)]


def _cells(
    grid: Grid, line: Line, best: str = "{}", paper: str = "{}", missing: str = "", escape: Callable[[str], str] = str
) -> list[str]:
    """A line's texts: ours, or the number of a missing number's command, and the paper's; `{}` is their place."""
    texts = []
    for column, entry in zip(grid.columns, line.entries, strict=True):
        mark = missing or f"[{grid.commands.get(entry.command)}]"
        ours = escape(mark if entry.missing else grid.text(column, entry))
        ours = best.format(ours) if entry in grid.best else ours
        texts.append(" ".join(filter(None, (ours, paper.format(escape(entry.paper_text)) if entry.paper else ""))))
    return texts


# Markdown


def plain_markdown(grid: Grid) -> str:
    """Our numbers alone, without title and notes."""
    return markdown(_head(grid), [[line.label, *_cells(grid, line)] for line in grid.lines])


def to_markdown(grid: Grid) -> str:
    """The title, the table, its notes, and the commands for missing cells."""
    head = [_inert(word).replace("|", "\\|") for word in _head(grid)]
    rows = [[_plain(line.title, line.paper), *_cells(grid, line, "**{}**", "*{}*")] for line in grid.lines]
    text = [f"## {_inert(grid.title)}", "", f"*{_inert(grid.setup)}*", "", markdown(head, rows), ""]
    text += [f"- {_inert(note.replace('Grey', 'Italics'))}" for note in grid.notes]
    text += [f"- Missing [{number}]: `{command}`" for command, number in grid.commands.items()]
    return "\n".join(text) + "\n"


def _inert(text: str) -> str:
    """Text with HTML escaped for Markdown: class names are arbitrary."""
    return escape_html(text, quote=False)


def _plain(text: str, paper: bool) -> str:
    safe = _inert(text).replace("|", "\\|").replace("*", "\\*")
    return f"*{safe}*" if paper else safe


def to_terminal(grid: Grid) -> tuple[list[str], list[list[str]], list[str]]:
    """Heading, rows and the style of each row; `[-]` is a cell that has no run."""
    rows = [[line.title, *_cells(grid, line, "{} (best)", "{}" if line.paper else "(paper {})", "[-]")]
            for line in grid.lines]  # fmt: skip
    return _head(grid), rows, ["dim" if line.paper else "" for line in grid.lines]


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
            label, cells = escape(line.title), _cells(grid, line, r"\textbf{{{}}}", GREY, escape=escape)
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


def latex_document(grids: Sequence[Grid]) -> str:
    """A whole document, ready for pdflatex."""
    return PREAMBLE + "\n\\clearpage\n".join(map(to_latex, grids)) + "\\end{document}\n"


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
