"""Child processes that never import modules from the current folder.

`python -m` and `python -c` put the current folder first on the module path, so a `json.py` next to a downloaded data
set would run instead of Python's own.

subprocess.run(python("-m", "pip", "--version"), env=child_environment())
with safe_children(): ...      # for libraries that start processes themselves
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SOURCE = Path(__file__).parents[2]  # the folder that contains this package


def python(*words: str) -> list[str]:
    """The command that starts this Python without the current folder on its module path."""
    return [sys.executable, "-P", *words]


def child_environment(**changes: str) -> dict[str, str]:
    """This process's environment, with this package importable and no empty (= current folder) entry in PYTHONPATH."""
    named = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    own = [] if SOURCE.name in ("site-packages", "dist-packages") else [str(SOURCE)]  # already on the path
    path = os.pathsep.join(dict.fromkeys([*own, *map(os.path.abspath, named)]))
    return {**os.environ, **changes, "PYTHONSAFEPATH": "1", "PYTHONPATH": path}


@contextmanager
def safe_children() -> Iterator[None]:
    """Inside this context, processes that libraries start (spawn, Ray, Slurm) inherit the safe environment."""
    before = {name: os.environ.get(name) for name in ("PYTHONSAFEPATH", "PYTHONPATH")}
    safe = child_environment()
    os.environ.update({name: safe[name] for name in before})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
