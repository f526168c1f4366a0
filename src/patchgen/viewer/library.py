"""The models and runs of the viewer, by id: no request ever contains a path.

library = Library(find_items(["runs", "tiles-model"]))   # a run, a model folder, or a folder of them
library.predictor("05c5e4b787f7")                        # loaded at first use, at most three in memory
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from patchgen.common.files import expanded
from patchgen.predict.predictor import Predictor, load_predictor
from patchgen.predict.runtime import RuntimeName
from patchgen.runs.find import UNREADABLE
from patchgen.runs.folder import is_model_folder
from patchgen.viewer.guard import RefusedRequest
from patchgen.viewer.uploads import clean_name

# `/home/ann lee/x/` of `/home/ann lee/x/y.png`: folders may hold spaces, but no quote before a delimiter and no `: `
PATH = re.compile(r"""(?<![\w./])(?:[A-Za-z]:)?(?!//)[/\\](?:(?:(?!['"][\s,;:.)]|: |; )[^/\\\n])+[/\\])+""")
LOADED = 3  # models in memory at a time: as many as the page compares on an image
EXAMPLES = 24  # images of the unseen domain that are offered


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


def without_paths(error: Exception, folder: Path) -> str:
    """The message of an error without paths: the folder appears by its name only."""
    text = f"{error}" if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    for place in dict.fromkeys((folder, folder.resolve(), folder.parent, folder.resolve().parent)):
        if place != Path(place.anchor):
            text = text.replace(f"{place}{os.sep}", f"{place.name}{os.sep}" if place == folder else "")
            text = text.replace(str(place), place.name)
    return hide_paths(text)[:500]


def hide_paths(text: str) -> str:
    """The text with only the last part of each absolute path; where a path ends is guessed, rather too late."""
    return PATH.sub("", text)


def find_items(words: Sequence[str | Path]) -> list[Item]:
    """Runs and models, and those directly inside folders, each once, in the order given.

    Raises:
        ValueError: a path without any.
    """
    kinds: dict[Path, Literal["run", "model"]] = {}
    for word in words:
        path = expanded(word)
        is_folder = bool(str(word).strip()) and path.is_dir()
        folders = [path] if is_folder and _kind(path) else sorted(path.iterdir()) if is_folder else []
        inside = {folder.resolve(): kind for folder in folders if (kind := _kind(folder))}
        if not inside:
            raise ValueError(
                f"{str(word)!r} is no run folder, no model folder, and holds none; `patchgen train` prints the first, "
                "`patchgen fit` writes the second"
            )
        kinds.update(inside)
    if not kinds:
        raise ValueError("name at least one model folder, run folder, or folder of runs")
    # numbers as ids, which reveal no path; equal names get their parent folder's name, then a number
    names = [clean_name(path.name) for path in kinds]
    longer = [
        name if names.count(name) == 1 else f"{clean_name(path.parent.name)}/{name}"
        for name, path in zip(names, kinds, strict=True)
    ]
    items = []
    for i, (name, (path, kind)) in enumerate(zip(longer, kinds.items(), strict=True), 1):
        again = longer[:i].count(name)
        items.append(Item(str(i), f"{name} ({again})" if again > 1 else name, path, kind))
    return items


def _kind(path: Path) -> Literal["run", "model"] | None:
    if not path.is_dir():
        return None
    if is_model_folder(path):
        return "model"
    return "run" if (path / "config.yaml").is_file() else None


class Library:
    """Items by id, and the most recently used models on the chosen runtime."""

    def __init__(self, items: Sequence[Item], runtime: RuntimeName = "torch", **device: Any) -> None:
        self.items, self.runtime, self.device = {item.id: item for item in items}, runtime, device
        self._loaded: OrderedDict[str, Predictor] = OrderedDict()
        self._examples: dict[str, list[Example]] = {}
        self._lock = threading.Lock()

    def item(self, name: str) -> Item:
        if name not in self.items:
            raise RefusedRequest(404, "there is no such model or run here; reload the page")
        return self.items[name]

    def predictor(self, name: str) -> Predictor:
        """The model of an item.

        Raises:
            RefusedRequest: no such item.
            ValueError: it cannot be loaded, with the reason.
        """
        item, say = self.item(name), partial(print, file=sys.stderr, flush=True)
        with self._lock:
            if name not in self._loaded:
                while len(self._loaded) >= LOADED:  # before the next one, which needs the room
                    self._loaded.popitem(last=False)
                try:
                    self._loaded[name] = load_predictor(item.path, **self.device).use(self.runtime, say=say)
                except UNREADABLE as error:
                    raise ValueError(without_paths(error, item.path)) from error
            self._loaded.move_to_end(name)
            return self._loaded[name]

    def examples(self, name: str) -> list[Example]:
        """Images of the run's unseen domain, balanced over classes; none if its data are missing."""
        item = self.item(name)
        if name not in self._examples:
            self._examples[name] = _examples_of(item) if item.kind == "run" else []
        return self._examples[name]


def _examples_of(item: Item) -> list[Example]:
    from patchgen.predict.fold_runs import unseen_rows
    from patchgen.runs.folder import RunFolder
    from patchgen.tasks import make_fold

    try:
        config = RunFolder.open(item.path).config
        fold = make_fold(config)
        rows = unseen_rows(fold, EXAMPLES, config.seed)
    except (ValueError, OSError):  # moved or changed data, or a run of stages: there is nothing to offer
        return []
    files = [fold.table.file(int(row)) for row in rows]
    labels = [fold.table.classes[int(fold.table.label[row])] for row in rows]
    return [Example(clean_name(file.name), label, file) for file, label in zip(files, labels, strict=True)]
