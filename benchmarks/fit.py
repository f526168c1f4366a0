"""A whole `fit` of four sites, against the plain loop and against itself without each thing that saves work.

    found = measure()
    found["ratio"]                              # how many times longer five trainings of the plain loop take
    found["without"]["shared files"]            # how many times longer ours takes without it

The plain loop (`benchmarks/fold.py`) trains the same five models: each site left out once, then all. A `fit` also reads
every image, calibrates the model and compares nothing, which is counted against it. Seconds are the processor's.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.common import Line, report
from benchmarks.fold import DOMAINS, PlainLoop, at_hand, image_cache, schedule, timed, write_domains
from benchmarks.start import children_seconds
from patchgen.config import NO_DOMAIN, Config
from patchgen.fit.procedure import fit
from patchgen.tasks import make_fold

TARGET = 2.0
SMALL = {"source": "tiny", "image_size": 28, "pixels": 32, "images": 10, "share": 0.1}


def measure(
    source: str = "dinov2-small",
    *,
    image_size: int = 84,
    pixels: int = 227,
    images: int = 12,
    share: float = 100 * 96 / 9_991,
    per_domain: int = 4,
) -> dict[str, Any]:
    """Train five models of generated images in each way.

    Args:
        source: A backbone; a name gets random weights.
        image_size: Pixels of the square images that the model reads.
        pixels: Side of the generated JPEG files.
        images: Files of each of four sites.
        share: Images trained on for each evaluation / images of the data; SWAD's on PACS when left out.
        per_domain: Images of each site in a step.
    """
    steps, every = schedule(share * DOMAINS * images / ((DOMAINS - 1) * per_domain))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = Config(
            str(write_domains(folder / "data", images, pixels)), NO_DOMAIN, method="lp-ln",
            backbone=at_hand(source, folder), image_size=image_size, steps=steps, batch_per_domain=per_domain,
            eval_every=every,
        )  # fmt: skip
        seconds = {}
        for way in WAYS:
            with image_cache(folder / f"cache {way}"), WAYS[way][0]():
                own = replace(config, **WAYS[way][1])
                seconds[way] = timed(lambda own=own, way=way: fit(own, folder / f"runs {way}", quiet=True))["cpu"]
            report(f"{way}: {seconds[way]:.1f} s")
        start = _start_seconds() * DOMAINS  # the first training has to be started in any case
        plain = timed(lambda: _plain(config))["cpu"]
        report(f"plain loop: {plain:.1f} s")
    ours = seconds.pop(WHOLE)
    without = {way: taken / ours for way, taken in seconds.items()} | {"one start": (ours + start) / ours}
    return {
        "backbone": source, "image_size": image_size, "images": DOMAINS * images, "steps": steps, "eval_every": every,
        "seconds": {"ours": ours, "plain": plain, **seconds}, "ratio": plain / ours, "without": without,
        "reached": plain / ours >= TARGET,
    }  # fmt: skip


def lines(found: dict[str, Any]) -> list[Line]:
    about = f"fit of {DOMAINS} sites, {found['images']} images, {found['steps']} steps each"
    rows: list[Line] = [(f"{about}: plain loop / ours", f"{found['ratio']:.2f}", f">= {TARGET:g}", found["reached"])]
    rows += [
        (f"{about}: without {NAMES[way]}, times as long", f"{value:.2f}") for way, value in found["without"].items()
    ]
    return rows


@contextmanager
def unshared() -> Iterator[None]:
    """Each training of a fit reads its table, images and weights for itself."""
    with patch("patchgen.fit.procedure.process_cache", nullcontext):
        yield


def _plain(config: Config) -> None:
    table = make_fold(config).table
    for unseen in (*table.domains, NO_DOMAIN):
        own = replace(config, unseen=unseen)
        PlainLoop(own, make_fold(own)).run()


def _start_seconds() -> float:
    """Processor seconds of a process that imports what a training needs, and ends."""
    return children_seconds("-c", "import patchgen.train.fold")


WHOLE = "as it is"
WAYS: dict[str, tuple[Any, dict[str, Any]]] = {  # what surrounds it, and settings
    WHOLE: (nullcontext, {}),
    "shared files": (unshared, {}),
    "cached pixels": (nullcontext, {"cache": False}),
}
NAMES = {
    "shared files": "tables, hashed images and weights that trainings share",
    "cached pixels": "the cache of decoded pixels",
    "one start": "one start of Python and torch for all trainings",
}
