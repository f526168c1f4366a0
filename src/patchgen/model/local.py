"""Backbones in local files: their path, and a digest of their content that does not depend on the path.

    local_path("weights/vit")                     # the folder; None for a name such as "auto", or if it does not exist
    content("weights/vit")                        # "sha256:...", the same after a move and for an exact copy

The name of every run of a sweep needs it, so each file is read once per process, until its size or time changes.
"""

from __future__ import annotations

import hashlib
import os
from functools import cache
from pathlib import Path

from patchgen.model.pixels import NESTED, is_nested

# the files of a folder that define a model: weights, architecture, mean and std, and CLIP's tokenizer
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
    """A digest of a local backbone's files; None if there are none or they cannot be read (loading reports that)."""
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
    """sha256 of a file; size and time are only part of the cache key."""
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
