"""Digests of images, by which a change under the same names is noticed."""

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from patchgen.common.files import cache_dir, replacing
from patchgen.data.safe_open import check_file
from patchgen.data.table import Table

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
