"""Tasks: which data is used for training and which for scoring.

    mdg        one domain is left out of training and scored at the end
    mdg_gcd    the same, and the labels of some classes are hidden: these classes must be discovered
    ccd        a labelled stage, then stages of unlabelled images in which new classes appear

`TASKS` lists them with their settings, their methods and the function that reads their data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from patchgen.config import Config, Settings, StreamConfig
from patchgen.data.table import Table
from patchgen.methods import METHODS, make_method
from patchgen.methods.stream import STREAM_METHODS, make_stream_method
from patchgen.tasks import ccd_data, mdg, mdg_gcd
from patchgen.tasks.ccd_data import Stream
from patchgen.tasks.fold import Fold


class Task(NamedTuple):
    config: type[Settings]
    methods: Mapping[str, Any]  # name -> class
    make_method: Callable[[Any], Any]  # the method named in the settings; raises ValueError
    read: Callable[[Any, Table | None], Fold | Stream]  # settings, and the table if it is already read
    loop: str  # the module in `patchgen.train` whose `work` trains it


TASKS: Mapping[str, Task] = {
    "mdg": Task(Config, METHODS, make_method, mdg.make_fold, "fold"),
    "mdg_gcd": Task(Config, METHODS, make_method, mdg_gcd.make_fold, "fold"),
    "ccd": Task(StreamConfig, STREAM_METHODS, make_stream_method, ccd_data.make_stream, "stream.loop"),
}


def make_fold(config: Config, table: Table | None = None) -> Fold:
    """Read, check and split the data of a run that leaves a domain out."""
    fold = TASKS[config.task].read(config, table)
    assert isinstance(fold, Fold)
    return fold


__all__ = ["TASKS", "Fold", "Stream", "Task", "make_fold"]
