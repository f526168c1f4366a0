"""What a method cannot work with, said before anything is trained: each raises a ValueError that names the fix."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from patchgen.methods.method import Method
from patchgen.model.classifier import MASKED, Classifier

ON_LOGITS = ("", "read", "shift", "replace")  # parts of a sum stand in this order; the first word may be anywhere


def refuse_fixed_features(method: Method) -> None:
    """A term on the features alone changes nothing where neither the backbone nor a mask in front of them learns."""
    if method.chosen_tune == "head" and method.chosen_pool not in MASKED:
        raise ValueError(
            f"{method.config.method!r} moves the features of the source domains, but with tune 'head' and pool "
            f"{method.chosen_pool!r} nothing can move them; choose --tune layernorm, last_block or full"
        )


def check_parts(name: str, parts: Mapping[str, type[Method]]) -> None:
    """Refuse a sum in which a part would be lost; ``parts`` are its classes by their names, in the order of the sum.

    The last part is asked first and hands the logits on, to the first one at the end: what changes them must be named
    after what reads them, and what starts again from the features after what only shifts them.
    """
    main = [part for part, method in parts.items() if method.replaces_main]
    if len(main) > 1:
        raise ValueError(f"method {name!r}: {' and '.join(main)} both replace the main loss; leave one out")
    for (early, one), (late, other) in itertools.combinations(parts.items(), 2):
        fix = f"name {early!r} after {late!r}"
        if other.on_logits and ON_LOGITS.index(one.on_logits) > ON_LOGITS.index(other.on_logits):
            lost, on = (early, late) if other.on_logits == "read" else (late, early)
            raise ValueError(f"method {name!r}: what {lost!r} does to the logits would be lost on {on!r}; {fix}")
        if other.predicts_alone and one.predicting is not Method.predicting:
            raise ValueError(f"method {name!r}: {late!r} would hide what {early!r} predicts with; {fix}")


def require_linear_head(method: Method, model: Classifier) -> None:
    """For what is computed from the head's weight (C, D) and bias (C,)."""
    if not (hasattr(model.head, "weight") and hasattr(model.head, "bias")):
        raise ValueError(
            f"method {method.config.method!r} needs a linear head, and the first part has brought "
            f"{type(model.head).__name__}; add it to a method with a linear one, such as lp-ln or patchgen"
        )
