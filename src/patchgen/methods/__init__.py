"""Methods: what is pooled, what is tuned, and which named losses are minimised.

A method is one small class with one verb, ``losses``; the trainer sums what it returns. Adding one is a class and a
line in ``METHODS``.
"""

from __future__ import annotations

from collections.abc import Mapping

from patchgen.config import Config
from patchgen.methods.erm import Erm, Full, LinearProbe
from patchgen.methods.method import Method
from patchgen.methods.patchgen import PatchGenMethod, PatchGenTrueMask, PatchGenWithoutLosses
from patchgen.names import did_you_mean

METHODS: Mapping[str, type[Method]] = {
    "lp": LinearProbe,
    "lp-ln": Erm,
    "full": Full,
    "patchgen": PatchGenMethod,
    "patchgen-no-losses": PatchGenWithoutLosses,
    "patchgen-true-mask": PatchGenTrueMask,
}


def make_method(config: Config) -> Method:
    """The method that the settings name, with their pool and tuning mode where given."""
    if config.method not in METHODS:
        hint = did_you_mean(config.method, METHODS)
        raise ValueError(f"unknown method {config.method!r}{hint} (known: {', '.join(METHODS)})")
    return METHODS[config.method](config)


__all__ = ["METHODS", "Method", "make_method"]
