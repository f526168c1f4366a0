"""The page in a real browser: upload, slider, patches by mouse and keyboard, bad files, runs, widths, contrast.

Where there is no Chromium these tests are skipped.
"""

import io
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.browser import Browser, needs_chromium
from tests.viewer.conftest import BAD_FILES, png

pytestmark = needs_chromium


class Viewer(Browser):
    """The viewer's page."""

    def open(self, address: str, width: int = 1400, height: int = 900) -> None:
        super().open(address, width, height)
        self.until("typeof state === 'object' && state.model !== null")
        self.until("document.getElementById('status').textContent === ''")

    def set(self, name: str, value: object, event: str = "change") -> None:
        dispatch = f"e.dispatchEvent(new Event('{event}', {{bubbles: true}}))"
        self.run(f"(e => {{ e.value = '{value}'; {dispatch}; }})(document.getElementById('{name}'))")

    def upload(self, *files: Path) -> None:
        root = self.send("DOM.getDocument")["root"]["nodeId"]
        node = self.send("DOM.querySelector", nodeId=root, selector="#files")["nodeId"]
        self.run("document.getElementById('status').textContent = ''")
        self.send("DOM.setFileInputFiles", nodeId=node, files=[str(file) for file in files])
        self.until("document.getElementById('status').textContent.includes('images opened')")


