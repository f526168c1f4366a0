"""Every setting of a run, and the files they are read from."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from patchgen.config.base import Refine, Settings, Tune, dump_config, known_settings, read_settings
from patchgen.config.fold import NO_DOMAIN, PRESETS, Config, Pool, Selection, SplitRule, Task


def config_class(task: Any) -> type[Settings]:
    """The settings class of a task; `ccd` is a package of its own, imported only for its runs."""
    return Config if task != "ccd" else import_module("patchgen.ccd.settings").StreamConfig  # type: ignore[no-any-return]


def load_settings(path: str | Path, **changes: Any) -> Settings:
    """Read a YAML file of settings of any task; raises ValueError for unknown keys, with the nearest known one."""
    settings = {**read_settings(path), **changes}
    kind = config_class(settings.get("task"))
    try:
        return kind(**known_settings(kind, settings, str(path)))
    except ValueError as error:
        text = str(error)
        raise ValueError(text if text.startswith(str(path)) else f"{path}: {text}") from error


__all__ = [
    "Config", "NO_DOMAIN", "PRESETS", "Pool", "Refine", "Selection", "Settings", "SplitRule", "Task",
    "Tune", "config_class", "dump_config", "known_settings", "load_settings", "read_settings",
]  # fmt: skip
