"""Specifications of the oracle benchmark: the spec, its checks, and the suite of named specs.

spec = replace(SUITE["oracle-shortcut"], predictive=3, seed=2)
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from patchgen.common.text import did_you_mean
from patchgen.data.oracle_draw import BACKDROPS, LOOKS, MOTIFS


@dataclass(frozen=True)
class Domain:
    """One domain: how far its background follows the class, and how strong its style is."""

    name: str
    correlation: float  # P(background = the class's own kind)
    style: float  # 0 = none, 1 = the full tint, contrast and brightness of the look at this domain's position
    turned: bool = False  # a background that is not the class's own is the NEXT class's, instead of any other's

    def __post_init__(self) -> None:
        # 1 and 1.0 are the same spec and must have the same digest
        object.__setattr__(self, "correlation", float(self.correlation))
        object.__setattr__(self, "style", float(self.style))


@dataclass(frozen=True)
class OracleSpec:
    """The specification of the data; equal specs give equal pixels."""

    domains: tuple[Domain, ...]
    unseen: str
    predictive: int  # |C*| in patches, 1..P
    classes: int = 4
    image_size: int = 84
    patch_size: int = 14
    objects: int = 1  # connected groups that C* is divided into
    distractors: int = 0  # patches outside C* with a pattern of no class
    noise: int = 8  # pixels move by at most this, of 255
    per_class: int = 100  # images per domain and class
    held_out: int = 0  # the last classes, meant to have no labels in training (discovery)
    local: bool = False  # style and noise do not affect C*: (C* pixels, label) has the same distribution in all domains
    seed: int = 1

    def __post_init__(self) -> None:
        _check_sizes(self)
        _check_domains(self)

    @property
    def grid(self) -> int:
        """Patches along a side; P is its square."""
        return self.image_size // self.patch_size

    @property
    def class_names(self) -> tuple[str, ...]:
        """The classes' motifs, sorted, so that labels are the ids `read_table` gives."""
        return tuple(sorted(list(MOTIFS)[: self.classes]))

    @property
    def held_out_names(self) -> tuple[str, ...]:
        """The classes meant to be unlabelled."""
        return self.class_names[self.classes - self.held_out :]

    @property
    def background_names(self) -> tuple[str, ...]:
        """Background kind k is class k's own."""
        return tuple(BACKDROPS)[: self.classes]


def _check_sizes(spec: OracleSpec) -> None:
    patches = spec.grid**2 if spec.patch_size > 0 else 0
    kinds = min(len(MOTIFS), len(BACKDROPS))
    rules = [
        (spec.patch_size >= 14,
         f"patch_size must be at least 14, so that one patch tells its motif; got {spec.patch_size}"),
        (spec.patch_size > 0 and spec.image_size >= 2 * spec.patch_size and spec.image_size % spec.patch_size == 0,
         f"image_size must be a multiple of patch_size {spec.patch_size}, at least two; got {spec.image_size}"),
        (2 <= spec.classes <= kinds, f"classes must be 2..{kinds} (there are {kinds} motifs), got {spec.classes}"),
        (1 <= spec.predictive <= patches, f"predictive must be 1..{patches} patches, got {spec.predictive}"),
        (1 <= spec.objects <= spec.predictive, f"objects must be 1..predictive {spec.predictive}, got {spec.objects}"),
        (spec.objects == 1 or 3 * spec.predictive <= patches,
         f"several objects need room between them: predictive must be at most {patches // 3}, got {spec.predictive}"),
        (0 <= spec.distractors <= patches - spec.predictive,
         f"distractors must be 0..{patches - spec.predictive} patches (outside C*), got {spec.distractors}"),
        (not spec.local or spec.predictive < patches,
         f"local keeps the shortcut off C*, so predictive must be below {patches}, got {spec.predictive}"),
        (0 <= spec.noise <= 64, f"noise must be 0..64, got {spec.noise}"),
        (1 <= spec.per_class <= 9999, f"per_class must be 1..9999, got {spec.per_class}"),
        (0 <= spec.held_out <= spec.classes - 1, f"held_out must leave a known class, got {spec.held_out}"),
        (spec.seed >= 0, f"seed must not be negative, got {spec.seed}"),
    ]  # fmt: skip
    _refuse_first(rules)


def _check_domains(spec: OracleSpec) -> None:
    names = [domain.name for domain in spec.domains]
    rules = [
        (2 <= len(names) <= len(LOOKS), f"there must be 2..{len(LOOKS)} domains, got {len(names)}"),
        (len({name.lower() for name in names}) == len(names), f"domain names must differ, got {', '.join(names)}"),
    ]
    for domain in spec.domains:
        rules += [
            (re.fullmatch(r"\w[\w-]*", domain.name) is not None,
             f"a domain name is letters, digits, _ and -, because it names a folder; got {domain.name!r}"),
            (0 <= domain.correlation <= 1, f"correlation of {domain.name} must be in [0,1], got {domain.correlation}"),
            (0 <= domain.style <= 1, f"style of {domain.name} must be in [0,1], got {domain.style}"),
        ]  # fmt: skip
    near = did_you_mean(spec.unseen, names)
    rules.append((spec.unseen in names, f"unseen must be one of {', '.join(names)}, got {spec.unseen!r}{near}"))
    _refuse_first(rules)


def _refuse_first(rules: list[tuple[bool, str]]) -> None:
    for holds, text in rules:
        if not holds:
            raise ValueError(text)


def _domains(amber: float, dusk: float, jade: float, mist: float, style: float) -> tuple[Domain, ...]:
    """Four domains with these correlations; the unseen one, mist, has the whole style."""
    sources = {"amber": amber, "dusk": dusk, "jade": jade}
    return *(Domain(name, value, style) for name, value in sources.items()), Domain("mist", mist, 1.0)


_SHORTCUT = OracleSpec(_domains(0.99, 0.97, 0.95, 0.25, style=0.6), "mist", predictive=6, distractors=4)
_WEAKER = replace(_SHORTCUT, domains=_domains(0.95, 0.9, 0.85, 0.25, style=0.6))
SUITE: dict[str, OracleSpec] = {
    "oracle-easy": OracleSpec(_domains(0.5, 0.4, 0.3, 0.25, style=0.3), "mist", predictive=12),
    "oracle-shortcut": _SHORTCUT,
    "oracle-turned": replace(
        _SHORTCUT, domains=(*_SHORTCUT.domains[:3], Domain("mist", correlation=0.05, style=1.0, turned=True))
    ),
    "oracle-full": replace(_SHORTCUT, predictive=36, distractors=0),
    "oracle-tiny": replace(_WEAKER, predictive=1),
    "oracle-unknown": replace(
        _SHORTCUT, domains=_domains(0.8, 0.75, 0.7, 0.125, style=0.6), classes=8, held_out=3, per_class=56
    ),
    "oracle-local": replace(_WEAKER, predictive=8, objects=2, local=True),
}
