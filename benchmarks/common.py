"""What the benchmarks share: clocks, checks, generated data, and the lines of their table."""

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.nn.functional import normalize

from patchgen.config import Config
from patchgen.diagnose.cost import Step, make_step
from patchgen.train.loop import make_optimizer

# measured and value, and where there is a target: the target and whether it is reached, if that can be said
Line = tuple[str, str] | tuple[str, str, str] | tuple[str, str, str, bool]


def device() -> torch.device:
    return torch.accelerator.current_accelerator() or torch.device("cpu")


def trained_step(method: str, source: str, image_size: int, **settings: Any) -> Step:
    """A step of a method as in the trainer, on a backbone of its own."""
    config = Config("random", "none", method=method, backbone=source, image_size=image_size, **settings)
    step = make_step(config)
    step.model.to(device())
    step.method.to(device())
    step.optimizer = make_optimizer(step.model, step.method)
    return step


def now() -> float:
    if device().type != "cpu":  # accelerators work asynchronously
        torch.accelerator.synchronize()
    return time.perf_counter()


LARGEST_SHARE = 0.15  # of the processors that others may take before a benchmark is inconclusive
STAT = Path("/proc/stat")


class Others:
    """What programs other than this one, and its children, take of the processors while a benchmark runs.

    others = Others()
    others.share()          # 0 to 1 since then; None where the system does not tell
    """

    def __init__(self) -> None:
        self.start = self._now()

    def share(self) -> float | None:
        now = self._now()
        if self.start is None or now is None or now[0] <= self.start[0]:
            return None
        total, busy, own = (later - earlier for later, earlier in zip(now, self.start, strict=True))
        return min(1.0, max(0.0, (busy - own) / total))

    def verdict(self) -> str:
        """A sentence where they took so much that the figures say little; else an empty text."""
        share = self.share()
        if share is None or share <= LARGEST_SHARE:
            return ""
        return f"inconclusive: other programs took {share:.0%} of the processors meanwhile; measure on an idle machine"

    def _now(self) -> tuple[float, float, float] | None:
        """Seconds of all processors so far: passed, busy, and those of this process and its children."""
        try:
            ticks = [int(word) for word in STAT.read_text().splitlines()[0].split()[1:9]]
        except (OSError, ValueError, IndexError):
            return None
        idle, hertz, own = ticks[3] + ticks[4], os.sysconf("SC_CLK_TCK"), os.times()
        return sum(ticks) / hertz, (sum(ticks) - idle) / hertz, sum(own[:4])


def random_features(points: int, dim: int, clusters: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Unit vectors (N, D) around unit centres (K, D), as L2-normalised image features lie."""
    generator = torch.Generator().manual_seed(0)
    centres = normalize(torch.randn(clusters, dim, generator=generator))
    noise = torch.randn(points, dim, generator=generator) / dim**0.5
    x = normalize(centres[torch.arange(points) % clusters] + 1.5 * noise)
    return x.to(device()), centres.to(device())


def write_images(folder: Path, count: int, pixels: int, seed: int = 0) -> list[Path]:
    """JPEG files as costly to decode as photographs: coarse shapes with some grain, about two bits per pixel."""
    generator, files = np.random.default_rng(seed), []
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(count):
        coarse = Image.fromarray(generator.integers(0, 256, (12, 12, 3), np.uint8)).resize((pixels, pixels))
        grain = generator.normal(0, 6, (pixels, pixels, 1))
        files.append(folder / f"{i:05}.jpg")
        Image.fromarray((np.asarray(coarse) + grain).clip(0, 255).astype(np.uint8)).save(files[-1], quality=85)
    return files


def report(line: str) -> None:
    """Progress, on standard error."""
    print(line, file=sys.stderr, flush=True)


def at_least_one(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")


def cpu_seconds(work: Callable[..., object], *arguments: object) -> float:
    """Processor seconds of all threads: what other programs take from a core is not counted."""
    start = time.process_time()
    work(*arguments)
    return time.process_time() - start


def step_seconds(work: Callable[..., object], *arguments: object) -> float:
    """Processor seconds divided by the number of threads; on an accelerator those of the clock."""
    if device().type == "cpu":
        return cpu_seconds(work, *arguments) / torch.get_num_threads()
    return clock_seconds(work, *arguments)


def clock_seconds(work: Callable[..., object], *arguments: object) -> float:
    start = now()
    work(*arguments)
    return now() - start


def take_turns(
    works: Mapping[str, Callable[[], object]], repeats: int, clock: Callable[[Callable[[], object]], float]
) -> dict[str, list[float]]:
    """Seconds of each work by the clock, in turn; the first turn warms up and is not counted."""
    turns = [{name: clock(work) for name, work in works.items()} for _ in range(repeats + 1)]
    return {name: [turn[name] for turn in turns[1:]] for name in works}


def fit_exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """Slope of the least-squares line through the logarithms: 1 is proportional, 2 is the square."""
    return float(np.polyfit(np.log(sizes), np.log(costs), 1)[0])


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch on one thread for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
