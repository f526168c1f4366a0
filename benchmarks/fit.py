"""A whole `fit` of four sites, against five trainings of the plain loop.

The plain loop (`benchmarks/fold.py`) trains the same five models: each site left out once, then all. A `fit` also reads
every image, calibrates the model and compares nothing, which is counted against it. Seconds are the processor's.
"""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.common import Line, report
from benchmarks.fold import DOMAINS, PlainLoop, image_cache, local_copy, schedule, timed, write_domains
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
    """Train five models of generated images both ways.

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
            backbone=local_copy(source, folder), image_size=image_size, steps=steps, batch_per_domain=per_domain,
            eval_every=every,
        )  # fmt: skip
        with image_cache(folder / "cache"):
            ours = timed(lambda: fit(config, folder / "runs", quiet=True))["cpu"]
        plain = timed(lambda: _plain(config))["cpu"]
    report(f"ours {ours:.1f} s, plain loop {plain:.1f} s")
    return {
        "backbone": source, "image_size": image_size, "images": DOMAINS * images, "steps": steps, "eval_every": every,
        "seconds": {"ours": ours, "plain": plain}, "ratio": plain / ours, "reached": plain / ours >= TARGET,
    }  # fmt: skip


def lines(result: dict[str, Any]) -> list[Line]:
    what = f"fit of {DOMAINS} sites, {result['images']} images, {result['steps']} steps each: plain loop / ours"
    return [(what, f"{result['ratio']:.2f}", f">= {TARGET:g}", result["reached"])]


def _plain(config: Config) -> None:
    table = make_fold(config).table
    for unseen in (*table.domains, NO_DOMAIN):
        own = replace(config, unseen=unseen)
        PlainLoop(own, make_fold(own)).run()
