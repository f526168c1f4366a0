"""Methods: a pool, a tuning mode and the named losses to minimise; ``patchgen+miro`` adds the term of ``miro``.

To add a method, write a class (see ``method.py``) and add it to ``METHODS``.
"""

from collections.abc import Iterable

from patchgen.common import plugins
from patchgen.common.text import did_you_mean
from patchgen.config import Config
from patchgen.methods.ablation import Attention, AttentionSuppressed, Channel, SelectChoices, Static
from patchgen.methods.alignment import Cdann, Coral, Dann, Mdsdi, Mmd
from patchgen.methods.averages import Gestur, Sma
from patchgen.methods.clip import ClipCeil, ClipOod, CoOp, ZeroShot
from patchgen.methods.features import MixStyle, Mtl, Rsc, SagNet
from patchgen.methods.invariance import Fish, GroupDro, Irm, Mldg, Vrex
from patchgen.methods.kadaptation import KAdaptation, KAdaptationMoa
from patchgen.methods.lreg import LReg, MarginalEntropy, Pim, PimLReg, SelfReg
from patchgen.methods.method import AllLabels, Erm, Full, LinearProbe, Method
from patchgen.methods.miro import DomainGaussian, DomainMoments, Gmdg, Miro
from patchgen.methods.mixup import BfMixLike, Mixup
from patchgen.methods.patchgen import (
    Balance,
    PatchGenAttend,
    PatchGenCls,
    PatchGenMethod,
    PatchGenSelect,
    PatchGenTrueMask,
    PatchGenWithoutLosses,
    SelectTrueMask,
)
from patchgen.methods.source_free import Duprg, PromptStyler
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

ALIASES = {"erm": "lp-ln"}  # other common names of a method
WITH_LREG = ("miro", "gmdg", "pim", "pim-lreg")  # terms that L-Reg was published on top of


def make_method(config: Config) -> Method:
    """The method named in the settings, with their pool and tuning mode if given."""
    return method_class(config.method)(config)


def method_class(name: str) -> type[Method]:
    """``patchgen``, or ``patchgen+miro`` with the term of another method; only one, so that none undoes another."""
    words = [ALIASES.get(word, word) for word in name.split("+")]
    first, *terms = map(_known, words)
    if not terms:
        return first
    published = len(terms) == 2 and words[1] in WITH_LREG and words[2] == "lreg"
    if first.addable or not all(term.addable for term in terms) or (len(terms) > 1 and not published):
        raise ValueError(
            f"method {name!r}: a sum is a method like lp-ln, full or patchgen and one term, or one of "
            f"{', '.join(f'{word}+lreg' for word in WITH_LREG)}; "
            f"the terms are {', '.join(word for word, term in METHODS.items() if term.addable)}"
        )
    if issubclass(first, terms[0]):
        raise ValueError(f"method {name!r}: {words[0]!r} has the terms of {words[1]!r} already; leave {words[1]!r} out")
    parts = (*reversed(terms), first)  # later parts call the earlier ones by super()
    return type(name, parts, {"summary": " + ".join(part.summary for part in reversed(parts))})


def compared_methods(methods: Iterable[str]) -> tuple[str, ...]:
    """The given names, with `all` replaced by every method that can be compared on any backbone."""
    plugins.load_all()
    every = [name for name, method in METHODS.items() if method.compared]
    return tuple(dict.fromkeys(name for word in methods for name in (every if word == "all" else [word])))


def _known(part: str) -> type[Method]:
    if part not in METHODS:
        plugins.load_all()
    if part not in METHODS:
        hint = did_you_mean(part, [*METHODS, *ALIASES])
        raise ValueError(f"unknown method {part!r}{hint} (known: {', '.join(METHODS)}; your own: --plugin FILE.py)")
    return METHODS[part]


__all__ = ["ALIASES", "METHODS", "Method", "compared_methods", "make_method", "method_class"]
