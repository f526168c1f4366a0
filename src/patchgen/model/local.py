"""A backbone of local files: where it lies, and a digest of what is in it, whatever its path.

    local_path("weights/vit")                     # the folder; None for a name such as "auto", or where nothing is
    content("weights/vit")                        # "sha256:...", the same after a move and for an exact copy

It is asked for the name of each run of a sweep, so a file is read once a process, until its size or time changes.
"""

from __future__ import annotations

import hashlib
import os
from functools import cache
from pathlib import Path

from patchgen.model.pixels import NESTED, is_nested

# of a folder what is read for a model: weights, architecture, mean and deviation, and CLIP's tokenizer
READ = ("config.json", "preprocessor_config.json", "model*.safetensors*", "pytorch_model.bin", "*token*.json",
        "vocab.json", "merges.txt")  # fmt: skip


def local_path(source: str) -> Path | None:
    """The folder or file that `load_backbone` would read for this source, if it is one and exists."""
    path = os.path.expanduser(source)
    if not source or not os.path.exists(path):
        return None
    from patchgen.model.backbone import BACKBONES
    from patchgen.model.timm import PREFIX

    is_name = source == "auto" or source in BACKBONES or source.startswith(PREFIX)
    return None if is_name else Path(path)


def content(source: str) -> str | None:
    """A digest of a local backbone's files; None where there is none, or it cannot be read (which loading will say)."""
    path = local_path(source)
    if path is None:
        return None
    try:
        if path.is_file():
            return f"sha256:{_digest(path)}"
        patterns = (*READ, NESTED) if is_nested(path) else READ
        files = sorted({file for pattern in patterns for file in path.glob(pattern) if file.is_file()})
        lines = "".join(f"{_digest(file)}  {file.name}\n" for file in files)
    except OSError:
        return None
    return f"sha256:{hashlib.sha256(lines.encode()).hexdigest()}" if files else None


def _digest(file: Path) -> str:
    about = file.stat()
    return _read(os.path.abspath(file), about.st_size, about.st_mtime_ns)


@cache
def _read(file: str, size: int, modified: int) -> str:
    """sha256 of a file; size and time stand in the cache's key alone."""
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
