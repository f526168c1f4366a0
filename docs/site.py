"""Hook of mkdocs: pages and files of the repository that are outside docs/, and links to them.

The Markdown is written for a reader of the repository, with links such as `../README.md` or `../examples/x.py`. In the
site those files have another place; this maps the links. A link to a file that is in neither fails the strict build.
"""

from __future__ import annotations

import ast
import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = {  # page of the repository -> its name in the site
    "README.md": "overview.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "examples": "examples.md",
}
COPIED = ("LICENSE", "CITATION.cff", "constraints.txt")
BOOST = {"use": 4.0, "results": 0.25}  # folder -> its weight in search: how to do a thing before what was measured
SHOWN_ELSEWHERE = {new: old for old, new in PAGES.items()}
LINK = re.compile(r"(\]\()(?!https?:|#)([^)#\s]+)(#[^)]*)?(\))")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages and the example files."""
    for old, new in PAGES.items():
        text = example_list() if old == "examples" else (ROOT / old).read_text(encoding="utf-8")
        files.append(File.generated(config, new, content=text))
    for path in [*(ROOT / name for name in COPIED), *example_files()]:
        name = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links as the site has them, and the page's weight in search."""
    source = page.file.src_uri
    page.meta["search"] = {"boost": BOOST.get(source.split("/")[0], 1.0)}
    here = SHOWN_ELSEWHERE.get(source, f"docs/{source}")  # where the text is in the repository
    folder = "" if here == "examples" else posixpath.dirname(here)

    def mapped(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, found[2]))
        new = PAGES.get(target, target.removeprefix("docs/"))
        address = posixpath.relpath(new, posixpath.dirname(source) or ".")
        return f"{found[1]}{address}{found[3] or ''}{found[4]}"

    return LINK.sub(mapped, markdown)


def example_files() -> list[Path]:
    return sorted(path for path in (ROOT / "examples").iterdir() if path.suffix in (".py", ".ipynb", ".csv"))


def example_list() -> str:
    """A page that names the examples, each with its first sentence."""
    lines = [f"- [{path.name}](examples/{path.name}): {first_line(path)}" for path in example_files()]
    return "\n".join(["# Examples", "", "Short programs that run as they are.", "", *lines, ""])


def first_line(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return (ast.get_docstring(ast.parse(text)) or "").split("\n")[0]
    cells: list[dict[str, Any]] = json.loads(text)["cells"] if path.suffix == ".ipynb" else []
    title = "".join(cells[0]["source"]).split("\n")[0] if cells else ""
    return title.lstrip("# ")
