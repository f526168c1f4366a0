"""What the faults happen to: a few drawn images, settings of a run of seconds, what must come out, and what came."""

import hashlib
import json
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from conftest import write_images
from PIL import Image

from chaos.children import command, run, warm

PER_CLASS = 5  # images of a class in a domain
RUN: dict[str, Any] = {
    "unseen": "studio", "backbone": "tiny", "image_size": 28, "steps": 13, "eval_every": 3, "batch_per_domain": 2,
    "val_images": 4, "lr": 1e-3, "swad": True, "threads": 1, "accelerator": "cpu",
}  # fmt: skip
FIT: dict[str, Any] = {name: value for name, value in RUN.items() if name not in ("unseen", "swad")} | {"swad": False}
STREAM: dict[str, Any] = {
    "task": "ccd", "backbone": "tiny", "image_size": 28, "epochs": 3, "batch": 6, "lr": 0.05, "warm_up": 1,
    "refit_every": 1, "val_every": 2, "projection_hidden": 16, "projection_bottleneck": 8, "projection_out": 32,
    "prompts": 2, "replay": 5, "holdout": 0.3, "inits": 2, "threads": 1, "accelerator": "cpu",
}  # fmt: skip
SCHEDULE = "groups: [[a, b], [c]]\nratios: [[0.6, 1.0], [1.0]]\n"


@dataclass
class Line:
    """What was tried of one kind of fault or input, and what went wrong."""

    room: str
    name: str
    tried: int = 0
    hit: int = 0  # kills that met a living process, inputs that were refused, damages that were noticed
    wrong: list[str] = field(default_factory=list)  # what a user should never see
    slowest: float = 0.0  # seconds of one input
    peak: int = 0  # bytes of memory of a process

    def add(self, other: "Line") -> None:
        for name in ("tried", "hit", "wrong"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.slowest, self.peak = max(self.slowest, other.slowest), max(self.peak, other.peak)


def prepare(ground: Path) -> None:
    """Images, settings and one finished run to work on."""

    def need(what: str, work: Any) -> None:
        ended = run(work)
        if ended.code:
            raise SystemExit(f"no {what}: {ended.said}")

    ground.mkdir(mode=0o755)
    os.environ["PATCHGEN_CACHE"] = str(ground / "cache")
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[3] / "src")  # of a sweep's workers
    os.chdir(ground)
    photos = write_images(ground / "photos", PER_CLASS)
    write_stream(ground / "shapes")
    shared = {**RUN, "swad": "false", "method": "lp", "data": photos}
    lines = [f"{name}: {value}" for name, value in shared.items()]
    (ground / "recipe.yaml").write_text("\n".join([*lines, "grid: {seed: [1, 2]}"]) + "\n")
    warm()
    from patchgen.model.backbone import load_backbone

    need("backbone", lambda: load_backbone("tiny").model.save_pretrained(ground / "backbone"))
    need("run", command("train", str(photos), *words_of(RUN), "--quiet", "--out", str(ground / "model")))
    for name, seed in (("older", "7"), ("newer", "0")):
        words = ["fit", str(photos), *words_of(FIT), "--seed", seed, "--no-expect", "--quiet"]
        out = ["--runs", str(ground / "fitted" / "runs"), "--out", str(ground / "fitted" / name)]
        need("fitted model", command(*words, *out))
    shutil.copytree(ground / "fitted" / "older", ground / "fitted" / "before" / "model")


def write_stream(root: Path) -> Path:
    """`class/*.png` and a schedule of two stages beside it."""
    for label, name in enumerate("abc"):
        rng = np.random.default_rng([7, label])
        (root / name).mkdir(parents=True)
        for i in range(12):
            pixels = rng.integers(0, 60, (24, 24, 3))
            pixels[6:18, 6:18, label] += 150
            Image.fromarray(pixels.astype(np.uint8)).save(root / name / f"{i:02d}.png")
    (root.parent / "stages.yaml").write_text(SCHEDULE)
    return root


def words_of(settings: dict[str, Any]) -> list[str]:
    """Settings as the options of a command."""
    words = []
    for name, value in settings.items():
        option = "--" + name.replace("_", "-")
        words += [option if value else option.replace("--", "--no-", 1)] if isinstance(value, bool) else [option]
        words += [] if isinstance(value, bool) else [str(value)]
    return words


def result(folder: Path) -> dict[str, str]:
    """A digest of every visible file below a folder, but for clocks."""
    found = {}
    for file in sorted(folder.rglob("*")):
        name = file.relative_to(folder)
        if file.is_file() and not any(part.startswith(".") for part in name.parts):
            content = _timeless(file)
            found[name.as_posix()] = f"{hashlib.sha256(content).hexdigest()[:16]} {len(content)}"
    return found


def _timeless(file: Path) -> bytes:
    if file.name == "done":
        return b"done"
    if file.suffix in (".png", ".svg", ".html"):
        return file.read_bytes()[-8:]
    if file.name == "records.jsonl":
        records = [json.loads(line) for line in file.read_bytes().splitlines()]
        return json.dumps([{k: v for k, v in record.items() if k != "seconds"} for record in records]).encode()
    return file.read_bytes()


def broken_files(run: Path) -> list[str]:
    """Files of a run folder that stand under their own name and are not whole; a kill must leave none."""
    from patchgen.runs.folder import RunFolder
    from patchgen.runs.tensors import load_tensors

    broken = []
    for file in (file for file in run.rglob("*") if file.is_file() and not file.name.startswith(".")):
        try:
            if file.suffix == ".safetensors":
                load_tensors(file)
            elif file.suffix == ".json":
                json.loads(file.read_text())
            elif file.name == "config.yaml":
                _ = RunFolder(run).settings
            elif file.name == "records.jsonl":
                RunFolder(run).records()
        except ValueError as error:
            broken.append(f"{file.name}: {error}")
    return broken
