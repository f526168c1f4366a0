"""A headless Chromium for tests, driven over its DevTools pipe.

The pipe is two file descriptors with JSON messages that end in a zero byte, so that no package is needed.
"""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: install the Debian package `chromium`")
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
        self.problems: list[str] = []  # errors in the page's console
        self.requests: list[str] = []  # addresses that the page asked for
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for name in ("Page", "Runtime", "Log", "DOM", "Network"):
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
        if event.get("method") == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
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
        self.requests.clear()
        self.send("Page.navigate", url=address)
        self.until(f"document.readyState === 'complete' && location.href.startsWith({address.partition('#')[0]!r})")

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
