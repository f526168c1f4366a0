"""What a method cannot work with, said before anything is trained: each raises a ValueError that names the fix."""

from __future__ import annotations

from patchgen.methods.method import Method
from patchgen.model.classifier import Classifier


def refuse_fixed_features(method: Method) -> None:
    """A term on the features alone changes nothing where neither the backbone nor a mask in front of them learns."""
    if method.chosen_tune == "head" and method.chosen_pool != "patchgen":
        raise ValueError(
            f"{method.config.method!r} moves the features of the source domains, but with tune 'head' and pool "
            f"{method.chosen_pool!r} nothing can move them; choose --tune layernorm, last_block or full"
        )


def refuse_behind(part: type[Method], method: Method, *others: type[Method]) -> None:
    """Where ``part`` changes the logits, others that start again from the model's must stand before it in a sum."""
    order = type(method).__mro__  # the last part of a sum comes first
    lost = [other.__name__ for other in others if other in order and order.index(other) < order.index(part)]
    if lost:
        raise ValueError(
            f"method {method.config.method!r}: what {part.__name__} does to the logits would be lost behind "
            f"{' and '.join(lost)}; name {part.__name__} after it"
        )


def require_linear_head(method: Method, model: Classifier) -> None:
    """For what is computed from the head's weight (C, D) and bias (C,)."""
    if not (hasattr(model.head, "weight") and hasattr(model.head, "bias")):
        raise ValueError(
            f"method {method.config.method!r} needs a linear head, and the first part has brought "
            f"{type(model.head).__name__}; add it to a method with a linear one, such as lp-ln or patchgen"
        )
