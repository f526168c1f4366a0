"""Run folders that were never trained: the files of a finished run with numbers of our choice."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from patchgen.ccd.settings import StreamConfig
from patchgen.config import Config, dump_config
from patchgen.runs.folder import run_name

TINY = "file vit_tiny_patch16_224.safetensors"
DOMAINS = {"PACS": ("art_painting", "cartoon", "photo", "sketch"), "oracle": ("amber", "dusk", "jade", "mist"),
           "terra_incognita": ("location_100", "location_38", "location_43", "location_46"),
           "VLCS": ("Caltech101", "LabelMe", "SUN09", "VOC2007"), "HISTOCOLON": ("CRC-TP", "K-16", "K-19")}  # fmt: skip


def scored(checkpoint: str, value: float, more: dict[str, Any]) -> dict[str, Any]:
    """`value` on the 80 % part, 0.1 less on the whole."""
    parts = {
        name: {"accuracy": v, "images": n, **more} for name, v, n in (("in", value, 80), ("all", value - 0.1, 100))
    }
    return {"kind": "test", "checkpoint": checkpoint, "step": 20, "metric": "accuracy", **parts}


def make_fold(
    root: Path, value: float, *, swad_value: float | None = None, validation: float = 0.9, backbone_name: str = TINY,
    scores: dict[str, Any] | None = None, mask: dict[str, float] | None = None, **settings: Any,
) -> Path:  # fmt: skip
    """The folder of a finished run with an unseen domain."""
    usual = {"data": "data/PACS", "unseen": "sketch", "method": "lp-ln", "image_size": 96, "steps": 61}
    config = Config(**{**usual, **settings})
    name = "oracle" if config.data.startswith("oracle-") else Path(config.data).name
    records = [
        {"kind": "evaluation", "step": 20, "validation": {"x": {"accuracy": validation}}},
        scored("selected", value, scores or {}) | ({"mask": mask} if mask else {}),
    ]
    records += [] if swad_value is None else [scored("swad", swad_value, scores or {})]
    folder = write_folder(root / run_name(config, Path(config.data).name), config, backbone_name, records)
    lines = [f"{d}/{i}.png,{d},a,,in,domainbed,1,0.2" for d in DOMAINS[name] for i in range(2)]
    (folder / "splits.csv").write_text("\n".join(["path,domain,label,group,part,rule,seed,holdout", *lines]) + "\n")
    return folder


def make_stream(root: Path, method: str, sessions: list[tuple[float, float, float]], **settings: Any) -> Path:
    """The folder of a finished stream: all, known and unknown of each session."""
    config = StreamConfig(**{"data": "data/CUB_200_2011", "method": method, **settings})
    records = []
    for number, numbers in enumerate(sessions, 1):
        cells = [{"accuracy": value, "error": 0.01, "images": 50} for value in numbers]
        scores = {"all": cells[0], "hard": {"known": cells[1], "unknown": cells[2]}}
        records.append({"kind": "stage", "stage": number, "checkpoint": "kept", "transductive": scores})
    return write_folder(root / run_name(config, "rows"), config, TINY, records)


def write_folder(folder: Path, config: Config | StreamConfig, backbone: str, records: list[dict[str, Any]]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(dump_config(config))
    (folder / "env.json").write_text(json.dumps({"backbone": {"resolved": backbone}}))
    (folder / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "done").write_text("2026\n")
    return folder


@pytest.fixture
def fold(tmp_path: Path) -> Callable[..., Path]:
    """`fold(0.8, swad_value=0.9, validation=0.95, backbone_name=..., **settings)` -> the folder of a finished run."""
    return partial(make_fold, tmp_path / "runs")


@pytest.fixture
def stream(tmp_path: Path) -> Callable[..., Path]:
    """`stream("promptccd", [(0.5, 0.6, 0.4), ...])`: all, known, unknown of each session."""
    return partial(make_stream, tmp_path / "runs")


@pytest.fixture(scope="session")
def mixed_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A little of everything: two seeds, SWAD, a missing fold, unknown classes, a stream, oracle sets, an ablation."""
    root = tmp_path_factory.mktemp("mixed")
    for name in DOMAINS["PACS"][:3]:
        for seed in (1, 2):
            make_fold(root, 0.8 + 0.01 * seed, unseen=name, seed=seed, swad_value=0.85)
            make_fold(root, 0.82, unseen=name, seed=seed, method="patchgen", swad_value=0.9)
        make_fold(root, 0.5, unseen=name, task="mdg_gcd", scores={"known": 0.6, "unknown": 0.2})
    for method in ("promptccd", "promptccd+patchgen"):
        make_stream(root, method, [(0.5, 0.6, 0.4), (0.3, 0.4, 0.2)])
    for name in ("oracle-easy", "oracle-tiny"):
        for method in ("lp-ln", "ablation-static", "patchgen"):
            make_fold(root, 0.7, data=name, unseen="mist", method=method)
        make_fold(root, 0.6, data=name, unseen="mist", method="patchgen", lambda_ms=1e-2)
    (make_fold(root, 0.1, seed=77) / "done").unlink()
    return root
