"""Small generated images and tiny runs that many tests share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

DOMAINS = ("clinic", "field", "studio")
CLASSES = ("circle", "cross", "square")


def draw_shape(kind: str, rng: np.random.Generator, size: int = 40) -> np.ndarray:
    """A bright shape at a random place on dim noise: (size, size, 3) uint8."""
    image = rng.integers(0, 60, (size, size, 3))
    y, x = np.mgrid[:size, :size] - rng.integers(14, size - 14, 2)[:, None, None]
    inside = {
        "circle": x**2 + y**2 < 90,
        "cross": (abs(x) < 3) | (abs(y) < 3),
        "square": (abs(x) < 9) & (abs(y) < 9),
    }[kind]
    image[inside] += rng.integers(120, 190, 3)
    return image.astype(np.uint8)


def write_images(root: Path, per_class: int = 10) -> Path:
    for d, domain in enumerate(DOMAINS):
        rng = np.random.default_rng(d)
        for kind in CLASSES:
            folder = root / domain / kind
            folder.mkdir(parents=True)
            for i in range(per_class):
                Image.fromarray(draw_shape(kind, rng)).save(folder / f"{i:02d}.png")
    return root


@pytest.fixture(scope="session")
def image_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`domain/class/*.png`: 3 domains x 3 classes x 10 images of 40 x 40."""
    return write_images(tmp_path_factory.mktemp("images") / "photos")


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tests never touch the user's cache."""
    patch = pytest.MonkeyPatch()
    patch.setenv("PATCHGEN_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="session")
def tiny_settings(image_folder: Path) -> dict[str, object]:
    return {
        "data": str(image_folder), "unseen": "studio", "backbone": "tiny", "image_size": 56, "steps": 5,
        "eval_every": 2, "batch_per_domain": 4, "val_images": 4, "lr": 1e-3, "swad": True,
    }  # fmt: skip


@pytest.fixture(scope="session")
def tiny_run(tiny_settings: dict[str, object], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., object]:
    """`tiny_run(method="patchgen", **settings)` trains (once) and returns the run folder."""
    from patchgen.config import Config
    from patchgen.train.trainer import train

    out = tmp_path_factory.mktemp("runs")

    def make(method: str = "patchgen", **settings: object) -> object:
        return train(Config(**{**tiny_settings, "method": method, **settings}), out, quiet=True)

    return make
