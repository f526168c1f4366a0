"""What changes on disk: digests of images, and the table and store that runs of a process share until then."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from patchgen.common.files import cache_dir, replacing
from patchgen.common.reading import cached
from patchgen.data.images import ImageStore
from patchgen.data.safe_open import check_file
from patchgen.data.table import Table, read_table

THREADS = 4  # files read in parallel


def digests(table: Table) -> np.ndarray:
    """64 bits of BLAKE2 (N,) of each row's file, stored in the cache folder until its size, time or inode changes."""
    files = {_key(file): file for file in (os.path.join(table.root, path) for path in table.paths)}
    store = cache_dir() / "content" / f"{_hash(os.fsencode(os.path.abspath(table.root))):016x}.npy"
    try:
        keys, values = np.load(store, allow_pickle=False).astype(np.uint64, casting="no")
        known = dict(zip(keys.tolist(), values.tolist(), strict=True))
    except (OSError, ValueError, TypeError, EOFError):  # missing or damaged
        known = {}
    if new := {key: file for key, file in files.items() if key not in known}:
        with ThreadPoolExecutor(THREADS) as pool:
            known |= zip(new, pool.map(_digest, new.values()), strict=True)
        store.parent.mkdir(parents=True, exist_ok=True)
        with replacing(store) as temporary, open(temporary, "wb") as stream:
            np.save(stream, np.array([[*files], [known[key] for key in files]], dtype=np.uint64))
    return np.array([known[key] for key in files], dtype=np.uint64)


def _key(file: str) -> int:
    try:
        about = check_file(file)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    return _hash(os.fsencode(f"{os.path.abspath(file)}\0{about.st_size}\0{about.st_mtime_ns}\0{about.st_ino}"))


def _hash(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def _digest(file: str) -> int:
    with open(file, "rb") as stream:
        digest = hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=8))
    return int.from_bytes(digest.digest(), "little")


def shared_table(data: str, benchmark: str | None, options: Mapping[str, str]) -> Table:
    """`read_table`, cached for consecutive runs until the manifest, or a folder with images, changes."""
    key = json.dumps([os.getcwd(), data, benchmark, dict(options)], sort_keys=True)

    def read() -> tuple[Table, object]:
        table = read_table(data, benchmark=benchmark, options=options)
        return table, _sources(data, table)

    return cached("table", key, read, lambda read: read[1] == _sources(data, read[0]))[0]


def _sources(data: str, table: Table) -> object:
    """Stamps of the manifest, or of every folder that may contain images or folders."""
    folders = {Path(os.path.abspath(os.path.expanduser(data))), table.root}
    for parent in {os.path.dirname(path) for path in table.paths}:
        folders |= {table.root / parent, *(table.root / above for above in Path(parent).parents)}
    return {folder: _stamp(folder) for folder in folders}


def shared_store(table: Table, size: int, cache: Path | None, interpolation: str) -> ImageStore:
    """An image store of the table's files, cached for consecutive runs while no file changes; without stain."""
    key = (table.root, table.paths, size, cache, interpolation, tuple(map(_stamp, table.files)))
    store = cached("store", key, lambda: ImageStore(table.files, size, cache, interpolation=interpolation))
    store.stain = None
    return store


def _stamp(file: str | Path) -> object:
    """Size, time and inode; never equal to another if the file is missing, so that reading it reports that."""
    try:
        about = os.stat(file)
    except OSError:
        return object()
    return about.st_size, about.st_mtime_ns, about.st_ino
