"""How time and memory of the bookkeeping grow with images, classes, sites and runs: exponents of log-log lines.

    measure()["rows"]                   # [{"cost": ..., "over": "images", "exponent": ..., "memory": ...}, ...]

Everything is generated: files of no bytes, run folders that were never trained. Seconds are the processor's, the
fastest of a few; memory is the peak of what Python allocates, in one more pass. Nothing may grow by more than a power
of 1.1.

    python -m benchmarks bookkeeping                        # a minute
    python -m benchmarks bookkeeping --scale 10             # up to 1,000,000 rows and 10,000 runs
"""

import json
import tempfile
import tracemalloc
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import Line, at_least_one, cpu_seconds, fit_exponent, one_thread, report
from patchgen.config import Config, dump_config
from patchgen.data.images import ImageStore
from patchgen.data.splits import write_splits
from patchgen.data.table import fingerprint, read_table, write_csv
from patchgen.report.write import write_report
from patchgen.runs.find import describe, find_runs
from patchgen.runs.folder import run_name
from patchgen.runs.scores import read_runs
from patchgen.tasks import make_fold
from patchgen.tasks.metrics import probability_scores

Work = Callable[[], object]
TARGET = 1.1
KINDS = ("images", "sites", "classes", "runs")
SCALED = ("images", "runs")
SMALL = {"repeats": 1, "scale": 0.01}
LEAST_SECONDS = 2e-4  # below this a clock says nothing
DOMAINS = ("art_painting", "cartoon", "photo", "sketch")
RATES, SEEDS = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2), (1, 2, 3)
CLASS = 7
PER_FOLDER = 1_000  # files


def measure(*, repeats: int = 2, scale: float = 1.0, over: tuple[str, ...] = KINDS) -> dict[str, Any]:
    """Time every cost at every size, and follow its memory at each.

    Args:
        repeats: Passes of each, of which the fastest counts; the smallest size has one more that warms up.
        scale: The largest sizes are this many times 100,000 images and 1,000 runs.
        over: What grows.
    """
    at_least_one(repeats=repeats)
    if odd := set(over) - set(KINDS):
        raise ValueError(f"over must be some of {', '.join(KINDS)}, not {', '.join(sorted(odd))}")
    if not 0 < scale <= 100:
        raise ValueError(f"scale must be above 0 and at most 100, not {scale}")
    rows = []
    with one_thread(), tempfile.TemporaryDirectory() as name:
        for (cost, kind), (make, sizes) in COSTS.items():
            if kind not in over:
                continue
            counts = [max(2 + i, round(size * scale)) if kind in SCALED else size for i, size in enumerate(sizes)]
            works = [make(count, Path(name)) for count in counts]
            works[0]()
            seconds = [max(LEAST_SECONDS, min(cpu_seconds(work) for _ in range(repeats))) for work in works]
            peaks = [peak_bytes(work) for work in works]
            rows.append({
                "cost": cost, "over": kind, "sizes": counts, "seconds": seconds, "bytes": peaks,
                "exponent": fit_exponent(counts, seconds), "memory": fit_exponent(counts, peaks),
            })  # fmt: skip
            report(f"{cost} over {kind}: time {rows[-1]['exponent']:.2f}, memory {rows[-1]['memory']:.2f}")
    return {"repeats": repeats, "rows": rows}


def lines(result: dict[str, Any]) -> list[Line]:
    rows: list[Line] = []
    for row in result["rows"]:
        largest = f"{row['sizes'][-1]:,} {row['over']}: {row['seconds'][-1]:.2g} s, {row['bytes'][-1] / 1e6:.0f} MB"
        what = f"{row['cost']}, {row['sizes'][0]:,} to {largest}; exponents of time and memory"
        reached = max(row["exponent"], row["memory"]) <= TARGET
        rows.append((what, f"{row['exponent']:.2f}, {row['memory']:.2f}", f"<= {TARGET}", reached))
    return rows


def peak_bytes(work: Work) -> int:
    """Most bytes that Python has allocated at once while it works, beyond what there was."""
    tracemalloc.start()
    try:
        work()
        return max(tracemalloc.get_traced_memory()[1], 1)
    finally:
        tracemalloc.stop()


def _read(rows: int, folder: Path) -> Work:
    manifest = write_manifest(folder, rows)
    return lambda: read_table(manifest)


def _fingerprint(rows: int, folder: Path) -> Work:
    table = read_table(write_manifest(folder, rows))
    return lambda: fingerprint(table)


def _fold(rows: int, folder: Path, sites: int = 4, classes: int = 7) -> Work:
    manifest = write_manifest(folder, rows, sites, classes)
    table, config = read_table(manifest), Config(str(manifest), "site 001")

    def work() -> None:
        fold = make_fold(config, table)
        fold.scores(np.ones((classes, classes), dtype=np.int64))
        write_splits(folder / "splits.csv", table, fold.splits)

    return work


def _store(rows: int, folder: Path) -> Work:
    files = read_table(write_manifest(folder, rows)).files
    return lambda: ImageStore(files, 28, folder / "cache")


def _rank(images: int, classes: int) -> Work:
    generator = np.random.default_rng(0)
    probabilities = generator.dirichlet(np.ones(classes), images).astype(np.float32)
    label = np.arange(images) % classes
    return lambda: probability_scores(label, probabilities)