@pytest.fixture(scope="module")
def address(run_folders: list[Path]) -> Iterator[str]:
    import uvicorn

    from patchgen.viewer.app import create_app
    from patchgen.viewer.library import Library, find_items

    server = uvicorn.Server(uvicorn.Config(create_app(Library(find_items(run_folders))), log_level="warning"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
        server.should_exit = True
        thread.join(20)


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Viewer]:
    browser = Viewer(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture
def page(chromium: Viewer, address: str) -> Iterator[Viewer]:
    """A fresh page; at its end the console must hold no error."""
    chromium.problems.clear()
    chromium.open(address)
    yield chromium
    chromium.run("0")  # events that were on their way
    assert chromium.problems == []


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    for name, (data, _) in BAD_FILES.items():
        (folder / name).write_bytes(data)
    for seed in range(3):
        (folder / f"good{seed}.png").write_bytes(png(seed, (60, 40)))
    (folder / "<img src=x onerror=alert(1)>.png").write_bytes(png(9))
    return folder


CELL = """(() => { const b = document.getElementById('canvas').getBoundingClientRect();
  return [b.left, b.top, b.width, b.height]; })()"""
# mean brightness of a patch of the 4 x 4 grid as the page draws it
PATCH = """(patch => { const c = document.getElementById('canvas'), w = c.width / 4, h = c.height / 4;
  const d = c.getContext('2d').getImageData(patch % 4 * w + 2, Math.floor(patch / 4) * h + 2, w - 4, h - 4).data;
  let sum = 0; for (let i = 0; i < d.length; i += 4) sum += d[i] + d[i + 1] + d[i + 2]; return sum / d.length; })"""


def test_upload_shows_the_answer_the_mask_and_the_rankings(page: Viewer, files: Path) -> None:
    assert "not annotations and not a diagnosis" in page.text("notice")
    page.upload(files / "good0.png", files / "good1.png")
    assert page.text("status") == "2 of 2 images opened"
    scores = page.run("state.current.scores")
    label, confidence = scores["label"], scores["confidence"]
    assert page.text("answer") == f"{label}, {100 * confidence:.1f} %"
    assert page.run("document.querySelectorAll('#classes tr').length") == 3
    assert page.run("document.querySelectorAll('#opened button').length") == 2
    current = page.run("[...document.querySelectorAll('#opened button')].map(b => b.getAttribute('aria-current'))")
    assert current == ["false", "true"]
    page.until("document.querySelectorAll('#rankings figure').length === 3")
    assert page.run("state.current.maps.mask.length") == 16
    assert "fixed scale" in page.text("scale-note") and "not calibrated" in page.text("calibration")
    assert page.run("document.getElementById('notice').getBoundingClientRect().top >= 0")


def test_the_slider_dims_patches_below_and_the_mask_can_be_stretched(page: Viewer, files: Path) -> None:
    page.upload(files / "good0.png")
    mask = page.until("state.current.maps.mask")
    order = sorted(range(16), key=lambda i: mask[i])
    threshold = round((mask[order[7]] + mask[order[8]]) / 2, 2)
    kept = sum(value >= threshold for value in mask)
    weakest, strongest = (page.run(f"{PATCH}({order[i]})") for i in (0, -1))
    page.set("threshold", threshold, "input")
    assert page.text("kept") == f"{threshold:.2f}: {kept} of 16 patches at or above"
    if kept < 16:
        assert page.run(f"{PATCH}({order[0]})") < weakest - 10
    if kept:
        assert page.run(f"{PATCH}({order[-1]})") == pytest.approx(strongest, abs=0.5)
    page.set("threshold", 1, "input")
    assert page.text("kept") == "1.00: 0 of 16 patches at or above"
    assert page.run(f"{PATCH}({order[-1]})") < strongest - 10
    assert page.run("shownMap()") == mask  # stretched only when asked, and then it says so
    page.run("document.getElementById('stretch').click()")
    stretched = page.run("shownMap()")
    assert (min(stretched), max(stretched)) == (0, 1) and "STRETCHED" in page.text("scale-note")


def test_a_click_takes_a_patch_away_and_the_probability_moves(page: Viewer, files: Path) -> None:
    page.upload(files / "good1.png")
    page.run("document.getElementById('canvas').scrollIntoView({block: 'center'})")
    left, top, width, height = page.run(CELL)
    page.click(left + width * 0.6, top + height * 0.4)  # row 2, column 3
    moved = page.until("state.current.moved")
    assert page.run("[...state.current.off]") == [6]
    answer = page.text("answer")
    assert answer.startswith(f"{moved['label']}, {100 * moved['confidence']:.1f} %; with 1 of 16 patches away")
    assert moved["classes"] != page.run("state.current.scores.classes")
    assert page.text("cell").startswith("row 2, column 3, mask ") and page.text("cell").endswith(", away")
    assert page.run("document.querySelector('.classes').classList.contains('moving')")
    page.run("document.getElementById('reset').click()")
    page.until("state.current.moved === null")
    assert "away" not in page.text("answer") and page.text("away") == "All patches are there."


def test_the_keyboard_alone_is_enough(page: Viewer, files: Path) -> None:
    page.upload(files / "good2.png")
    page.run("document.getElementById('lines').focus()")
    page.key("Tab")
    assert page.run("document.activeElement.id") == "canvas"
    for name in ("ArrowRight", "ArrowDown", "ArrowDown", "Space"):
        page.key(name)
    page.until("state.current.moved")
    assert page.run("[...state.current.off]") == [9] and page.text("cell").startswith("row 3, column 2")
    page.key("End")
    page.key("Space")
    page.until("state.current.moved?.off === 2")
    assert page.run("[...state.current.off]") == [9, 11]
    page.key("Escape")
    page.until("state.current.moved === null && state.current.off.size === 0")
    page.key("Tab")
    assert page.run("document.activeElement.id") == "threshold"


def test_all_dimmed_patches_at_once_and_mean_colour(page: Viewer, files: Path) -> None:
    page.upload(files / "good0.png")
    mask = page.until("state.current.maps.mask")
    threshold = round(sum(mask) / 16, 2)
    page.set("threshold", threshold, "input")
    page.run("document.getElementById('below').click()")
    blurred = page.until("state.current.moved")
    assert sorted(page.run("[...state.current.off]")) == [i for i, value in enumerate(mask) if value < threshold]
    page.set("operator", "mean")
    changed = f"state.current.moved.confidence !== {blurred['confidence']!r}"
    other = page.until(f"state.current.moved && {changed} && state.current.moved")
    assert other["off"] == blurred["off"]


def test_earlier_probabilities_are_gone_while_new_ones_are_computed(page: Viewer, files: Path) -> None:
    page.upload(files / "good0.png")
    page.until("state.current.maps.mask && document.querySelectorAll('#classes tr').length > 0")
    page.run("state.model.knows_unlike = true; drawAnswer()")
    assert "is like the training images" in page.text("calibration")
    page.run("window.asked = ask; "
             "ask = (...words) => new Promise((go) => { window.answer = () => go(asked(...words)); })")  # fmt: skip
    page.run("void toggle(5)")
    assert page.text("answer") == "Computing the answer with 1 of 16 patches away …" and page.text("calibration") == ""
    assert page.run("document.querySelectorAll('#classes tr').length") == 0
    page.run("answer(); ask = asked")
    page.until("state.current.moved && document.querySelectorAll('#classes tr').length > 0")
    assert "is like the training images" not in page.text("calibration")


def test_bad_files_are_said_the_good_one_is_shown_and_names_are_never_markup(page: Viewer, files: Path) -> None:
    page.upload(*(files / name for name in BAD_FILES), files / "<img src=x onerror=alert(1)>.png")
    problems = page.text("problems")
    assert all(reason in problems and name in problems for name, (_, reason) in BAD_FILES.items())
    assert page.text("status") == f"1 of {len(BAD_FILES) + 1} images opened; 7 could not be shown, listed below"
    assert page.run("document.querySelector('#opened span').textContent") == "<img src=x onerror=alert(1)>.png"
    assert page.run("document.querySelectorAll('img[src=x]').length") == 0
    for _ in BAD_FILES:
        page.run("document.querySelector('#problems button').click()")
    assert page.text("problems") == "" and page.run("document.activeElement.id") == "files"


def test_a_model_without_a_mask_shows_the_rankings_it_has(page: Viewer, files: Path) -> None:
    page.upload(files / "good0.png")
    page.set("model", 2)
    page.until("state.model.id === '2' && state.current.scores && state.current.scores.model === '2'")
    page.until("document.querySelector('#rankings canvas[aria-label^=attention]') !== null")
    assert page.run("document.getElementById('map').value") == "attention" and "no mask" in page.text("about")
    assert page.text("reading").startswith("No selection to read: lp-ln has no mask")
    assert "STRETCHED" in page.text("scale-note")


def test_a_model_that_cannot_be_loaded_leaves_the_one_before(page: Viewer, files: Path) -> None:
    page.upload(files / "good0.png")
    page.run("document.getElementById('model').append(make('option', {value: '99'}, 'gone'))")
    page.set("model", 99)
    page.until("document.getElementById('message').textContent.includes('no such model')")
    assert page.run("document.getElementById('model').value") == "1" and page.run("isReady()")
    page.run("0")
    page.problems.clear()  # Chromium logs every 404


def test_the_map_has_colours_and_opacity_and_is_saved_as_a_numpy_array(page: Viewer, files: Path) -> None:
    page.upload(files / "good0.png")
    page.until("state.current.maps.mask")
    assert page.run("colour(1)") == "rgba(253,231,37,0.6)"
    page.set("colours", "gray", "input")
    page.set("opacity", 1, "input")
    assert page.run("colour(0.5)") == "rgba(128,128,128,1)"
    mask = page.run("state.current.maps.mask")
    assert page.run(f"{PATCH}(5)") == pytest.approx(0.75 * 255 * mask[5], abs=1.5)  # the map alone; alpha counts as 0
    page.run("window.saved = []; HTMLAnchorElement.prototype.click = function () { saved.push(this.download); }")
    page.run("document.getElementById('save-array').click(); document.getElementById('save-picture').click()")
    page.until("saved.length === 2")
    assert page.run("saved") == ["good0.png-mask.npy", "good0.png-mask.png"]
    data = bytes(page.run("[...npyFile(state.current.maps.mask, 4, 4)]"))
    array = np.load(io.BytesIO(data), allow_pickle=False)
    assert array.dtype == np.float32 and array.shape == (4, 4)
    np.testing.assert_allclose(array.ravel(), mask, rtol=1e-6)


def test_models_side_by_side_on_one_image(page: Viewer, files: Path) -> None:
    page.upload(files / "good0.png")
    page.run("document.getElementById('compare-methods').click()")
    page.until("document.querySelectorAll('#methods figure').length === 2")
    said = page.run("[...document.querySelectorAll('#methods figcaption')].map(e => e.textContent)")
    assert said[0].startswith("lp-ln") and "no selection to read: lp-ln has no mask" in said[0]
    assert said[1].startswith("patchgen") and "of 16 patches selected" in said[1]
    score = page.run("state.current.scores")
    assert f"{score['label']}, {100 * score['confidence']:.1f} %" in said[1]


def test_a_model_card_is_shown_as_text_never_as_markup(page: Viewer) -> None:
    table = "| h |\n|---|\n| <b>1</b> |"
    card = "\n\n".join(("---\nlicense: mit\n---", "# A <img src=x>", "Use `a` and **b**.", "- one\n  more", table))
    page.run(f"window.shown = make('div', {{}}, ...written({card!r})); document.body.append(shown)")
    assert page.run("[...shown.children].map(e => e.tagName)") == ["H5", "P", "UL", "DIV"]
    assert page.run("shown.querySelectorAll('img, b').length") == 0
    assert page.run("shown.querySelector('h5').textContent") == "A <img src=x>"
    assert page.run("[...shown.querySelectorAll('code, strong')].map(e => e.textContent)") == ["a", "b"]
    assert page.run("shown.querySelector('li').textContent") == "one more"
    assert page.run("shown.querySelector('td').textContent") == "<b>1</b>"


def test_examples_of_the_unseen_domain_say_the_true_class(page: Viewer) -> None:
    page.until("!document.getElementById('examples').hidden")
    page.run("document.getElementById('show-example').click()")
    page.until("state.current")
    assert page.until("document.getElementById('answer').textContent.includes('true class: ')")


def test_runs_are_compared_side_by_side(page: Viewer) -> None:
    page.run("document.getElementById('tab-look').focus()")
    page.key("ArrowRight")
    page.until("document.querySelectorAll('#runs-table tbody tr').length === 2")
    assert page.run("document.activeElement.id") == "tab-runs"
    page.until("document.querySelectorAll('.charts svg').length >= 4")
    cells = "[...r.cells].map(c => c.textContent)"
    rows = page.run(f"[...document.querySelectorAll('#differences tbody tr')].map(r => {cells})")
    assert ["method", "patchgen", "lp-ln"] in rows and all(len(set(row[1:])) > 1 for row in rows)
    assert page.run("document.querySelectorAll('.summary').length") == 2
    page.run("document.querySelector('#runs-table input').click()")
    page.until("document.querySelectorAll('.summary').length === 1")


# For every eye, hand and width

CONTRAST = """(() => {
  const parse = c => (c.match(/[\\d.]+/g) || []).map(Number);
  const linear = v => v <= 10.31 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const ground = e => {
    for (; e; e = e.parentElement) {
      const c = parse(getComputedStyle(e).backgroundColor);
      if (c.length === 3 || c[3] === 1) return c.slice(0, 3);
    }
    return [255, 255, 255];
  };
  const low = [];
  for (const e of document.querySelectorAll('body *')) {
    const own = [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
    if (!own || !e.checkVisibility() || e.closest('.hidden, .skip, :disabled, svg')) continue;
    const a = light(parse(getComputedStyle(e).color).slice(0, 3)), b = light(ground(e));
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) low.push(`${e.tagName}.${e.className}: ${ratio.toFixed(2)} ${e.textContent.slice(0, 40)}`);
  }
  return low; })()"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast_in_light_and_dark(page: Viewer, files: Path, scheme: str) -> None:
    page.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    try:
        page.upload(files / "good0.png", files / "text.jpg")
        assert page.run(CONTRAST) == []
        page.run("document.getElementById('tab-runs').click()")
        page.until("document.querySelectorAll('.summary').length === 2")
        assert page.run(CONTRAST) == []
        dark = page.run("getComputedStyle(document.documentElement).backgroundColor")
        assert (dark == "rgb(255, 255, 255)") == (scheme == "light")
    finally:
        page.send("Emulation.setEmulatedMedia", features=[])


@pytest.mark.parametrize("width", [400, 1400])
def test_nothing_is_wider_than_the_window(page: Viewer, address: str, files: Path, width: int) -> None:
    page.open(address, width)
    page.upload(files / "good0.png", files / "huge.png")
    page.until("document.querySelectorAll('#rankings figure').length === 3")
    assert page.run("document.documentElement.scrollWidth") <= width
    page.run("document.getElementById('tab-runs').click()")
    page.until("document.querySelectorAll('.summary').length === 2")
    assert page.run("document.documentElement.scrollWidth") <= width
    edges = page.run("[...document.querySelectorAll('.captioned > p')].map(e => e.getBoundingClientRect().right)")
    assert len(edges) == 2 and max(edges) <= width  # captions stay where tables scroll


def test_everything_that_can_be_used_has_a_name(page: Viewer, files: Path) -> None:
    page.upload(files / "good0.png")
    roles = {"button", "checkbox", "combobox", "slider", "tab", "application", "image", "tabpanel", "listbox"}
    for tab in ("tab-look", "tab-runs"):
        page.run(f"document.getElementById({tab!r}).click()")
        page.until(f"{tab!r} === 'tab-look' || document.querySelectorAll('.summary').length === 2")
        nodes = page.send("Accessibility.getFullAXTree")["nodes"]
        found = [(node["role"]["value"].lower(), node.get("name", {}).get("value", "")) for node in nodes
                 if not node.get("ignored")]  # fmt: skip
        assert {"tab", "tabpanel"} <= {role for role, _ in found}
        assert [role for role, name in found if role in roles and not name.strip()] == []
    live = page.run("[...document.querySelectorAll('[aria-live=polite], [role=alert]')].map(e => e.id)")
    assert {"answer", "status", "cell", "message"} <= set(live)


def test_a_server_that_is_gone_is_said(page: Viewer, files: Path) -> None:
    page.run("window.fetch = () => Promise.reject(new TypeError('gone'))")
    page.upload(files / "good0.png")
    assert "Is `patchgen serve` still running?" in page.text("problems")
