"""The models and runs of the viewer, by id: no request ever contains a path."""

import json
import math
import os
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from patchgen.common.files import expanded, refuse_links
from patchgen.common.text import json_text
from patchgen.common.untrusted import read_json
from patchgen.config import Config
from patchgen.model.weights import local_path
from patchgen.predict.predictor import Predictor, load_predictor
from patchgen.predict.runtime import RuntimeName
from patchgen.runs.folder import UNREADABLE, RunFolder, is_model_folder
from patchgen.viewer import RefusedRequest
from patchgen.viewer.uploads import clean_name

# `/home/ann lee/x/` of `/home/ann lee/x/y.png`: folders may hold spaces, but no quote before a delimiter and no `: `
PATH = re.compile(r"""(?<![\w./])(?:[A-Za-z]:)?(?!//)[/\\](?:(?:(?!['"][\s,;:.)]|: |; )[^/\\\n])+[/\\])+""")
LOADED = 3  # models in memory at a time: as many as the page compares on an image
EXAMPLES = 24  # images of the unseen domain that are offered
SUMMARY = 200_000  # characters of a summary that are shown

# Name of a curve -> keys of its value in an evaluation record; a star averages over all keys.
CURVES: dict[str, tuple[str, ...]] = {
    "training loss": ("train", "main"),
    "source validation loss": ("validation", "*", "loss"),
    "source validation accuracy": ("validation", "*", "accuracy"),
    "mask mean": ("mask", "mean"),
    "mask spread within an image": ("mask", "spread"),
    "mask AUROC against the truth": ("mask", "auroc"),
}


@dataclass(frozen=True)
class Item:
    id: str
    name: str  # the folder's, printable
    path: Path
    kind: Literal["run", "model"]


class Example(NamedTuple):
    """An image of the run's unseen domain."""

    name: str
    label: str
    file: Path


def hide_paths(text: str) -> str:
    """The text with only the last part of each absolute path; where a path ends is guessed, rather too late."""
    return PATH.sub("", text)


def without_paths(error: Exception, folder: Path) -> str:
    """The message of an error without paths: the folder appears by its name only."""
    text = f"{error}" if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    for place in (folder, folder.resolve()):  # where these end need not be guessed
        text = text.replace(str(place), place.name)
    return hide_paths(text)[:500]


def find_items(words: Sequence[str | Path]) -> list[Item]:
    """Runs and models, and those directly inside folders, each once, in order; ValueError for a path without any."""
    kinds: dict[Path, Literal["run", "model"]] = {}
    for word in words:
        path = expanded(word)
        is_folder = bool(str(word).strip()) and path.is_dir()
        folders = [path] if is_folder and _kind(path) else sorted(path.iterdir()) if is_folder else []
        inside = {folder.resolve(): kind for folder in folders if (kind := _kind(folder))}
        if not inside:
            raise ValueError(f"{str(word)!r} is no run folder, no model folder, and holds none; check the path")
        kinds.update(inside)
    if not kinds:
        raise ValueError("name at least one model folder, run folder, or folder of runs")
    # numbers as ids, which reveal no path; equal names get their parent folder's name
    names, items = [clean_name(path.name) for path in kinds], []
    for i, (name, (path, kind)) in enumerate(zip(names, kinds.items(), strict=True), 1):
        parent = f"{clean_name(path.parent.name)}/" if names.count(name) > 1 else ""
        items.append(Item(str(i), parent + name, path, kind))
    return items


def _kind(path: Path) -> Literal["run", "model"] | None:
    if path.is_dir() and is_model_folder(path):
        return "model"
    return "run" if (path / "config.yaml").is_file() else None


class Library:
    """Items by id, and the most recently used models on the chosen runtime, which only one thread loads."""

    def __init__(self, items: Sequence[Item], runtime: RuntimeName = "torch", **how: Any) -> None:
        self.items, self.runtime, self.how = {item.id: item for item in items}, runtime, how
        self.predictor = lru_cache(LOADED)(self._load)

    def item(self, name: str) -> Item:
        if name not in self.items:
            raise RefusedRequest(404, "there is no such model or run here; reload the page")
        return self.items[name]

    def _load(self, name: str) -> Predictor:
        """The model of an item; ValueError with the reason if it cannot be loaded."""
        item, say = self.item(name), partial(print, file=sys.stderr, flush=True)
        try:
            return load_predictor(item.path, **self.how).use(self.runtime, say=say)
        except UNREADABLE as error:
            raise ValueError(without_paths(error, item.path)) from error

    def examples(self, name: str) -> list[Example]:
        """Images of the run's unseen domain, balanced over classes; none for a model folder, or without the data."""
        return _examples_of(self.item(name).path)


@lru_cache(maxsize=64)
def _examples_of(run: Path) -> list[Example]:
    from patchgen.predict.fold_runs import unseen_rows
    from patchgen.tasks import make_fold

    try:
        config = RunFolder.open(run).config
        fold = make_fold(config)
        rows = unseen_rows(fold, EXAMPLES, config.seed).tolist()
    except (ValueError, OSError):  # no run, moved or changed data, or a run of stages: there is nothing to offer
        return []
    files = [fold.table.file(row) for row in rows]
    return [Example(clean_name(f.name), fold.table.label_name(row), f) for f, row in zip(files, rows, strict=True)]


def overview(item: Item) -> dict[str, Any]:
    """A row of the table of runs; for an unreadable run, with the reason."""
    row: dict[str, Any] = {"id": item.id, "name": item.name, "kind": item.kind}
    try:
        facts = _run_row(RunFolder.open(item.path)) if item.kind == "run" else _model_row(item.path)
        return row | json.loads(json_text(facts))  # numbers that are not finite become null
    except UNREADABLE as error:  # a damaged folder must not hide the others
        return row | {"error": f"cannot be read: {without_paths(error, item.path)}"}


def detail(item: Item) -> dict[str, Any]:
    """The same with its curves and summary."""
    row = overview(item)
    if "error" in row or item.kind == "model":
        return row | {"curves": {}, "summary": _text(item.path / "README.md")}
    records, curves = RunFolder(item.path).records("evaluation"), dict[str, Any]()
    for name, keys in CURVES.items():  # [[step, value], ...] of those with values
        points = [[r["step"], value] for r in records if "step" in r and (value := _at(r, keys)) is not None]
        curves |= {name: points} if points else {}
    return row | {"curves": json.loads(json_text(curves)), "summary": _text(item.path / "summary.md")}


def _at(record: Any, keys: tuple[str, ...]) -> float | None:
    """The number at a path of keys in a record; a star averages over all keys."""
    if not keys:
        return float(record) if isinstance(record, (int, float)) and math.isfinite(record) else None
    if not isinstance(record, Mapping):
        return None
    if keys[0] != "*":
        return _at(record.get(keys[0]), keys[1:])
    values = [value for part in record.values() if (value := _at(part, keys[1:])) is not None]
    return statistics.fmean(values) if values else None


def _run_row(run: RunFolder) -> dict[str, Any]:
    settings = _without_place(run.settings.result_settings())
    facts = {name: settings.get(name) for name in ("method", "unseen", "seed")}
    return facts | {"done": run.done, "task": settings.get("task", "mdg"), "settings": settings, "scores": _scores(run)}


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
    with suppress(OSError):
        if not path.is_symlink() and os.path.isfile(path):
            with open(path, encoding="utf-8", errors="replace") as handle:
                return hide_paths(handle.read(SUMMARY))
    return ""
