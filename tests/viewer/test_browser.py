"""The page in a real browser: upload, slider, patches by mouse and keyboard, bad files, runs, widths, contrast.

Chromium is driven over its DevTools pipe (two file descriptors, JSON with a zero byte behind it), so that no package
is needed. Where there is no Chromium these tests are skipped.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.viewer.conftest import BAD_FILES, png

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: install the Debian package `chromium`")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage", "--hide-scrollbars",
    "--remote-debugging-pipe",
)  # fmt: skip
PATIENCE = 60.0  # seconds: a busy machine is no defect
KEYS = {"ArrowRight": 39, "ArrowDown": 40, "Space": 32, "Escape": 27, "Tab": 9, "End": 35}


class Browser:
    """One page in a headless Chromium."""

    def __init__(self, profile: Path) -> None:
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        # numbers far from 3 and 4, which Chromium reads and writes: one must not overwrite the other
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 50) for end in (theirs_in, theirs_out)]
        place = f"import os, sys; os.dup2({ends[0]}, 3); os.dup2({ends[1]}, 4); os.execv(sys.argv[1], sys.argv[1:])"
        words = [sys.executable, "-c", place, str(CHROMIUM), *FLAGS]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen([*words, f"--user-data-dir={profile}"], pass_fds=ends, **quiet)  # type: ignore[call-overload]
        for end in (theirs_in, theirs_out, *ends):
            os.close(end)
        self._buffer, self._count, self.session = b"", 0, None
        self.problems: list[str] = []  # what the page's console holds of errors
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for name in ("Page", "Runtime", "Log", "DOM"):
            self.send(f"{name}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._count:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self._note(answer)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], PATIENCE)
            assert ready, "Chromium does not answer"
            chunk = os.read(self._in, 1 << 20)
            assert chunk, "Chromium has ended"
            self._buffer += chunk
        first, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(first)

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(params["exceptionDetails"])[:600])
        if event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.problems.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        found = self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, script: str) -> Any:
        """Waits for an expression to be true, and returns it."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            value = self.run(script)
            if value:
                return value
            time.sleep(0.05)
        raise AssertionError(f"never true: {script}; the page says: {self.run('document.body.innerText')[:1500]}")

    def text(self, name: str) -> str:
        return self.run(f"document.getElementById({name!r}).textContent")

    def open(self, address: str, width: int = 1400, height: int = 900) -> None:
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.send("Page.navigate", url=address)
        self.until("document.readyState === 'complete' && typeof state === 'object' && state.model !== null")
        self.until("document.getElementById('status').textContent === ''")

    def upload(self, *files: Path) -> None:
        root = self.send("DOM.getDocument")["root"]["nodeId"]
        node = self.send("DOM.querySelector", nodeId=root, selector="#files")["nodeId"]
        self.run("document.getElementById('status').textContent = ''")
        self.send("DOM.setFileInputFiles", nodeId=node, files=[str(file) for file in files])
        self.until("document.getElementById('status').textContent.includes('images opened')")

    def key(self, name: str) -> None:
        text = {"Space": " "}.get(name, "")
        key = {"Space": " "}.get(name, name)
        for kind in ("keyDown" if text else "rawKeyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=name, windowsVirtualKeyCode=KEYS[name],
                      **({"text": text} if text and kind == "keyDown" else {}))  # fmt: skip

    def click(self, x: float, y: float) -> None:
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def screenshot(self, file: Path, whole: bool = True) -> None:
        found = self.send("Page.captureScreenshot", captureBeyondViewport=whole)
        file.write_bytes(base64.b64decode(found["data"]))

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(20)
        os.close(self._in)
        os.close(self._out)


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
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture
def page(chromium: Browser, address: str) -> Iterator[Browser]:
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


def slide(page: Browser, value: float) -> None:
    page.run(f"(s => {{ s.value = {value}; s.dispatchEvent(new Event('input', {{bubbles: true}})); }})"
             "(document.getElementById('threshold'))")  # fmt: skip


