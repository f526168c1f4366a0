"""A whole fold, trained and scored: `train` against a plain loop with the host projects' habits.

    cost = measure()
    cost["policies"]["PACS, DomainBed"]["ratio"]       # how many times longer the plain loop takes
    cost["policies"]["PACS, DomainBed"]["counts"]      # images that each passed through the model

The plain loop trains the same classifier (LP+LN) on the same backbone, splits and batch sizes, and does what DomainBed
and its descendants do: each sample is decoded and augmented by Pillow whenever it is drawn, the loss is read at every
step, and every evaluation scores every split of every domain, the unseen one included, through loaders that are built
for it. Its loaders have no worker processes, whose start would only cost it time here. Ours starts on an empty cache.

How much that saves depends on how often a run is evaluated, so each policy below is measured.
"""

import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import tyro
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from benchmarks.common import Line, report, write_images
from benchmarks.input import plain_batch
from patchgen.config import Config
from patchgen.methods import make_method
from patchgen.methods.build import build_model
from patchgen.model.backbone import BACKBONES, load_architecture
from patchgen.model.classifier import Classifier
from patchgen.model.generic import quiet_loading
from patchgen.tasks import Fold, make_fold
from patchgen.train.lifecycle import train
from patchgen.train.loop import make_optimizer

TARGET = 2.0  # the smallest ratio wanted
DOMAINS, CLASSES = 4, 3
EVAL_BATCH = 64  # DomainBed's
EVALUATIONS = 3  # of a measured run; its steps follow from the policy


class Policy(NamedTuple):
    """Images that a run trains on for each evaluation, as a share of the data, and how many files to measure it on."""

    share: float
    images: int  # of each domain
    val_images: int | None = None  # of each source domain that ours scores; all of the held-out ones when left out


POLICIES = {  # steps between evaluations x images a step / images of the data
    "PACS, DomainBed": Policy(300 * 96 / 9_991, 24),
    "PACS, SWAD": Policy(100 * 96 / 9_991, 48),
    "VLCS, SWAD": Policy(50 * 96 / 10_729, 72),
    "DomainNet, DomainBed": Policy(1_000 * 160 / 586_575, 96),
    "PACS, preset small": Policy(25 * 36 / 9_991, 100, val_images=round(100 * 400 / 9_991)),
}


SMALL = {"policies": {"tiny": Policy(0.1, 10)}, "source": "tiny", "image_size": 28, "pixels": 32}


def measure(
    source: str = "dinov2-small",
    *,
    image_size: int = 112,
    pixels: int = 227,
    per_domain: int = 8,
    policies: Annotated[Mapping[str, Policy], tyro.conf.Suppress] = POLICIES,
) -> dict[str, Any]:
    """Train one fold of generated images twice with the settings of each policy.

    Args:
        source: A backbone; a name gets random weights.
        image_size: Pixels of the square images that the model reads.
        pixels: Side of the generated JPEG files.
        per_domain: Images of each source domain in a step.
    """
    result = {}
    for name, policy in policies.items():
        report(f"{name}:")
        result[name] = _measure_fold(source, policy, image_size, pixels, per_domain)
    return {"policies": result}


def lines(result: dict[str, Any]) -> list[Line]:
    rows: list[Line] = []
    for name, each in result["policies"].items():
        ours, plain = each["counts"]["ours"], each["counts"]["plain"]
        what = (
            f"evaluated as often as {name}: plain loop / ours ({plain['trained']:,} images trained on, "
            f"{plain['scored']:,} / {ours['scored']:,} scored)"
        )
        value = f"{each['ratio']:.2f} (arithmetic alone {each['arithmetic']:.2f})"
        rows.append((what, value, f">= {TARGET:g}", each["reached"]))
    return rows


def _measure_fold(source: str, policy: Policy, image_size: int, pixels: int, per_domain: int) -> dict[str, Any]:
    share, images, val_images = policy
    steps, every = schedule(share * DOMAINS * images / ((DOMAINS - 1) * per_domain))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = write_domains(folder / "data", images, pixels)
        config = Config(
            str(data), "d0", method="lp-ln", backbone=local_copy(source, folder), image_size=image_size, steps=steps,
            batch_per_domain=per_domain, eval_every=every, val_images=val_images,
        )  # fmt: skip
        seconds, counts = {}, {}
        with image_cache(folder / "cache"):
            seconds["ours"] = timed(lambda: train(config, folder / "runs", quiet=True))
        counts["ours"] = our_counts(config, make_fold(config))
        report(f"ours {seconds['ours']['wall']:.1f} s")
        whole = replace(config, val_images=None)
        loop = PlainLoop(whole, make_fold(whole))
        seconds["plain"] = timed(loop.run)
        counts["plain"] = {"trained": loop.trained, "scored": loop.scored}
        report(f"plain loop {seconds['plain']['wall']:.1f} s")
    ratio = seconds["plain"]["cpu"] / seconds["ours"]["cpu"]
    # if passes through the backbone were all that costs: a trained image passes it twice, there and back
    passes = {name: 2 * each["trained"] + each["scored"] for name, each in counts.items()}
    return {
        "backbone": source, "image_size": image_size, "images": DOMAINS * images, "steps": steps, "eval_every": every,
        "seconds": seconds, "counts": counts, "ratio": ratio, "arithmetic": passes["plain"] / passes["ours"],
        "ratio_of_wall": seconds["plain"]["wall"] / seconds["ours"]["wall"], "reached": ratio >= TARGET,
    }  # fmt: skip


