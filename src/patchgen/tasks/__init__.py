"""Tasks: which data is used for training and which for scoring.

mdg        one domain is left out of training and scored at the end
mdg_gcd    the same, and the labels of some classes are hidden: these classes must be discovered
ccd        a labelled stage, then unlabelled stages with new classes: `patchgen.ccd`, imported only for its runs
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

from patchgen.config import Config
from patchgen.data.table import Table
from patchgen.methods import make_method
from patchgen.tasks import mdg, mdg_gcd
from patchgen.tasks.mdg import Fold


class Task(NamedTuple):
    make_method: Callable[[Any], Any]  # the method named in the settings; raises ValueError
    read: Callable[[Any, Table | None], Any]  # settings, and the table if it is already read -> a Fold or a Stream
    loop: str  # the module whose `work` trains it


def get_task(name: str) -> Task:
    if name == "ccd":
        data, methods = import_module("patchgen.ccd.data"), import_module("patchgen.ccd.methods")
        return Task(methods.make_stream_method, data.make_stream, "patchgen.ccd.loop")
    read = mdg_gcd.make_fold if name == "mdg_gcd" else mdg.make_fold
    return Task(make_method, read, "patchgen.train.fold")


def make_fold(config: Config, table: Table | None = None) -> Fold:
    """Read, check and split the data of a run that leaves a domain out."""
    fold = get_task(config.task).read(config, table)
    assert isinstance(fold, Fold)
    return fold


__all__ = ["Fold", "Task", "get_task", "make_fold"]
