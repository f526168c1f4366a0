"""patchgen serve: finds runs, says the address, warns where others can reach it, and stops."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from patchgen.cli import main
from patchgen.commands import serve
from patchgen.viewer import guard
from patchgen.viewer.library import find_items


def test_a_folder_of_runs_and_single_runs_are_each_taken_once(run_folders: list[Path]) -> None:
    items = find_items([run_folders[1], run_folders[0].parent])
    paths = [item.path for item in items]
    assert paths[0] == run_folders[1].resolve() and len(set(paths)) == len(paths) >= 2
    assert [item.id for item in items] == [str(i + 1) for i in range(len(items))]


def test_a_missing_extra_names_the_fix(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(serve, "find_spec", lambda name: None)
    assert main(["serve", "runs"]) == 2
    assert "pip install 'patchgen[viewer]'" in capsys.readouterr().err


def test_a_port_that_is_taken_is_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ValueError, match="choose another --port"):
        serve.listen("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(ValueError, match="cannot listen at 203.0.113.9"):
        serve.listen("203.0.113.9", 0)


def test_the_command_serves_and_stops(run_folders: list[Path]) -> None:
    command = [sys.executable, "-m", "patchgen", "serve", str(run_folders[0]), "--port", "0", "--host", "0.0.0.0"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # where the tests run in the background
    )  # fmt: skip
    try:
        assert process.stdout
        address = process.stdout.readline().strip()
        assert address.startswith("http://127.0.0.1:")
        with urllib.request.urlopen(f"{address}api/health", timeout=30) as answer:
            assert answer.status == 200 and "server" not in answer.headers
    finally:
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in errors and "WARNING" in errors


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, int]]:
    """A server that waits 0.3 seconds for a request, answers 204, and takes a second for `/slow`."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(1.0 if scope["path"] == "/slow" else 0)
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    monkeypatch.setattr(guard, "HEADER_SECONDS", 0.3)
    server = uvicorn.Server(uvicorn.Config(app, http=guard.HeaderTimeout, log_level="error", lifespan="off"))
    with serve.listen("127.0.0.1", 0) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        yield listener.getsockname()[:2]
        server.should_exit = True
        thread.join(30)
    assert not thread.is_alive()


@pytest.mark.parametrize("first", [b"", b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"])
def test_a_connection_that_drips_its_headers_is_closed(first: bytes, address: tuple[str, int]) -> None:
    with socket.create_connection(address, timeout=30) as slow:
        if first:  # an answer does not buy the next request more time
            slow.sendall(first)
            assert slow.recv(1000).startswith(b"HTTP/1.1 204")
        slow.sendall(b"GET / HTTP/1.1\r\nHost: 127.0")
        assert slow.recv(1000) == b""  # closed by the server; without a limit this would run into the timeout


def test_an_answer_under_way_is_not_cut_off(address: tuple[str, int]) -> None:
    with socket.create_connection(address, timeout=30) as both:
        both.sendall(b"".join(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode() for path in ("/", "/slow")))
        said = b""
        while chunk := both.recv(1000):
            said += chunk
    assert said.count(b"HTTP/1.1 204") == 2
