"""Every setting of a run, and the files they are read from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from patchgen.config.base import Refine, Settings, Tune, dump_config, from_file, known_settings, read_settings
from patchgen.config.fold import NO_DOMAIN, PRESETS, Config, Pool, Selection, SplitRule, Task
from patchgen.config.stream import StreamConfig, stream_preset


def config_class(task: Any) -> type[Settings]:
    """The settings class of a task."""
    return StreamConfig if task == "ccd" else Config


def load_settings(path: str | Path, **changes: Any) -> Settings:
    """Read a YAML file of settings of any task; raises ValueError for unknown keys, with the nearest known one."""
    found = read_settings(path)
    return from_file(config_class(changes.get("task", found.get("task"))), path, changes, found)


__all__ = [
    "Config", "NO_DOMAIN", "PRESETS", "Pool", "Refine", "Selection", "Settings", "SplitRule", "StreamConfig", "Task",
    "Tune", "config_class", "dump_config", "from_file", "known_settings", "load_settings", "read_settings",
    "stream_preset",
]  # fmt: skip
