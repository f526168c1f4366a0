"""The documentation site: a broken link fails its build, no page scrolls sideways on a phone or asks another server."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.browser import Browser, needs_chromium

ROOT = Path(__file__).parents[2]
FOLDERS = ("use/", "study/", "results/")
PAGES = ("index", "overview", "use/fit", "study/methods", "develop/api", "examples", "results/selection")


def build(*options: str) -> subprocess.CompletedProcess[str]:
    """What `make docs` runs, with more options."""
    recipe = re.search(r"^docs:.*\n\t\$\(BIN\)/mkdocs (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert recipe
    words = [sys.executable, "-m", "mkdocs", *recipe[1].split(), *options]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize("target", ["page.md", "missing.md"])
def test_a_broken_link_fails_the_build(target: str, tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="the site needs patchgen[docs]")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(f"# Home\n\n[a page]({target})\n")
    (tmp_path / "docs" / "page.md").write_text("# Page\n")
    (tmp_path / "mkdocs.yml").write_text("site_name: links\ntheme: mkdocs\n")
    built = build("-f", str(tmp_path / "mkdocs.yml"), "-d", str(tmp_path / "site"))
    assert (built.returncode == 0) == (target == "page.md"), built.stderr


@pytest.mark.slow
@needs_chromium
def test_the_site_is_whole_and_asks_no_other_server(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="the site needs patchgen[docs]")
    built = build("-d", str(tmp_path / "site"))
    assert built.returncode == 0, built.stderr
    entries = json.loads((tmp_path / "site" / "search" / "search_index.json").read_text())["docs"]
    boosts = {folder: {e.get("boost", 1) for e in entries if e["location"].startswith(folder)} for folder in FOLDERS}
    assert min(boosts["use/"]) > max(boosts["study/"]) and min(boosts["study/"]) > max(boosts["results/"])
    browser = Browser(tmp_path / "profile")
    try:
        for name in PAGES:
            address = (tmp_path / "site" / f"{name}.html").as_uri()
            browser.open(address, width=390)
            assert browser.run("document.documentElement.scrollWidth") <= 390, name
            elsewhere = [a for a in browser.requests if not a.startswith(((tmp_path / "site").as_uri(), "data:"))]
            assert elsewhere == [] and len(browser.requests) > 3, name
        browser.open((tmp_path / "site" / "develop" / "api.html").as_uri())
        assert "PatchGenClassifier" in browser.run("document.body.innerText")
    finally:
        browser.close()
