"""Read weight files into memory, so that later changes of the file have no effect.

Truncating a memory-mapped file would kill its readers, and bytes written to it would change the weights immediately.

tensors, metadata = read_tensors(Path("model.safetensors"))
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from patchgen.common.files import refuse_pipe

if TYPE_CHECKING:
    from torch import Tensor


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a .safetensors file.

    Raises:
        ValueError: it is not a readable .safetensors file.
    """
    refuse_pipe(path)
    return parse_tensors(path.read_bytes(), str(path))


def parse_tensors(data: bytes, name: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The same of a file's bytes; `name` is for the error."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors = load(data)  # checks the header
        size = int.from_bytes(data[:8], "little")
        metadata = json.loads(data[8 : 8 + size]).get("__metadata__") or {}
    # the library also raises built-in errors, for types that torch lacks and for shapes that do not fit
    except (SafetensorError, KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise ValueError(
            f"{name} is not a readable .safetensors file ({type(error).__name__}: {error!s:.200})"
        ) from error
    return tensors, metadata
