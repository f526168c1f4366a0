"""Methods: what is pooled, what is tuned, and which named losses are minimised.

A method is one small class with one verb, ``losses`` (see ``method.py``); the trainer sums what it returns. Adding one
is a class and a line in ``METHODS``; ``a+b`` is method ``a`` with the terms of ``b``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from patchgen.common import plugins
from patchgen.common.text import did_you_mean
from patchgen.config import Config
from patchgen.methods.ablation import Attention, AttentionSuppressed, Channel, SelectChoices, Static
from patchgen.methods.adversarial import Cdann, Dann
from patchgen.methods.alignment import Coral, Mmd
from patchgen.methods.arm import Arm
from patchgen.methods.averages import Sma
from patchgen.methods.balance import Balance
from patchgen.methods.bfmix import BfMixLike
from patchgen.methods.clip import CoOp, ZeroShot
from patchgen.methods.clipceil import ClipCeil
from patchgen.methods.clipood import ClipOod
from patchgen.methods.dpl import Dpl
from patchgen.methods.duprg import Duprg
from patchgen.methods.erm import AllLabels, Erm, Full, LinearProbe
from patchgen.methods.gestur import Gestur
from patchgen.methods.gmdg import Gmdg
from patchgen.methods.guards import check_parts
from patchgen.methods.invariance import GroupDro, Irm, Vrex
from patchgen.methods.kadaptation import KAdaptation, KAdaptationMoa
from patchgen.methods.lreg import LReg
from patchgen.methods.mdsdi import Mdsdi
from patchgen.methods.meta import Fish, Mldg
from patchgen.methods.method import Method
from patchgen.methods.miro import Miro
from patchgen.methods.mixup import Mixup
from patchgen.methods.moments import DomainGaussian, DomainMoments
from patchgen.methods.mtl import Mtl
from patchgen.methods.patchgen import PatchGenMethod, PatchGenTrueMask, PatchGenWithoutLosses
from patchgen.methods.pim import MarginalEntropy, Pim, PimLReg
from patchgen.methods.promptstyler import PromptStyler
from patchgen.methods.rsc import Rsc
from patchgen.methods.select import PatchGenAttend, PatchGenSelect, SelectTrueMask
from patchgen.methods.selfreg import SelfReg
from patchgen.methods.style import MixStyle, SagNet

METHODS: dict[str, type[Method]] = {
    "lp": LinearProbe,
    "lp-ln": Erm,
    "full": Full,
    "patchgen-select": PatchGenSelect,
    "patchgen": PatchGenMethod,
    "patchgen-no-losses": PatchGenWithoutLosses,
    "patchgen-true-mask": PatchGenTrueMask,
    "patchgen-attend": PatchGenAttend,
    "patchgen-select-true-mask": SelectTrueMask,
    "ablation-static": Static,
    "ablation-channel": Channel,
    "ablation-attention": Attention,
    "ablation-attention-ms": AttentionSuppressed,
    "ablation-select": SelectChoices,
    "balance": Balance,
    "all-labels": AllLabels,
    "miro": Miro,
    "gmdg": Gmdg,
    "domain-moments": DomainMoments,
    "domain-gaussian": DomainGaussian,
    "gestur": Gestur,
    "lreg": LReg,
    "pim": Pim,
    "pim-lreg": PimLReg,
    "entropy": MarginalEntropy,
    "coral": Coral,
    "mmd": Mmd,
    "dann": Dann,
    "cdann": Cdann,
    "mtl": Mtl,
    "rsc": Rsc,
    "selfreg": SelfReg,
    "mdsdi": Mdsdi,
    "mixstyle": MixStyle,
    "sagnet": SagNet,
    "arm": Arm,
    "clip": ZeroShot,
    "coop": CoOp,
    "duprg": Duprg,
    "promptstyler": PromptStyler,
    "dpl": Dpl,
    "clipood": ClipOod,
    "clipceil": ClipCeil,
    "kadaptation": KAdaptation,
    "kadaptation-moa": KAdaptationMoa,
    "bfmix-like": BfMixLike,
    "irm": Irm,
    "vrex": Vrex,
    "groupdro": GroupDro,
    "mixup": Mixup,
    "mldg": Mldg,
    "fish": Fish,
    "sma": Sma,
}
plugins.open_table("methods", METHODS)

ALIASES = {"erm": "lp-ln"}  # other names that people know a method by


def make_method(config: Config) -> Method:
    """The method that the settings name, with their pool and tuning mode where given."""
    return method_class(config.method)(config)


def method_class(name: str) -> type[Method]:
    """``patchgen``, or ``patchgen+miro``: the first part with the terms of the others."""
    first, *more = [_known(part, name) for part in name.split("+")]
    odd = [part for part, found in zip(name.split("+")[1:], more, strict=True) if not found.addable]
    if odd:
        fit = ", ".join(part for part, found in METHODS.items() if found.addable)
        raise ValueError(f"{odd[0]!r} in {name!r} cannot be added to another method; what can: {fit}")
    if len(set(more)) < len(more) or first in more:
        raise ValueError(f"method {name!r} names a part twice")
    for whole, part in itertools.permutations([first, *more], 2):
        if part.addable and issubclass(whole, part):
            a, b = _name(whole), _name(part)
            raise ValueError(f"method {name!r}: {a!r} has the terms of {b!r} already; leave {b!r} out")
    if not more:
        return first
    check_parts(name, {_name(part): part for part in (first, *more)})
    parts = (*reversed(more), first)  # later parts call the earlier ones by super()
    return type(name, parts, {"summary": " + ".join(part.summary for part in reversed(parts))})


def compared_methods(methods: Iterable[str]) -> tuple[str, ...]:
    """The names given, `all` among them standing for every method that can be compared on any backbone."""
    plugins.load_all()
    every = [name for name, method in METHODS.items() if method.compared]
    return tuple(dict.fromkeys(name for word in methods for name in (every if word == "all" else [word])))


def _name(method: type[Method]) -> str:
    return next(name for name, found in METHODS.items() if found is method)


def _known(part: str, name: str) -> type[Method]:
    part = ALIASES.get(part, part)
    if part not in METHODS:
        plugins.load_all()
    if part not in METHODS:
        inside = f" in {name!r}" if part != name else ""
        hint = did_you_mean(part, [*METHODS, *ALIASES])
        known = f"(known: {', '.join(METHODS)}; one of your own: --plugin FILE.py)"
        raise ValueError(f"unknown method {part!r}{inside}{hint} {known}")
    return METHODS[part]


__all__ = ["ALIASES", "METHODS", "Method", "compared_methods", "make_method", "method_class"]
