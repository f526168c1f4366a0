"""A table and an image store that the runs of one process share while the files do not change.

    table = shared_table(config.data, config.benchmark, config.options)
    store = shared_store(table, 224, cache, interpolation)

A table is read again when the manifest, or a folder with images, has changed. The images of a store are checked before
a run: files whose size, time or inode has changed are hashed again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from patchgen.common.reading import cached
from patchgen.data.images import ImageStore
from patchgen.data.table import Table, read_table


def shared_table(data: str, benchmark: str | None, options: Mapping[str, str]) -> Table:
    """`read_table`, cached for consecutive runs on the same data."""
    key = json.dumps([os.getcwd(), data, benchmark, dict(options)], sort_keys=True)

    def read() -> tuple[Table, object]:
        table = read_table(data, benchmark=benchmark, options=options)
        return table, _stamp(data, table)

    return cached("table", key, read, lambda found: found[1] == _stamp(data, found[0]))[0]


def shared_store(table: Table, size: int, cache: Path | None, interpolation: str) -> ImageStore:
    """An image store of the table's files, cached for consecutive runs on the same files; without stain."""
    key = (table.root, table.paths, size, cache, interpolation)
    store = cached("store", key, lambda: ImageStore(table.files, size, cache, interpolation=interpolation))
    store.stain = None
    store.forget_changed()
    return store


def _stamp(data: str, table: Table) -> object:
    """Modification times of a table's sources: the manifest, or every folder that may contain images or folders."""
    place = os.path.abspath(os.path.expanduser(data))
    folders = {place, os.fspath(table.root)}
    for parent in {os.path.dirname(path) for path in table.paths}:
        while parent and os.path.join(table.root, parent) not in folders:
            folders.add(os.path.join(table.root, parent))
            parent = os.path.dirname(parent)
    try:
        return sorted((folder, (about := os.stat(folder)).st_mtime_ns, about.st_size) for folder in folders)
    except OSError:  # missing: reading it again reports that
        return object()
