"""Small generated images and tiny runs that many tests share."""

import itertools
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils._python_dispatch import TorchDispatchMode

# Some virtual machines announce AMX and stop a process that uses it; oneDNN reads this before its first product.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

pytest_plugins = ("untrained_runs", "sweep_jobs")  # fixtures that several packages share

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
    from patchgen.train.lifecycle import train

    out = tmp_path_factory.mktemp("runs")

    def make(method: str = "patchgen", **settings: object) -> object:
        return train(Config(**{**tiny_settings, "method": method, **settings}), out, quiet=True)

    return make


def interrupt(place: Any, name: str, count: int, work: Callable[[], object]) -> None:
    """Do the work until the `count`-th call of a function, which is interrupted."""
    whole, calls = getattr(place, name), itertools.count(1)

    def breaks(*args: Any, **named: Any) -> Any:
        if next(calls) == count:
            raise KeyboardInterrupt
        return whole(*args, **named)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(place, name, breaks)
        work()


class Asks(TorchDispatchMode):
    """Notes who needs a value, or a shape that depends on values: on a device that makes a step wait.

    What is on the CPU whatever the device is left out: the optimisers' counters, single random draws, and the range
    check of `one_hot`, which a GPU does not make.
    """

    HOST = ("torch/optim/", "torch/distributions/", "if torch.rand(())", "float(Beta(", "F.one_hot(")

    def __init__(self) -> None:
        super().__init__()
        self.who: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        asks = func in (aten.nonzero.default, aten._unique2.default, aten._local_scalar_dense.default)
        by_mask = func is aten.index.Tensor and any(i is not None and i.dtype == torch.bool for i in args[1])
        if asks or by_mask:
            stack = traceback.format_stack()
            if not any(place in frame for frame in stack for place in self.HOST):
                self.who.append(f"{func}: " + [frame for frame in stack if "/src/patchgen/" in frame][-1])
        return func(*args, **(kwargs or {}))


@pytest.fixture
def asks() -> Asks:
    """`with asks: ...`, then `asks.who`"""
    return Asks()
