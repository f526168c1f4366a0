"""The viewer shows no path, survives its decoder, holds no connection, and logs no traceback."""

import asyncio
import os
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fastapi", reason="the viewer needs patchgen[viewer]")
import uvicorn  # noqa: E402
from fastapi.testclient import TestClient  # noqa: E402

from patchgen.common.child_process import child_environment, python  # noqa: E402
from patchgen.viewer import Limits  # noqa: E402
from patchgen.viewer.app import create_app  # noqa: E402
from patchgen.viewer.guard import Guard, HeaderTimeout, Hosts  # noqa: E402
from patchgen.viewer.library import Library, find_items, hide_paths  # noqa: E402


def test_errors_name_no_path(model_folder: Path, tmp_path: Path) -> None:
    (model_folder / "model.safetensors").write_bytes(b"damaged")
    with TestClient(create_app(Library(find_items([model_folder]))), base_url="http://127.0.0.1:8000") as client:
        answer = client.get("/api/models/1")
    assert answer.status_code == 422 and "model.safetensors has sha256" in answer.text
    assert str(tmp_path) not in answer.text and "/tmp/" not in answer.text


@pytest.mark.parametrize(("text", "shown"), [
    ("no file '/a/b c/d.txt', nor /x/y/z: but 3/4 and a/b", "no file 'd.txt', nor z: but 3/4 and a/b"),
    ("cannot read /home/Ann Lee, MD/it's mine/x.png: damaged", "cannot read x.png: damaged"),
    (r"cannot read C:\Users\Ann Lee\x.png", "cannot read x.png"),
    ("see https://example.org/a/b", "see https://example.org/a/b"),
])  # fmt: skip
def test_absolute_paths_are_hidden_with_their_spaces(text: str, shown: str) -> None:
    assert hide_paths(text) == shown


def test_a_picture_that_hangs_or_crashes_its_decoder_is_refused_alone(image_folder: Path) -> None:
    from patchgen.data.images import UnreadableImage, decode
    from patchgen.draw.overlay import original
    from patchgen.viewer.uploads import Decoder

    file = image_folder / "clinic" / "circle" / "00.png"
    decoder, data = Decoder(), file.read_bytes()
    assert np.array_equal(decoder.decode(data, 28), decode(file, 28))
    for number, reason in ((signal.SIGSTOP, "no answer within 0.5 s"), (signal.SIGSEGV, "a crash with exit code -11")):
        assert np.array_equal(decoder.decode(data), original(file)) and decoder._child is not None
        decoder._child.seconds = 0.5
        decoder._child.process.send_signal(number)
        with pytest.raises(UnreadableImage, match=reason):
            decoder.decode(data, 28)
    with pytest.raises(UnreadableImage, match="cannot identify image file"):
        decoder.decode(b"no image", 28)


def test_a_client_that_does_not_read_is_cut() -> None:
    ended = threading.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        try:
            for _ in range(200):
                await send({"type": "http.response.body", "body": b"x" * (1 << 20), "more_body": True})
        finally:
            ended.set()

    listener = socket.create_server(("127.0.0.1", 0))
    guard: Any = Guard(app, Hosts(), Limits(send_seconds=1.0))
    server = uvicorn.Server(uvicorn.Config(guard, http=HeaderTimeout, lifespan="off", log_level="critical"))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])), daemon=True)
    thread.start()
    with socket.create_connection(listener.getsockname()) as reader:
        reader.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert ended.wait(20)
        time.sleep(0.5)
        got = 0
        try:
            while part := reader.recv(1 << 20):
                got += len(part)
        except ConnectionResetError:
            pass
        assert got < 100 << 20
    server.should_exit = True
    thread.join(20)


@pytest.mark.slow
def test_without_descriptors_the_log_has_no_traceback(fitted_model: Path) -> None:
    code = (
        "import resource, sys\nresource.setrlimit(resource.RLIMIT_NOFILE, (60, 60))\n"
        "from patchgen.cli import main\nsys.exit(main(sys.argv[1:]))"
    )
    command = python("-c", code, "serve", str(fitted_model), "--port", "0")
    process = subprocess.Popen(
        command, env=child_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None and process.stderr is not None
        address = process.stdout.readline().strip()
        port = int(address.rstrip("/").rpartition(":")[2])
        crowd = [socket.create_connection(("127.0.0.1", port)) for _ in range(80)]
        time.sleep(2)
        for one in crowd:
            one.close()
        time.sleep(1.5)  # the server pauses a second where it can accept no connection
        with urllib.request.urlopen(f"{address}api/health", timeout=20) as answer:
            assert answer.status == 200
    finally:
        process.send_signal(signal.SIGINT)
        _, log = process.communicate(timeout=30)
    assert "Traceback" not in log and 'File "' not in log, log
    assert 1 <= log.count("Too many open files") <= 5 and os.path.basename(__file__) not in log
