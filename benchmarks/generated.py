"""Tables and run folders of any size, generated: what a large project leaves on disk, without its images.

data = write_manifest(folder, rows=100_000)          # files of no bytes, and the manifest that names them
write_runs(folder, count=1_000)                      # finished runs of many methods, rates, folds and seeds
"""

from __future__ import annotations

import json
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

from patchgen.config import Config, dump_config
from patchgen.data.table import write_csv
from patchgen.runs.folder import run_name

DOMAINS = ("art_painting", "cartoon", "photo", "sketch")
RATES, SEEDS = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2), (1, 2, 3)
CLASS = 7
PER_FOLDER = 1_000  # files


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
