"""PatchGen: image classifiers that hold where the training data ends.

The names below are imported on first use, so that ``import patchgen`` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for type checkers, editors and the API pages
    from patchgen.data.table import read_table
    from patchgen.draw.overlay import Explanation
    from patchgen.fit.estimator import PatchGenClassifier
    from patchgen.model.backbone import Backbone, load_backbone
    from patchgen.model.classifier import Classifier
    from patchgen.model.losses import class_similarity, cross_entropy, mask_suppression, selected_confidence
    from patchgen.model.patchgen import PatchGen, PatchGenOutput
    from patchgen.model.selector import Selector
    from patchgen.model.tuning import set_tuning
    from patchgen.predict.predictor import load_predictor, load_run

__version__ = "0.2.0"
__all__ = [
    "Backbone", "Classifier", "Explanation", "PatchGen", "PatchGenClassifier", "PatchGenOutput", "Selector",
    "class_similarity", "cross_entropy", "load_backbone", "load_predictor", "load_run", "mask_suppression",
    "read_table", "selected_confidence", "set_tuning",
]  # fmt: skip
_HOME = {
    "patchgen.data.table": ["read_table"],
    "patchgen.draw.overlay": ["Explanation"],
    "patchgen.fit.estimator": ["PatchGenClassifier"],
    "patchgen.model.backbone": ["Backbone", "load_backbone"],
    "patchgen.model.classifier": ["Classifier"],
    "patchgen.model.losses": ["class_similarity", "cross_entropy", "mask_suppression", "selected_confidence"],
    "patchgen.model.patchgen": ["PatchGen", "PatchGenOutput"],
    "patchgen.model.selector": ["Selector"],
    "patchgen.model.tuning": ["set_tuning"],
    "patchgen.predict.predictor": ["load_predictor", "load_run"],
}


def __getattr__(name: str) -> Any:
    home = next((module for module, names in _HOME.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module 'patchgen' has no attribute {name!r}; it offers {', '.join(__all__)}")
    return getattr(import_module(home), name)
