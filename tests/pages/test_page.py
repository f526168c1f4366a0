"""What all pages share: names are text, figures follow the theme, and nothing comes from elsewhere."""

import re
from pathlib import Path

import pytest
from PIL import Image

from patchgen.draw.plots import Drawn, new_figure, percent_axis
from patchgen.pages.page import MOST_ROWS, Cell, Picture, data_address, file_address, render, svg, write_page

TEMPLATES = Path(__file__).parents[2] / "src/patchgen/pages/templates"
ODD = "<script>alert(1)</script> \"'&\x1b[2J"


def drawn(rows: int = 3) -> Drawn:
    figure = new_figure(3, 2)
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], color="#0072b2")
    axes.text(0.5, 0.5, "label", color="#1c2024")
    return Drawn("one", "A line that rises", figure, ("x", "name"), [(i / 7, f"row {i}") for i in range(rows)])


def demo(**more: object) -> str:
    values: dict[str, object] = {
        "title": ODD, "smoke": True, "images": 9, "error": 2.2, "bars": drawn(), "curves": drawn(),
        "score_head": ["method", "unseen"], "score_rows": [[ODD, Cell("1.0", "best", ODD)]],
        "mask_head": ["method"], "mask_rows": [["m"]], "masked": ODD,
        "pictures": [Picture(data_address(Image.new("RGB", (2, 2))), ODD, [[Cell(ODD, "right", ODD)]])],
    }  # fmt: skip
    return render("demo.html", **{**values, **more})


def test_names_are_text_in_every_place() -> None:
    text = demo()
    assert "<script" not in text and "\x1b" not in text
    assert text.count("&lt;script&gt;") == 8  # title twice, row, tooltips twice, masked, alternative text, caption
    assert 'class="best"' in text


def test_a_figure_has_a_description_and_its_data() -> None:
    text = demo(bars=drawn(MOST_ROWS + 5))
    assert text.count('aria-label="A line that rises"') == 2 and text.count("<summary>Data of this figure") == 2
    assert "<td>0.1429</td>" not in text and ">0.1429</td>" in text  # 1/7, four digits
    assert f"The first {MOST_ROWS} of {MOST_ROWS + 5} rows" in text and f"row {MOST_ROWS}<" not in text


def test_figures_take_the_colours_of_the_theme() -> None:
    text = str(svg(drawn()))
    assert "#000000" not in text and "#1c2024" not in text and "#ffffff" not in text
    assert "currentColor" in text and "#0072b2" in text
    assert text == str(svg(drawn()))  # the same figure, the same bytes


def test_axes_of_percent_end_at_100() -> None:
    axes = new_figure(3, 3).subplots()
    percent_axis(axes, 100)
    assert max(axes.get_xticks()) == 100 and axes.get_xlim()[1] > 100  # room for the numbers beside the bars


def test_addresses_of_files() -> None:
    assert file_address("a b", "<c>#?.png") == "a%20b/%3Cc%3E%23%3F.png"
    assert data_address(Image.new("RGB", (2, 2)), "JPEG").startswith("data:image/jpeg;base64,/9j/")


def test_a_page_that_cannot_be_encoded_is_written(tmp_path: Path) -> None:
    page = write_page(tmp_path / "new" / "page.html", "name \udcff")
    assert page.read_text() == "name \\udcff"


@pytest.mark.parametrize("template", sorted(TEMPLATES.iterdir()), ids=lambda path: path.stem)
def test_templates_escape_and_fetch_nothing(template: Path) -> None:
    text = template.read_text()
    assert re.findall(r"\|\s*safe", text) == (["| safe"] if template.stem == "base" else [])  # our own style sheet
    assert "://" not in text and "<script" not in text and "autoescape" not in text and not re.search(r"\son\w+=", text)
