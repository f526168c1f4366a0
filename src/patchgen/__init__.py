"""PatchGen: image classifiers that hold where the training data ends.

The names below are imported on first use, so that ``import patchgen`` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for type checkers, editors and the API pages
    from patchgen.data.table import read_table
    from patchgen.fit.estimator import PatchGenClassifier
    from patchgen.model.patchgen import PatchGen, PatchGenOutput
    from patchgen.predict.predictor import load_predictor, load_run

__version__ = "0.2.0"
__all__ = ["PatchGen", "PatchGenClassifier", "PatchGenOutput", "load_predictor", "load_run", "read_table"]

_HOME = {
    "PatchGen": "patchgen.model.patchgen",
    "PatchGenClassifier": "patchgen.fit.estimator",
    "PatchGenOutput": "patchgen.model.patchgen",
    "load_predictor": "patchgen.predict.predictor",
    "load_run": "patchgen.predict.predictor",
    "read_table": "patchgen.data.table",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'patchgen' has no attribute {name!r}; it offers {', '.join(__all__)}")
    return getattr(import_module(_HOME[name]), name)
