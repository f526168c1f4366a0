"""The documentation site, built strictly: no page scrolls sideways on a phone or makes a request to another server."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.browser import Browser, needs_chromium

ROOT = Path(__file__).parents[2]
PAGES = ("index", "overview", "fit", "methods", "api", "examples", "results/selection")


@pytest.mark.slow
@needs_chromium
def test_the_site_is_whole_and_asks_no_other_server(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="the site needs patchgen[docs]")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(tmp_path / "site")]
    subprocess.run(words, cwd=ROOT, check=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    browser = Browser(tmp_path / "profile")
    try:
        for name in PAGES:
            address = (tmp_path / "site" / f"{name}.html").as_uri()
            browser.open(address, width=390)
            assert browser.run("document.documentElement.scrollWidth") <= 390, name
            elsewhere = [a for a in browser.requests if not a.startswith(((tmp_path / "site").as_uri(), "data:"))]
            assert elsewhere == [] and len(browser.requests) > 3, name
        browser.open((tmp_path / "site" / "api.html").as_uri())
        assert "PatchGenClassifier" in browser.run("document.body.innerText")
    finally:
        browser.close()
