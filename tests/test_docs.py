"""The pages keep their word: links lead somewhere, commands and options exist, quoted messages are the program's.

The site itself is built by `make docs`.
"""

import re
import shlex
from collections.abc import Callable
from functools import cache, wraps
from importlib import import_module
from pathlib import Path

import pytest

from patchgen.cli import COMMANDS, main
from patchgen.commands.slide import COMMAND as SLIDE
from patchgen.common.plugins import take_options

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(
    [DOCS / "README.md", *(page for folder in ("use", "study", "develop") for page in (DOCS / folder).glob("*.md"))]
)
RESULTS = sorted((DOCS / "results").glob("*.md"))
USE = ("embed", "evaluate", "export", "histology", "reading-masks", "slides", "troubleshooting")
WRITTEN = [*(DOCS / "use" / f"{name}.md" for name in USE), DOCS / "study" / "tuning.md"]


def anchors(page: Path) -> set[str]:
    """The names that a link may have behind its `#`."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *PAGES, *RESULTS], ids=lambda page: f"{page.parent.name}-{page.stem}"
)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", page.read_text(encoding="utf-8")):
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_the_index_has_every_page() -> None:
    index = (DOCS / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"^- \[[^\]]+\]\(([\w/-]+\.md)\)", index, re.MULTILINE)
    pages = {page.relative_to(DOCS).as_posix() for page in PAGES}
    assert pages - {"README.md"} == set(listed) - {"results/README.md"}


def test_the_index_of_results_has_every_page_and_they_lead_back() -> None:
    index = (DOCS / "results" / "README.md").read_text(encoding="utf-8")
    pages = [page for page in RESULTS if page.name != "README.md"]
    assert sorted(re.findall(r"^\| \[[\w-]+\]\(([\w-]+\.md)\)", index, re.MULTILINE)) == [page.name for page in pages]
    for page in pages:
        assert "](README.md" in page.read_text(encoding="utf-8"), page.name


@cache
def options(*command: str) -> str:
    """The help of a command, as one text."""
    import contextlib
    import io

    with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.suppress(SystemExit):
        main([*command, "--help"])
    return text.getvalue()


def commands(page: Path) -> list[list[str]]:
    """The words behind `patchgen` of each line of the shell blocks."""
    blocks = re.findall(r"^```(?:sh|bash)\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    lines = [shlex.split(line, comments=True) for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [words[1:] for words in lines if words and words[0] == "patchgen"]


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.stem)
def test_commands_and_options_exist(page: Path) -> None:
    assert commands(page)
    for words in commands(page):
        assert words[0] in COMMANDS, words
        command = words[:2] if words[0] == "slide" and words[1] in SLIDE else words[:1]
        for word in take_options(words[1:])[0]:  # `--plugin` is every command's
            assert not word.startswith("--") or re.search(rf"{word}\b", options(*command)), words


def measurements() -> list[list[str]]:
    """The words of every `python -m benchmarks`, in shell blocks and between backticks."""
    found = []
    for page in [*PAGES, *RESULTS]:
        text = page.read_text(encoding="utf-8")
        inline = re.findall(r"`(python -m benchmarks(?: [^`]*)?)`", text)
        lines = re.findall(r"^python -m benchmarks .*$", text, re.MULTILINE)
        found += [shlex.split(line, comments=True) for line in (*inline, *lines)]
    return found


def parsed_alone(function: Callable[..., object]) -> Callable[..., dict[str, object]]:
    """A function with the same options that measures nothing."""

    @wraps(function)
    def nothing(*_: object, **__: object) -> dict[str, object]:
        return {}

    return nothing


def test_measurements_have_the_options_that_the_pages_give_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import table  # here: this file also runs as a script, where the name is another folder's
    from benchmarks.__main__ import main as measure

    for module in table.SUBJECTS.values():
        monkeypatch.setattr(module, "measure", parsed_alone(module.measure))
        monkeypatch.setattr(module, "lines", lambda _: [])
    monkeypatch.setattr("benchmarks.__main__.write_text", lambda *_: None)
    called = {" ".join(words[:4]) for words in measurements()}
    assert {f"python -m benchmarks {name}" for name in ("all", "rate", "methods", "peers", "sweep")} <= called
    for words in measurements():
        if len(words) > 3:
            assert measure(words[3:]) == 0, words


def source() -> str:
    """All text of the program on one line: literals that are written in several pieces are joined."""
    files = [*(ROOT / "src").rglob("*.py"), ROOT / "Makefile"]
    return re.sub(r'"\s*\n\s*f?"', "", "\n".join(file.read_text(encoding="utf-8") for file in files))


def test_quoted_messages_are_the_programs() -> None:
    """Each message in the first column, between the words that vary, stands in the source: the longest piece of each,
    and every piece that is longer than 15 characters."""
    text, page = source(), (DOCS / "use" / "troubleshooting.md").read_text(encoding="utf-8")
    column = re.findall(r"^\| (`.+?) \|", page, re.MULTILINE)
    quoted = [quote for cell in column for quote in re.findall(r"`([^`]+)`", cell)]
    assert len(quoted) > 10  # or the pattern finds nothing
    varying = r"'[^']*'|\.\.\.|\b\d[\d.]*(?:x\d+)?\b|\b[A-Z]+\b|\bstep N\b|: main\b|config\.json|patchgen: stopped"
    for quote in quoted:
        parts = [part.strip(" ,;:()") for part in re.split(varying, quote)]
        longest = max(parts, key=len)
        assert len(longest) > 5, quote
        for part in parts:
            assert part in text or part != longest and len(part) <= 15, (quote, part)


@pytest.mark.parametrize("picture", sorted((DOCS / "images").iterdir()), ids=lambda path: path.stem)
def test_pictures_are_small_in_true_colour_and_shown(picture: Path) -> None:
    from PIL import Image

    assert picture.stat().st_size < 400_000
    with Image.open(picture) as image:
        assert image.mode in ("RGB", "RGBA")  # a palette makes bands of a colour bar
    pages = [ROOT / "README.md", *PAGES, *RESULTS]
    assert any(f"images/{picture.name})" in page.read_text(encoding="utf-8") for page in pages)


def test_python_in_the_pages_compiles() -> None:
    found = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
    blocks = [(page, block) for page in [*PAGES, *RESULTS] for block in found.findall(page.read_text(encoding="utf-8"))]
    assert len(blocks) > 3  # or the pattern finds nothing and nothing is checked
    for page, block in blocks:
        compile(block, str(page), "exec")


# The API page


def test_what_is_public_has_a_docstring() -> None:
    """The site fills each `:::` line of the page with a docstring; `patchgen.__all__` is public as well."""
    import patchgen

    paths = re.findall(r"^::: ([\w.]+)$", (DOCS / "develop" / "api.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(paths) > 20 and len(set(paths)) == len(paths)
    assert {f"patchgen.{name}" for name in patchgen.__all__ if name != "__version__"} <= set(paths)
    for path in paths:
        module, _, name = path.rpartition(".")
        assert getattr(import_module(module), name).__doc__, path


# The site


def test_the_site_has_every_page() -> None:
    """`make docs` builds it strictly, where broken links fail; that takes longer than a test may."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    nav = set(re.findall(r"([\w/-]+\.md)$", text[text.index("\nnav:") :], re.MULTILINE))
    own = {path.relative_to(DOCS).as_posix() for path in [*PAGES, *RESULTS]}
    added = re.findall(r'^    "[\w.]+": "([\w.]+)",$', (DOCS / "site.py").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(added) == 5 and nav == own | set(added)