def test_upload_shows_the_answer_the_mask_and_the_rankings(page: Browser, files: Path) -> None:
    assert "not annotations and not a diagnosis" in page.text("notice")
    page.upload(files / "good0.png", files / "good1.png")
    assert page.text("status") == "2 of 2 images opened"
    scores = page.run("state.current.scores")
    label, confidence = scores["label"], scores["confidence"]
    assert page.text("answer") == f"{label}, {100 * confidence:.1f} %"
    assert page.run("document.querySelectorAll('#classes tr').length") == 3
    assert page.run("document.querySelectorAll('#opened button').length") == 2
    assert page.run("[...document.querySelectorAll('#opened button')].map(b => b.getAttribute('aria-current'))") == [
        "false",
        "true",
    ]
    page.until("document.querySelectorAll('#rankings figure').length === 3")
    assert page.run("state.current.maps.mask.length") == 16
    assert "fixed scale" in page.text("scale-note") and "not calibrated" in page.text("calibration")
    assert page.run("document.getElementById('notice').getBoundingClientRect().top >= 0")


def test_the_slider_dims_patches_below(page: Browser, files: Path) -> None:
    page.upload(files / "good0.png")
    mask = page.until("state.current.maps.mask")
    order = sorted(range(16), key=lambda i: mask[i])
    threshold = round((mask[order[7]] + mask[order[8]]) / 2, 2)
    kept = sum(value >= threshold for value in mask)
    weakest, strongest = (page.run(f"{PATCH}({order[i]})") for i in (0, -1))
    slide(page, threshold)
    assert page.text("kept") == f"{threshold:.2f}: {kept} of 16 patches at or above"
    if kept < 16:
        assert page.run(f"{PATCH}({order[0]})") < weakest - 10
    if kept:
        assert page.run(f"{PATCH}({order[-1]})") == pytest.approx(strongest, abs=0.5)
    slide(page, 1)
    assert (
        page.text("kept") == "1.00: 0 of 16 patches at or above" and page.run(f"{PATCH}({order[-1]})") < strongest - 10
    )


def test_a_mask_is_stretched_only_when_asked_and_says_so(page: Browser, files: Path) -> None:
    page.upload(files / "good0.png")
    mask = page.until("state.current.maps.mask")
    assert page.run("shownMap()") == mask
    page.run("document.getElementById('stretch').click()")
    stretched = page.run("shownMap()")
    assert (min(stretched), max(stretched)) == (0, 1) and "STRETCHED" in page.text("scale-note")


def test_an_image_unlike_the_training_images_is_said(page: Browser, files: Path) -> None:
    page.upload(files / "good0.png")
    page.run("state.current.scores.unlike_training = true; state.model.knows_unlike = true; drawAnswer()")
    assert "do not rely on its answer" in page.text("warning")
    assert page.run("document.getElementById('warning').checkVisibility()")


def test_a_click_takes_a_patch_away_and_the_probability_moves(page: Browser, files: Path) -> None:
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


def test_the_keyboard_alone_is_enough(page: Browser, files: Path) -> None:
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
    page.until("state.current.moved.off === 2")
    assert page.run("[...state.current.off]") == [9, 11]
    page.key("Escape")
    page.until("state.current.moved === null && state.current.off.size === 0")
    page.key("Tab")
    assert page.run("document.activeElement.id") == "threshold"


def test_all_dimmed_patches_at_once_and_mean_colour(page: Browser, files: Path) -> None:
    page.upload(files / "good0.png")
    mask = page.until("state.current.maps.mask")
    threshold = round(sum(mask) / 16, 2)
    slide(page, threshold)
    page.run("document.getElementById('below').click()")
    blurred = page.until("state.current.moved")
    assert sorted(page.run("[...state.current.off]")) == [i for i, value in enumerate(mask) if value < threshold]
    page.run("(o => { o.value = 'mean'; o.dispatchEvent(new Event('change')); })(document.getElementById('operator'))")
    other = page.until(f"state.current.moved.confidence !== {blurred['confidence']!r} && state.current.moved")
    assert other["off"] == blurred["off"]


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_said_and_the_good_one_shown(page: Browser, files: Path, name: str) -> None:
    page.upload(files / name, files / "good0.png")
    assert BAD_FILES[name][1] in page.text("problems") and name in page.text("problems")
    assert page.text("status") == "1 of 2 images opened; 1 could not be shown, listed below"
    page.run("document.querySelector('#problems button').click()")
    assert page.text("problems") == "" and page.run("document.activeElement.id") == "files"


