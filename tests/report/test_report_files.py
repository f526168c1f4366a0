"""What is written: Markdown, CSV, LaTeX that compiles, a page that fetches nothing, figures with their numbers."""

import csv
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from PIL import Image

from patchgen.draw import plots
from patchgen.report.charts import gains
from patchgen.report.reference import find
from patchgen.report.tables import stream_grids
from patchgen.report.write import escape, write_report
from patchgen.runs.scores import read_runs

COMMANDS = {
    "documentclass", "usepackage", "begin", "end", "centering", "small", "caption", "label", "toprule", "midrule",
    "bottomrule", "cmidrule", "multicolumn", "textcolor", "resizebox", "linewidth", "par", "smallskip", "scriptsize",
    "textbf", "texttt", "clearpage", "pm", "times", "ldots", "textless", "textgreater", "textbar", "textbackslash",
    "textasciitilde", "textasciicircum", "textquotedbl",
}  # fmt: skip


@pytest.fixture(scope="module")
def written(mixed_runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("report")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "DPI", 50)  # drawing takes most of the time
        write_report([mixed_runs], out)
    return out


def check_latex(text: str) -> None:
    """A strict little reader: environments and braces nest, rows have their cells, specials are escaped."""
    open_environments: list[tuple[str, int]] = []
    for verb, name, columns in re.findall(r"\\(begin|end)\{(\w+)\}(?:\{(l[c]+)\})?", text):
        if verb == "begin":
            open_environments.append((name, len(columns)))
        else:
            assert open_environments and open_environments.pop()[0] == name
    assert not open_environments
    assert set(re.findall(r"\\([A-Za-z]+)", text)) <= COMMANDS
    bare = re.sub(r"\\[&%$#_{}\\]", "", text)
    depth = 0
    for letter in bare:
        depth += {"{": 1, "}": -1}.get(letter, 0)
        assert depth >= 0
    assert depth == 0 and bare.count("$") % 2 == 0
    assert not set("#_~^") & set(re.sub(r"\\label\{[^}]*\}", "", bare))
    assert all(ord(letter) < 0x250 for letter in text)
    assert all(line.endswith("{%") for line in bare.splitlines() if "%" in line)  # else the rest of the line is lost
    for columns, body in re.findall(r"\\begin\{tabular\}\{l(c+)\}\n(.*?)\\end\{tabular\}", text, re.DOTALL):
        for row in (line for line in body.splitlines() if line.endswith(r"\\")):
            spans = [int(width) - 1 for width in re.findall(r"\\multicolumn\{(\d+)\}", row)]
            assert len(re.findall(r"(?<!\\)&", row)) + sum(spans) == len(columns), row


def test_latex_is_well_formed(written: Path) -> None:
    check_latex((written / "report.tex").read_text())
    fragments = list((written / "tables").glob("*.tex"))
    assert len(fragments) >= 6
    for fragment in fragments:
        check_latex(fragment.read_text())
        assert r"\toprule" in fragment.read_text() and r"\textcolor{gray}" in (written / "report.tex").read_text()


def test_escape() -> None:
    assert escape("50 % of a_b & c ± 1 [2]") == r"50 \% of a\_b \& c $\pm$ 1 {[}2{]}"
    assert escape("~/x^2 \\ 中") == r"\textasciitilde{}/x\textasciicircum{}2 \textbackslash{} ?"


def test_latex_compiles(written: Path) -> None:
    binary = next(filter(None, map(shutil.which, ("pdflatex", "tectonic"))), None)
    if binary is None:
        pytest.skip("no LaTeX on this machine: the strict reader above stands in for it")
    options = ["-interaction=nonstopmode", "-halt-on-error"] if binary.endswith("pdflatex") else []
    done = subprocess.run([binary, *options, "report.tex"], cwd=written, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:]


def test_the_page_is_self_contained_and_cells_have_their_provenance(written: Path) -> None:
    text = (written / "report.html").read_text()
    addresses = re.findall(r"""(?<!use)\s(?:src|href)=["']([^"']+)""", text)
    assert addresses and all(each.startswith(("#", "data:")) for each in addresses)
    assert "<script" not in text and "@import" not in text
    titles = re.findall(r'<td[^>]* title="([^"]+)"', text)
    assert any("80 images, 80 % of the unseen domain; checkpoint by source-validation; runs" in t for t in titles)
    assert any(t.startswith(("for unseen in", "patchgen train")) for t in titles)
    assert 'class="paper"' in text and "not finished" in text and "patchgen sweep histology-small" in text


def test_csv_has_one_line_a_cell(written: Path) -> None:
    rows = list(csv.DictReader((written / "tables" / "mdg-pacs.csv").open()))
    cell = next(r for r in rows if r["line"] == "lp-ln" and r["column"] == "photo")
    assert float(cell["value"]) == pytest.approx(81.5) and float(cell["standard_error"]) == pytest.approx(0.5)
    wanted = {"seeds": "1 2", "images": "80", "split": "in", "selected_by": "source-validation"}
    assert {name: cell[name] for name in wanted} == wanted
    assert len(cell["runs"].split()) == 2 and cell["command"] == ""
    missing = next(r for r in rows if r["line"] == "lp-ln" and r["column"] == "sketch")
    assert missing["value"] == "" and "--unseen sketch" in missing["command"]
    paper = next(r for r in rows if r["line"] == "paper: LP+LN, DINOv2 ViT-B/14*")
    assert (paper["paper_value"], paper["paper_rerun"], paper["value"]) == ("96.2", "yes", "")


def test_markdown_tables_have_equal_rows(written: Path) -> None:
    text = (written / "report.md").read_text()
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        widths = {len(re.findall(r"(?<!\\)\|", row)) for row in block.splitlines()}
        assert len(widths) == 1
    assert "81.5 ± 0.5" in text and "*96.2*" in text
    assert "## Tables without runs" in text and "` or `patchgen sweep" in text
    assert all((written / link).is_file() for link in re.findall(r"!\[[^]]*\]\((.*?)\)", text))


def test_figures_have_their_numbers(written: Path) -> None:
    names = {path.stem for path in (written / "figures").glob("*.png")}
    assert names >= {"mdg-pacs", "mdg-gcd-pacs", "ccd-cub", "ablation", "sensitivity", "oracle"}
    for name in names:
        with Image.open(written / "figures" / f"{name}.png") as image:
            assert min(image.size) > 50
        assert (written / "figures" / f"{name}.svg").read_text().count("<svg") == 1
        rows = list(csv.DictReader((written / "figures" / f"{name}.csv").open()))
        assert rows and {row["whose"] for row in rows} <= {"ours", "paper"}


def test_gains_are_of_patchgen_over_its_host(mixed_runs: Path) -> None:
    [grid] = stream_grids(read_runs([mixed_runs])[0])
    found = gains(grid)
    assert [one for one in found if not one[0].startswith("paper")] == [("promptccd+patchgen", x, 0.0) for x in "AKU"]
    paper = [gain for name, _, gain in found if name == "paper: PromptCCD+PatchGen, DINO ViT-B/16"]
    before, after = (
        [row.value for row in find("ccd", method=name, dataset="CUB", domain="average", pretraining="DINO")]
        for name in ("PromptCCD", "PromptCCD+PatchGen")
    )
    assert paper == pytest.approx([b - a for a, b in zip(before, after, strict=True)])
