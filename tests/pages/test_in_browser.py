"""Every page that a command writes, in a real browser: none scrolls sideways on a phone, none makes a request.

Pages are made by the commands themselves, from tiny runs; names of a class and a slide are long and hostile.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from patchgen.cli import main
from patchgen.data.oracle import SUITE, Oracle
from patchgen.draw import plots
from tests.browser import Browser, needs_chromium

pytestmark = needs_chromium
NAMES = ("demo", "report", "explain", "evaluate", "discover", "diagnose", "cohort")
LONG = "a_very_long_name_without_any_space_" * 4


@pytest.fixture(scope="module")
def pages(
    tiny_run: Callable[..., Any], image_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    out = tmp_path_factory.mktemp("pages")
    data = Oracle(replace(SUITE["oracle-tiny"], per_class=4)).write(out / "small") / "images"
    methods = ("patchgen", "patchgen-cls", "lp-ln", "lp")
    known = {m: tiny_run(m, data=str(data), unseen="mist", augment=False, image_size=84) for m in methods}
    run, masked = str(tiny_run("lp-ln").path), str(tiny_run("patchgen").path)
    photo = out / f"{LONG}<b>.png"
    photo.write_bytes(next(image_folder.glob("studio/*/*.png")).read_bytes())
    (out / "broken.png").write_bytes(b"nothing")
    words = [
        ["explain", masked, str(photo), str(out / "broken.png"), "--out", str(out / "explain")],
        ["evaluate", masked, str(image_folder), "--out", str(out / "evaluate"), "--resamples", "0"],
        ["discover", run, str(image_folder / "studio"), "--out", str(out / "discover"), "--new-classes", "2"],
        ["diagnose", str(known["patchgen"].path), "--against", str(known["lp-ln"].path), "--images", "4",
         "--steps", "2", "--operators", "mean", "--projection", "pca", "--out", str(out / "diagnose")],
        ["report", str(Path(run).parent), "--out", str(out / "report"), "--quiet"],
    ]  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "DPI", 50)  # drawing takes most of the time
        for line in words:
            assert main(line) == 0, line
    from patchgen.pages.page import write_page
    from patchgen.report.demo import render_page

    write_page(out / "demo" / "index.html", render_page(known, smoke=True))
    cohort(out / "cohort")
    return {name: out / name / ("report.html" if name == "report" else "index.html") for name in NAMES}


def cohort(out: Path) -> None:
    from patchgen.pages.page import write_page
    from patchgen.slides.cohort import Rates, SlideSummary, _page

    classes = tuple(f"class {i} {LONG[:20]}" for i in range(9))
    folder = out / "slide 1"
    folder.mkdir(parents=True)
    for name in ("thumbnail.png", "map.png"):
        Image.fromarray(np.full((60, 90, 3), 120, np.uint8)).save(folder / name)
    rates = Rates(np.array([[9.0, *[1.0] * 18]] * 2))
    slide = SlideSummary(folder, f"{LONG}.svs", "abc", 1.5, classes, rates, 0.1, 0.5, {"mask": "map.png"})
    failures = [(f"{LONG}<i>.svs", f"cannot use slide {LONG}")]
    write_page(out / "index.html", _page([slide], failures, [(LONG, [slide], rates)]))


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.mark.parametrize("name", NAMES)
def test_no_page_scrolls_sideways_or_makes_a_request(browser: Browser, pages: dict[str, Path], name: str) -> None:
    browser.problems.clear()
    for width in (390, 1200):
        browser.open(pages[name].as_uri(), width)
        browser.run("document.querySelectorAll('details').forEach(one => { one.open = true; })")
        assert browser.run("document.documentElement.scrollWidth") <= width
    folder = pages[name].parent.as_uri()
    assert [a for a in browser.requests if not a.startswith((folder, "data:"))] == []
    assert browser.run("[...document.images].every(one => { one.loading = 'eager'; return one.alt.trim(); })")
    browser.until("[...document.images].every(one => one.complete)")
    assert browser.run("[...document.images].every(one => one.naturalWidth > 0)") and browser.problems == []


@pytest.mark.parametrize("width", [390, 1200])
def test_a_long_name_stays_in_its_column(browser: Browser, pages: dict[str, Path], width: int) -> None:
    browser.open(pages["cohort"].as_uri(), width)
    edges = browser.run("""(row => [row.cells[0].firstElementChild.getBoundingClientRect().right,
        row.cells[1].getBoundingClientRect().left])(document.querySelector('tbody tr'))""")
    assert edges[0] <= edges[1]


def test_the_demos_bars_are_whole_on_a_phone(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["demo"].as_uri(), 390)
    assert 250 < browser.run("document.querySelector('.chart svg').getBoundingClientRect().right") <= 390


def test_pictures_of_many_images_keep_their_size_on_a_phone(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["discover"].as_uri(), 390)
    assert browser.run("document.querySelector('img.sheet').getBoundingClientRect().width") > 600


@pytest.mark.parametrize("name", NAMES)
def test_every_page_has_a_dark_side(browser: Browser, pages: dict[str, Path], name: str) -> None:
    found = {}
    for scheme in ("light", "dark"):
        browser.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        browser.open(pages[name].as_uri())
        found[scheme] = browser.run("(s => [s.backgroundColor, s.color])(getComputedStyle(document.documentElement))")
    browser.send("Emulation.setEmulatedMedia", features=[])
    assert found["light"] == ["rgb(255, 255, 255)", "rgb(28, 32, 36)"]
    assert found["dark"] == ["rgb(22, 25, 28)", "rgb(230, 233, 236)"]
