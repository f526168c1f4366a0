"""A linear probe without augmentation: features of the frozen backbone kept in memory, against computed at each step.

    cost = measure(images=48)
    cost["ratio"]["run"], cost["ratio"]["step"]      # of a run of `passes` over the images; of a step that finds them

Both train the same head by `Reader`, with room for features and without. The run's ratio is put together from measured
seconds: `passes` passes without, against one that fills the memory and the others that read it.
"""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from benchmarks.common import Line, at_least_one, cpu_seconds, report, write_images
from patchgen.config import Config
from patchgen.data.images import ImageStore
from patchgen.methods import make_method
from patchgen.methods.build import build_on
from patchgen.model.backbone import load_architecture
from patchgen.model.device import SingleDevice
from patchgen.train.evaluate import Reader
from patchgen.train.loop import make_optimizer

TARGET = 20.0  # the smallest ratio wanted of a run
PASSES = 80  # over the training images: 5,001 steps of 96 on PACS's 6,000 of three source domains
SMALL = {"source": "tiny", "image_size": 28, "images": 8}
BATCH, CLASSES = 24, 7


def measure(source: str = "dinov2-small", *, image_size: int = 112, images: int = 48) -> dict[str, Any]:
    """Time three passes over the images: without memory, filling it, and reading it.

    Args:
        source: A backbone; a name gets random weights.
        image_size: Pixels of the square images.
        images: Generated JPEG files.
    """
    at_least_one(images=images)
    with tempfile.TemporaryDirectory() as folder:
        probe = Probe(source, image_size, write_images(Path(folder), images, image_size), Path(folder) / "cache")
        probe.reader.store.load(np.arange(images))  # decoded before: pixels are kept either way
        seconds = {"without": probe.one_pass(room=0)}
        report(f"without memory {seconds['without']:.2f} s a pass")
        seconds["filling"] = probe.one_pass(room=1 << 30)
        report(f"filling it {seconds['filling']:.2f} s")
        seconds["reading"] = probe.one_pass(room=1 << 30)
        report(f"reading it {seconds['reading']:.4f} s")
    return {
        "backbone": source, "image_size": image_size, "images": images, "passes": PASSES, "seconds": seconds,
        "forwards": probe.forwards, "ratio": ratios(seconds, PASSES),
        "reached": ratios(seconds, PASSES)["run"] >= TARGET,
    }  # fmt: skip


def lines(result: dict[str, Any]) -> list[Line]:
    ratio = result["ratio"]
    what = f"LP, no augmentation, {result['passes']} passes: without / with kept features"
    return [
        (what, f"{ratio['run']:.0f}", f">= {TARGET:g}", result["reached"]),
        ("a step that finds its features", f"{ratio['step']:.0f}"),
    ]


def ratios(seconds: dict[str, float], passes: int) -> dict[str, float]:
    """Of a run of so many passes, and of a step that finds its features."""
    kept = seconds["filling"] + (passes - 1) * seconds["reading"]
    return {"run": passes * seconds["without"] / kept, "step": seconds["without"] / seconds["reading"]}


class Probe:
    """A head on a frozen backbone; `forwards` counts the images that the backbone reads in each pass."""

    def __init__(self, source: str, image_size: int, files: list[Path], cache: Path) -> None:
        config = Config("random", "none", method="lp", image_size=image_size, augment=False)
        backbone, method = load_architecture(source, image_size), make_method(config)
        self.model = build_on(backbone, config, method, CLASSES)
        self.optimizer = make_optimizer(self.model, method)
        self.reader = Reader(SingleDevice("cpu"), self.model, ImageStore(files, image_size, cache))
        self.rows = np.arange(len(files))
        self.forwards: list[int] = []
        backbone.register_forward_hook(self._count)

    def one_pass(self, room: int) -> float:
        """Processor seconds of a pass with so many bytes for features."""
        self.reader.room = room
        self.forwards.append(0)
        return cpu_seconds(self._train)

    def _train(self) -> None:
        for first in range(0, len(self.rows), BATCH):
            rows = self.rows[first : first + BATCH]
            loss = functional.cross_entropy(self.model(self.reader(rows)).logits, torch.from_numpy(rows % CLASSES))
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()

    def _count(self, _: Any, inputs: tuple[torch.Tensor, ...], __: Any) -> None:
        self.forwards[-1] += len(inputs[0])
