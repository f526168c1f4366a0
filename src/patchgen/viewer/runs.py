"""Settings, scores, curves and summaries of run folders, for the page that compares them."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from patchgen.common.files import refuse_links, regular
from patchgen.common.untrusted import read_json
from patchgen.config import Config
from patchgen.model.local import local_path
from patchgen.runs.find import UNREADABLE
from patchgen.runs.folder import RunFolder
from patchgen.viewer.library import Item, hide_paths, without_paths

SUMMARY = 200_000  # characters of a summary that are shown
POINTS = 400  # of a curve

# Name of a curve -> keys of its value in an evaluation record; a star averages over all keys.
CURVES: dict[str, tuple[str, ...]] = {
    "training loss": ("train", "main"),
    "source validation loss": ("validation", "*", "loss"),
    "source validation accuracy": ("validation", "*", "accuracy"),
    "mask mean": ("mask", "mean"),
    "mask spread within an image": ("mask", "spread"),
    "mask AUROC against the truth": ("mask", "auroc"),
}


def overview(item: Item) -> dict[str, Any]:
    """A row of the table of runs; for an unreadable run, with the reason."""
    row: dict[str, Any] = {"id": item.id, "name": item.name, "kind": item.kind}
    try:
        return plain(row | (_run_row(RunFolder.open(item.path)) if item.kind == "run" else _model_row(item.path)))
    except UNREADABLE as error:  # a damaged folder must not hide the others
        return row | {"error": f"cannot be read: {without_paths(error, item.path)}"}


def detail(item: Item) -> dict[str, Any]:
    """The same with its curves and summary."""
    row = overview(item)
    if "error" in row or item.kind == "model":
        return row | {"curves": {}, "summary": _text(item.path / "README.md")}
    records = RunFolder(item.path).records("evaluation")
    return plain(row | {"curves": curves(records), "summary": _text(item.path / "summary.md")})


def curves(records: Iterable[Mapping[str, Any]]) -> dict[str, list[list[float]]]:
    """Name -> [[step, value], ...] of the curves with values, with at most about `POINTS` points."""
    records = list(records)
    records = records[:: max(1, math.ceil(len(records) / POINTS))]
    points = {
        name: [[r["step"], value] for r in records if "step" in r and (value := _at(r, where)) is not None]
        for name, where in CURVES.items()
    }
    return {name: curve for name, curve in points.items() if curve}


def _at(record: Any, where: tuple[str, ...]) -> float | None:
    """The number at a path of keys in a record; a star averages over all keys."""
    if not where:
        return float(record) if isinstance(record, (int, float)) and math.isfinite(record) else None
    if not isinstance(record, Mapping):
        return None
    if where[0] != "*":
        return _at(record.get(where[0]), where[1:])
    values = [value for part in record.values() if (value := _at(part, where[1:])) is not None]
    return statistics.fmean(values) if values else None


def _run_row(run: RunFolder) -> dict[str, Any]:
    values = _without_place(run.settings.result_settings())
    return {
        "done": run.done,
        "method": values.get("method"),
        "task": values.get("task", "mdg"),
        "unseen": values.get("unseen"),
        "seed": values.get("seed"),
        "settings": values,
        "scores": _scores(run),
    }


def _scores(run: RunFolder) -> dict[str, float]:
    """Accuracies from 0 to 1 by name; none for an unfinished run, those of the kept epochs for a run of stages."""
    scores: dict[str, float | None] = {}
    for record in run.records("test"):
        name = {"selected": "unseen accuracy", "swad": "unseen accuracy, SWAD"}.get(record.get("checkpoint", ""))
        if name:
            scores[name] = _at(record, ("all", "accuracy"))
            scores |= {f"{name}, {part} classes": _at(record, ("all", part)) for part in ("known", "unknown")}
        if record.get("checkpoint") == "selected":
            evaluation = next((r for r in run.records("evaluation") if r.get("step") == record.get("step")), {})
            scores["source accuracy"] = _at(evaluation, ("validation", "*", "accuracy"))
            scores |= {f"mask {part}": _at(record, ("mask", part)) for part in ("mean", "spread")}
    for record in run.records("average"):
        if record.get("checkpoint") == "kept":
            scores |= {f"stages: {part}": _at(record, ("transductive", part)) for part in ("all", "known", "unknown")}
    return {name: value for name, value in scores.items() if value is not None}


def _model_row(path: Path) -> dict[str, Any]:
    refuse_links(path)
    facts = read_json(path / "config.json")
    settings, data = facts["settings"], facts.get("data")
    expected, unseen = _at(facts, ("expected", "mean")), data.get("unseen") if isinstance(data, Mapping) else None
    defaults = Config(data="data", unseen="none").result_settings()  # an earlier release did not have all settings
    return {
        "done": True,
        "method": settings.get("method"),
        "unseen": unseen if isinstance(unseen, str) else None,
        "seed": settings.get("seed"),
        "settings": _without_place({name: settings.get(name, value) for name, value in defaults.items()}),
        "scores": {} if expected is None else {"expected at a new site": expected},
    }


def _without_place(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings with the name alone of a backbone's folder or file."""
    backbone = settings.get("backbone")
    if not isinstance(backbone, str) or not (backbone.startswith(("/", "~", ".", "\\")) or local_path(backbone)):
        return settings
    return {**settings, "backbone": re.split(r"[/\\]", backbone.rstrip("/\\"))[-1]}


def _text(path: Path) -> str:
    """The beginning of a plain file; links, which may lead anywhere on this machine, are not followed."""
    try:
        if path.is_symlink() or not regular(path):
            return ""
        with open(path, encoding="utf-8", errors="replace") as handle:
            return hide_paths(handle.read(SUMMARY))
    except OSError:
        return ""


def plain(value: Any) -> Any:
    """A value that JSON can hold: numbers that are not finite become null, other objects their text."""
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (str, bool, int)) else str(value)
