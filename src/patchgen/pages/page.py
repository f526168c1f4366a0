"""Fill a template of `templates/` into one self-contained HTML page.

Every value is escaped, so names of users may hold anything. A page has no script; images are data addresses or files
in the page's own folder.
"""

import base64
import io
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

from patchgen.common.files import write_text
from patchgen.common.text import printable
from patchgen.draw.plots import Drawn

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup
    from PIL.Image import Image

MOST_ROWS = 120  # of a figure's data on a page; its CSV file has all of them
# Colours of figures that follow the page's light or dark theme: black and near-black text, greys, white
THEME = {
    "#000000": "currentColor", "#1c2024": "currentColor", "#ffffff": "var(--paper)", "#dde1e6": "var(--line)",
    "#4d4d4d": "var(--soft)", "#595959": "var(--soft)", "#6b7280": "var(--soft)", "#737373": "var(--soft)",
    "#777777": "var(--soft)", "#999999": "var(--pale)", "#9aa3ad": "var(--pale)", "#c3cad1": "var(--fill)",
}  # fmt: skip


class Cell(NamedTuple):
    text: object
    kind: str = ""  # classes of the style sheet, such as `best`, `paper`, `right`, `wrong`
    title: str = ""  # shown on hover
    link: str = ""


class Picture(NamedTuple):
    source: str  # a data address, or the path of a file beside the page
    alt: str
    lines: Sequence[Sequence[Cell]]  # below the image


def render(template: str, **values: Any) -> str:
    return _environment().get_template(template).render(**values)


def write_page(path: Path, html: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, html, "backslashreplace")
    return path


def svg(drawn: Drawn) -> "Markup":
    """The figure as inline SVG in the page's own colours."""
    from markupsafe import Markup

    text = drawn.svg[drawn.svg.index("<svg") :]
    for colour, themed in THEME.items():
        text = text.replace(f": {colour}", f": {themed}")
    return Markup(text)


def data_rows(drawn: Drawn) -> list[list[str]]:
    return [[f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row] for row in drawn.rows[:MOST_ROWS]]


def data_address(image: "Image | Drawn", kind: str = "PNG") -> str:
    """An image or a figure inside its own address, so that no file is needed beside the page."""
    buffer = io.BytesIO()
    if isinstance(image, Drawn):
        image.figure.savefig(buffer, format=kind, dpi=130)
    else:
        image.save(buffer, kind, **({"quality": 88} if kind == "JPEG" else {}))
    return f"data:image/{kind.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def file_address(*parts: str) -> str:
    """The relative address of a file, whatever letters its name has."""
    return "/".join(quote(part, errors="surrogateescape") for part in parts)


def _inert(value: Any) -> Any:
    """Text without control characters; templates' own markup as it is."""
    return printable(value) if isinstance(value, str) and not hasattr(value, "__html__") else value


@cache
def _environment() -> "Environment":
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("patchgen.pages"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, finalize=_inert,
    )  # fmt: skip
    style = files("patchgen.pages").joinpath("style.css").read_text(encoding="utf-8")
    environment.globals |= {"style": style, "svg": svg, "data_rows": data_rows, "most_rows": MOST_ROWS}
    return environment
