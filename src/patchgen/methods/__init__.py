"""Methods: a pool, a tuning mode and the named losses to minimise.

A method is a small class with one main function, ``losses`` (see ``method.py``); the trainer minimises the sum of its
terms. To add a method, write a class and add it to ``METHODS``; ``patchgen+miro`` is ``patchgen`` plus the term of
``miro``.
"""

from collections.abc import Iterable

from patchgen.common import plugins
from patchgen.common.text import did_you_mean
from patchgen.config import Config
from patchgen.methods.ablation import Attention, AttentionSuppressed, Channel, SelectChoices, Static
from patchgen.methods.alignment import Cdann, Coral, Dann, Mdsdi, Mmd
from patchgen.methods.averages import Gestur, Sma
from patchgen.methods.balance import Balance, PatchGenAttend, PatchGenSelect, SelectTrueMask
from patchgen.methods.clip import ClipOod, CoOp, ZeroShot
from patchgen.methods.clipceil import ClipCeil
from patchgen.methods.gmdg import DomainGaussian, DomainMoments, Gmdg
from patchgen.methods.heads import Mtl, Rsc
from patchgen.methods.invariance import GroupDro, Irm, Vrex
from patchgen.methods.kadaptation import KAdaptation, KAdaptationMoa
from patchgen.methods.lreg import LReg, MarginalEntropy, Pim, PimLReg
from patchgen.methods.meta import Fish, Mldg
from patchgen.methods.method import AllLabels, Erm, Full, LinearProbe, Method
from patchgen.methods.miro import Miro
from patchgen.methods.mixup import BfMixLike, Mixup
from patchgen.methods.patchgen import PatchGenCls, PatchGenMethod, PatchGenTrueMask, PatchGenWithoutLosses
from patchgen.methods.selfreg import SelfReg
from patchgen.methods.source_free import Duprg, PromptStyler
from patchgen.methods.style import MixStyle, SagNet
from patchgen.methods.transductive import Arm, Dpl

METHODS: dict[str, type[Method]] = {
    "lp": LinearProbe, "lp-ln": Erm, "full": Full,
    "patchgen": PatchGenMethod, "patchgen-cls": PatchGenCls, "patchgen-select": PatchGenSelect,
    "patchgen-no-losses": PatchGenWithoutLosses, "patchgen-true-mask": PatchGenTrueMask,
    "patchgen-attend": PatchGenAttend, "patchgen-select-true-mask": SelectTrueMask,
    "ablation-static": Static, "ablation-channel": Channel, "ablation-attention": Attention,
    "ablation-attention-ms": AttentionSuppressed, "ablation-select": SelectChoices,
    "balance": Balance, "all-labels": AllLabels,
    "miro": Miro, "gmdg": Gmdg, "domain-moments": DomainMoments, "domain-gaussian": DomainGaussian, "gestur": Gestur,
    "lreg": LReg, "pim": Pim, "pim-lreg": PimLReg, "entropy": MarginalEntropy,
    "coral": Coral, "mmd": Mmd, "dann": Dann, "cdann": Cdann,
    "mtl": Mtl, "rsc": Rsc, "selfreg": SelfReg, "mdsdi": Mdsdi, "mixstyle": MixStyle, "sagnet": SagNet, "arm": Arm,
    "clip": ZeroShot, "coop": CoOp, "duprg": Duprg, "promptstyler": PromptStyler, "dpl": Dpl, "clipood": ClipOod,
    "clipceil": ClipCeil, "kadaptation": KAdaptation, "kadaptation-moa": KAdaptationMoa, "bfmix-like": BfMixLike,
    "irm": Irm, "vrex": Vrex, "groupdro": GroupDro, "mixup": Mixup, "mldg": Mldg, "fish": Fish, "sma": Sma,
}  # fmt: skip
plugins.open_table("methods", METHODS)

ALIASES = {"erm": "lp-ln"}  # other common names of a method
WITH_LREG = ("miro", "gmdg", "pim", "pim-lreg")  # terms that L-Reg was published on top of


def make_method(config: Config) -> Method:
    """The method named in the settings, with their pool and tuning mode if given."""
    return method_class(config.method)(config)


def method_class(name: str) -> type[Method]:
    """``patchgen``, or ``patchgen+miro``: a method with the term of another one.

    Only one term can be added, so that terms cannot undo one another; the exception is L-Reg.
    """
    words = [ALIASES.get(word, word) for word in name.split("+")]
    first, *terms = [_known(word, name) for word in words]
    if not terms:
        return first
    if odd := [word for word, term in zip(words[1:], terms, strict=True) if not term.addable]:
        fit = ", ".join(word for word, term in METHODS.items() if term.addable)
        raise ValueError(f"{odd[0]!r} in {name!r} cannot be added to another method; what can: {fit}")
    if first.addable:
        raise ValueError(f"method {name!r}: {words[0]!r} is a term; begin with a method like lp-ln, full or patchgen")
    if len(terms) > 1 and (len(terms) > 2 or words[2] != "lreg" or words[1] not in WITH_LREG):
        allowed = ", ".join(f"{word}+lreg" for word in WITH_LREG)
        raise ValueError(f"method {name!r}: a sum has one term, or one of {allowed}; it has {'+'.join(words[1:])}")
    if issubclass(first, terms[0]):
        raise ValueError(f"method {name!r}: {words[0]!r} has the terms of {words[1]!r} already; leave {words[1]!r} out")
    parts = (*reversed(terms), first)  # later parts call the earlier ones by super()
    return type(name, parts, {"summary": " + ".join(part.summary for part in reversed(parts))})


def compared_methods(methods: Iterable[str]) -> tuple[str, ...]:
    """The given names, with `all` replaced by every method that can be compared on any backbone."""
    plugins.load_all()
    every = [name for name, method in METHODS.items() if method.compared]
    return tuple(dict.fromkeys(name for word in methods for name in (every if word == "all" else [word])))


def _known(part: str, name: str) -> type[Method]:
    if part not in METHODS:
        plugins.load_all()
    if part not in METHODS:
        inside = f" in {name!r}" if part != name else ""
        hint = did_you_mean(part, [*METHODS, *ALIASES])
        known = f"(known: {', '.join(METHODS)}; one of your own: --plugin FILE.py)"
        raise ValueError(f"unknown method {part!r}{inside}{hint} {known}")
    return METHODS[part]


__all__ = ["ALIASES", "METHODS", "Method", "compared_methods", "make_method", "method_class"]
