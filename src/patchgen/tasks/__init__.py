"""Tasks: what is trained on and what is scored.

A task turns settings and a table into a ``Fold``. ``mdg`` leaves one domain out; ``mdg_gcd`` also hides the labels of
some classes, which are then to be discovered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from patchgen.config import Config
from patchgen.data.table import Table
from patchgen.tasks import mdg, mdg_gcd
from patchgen.tasks.fold import Fold

TASKS: Mapping[str, Callable[[Config, Table | None], Fold]] = {"mdg": mdg.make_fold, "mdg_gcd": mdg_gcd.make_fold}


def make_fold(config: Config, table: Table | None = None) -> Fold:
    """Read, check and split the data of a run, as its task says."""
    return TASKS[config.task](config, table)


__all__ = ["TASKS", "Fold", "make_fold"]