def _runs(count: int, folder: Path, work: Callable[[Path], object]) -> Work:
    place = write_runs(folder, count)
    return lambda: work(place)


def _list(place: Path) -> None:
    for run in find_runs([place]):
        describe(run)


COSTS: dict[tuple[str, str], tuple[Callable[[int, Path], Work], Sequence[int]]] = {
    ("a manifest is read and checked", "images"): (_read, (1_000, 10_000, 100_000)),
    ("fingerprint of the data", "images"): (_fingerprint, (1_000, 10_000, 100_000)),
    ("a fold is made and written", "images"): (_fold, (1_000, 10_000, 100_000)),
    ("the cache of pixels is opened", "images"): (_store, (1_000, 10_000, 100_000)),
    ("a fold of 5,000 images", "sites"): (lambda n, folder: _fold(5_000, folder, sites=n), (4, 14, 50)),
    ("a fold of 5,000 images", "classes"): (lambda n, folder: _fold(5_000, folder, classes=n), (10, 100, 1_000)),
    ("AUROC of 2,000 images", "classes"): (lambda n, _: _rank(2_000, n), (10, 100, 1_000)),
    ("run folders are read", "runs"): (
        lambda n, folder: _runs(n, folder, lambda at: read_runs([at])), (10, 100, 1_000),
    ),
    ("`patchgen runs`", "runs"): (lambda n, folder: _runs(n, folder, _list), (10, 100, 1_000)),
    ("`patchgen report`", "runs"): (
        lambda n, folder: _runs(n, folder, lambda at: write_report([at], folder / "report")), (10, 100, 1_000),
    ),
}  # fmt: skip


# Tables and run folders of any size: what a large project leaves on disk, without its images


def write_manifest(folder: Path, rows: int, sites: int = 4, classes: int = CLASS) -> Path:
    """A CSV manifest of so many files, which hold nothing; it is made once."""
    manifest = folder / f"{rows}-{sites}-{classes}.csv"
    if manifest.exists():
        return manifest
    lines = []
    for row in range(rows):
        name = f"{manifest.stem}/{row // PER_FOLDER:05}/{row:07}.jpg"
        if row % PER_FOLDER == 0:
            (folder / name).parent.mkdir(parents=True)
        (folder / name).touch()
        lines.append((name, f"site {row % sites:03}", f"class {row // sites % classes:04}"))
    write_csv(manifest, ("path", "domain", "label"), lines)
    return manifest


def write_runs(folder: Path, count: int, images: int = 40, evaluations: int = 6) -> Path:
    """So many finished runs: five rates, four folds and three seeds of each method; they are made once."""
    place = folder / f"runs-{count}"
    if place.exists():
        return place
    lines = [f"{d}/{i}.jpg,{d},class {i % CLASS},,in,domainbed,1,0.2" for d in DOMAINS for i in range(images)]
    splits = "\n".join(["path,domain,label,group,part,rule,seed,holdout", *lines]) + "\n"
    start = Config("data/PACS", DOMAINS[0], method="m", swad=True)
    text = dump_config(start)
    for number in range(count):
        method, rest = divmod(number, len(RATES) * len(DOMAINS) * len(SEEDS))
        rate, rest = divmod(rest, len(DOMAINS) * len(SEEDS))
        domain, seed = divmod(rest, len(SEEDS))
        own = {"unseen": DOMAINS[domain], "method": f"method-{method:04}", "lr": RATES[rate], "seed": SEEDS[seed]}
        run = place / run_name(replace(start, **own), "generated")
        (run / "checkpoints").mkdir(parents=True)
        (run / "config.yaml").write_text(_with(text, own))
        (run / "splits.csv").write_text(splits)
        backbone = {"resolved": "file vit_tiny_patch16_224.safetensors", "digest": "0" * 64}
        (run / "env.json").write_text(json.dumps({"backbone": backbone, "data": "0" * 16}))
        lines_of_run = _records(own["unseen"], evaluations, number).encode()
        (run / "records.jsonl").write_bytes(lines_of_run)
        (run / "done").write_text(f"2026-01-01T00:00:00+0000\nrecords {zlib.crc32(lines_of_run)}\n")
    return place


def _with(text: str, own: dict[str, Any]) -> str:
    """The settings file with a few other values: making it anew takes longer than all else."""
    lines = dict(line.split(": ", 1) for line in text.splitlines())
    return "".join(f"{name}: {value}\n" for name, value in (lines | {k: str(v) for k, v in own.items()}).items())


def _records(unseen: str, evaluations: int, number: int) -> str:
    """As a run writes them."""
    sources = [domain for domain in DOMAINS if domain != unseen]
    value = 0.5 + number % 97 / 200
    scores = {"accuracy": value, "f1": value, "balanced_accuracy": value, "macro_f1": value, "images": 400, "loss": 0.5}
    lines: list[dict[str, Any]] = [
        {"kind": "evaluation", "step": 25 * i, "train": {"main": 1.0}, "validation": dict.fromkeys(sources, scores)}
        for i in range(evaluations)
    ]
    test = {"kind": "test", "unseen": unseen, "step": 25, "metric": "accuracy", "in": scores, "out": scores}
    lines += [{**test, "checkpoint": name, "all": scores} for name in ("selected", "swad")]
    return "".join(json.dumps(line) + "\n" for line in lines)
