"""A table and an image store that the runs of one process share (`common/kept.py`), as long as the files are the same.

    table = shared_table(config.data, config.benchmark, config.options)
    store = shared_store(table, 224, cache, interpolation)

A table is read again when the manifest, or a folder that holds images, has changed. Of a store's images each is looked
at before a run: what has another size, time or inode since it was hashed is hashed again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from patchgen.common.kept import kept
from patchgen.data.images import ImageStore
from patchgen.data.table import Table, read_table


def shared_table(data: str, benchmark: str | None, options: Mapping[str, str]) -> Table:
    """`read_table`, once for runs in a row on the same data."""
    key = json.dumps([os.getcwd(), data, benchmark, dict(options)], sort_keys=True)

    def read() -> tuple[Table, object]:
        table = read_table(data, benchmark=benchmark, options=options)
        return table, _stamp(data, table)

    return kept("table", key, read, lambda found: found[1] == _stamp(data, found[0]))[0]


def shared_store(table: Table, size: int, cache: Path | None, interpolation: str) -> ImageStore:
    """An image store of the table's files, once for runs in a row on the same files; without stain."""
    key = (table.root, table.paths, size, cache, interpolation)
    store = kept("store", key, lambda: ImageStore(table.files, size, cache, interpolation=interpolation))
    store.stain = None
    store.forget_changed()
    return store


def _stamp(data: str, table: Table) -> object:
    """Times of what a table was read from: a manifest, or every folder in which an image or a folder may appear."""
    place = os.path.abspath(os.path.expanduser(data))
    folders = {place, os.fspath(table.root)}
    for parent in {os.path.dirname(path) for path in table.paths}:
        while parent and os.path.join(table.root, parent) not in folders:
            folders.add(os.path.join(table.root, parent))
            parent = os.path.dirname(parent)
    try:
        return sorted((folder, (about := os.stat(folder)).st_mtime_ns, about.st_size) for folder in folders)
    except OSError:  # gone: reading it again says so
        return object()
