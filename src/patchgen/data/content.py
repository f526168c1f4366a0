"""Digests of the image files, to detect changed pixels even if names and sizes are the same.

    digests(table)      # (N,) uint64

A file is read once, until its size, time or inode changes: digests are stored in the cache folder.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from patchgen.common.files import cache_dir, replacing
from patchgen.data.safe_open import check_length
from patchgen.data.table import Table

THREADS = 4  # files read in parallel


def digests(table: Table) -> np.ndarray:
    """A digest (N,) of each row's file, 64 bits of BLAKE2."""
    files = [os.path.join(table.root, path) for path in table.paths]
    keys = np.array([_key(file) for file in files], dtype=np.uint64)
    store = (
        cache_dir() / "content" / f"{_hash(os.path.abspath(table.root).encode('utf-8', 'surrogateescape')):016x}.npy"
    )
    known = _load(store)  # (2, M): keys in order, digests
    place = np.minimum(np.searchsorted(known[0], keys), max(known.shape[1] - 1, 0))
    found = known[1][place] if known.shape[1] else np.zeros(len(keys), np.uint64)
    new = np.flatnonzero(known[0][place] != keys) if known.shape[1] else np.arange(len(keys))
    if len(new):
        found[new] = _read([files[i] for i in new])
        _save(store, keys, found)
    return found


def _key(file: str) -> int:
    """The cache key of a digest: a different size, time or inode means that the file may have changed."""
    about = os.stat(file)
    try:
        check_length(about.st_size)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    text = f"{os.path.abspath(file)}\0{about.st_size}\0{about.st_mtime_ns}\0{about.st_ino}"
    return _hash(os.fsencode(text))


def _hash(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def _read(files: Sequence[str]) -> np.ndarray:
    def one(file: str) -> int:
        digest = hashlib.blake2b(digest_size=8)
        with open(file, "rb") as stream:
            while part := stream.read(1 << 20):
                digest.update(part)
        return int.from_bytes(digest.digest(), "little")

    with ThreadPoolExecutor(THREADS) as pool:
        return np.fromiter(pool.map(one, files), np.uint64, len(files))


def _load(store: Path) -> np.ndarray:
    try:
        found: np.ndarray = np.load(store, allow_pickle=False)
    except (OSError, ValueError, EOFError):  # missing or damaged: all files are read
        return np.zeros((2, 0), np.uint64)
    return found if found.dtype == np.uint64 and found.ndim == 2 and len(found) == 2 else np.zeros((2, 0), np.uint64)


def _save(store: Path, keys: np.ndarray, found: np.ndarray) -> None:
    store.parent.mkdir(parents=True, exist_ok=True)
    order = np.argsort(keys)
    with replacing(store) as temporary, open(temporary, "wb") as stream:
        np.save(stream, np.stack([keys[order], found[order]]))
