"""Peak memory of `predict` over ever more images, and of `slide` over ever more slides: it should not grow.

    result = measure()
    result["images"]["ratio"]            # most bytes with the largest number / with the smallest

Each is a command in a process of its own, whose largest resident memory the system tells. Images are small generated
JPEG files, slides are generated pyramids, and the model is an untrained one: what is asked is what is kept per image.
"""

import os
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import Line, at_least_one, report, write_images
from benchmarks.fold import write_domains
from patchgen.common.child_process import child_environment, python
from patchgen.config import Config
from patchgen.train.lifecycle import train

TARGET = 1.1
SMALL = {"images": (4, 8), "slides": (1, 2), "pixels": 32}
UNIT = 1024 if os.uname().sysname == "Linux" else 1  # of ru_maxrss
SIDE = 512  # of a generated slide


def measure(
    *, images: tuple[int, ...] = (1_000, 5_000, 20_000), slides: tuple[int, ...] = (1, 5, 20), pixels: int = 64
) -> dict[str, Any]:
    """Peak bytes of each command at each size.

    Args:
        images: Numbers of images for `predict`.
        slides: Numbers of slides for `slide`; left out where OpenSlide is not installed.
        pixels: Side of the generated images.
    """
    for counts in (images, slides):
        at_least_one(**{f"count {i}": count for i, count in enumerate(counts)})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = write_domains(folder / "data", 6, 32)
        config = Config(
            str(data), "d0", method="patchgen-select", backbone="tiny", image_size=56, steps=1, batch_per_domain=2
        )
        run = train(config, folder / "runs", quiet=True).path
        result = {"images": _grow(images, lambda count: _predict(run, folder, count, pixels))}
        if find_spec("openslide") is not None:
            result["slides"] = _grow(slides, lambda count: _slide(run, folder, count))
    return result


def lines(result: dict[str, Any]) -> list[Line]:
    return [
        (
            f"peak memory over {what}: {row['counts'][0]:,} to {row['counts'][-1]:,}, "
            + ", ".join(f"{peak / 1e6:.0f}" for peak in row["bytes"])
            + " MB",
            f"{row['ratio']:.2f}", f"<= {TARGET}", row["ratio"] <= TARGET,
        )
        for what, row in result.items()
    ]  # fmt: skip


def peak_bytes(words: Sequence[str]) -> int:
    """Largest resident memory of a command of its own process.

    Raises:
        ValueError: it fails; the text is what it printed.
    """
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            python("-m", "patchgen", *words), stdout=subprocess.DEVNULL, stderr=said, env=child_environment()
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            said.seek(0)
            raise ValueError(f"patchgen {words[0]} failed: {said.read().decode(errors='replace')[-500:]}")
    return usage.ru_maxrss * UNIT


def _grow(counts: Sequence[int], work: Callable[[int], int]) -> dict[str, Any]:
    peaks = []
    for count in counts:
        peaks.append(work(count))
        report(f"{count:,}: {peaks[-1] / 1e6:.0f} MB")
    return {"counts": list(counts), "bytes": peaks, "ratio": peaks[-1] / peaks[0]}


def _predict(run: Path, folder: Path, count: int, pixels: int) -> int:
    place = folder / f"images-{count}"
    write_images(place, count, pixels)
    return peak_bytes(["predict", str(run), str(place), "--csv", str(folder / f"{count}.csv")])


def _slide(run: Path, folder: Path, count: int) -> int:
    from patchgen.slides.heatmap import write_pyramid

    place = folder / f"slides-{count}"
    place.mkdir()
    for number in range(count):
        pixels = np.random.default_rng(number).integers(100, 180, (SIDE, SIDE, 3)).astype(np.uint8)
        write_pyramid(place / f"{number:03}.tif", pixels, (0.5, 0.5))
    out = str(folder / f"maps-{count}")
    return peak_bytes(
        ["slide", str(run), str(place), "--out", out, "--tile", "32", "--mpp", "0.5", "--min-tissue", "0"]
    )
