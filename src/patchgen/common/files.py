"""Files that are whole or not there, also after a kill: a temporary name in the same folder, then a rename.

write_text(path, text)
with replacing(path) as temporary: picture.save(temporary, "PNG")
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A temporary name that takes the place of `path` when the block ends well, and is removed when it does not."""
    # of this block alone, also where machines share the folder and threads the process
    temporary = Path(path).with_name(f".{Path(path).name}.{secrets.token_hex(6)}.tmp")
    try:
        yield temporary
        with open(temporary, "rb+") as handle:
            os.fsync(handle.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: str | Path, text: str, errors: str = "strict") -> None:
    """Text as UTF-8; `errors` as in `str.encode`."""
    with replacing(path) as temporary:
        temporary.write_bytes(text.encode("utf-8", errors))


def cache_dir() -> Path:
    """`$PATCHGEN_CACHE`, else `$XDG_CACHE_HOME/patchgen`, else `~/.cache/patchgen`."""
    if chosen := os.environ.get("PATCHGEN_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "patchgen"
