"""Run folders that were never trained: the files of a finished run with numbers of our choice."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from patchgen.config import Config, dump_config
from patchgen.config_stream import StreamConfig

TINY = "file vit_tiny_patch16_224.safetensors"
DOMAINS = {"PACS": ("art_painting", "cartoon", "photo", "sketch"), "oracle": ("amber", "dusk", "jade", "mist"),
           "terra_incognita": ("location_100", "location_38", "location_43", "location_46"),
           "HISTOCOLON": ("CRC-TP", "K-16", "K-19")}  # fmt: skip


def test_record(checkpoint: str, value: float, more: dict[str, Any]) -> dict[str, Any]:
    """`value` on the 80 % part, 0.1 less on the whole."""
    parts = {name: {"accuracy": v, "images": n, **more} for name, v, n in (("in", value, 80), ("all", value - 0.1, 100))}
    return {"kind": "test", "checkpoint": checkpoint, "step": 20, "metric": "accuracy", **parts}


@pytest.fixture
def fold(tmp_path: Path) -> Callable[..., Path]:
    """`fold(0.8, swad_value=0.9, validation=0.95, backbone_name=..., **settings)` -> the folder of a finished run."""

    def make(
        value: float, *, swad_value: float | None = None, validation: float = 0.9, backbone_name: str = TINY,
        scores: dict[str, Any] | None = None, mask: dict[str, float] | None = None, **settings: Any,
    ) -> Path:  # fmt: skip
        usual = {"data": "data/PACS", "unseen": "sketch", "method": "lp-ln", "image_size": 96, "steps": 61}
        config = Config(**{**usual, **settings})
        folder = tmp_path / "runs" / config.hash(Path(config.data).name)
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text(dump_config(config))
        (folder / "env.json").write_text(json.dumps({"backbone": {"resolved": backbone_name}}))
        name = "oracle" if config.data.startswith("oracle-") else Path(config.data).name
        lines = [f"{d}/{i}.png,{d},a,,in,domainbed,1,0.2" for d in DOMAINS[name] for i in range(2)]
        (folder / "splits.csv").write_text("\n".join(["path,domain,label,group,part,rule,seed,holdout", *lines]) + "\n")
        records = [
            {"kind": "evaluation", "step": 20, "validation": {"x": {"accuracy": validation}}},
            test_record("selected", value, scores or {}) | ({"mask": mask} if mask else {}),
        ]
        records += [] if swad_value is None else [test_record("swad", swad_value, scores or {})]
        (folder / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        (folder / "done").write_text("2026\n")
        return folder

    return make


@pytest.fixture
def stream(tmp_path: Path) -> Callable[..., Path]:
    """`stream("promptccd", [(0.5, 0.6, 0.4), ...])`: all, known, unknown of each session."""

    def make(method: str, sessions: list[tuple[float, float, float]], **settings: Any) -> Path:
        config = StreamConfig(**{"data": "data/CUB_200_2011", "method": method, **settings})
        folder = tmp_path / "runs" / config.hash("rows")
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text(dump_config(config))
        (folder / "env.json").write_text(json.dumps({"backbone": {"resolved": TINY}}))
        records = []
        for number, numbers in enumerate(sessions, 1):
            cells = [{"accuracy": value, "error": 0.01, "images": 50} for value in numbers]
            scores = {"all": cells[0], "hard": {"known": cells[1], "unknown": cells[2]}}
            records.append({"kind": "stage", "stage": number, "checkpoint": "kept", "transductive": scores})
        (folder / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        (folder / "done").write_text("2026\n")
        return folder

    return make
