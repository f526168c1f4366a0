"""One file a command: its options as a typed signature, and what it prints."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def parse(what: Callable[..., T], name: str, argv: list[str], **more: Any) -> T:
    """A function or dataclass from the command's words."""
    import tyro

    return tyro.cli(what, prog=f"patchgen {name}", args=argv, **more)


def option(argv: list[str], name: str, default: str) -> str:
    """The value of one option, before the rest is parsed (a preset changes the others' defaults)."""
    for i, word in enumerate(argv):
        if word == name and i + 1 < len(argv):
            return argv[i + 1]
        if word.startswith(f"{name}="):
            return word.split("=", 1)[1]
    return default


def settings_of(arguments: Any, config: type[T], **changes: Any) -> T:
    """The run's settings out of a command's arguments."""
    names = {f.name for f in dataclasses.fields(config)}  # type: ignore[arg-type]
    return config(**{k: v for k, v in vars(arguments).items() if k in names} | changes)
