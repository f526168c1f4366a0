"""A viewer over two tiny runs, and files that it must refuse."""

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import forged
import numpy as np
import pytest
from PIL import Image

pytest.importorskip("fastapi", reason="the viewer needs patchgen[viewer]")


def png(seed: int = 0, size: tuple[int, int] = (40, 30)) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


BAD_FILES = {
    "empty.png": (b"", "empty (0 bytes)"),
    "text.jpg": (b"hello, I am no image", "not an image of a known format"),
    "cut.png": (png()[:900], "truncated"),
    "huge.png": (forged.png(20_000, 5_000, 64), "image too large (20000 x 5000 pixels"),
    "bomb.png": (forged.png(60_000, 60_000, 64), "image too large"),
    "page.svg": (b"<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>", "not an image"),
    "shell.eps": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image of a known format"),
}


@pytest.fixture(scope="session")
def run_folders(tiny_run: Callable[..., Any]) -> list[Path]:
    return [tiny_run("patchgen").path, tiny_run("lp-ln").path]


@pytest.fixture(scope="session")
def make_client(run_folders: list[Path]) -> Iterator[Callable[..., Any]]:
    """`make_client(limits, raise_server_exceptions)`: a test client of a viewer over both runs."""
    from fastapi.testclient import TestClient

    from patchgen.viewer import Limits
    from patchgen.viewer.app import create_app
    from patchgen.viewer.library import Library, find_items

    opened: list[Any] = []

    def make(library: Any = None, defects: bool = True, **limits: Any) -> Any:
        app = create_app(library or Library(find_items(run_folders)), limits=Limits(**limits))
        client = TestClient(app, base_url="http://127.0.0.1:8000", raise_server_exceptions=defects)
        opened.append(client)
        return client.__enter__()

    yield make
    for client in opened:
        client.__exit__(None, None, None)


@pytest.fixture(scope="session")
def client(make_client: Callable[..., Any]) -> Any:
    return make_client()