def schedule(steps_each: float) -> tuple[int, int]:
    """Steps, and steps between evaluations, of a run with `EVALUATIONS` and about `steps_each` steps for each.

    The first evaluation comes at step 0, which in a short run must not count for less than in a long one.
    """
    every = max(1, round((EVALUATIONS * steps_each - 1) / (EVALUATIONS - 1)))
    return (EVALUATIONS - 1) * every + 1, every


def evaluations(steps: int, every: int) -> int:
    """How often a run is evaluated: at step 0, at every such step, and at the last."""
    return sum(step % every == 0 or step == steps - 1 for step in range(steps))


def our_counts(config: Config, fold: Fold) -> dict[str, int]:
    """Images that `train` passes through the model: validation each time, the unseen domain once."""
    validation = sum(map(len, fold.validation.values()))
    unseen = sum(map(len, fold.test.values()))
    trained = config.steps * config.batch_per_domain * len(fold.train)
    return {"trained": trained, "scored": evaluations(config.steps, config.eval_every) * validation + unseen}


def write_domains(folder: Path, images: int, pixels: int) -> Path:
    """`images` generated JPEGs for each of `DOMAINS` domains, dealt to `CLASSES` classes."""
    for domain in range(DOMAINS):
        for label in range(CLASSES):
            place, count = folder / f"d{domain}" / f"c{label}", len(range(label, images, CLASSES))
            write_images(place, count, pixels, seed=DOMAINS * label + domain)
    return folder


# The plain loop


class Samples(Dataset[tuple[Tensor, int]]):
    """Rows of a split, decoded one at a time and resized."""

    def __init__(self, fold: Fold, rows: np.ndarray, size: int) -> None:
        self.fold, self.rows, self.size = fold, rows, size

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        row = int(self.rows[i])
        return plain_batch([self.fold.table.file(row)], self.size, None)[0], int(self.fold.target[row])


@dataclass
class PlainLoop:
    """The host projects' loop; `trained` and `scored` count the images that it passes through the model."""

    config: Config
    fold: Fold
    trained: int = 0
    scored: int = 0
    accuracy: dict[str, float] = field(default_factory=dict)  # of each split at the last evaluation
    splits: dict[str, np.ndarray] | None = None  # to score; all when left out

    def run(self) -> Classifier:
        method = make_method(self.config)
        self.model = build_model(self.config, method, len(self.fold.classes), lambda _: None)
        optimizer, source = make_optimizer(self.model, method), random.Random(self.config.seed)
        splits = every_split(self.fold) if self.splits is None else self.splits
        for step in range(self.config.steps):
            images, labels = self._batch(source)
            loss = functional.cross_entropy(self.model(images).logits, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss.item()
            self.trained += len(images)
            if step % self.config.eval_every == 0 or step == self.config.steps - 1:
                self.accuracy = {name: self.score(rows) for name, rows in splits.items()}
        return self.model

    def _batch(self, source: random.Random) -> tuple[Tensor, Tensor]:
        drawn = [source.choices(rows.tolist(), k=self.config.batch_per_domain) for rows in self.fold.train.values()]
        rows = [row for part in drawn for row in part]
        images = plain_batch([self.fold.table.file(row) for row in rows], self.config.image_size, source)
        return images, torch.from_numpy(self.fold.target[rows])

    @torch.no_grad()
    def score(self, rows: np.ndarray) -> float:
        right = 0
        for images, labels in DataLoader(Samples(self.fold, rows, self.config.image_size), EVAL_BATCH):
            right += int((self.model(images).logits.argmax(1) == labels).sum())
            self.scored += len(images)
        return right / max(1, len(rows))


def every_split(fold: Fold) -> dict[str, np.ndarray]:
    """What DomainBed scores each time: the training and the held-out part of every domain."""
    training = {f"{fold.table.domains[domain]} in": rows for domain, rows in fold.train.items()}
    held_out = {f"{name} out": rows for name, rows in fold.validation.items()}
    return training | held_out | {f"{fold.unseen} {part}": rows for part, rows in fold.test.items()}


def local_copy(source: str, folder: Path) -> str:
    """A named architecture with random weights becomes a folder, which both loops read."""
    if source not in BACKBONES or source == "tiny":
        return source
    with quiet_loading():
        load_architecture(source).model.save_pretrained(folder / "backbone")
    return str(folder / "backbone")


def timed(work: Callable[[], object]) -> dict[str, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}


@contextmanager
def image_cache(folder: Path) -> Iterator[None]:
    """An empty cache of decoded images for a while."""
    before = os.environ.get("PATCHGEN_CACHE")
    os.environ["PATCHGEN_CACHE"] = str(folder)
    try:
        yield
    finally:
        os.environ.pop("PATCHGEN_CACHE")
        if before is not None:
            os.environ["PATCHGEN_CACHE"] = before