def test_a_name_is_never_markup(page: Browser, files: Path) -> None:
    page.upload(files / "<img src=x onerror=alert(1)>.png")
    assert page.run("document.querySelector('#opened span').textContent") == "<img src=x onerror=alert(1)>.png"
    assert page.run("document.querySelectorAll('img[src=x]').length") == 0


def test_a_model_without_a_mask_shows_the_rankings_it_has(page: Browser, files: Path) -> None:
    page.upload(files / "good0.png")
    page.run("(m => { m.value = '2'; m.dispatchEvent(new Event('change')); })(document.getElementById('model'))")
    page.until("state.model.id === '2' && state.current.scores && state.current.scores.model === '2'")
    page.until("document.querySelector('#rankings canvas[aria-label^=attention]') !== null")
    assert page.run("document.getElementById('map').value") == "attention" and "no mask" in page.text("about")
    assert "STRETCHED" in page.text("scale-note")


def test_a_model_that_cannot_be_loaded_leaves_the_one_before(page: Browser, files: Path) -> None:
    page.upload(files / "good0.png")
    page.run("(m => { m.append(make('option', {value: '99'}, 'gone')); m.value = '99'; "
             "m.dispatchEvent(new Event('change')); })(document.getElementById('model'))")  # fmt: skip
    page.until("document.getElementById('message').textContent.includes('no such model')")
    assert page.run("document.getElementById('model').value") == "1" and page.run("isReady()")
    page.run("0")
    page.problems.clear()  # Chromium logs every 404


def test_examples_of_the_unseen_domain_say_the_true_class(page: Browser) -> None:
    page.until("!document.getElementById('examples').hidden")
    page.run("document.getElementById('show-example').click()")
    page.until("state.current")
    assert page.until("document.getElementById('answer').textContent.includes('true class: ')")


def test_runs_are_compared_side_by_side(page: Browser) -> None:
    page.run("document.getElementById('tab-look').focus()")
    page.key("ArrowRight")
    page.until("document.querySelectorAll('#runs-table tbody tr').length === 2")
    assert page.run("document.activeElement.id") == "tab-runs"
    page.until("document.querySelectorAll('.charts svg').length >= 4")
    rows = page.run(
        "[...document.querySelectorAll('#differences tbody tr')].map(r => [...r.cells].map(c => c.textContent))"
    )
    assert ["method", "patchgen", "lp-ln"] in rows
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
def test_text_has_contrast_in_light_and_dark(page: Browser, files: Path, scheme: str) -> None:
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
def test_nothing_is_wider_than_the_window(page: Browser, address: str, files: Path, width: int) -> None:
    page.open(address, width)
    page.upload(files / "good0.png", files / "huge.png")
    page.until("document.querySelectorAll('#rankings figure').length === 3")
    assert page.run("document.documentElement.scrollWidth") <= width
    page.run("document.getElementById('tab-runs').click()")
    page.until("document.querySelectorAll('.summary').length === 2")
    assert page.run("document.documentElement.scrollWidth") <= width


def test_everything_that_can_be_used_has_a_name(page: Browser, files: Path) -> None:
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


def test_a_server_that_is_gone_is_said(page: Browser, files: Path) -> None:
    page.run("window.fetch = () => Promise.reject(new TypeError('gone'))")
    page.upload(files / "good0.png")
    assert "Is `patchgen serve` still running?" in page.text("problems")
