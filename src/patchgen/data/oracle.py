"""The oracle benchmark: images in several domains whose predictive patches C* are known (docs/study/oracle.md).

The class depends only on the motif in C*. Backgrounds are correlated with the class in the source domains and not in
the unseen one. Pixels depend only on the spec, on every machine.
"""

import hashlib
import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from patchgen.common.files import cache_dir, replacing_folder
from patchgen.common.text import did_you_mean
from patchgen.common.untrusted import read_json
from patchgen.data import oracle_draw as draw
from patchgen.data.image_files import open_image
from patchgen.data.oracle_draw import BACKDROPS, LOOKS, MOTIFS, Dice
from patchgen.data.table import Table

LAYOUT, MOTIF, BACKDROP, DISTRACTOR, NOISE, KINDS = range(6)  # independent random streams


@dataclass(frozen=True)
class Domain:
    name: str
    correlation: float  # P(background = the class's own kind)
    style: float  # 0 = none, 1 = the full tint, contrast and brightness of the look at this domain's position
    turned: bool = False  # a background that is not the class's own is the NEXT class's, instead of any other's


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
        check_ranges({"patch_size": (self.patch_size, 14, self.image_size // 2)})  # a smaller patch tells no motif
        patches, kinds, names = self.grid**2, min(len(MOTIFS), len(BACKDROPS)), [domain.name for domain in self.domains]
        if self.image_size % self.patch_size:
            raise ValueError(f"image_size must be a multiple of patch_size {self.patch_size}, got {self.image_size}")
        check_ranges({
            "classes": (self.classes, 2, kinds),
            "predictive": (self.predictive, 1, patches - self.local),  # `local` needs patches outside C*
            "objects": (self.objects, 1, self.predictive if 3 * self.predictive <= patches else 1),  # with room between
            "distractors": (self.distractors, 0, patches - self.predictive),
            "noise": (self.noise, 0, 64),
            "per_class": (self.per_class, 1, 9999),
            "held_out": (self.held_out, 0, self.classes - 1),
            "seed": (self.seed, 0, 2**32 - 1),
            "number of domains": (len(names), 2, len(LOOKS)),
            **{f"correlation of {domain.name}": (domain.correlation, 0, 1) for domain in self.domains},
            **{f"style of {domain.name}": (domain.style, 0, 1) for domain in self.domains},
        })  # fmt: skip
        if len({name.lower() for name in names}) < len(names) or not all(re.fullmatch(r"\w[\w-]*", n) for n in names):
            raise ValueError(f"domain names must differ and name folders (letters, digits, _ and -), got {names}")
        if self.unseen not in names:
            raise ValueError(f"unseen must be one of {', '.join(names)}, got {self.unseen!r}")

    @property
    def grid(self) -> int:
        """Patches along a side."""
        return self.image_size // self.patch_size

    @property
    def class_names(self) -> tuple[str, ...]:
        """The classes' motifs, sorted, so that labels are the ids `read_table` gives."""
        return tuple(sorted(list(MOTIFS)[: self.classes]))

    @property
    def held_out_names(self) -> tuple[str, ...]:
        return self.class_names[self.classes - self.held_out :]


def check_ranges(limits: Mapping[str, tuple[float, float, float]]) -> None:
    """ValueError for the first (value, least, most) that is out of its range."""
    for name, (value, least, most) in limits.items():
        if not least <= value <= most:
            raise ValueError(f"{name} must be {least}..{most}, got {value}")


def _domains(amber: float, dusk: float, jade: float, mist: float, style: float) -> tuple[Domain, ...]:
    sources = {"amber": amber, "dusk": dusk, "jade": jade}
    return *(Domain(name, value, style) for name, value in sources.items()), Domain("mist", mist, 1.0)


_SHORTCUT = OracleSpec(_domains(0.99, 0.97, 0.95, 0.25, style=0.6), "mist", predictive=6, distractors=4)
_WEAKER = replace(_SHORTCUT, domains=_domains(0.95, 0.9, 0.85, 0.25, style=0.6))
SUITE: dict[str, OracleSpec] = {
    "oracle-easy": OracleSpec(_domains(0.5, 0.4, 0.3, 0.25, style=0.3), "mist", predictive=12),
    "oracle-shortcut": _SHORTCUT,
    "oracle-turned": replace(_SHORTCUT, domains=(*_SHORTCUT.domains[:3], Domain("mist", 0.05, 1.0, turned=True))),
    "oracle-full": replace(_SHORTCUT, predictive=36, distractors=0),
    "oracle-tiny": replace(_WEAKER, predictive=1),
    "oracle-unknown": replace(
        _SHORTCUT, domains=_domains(0.8, 0.75, 0.7, 0.125, style=0.6), classes=8, held_out=3, per_class=56
    ),
    "oracle-local": replace(_WEAKER, predictive=8, objects=2, local=True),
}


@dataclass(frozen=True, eq=False)
class Sample:
    image: np.ndarray  # (S,S,3) uint8
    mask: np.ndarray  # (h,w) bool, True = in C*; patches, or single pixels of a composed photograph
    label: int
    domain: int
    background: int


class ImageSet(ABC):
    """The images of a spec, ordered by domain, class and number, with random access."""

    spec: Any

    def __init__(self, spec: Any) -> None:
        self.spec = spec
        blocks = [(d, c) for d in range(len(spec.domains)) for c in range(len(spec.class_names))]
        self.keys = [(d, c, n) for d, c in blocks for n in range(spec.per_class)]
        self.names = [f"{spec.domains[d].name}/{spec.class_names[c]}/{n:04d}.png" for d, c, n in self.keys]
        self.backgrounds = [kind for d, c in blocks for kind in self._background_kinds(d, c)]

    def _background_kinds(self, domain: int, label: int) -> list[int]:
        """The backgrounds of one domain and class: exact shares, rounded once, in random order."""
        law, classes, count = self.spec.domains[domain], len(self.spec.class_names), self.spec.per_class
        dice = Dice(self.spec.seed, KINDS, domain, label)
        faithful = int(law.correlation * count + 0.5)
        others = (label + 1 + np.arange(classes - 1)) % classes
        others = others[:1] if law.turned else others[dice.order(len(others))]
        kinds = np.concatenate([np.full(faithful, label), np.resize(others, count - faithful)])
        return kinds[dice.order(count)].tolist()

    def __len__(self) -> int:
        return len(self.keys)

    def __iter__(self) -> Iterator[Sample]:
        return (self.sample(i) for i in range(len(self)))

    @abstractmethod
    def sample(self, i: int) -> Sample:
        """Image i; the sides of its mask divide those of the image."""

    def law(self) -> list[object]:
        """What the pixels depend on."""
        return [draw.DRAW_VERSION, asdict(self.spec)]

    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.law(), sort_keys=True).encode()).hexdigest()[:12]

    def facts(self) -> dict[str, object]:
        """The content of `oracle.json`."""
        spec, kinds = self.spec, list(BACKDROPS)
        names = {"class_names": spec.class_names, "held_out_names": spec.held_out_names}
        backgrounds = {name: kinds[kind] for name, kind in zip(self.names, self.backgrounds, strict=True)}
        return {"digest": self.digest(), "spec": asdict(spec), **names, "backgrounds": backgrounds}

    def styled(self, image: np.ndarray, domain: int, dice: Dice) -> np.ndarray:
        """The image (S,S,3) in the style of a domain, with pixel noise; not yet clipped."""
        look, noise = list(LOOKS.values())[domain], self.spec.noise
        return draw.styled(image, look, self.spec.domains[domain].style) + dice.field(-noise, noise, *image.shape)

    def write(self, folder: str | Path, progress: Callable[[int], object] | None = None) -> Path:
        """Write `images/<name>`, `masks/<name>` (0 or 255) and `oracle.json` atomically, unless they are there."""
        target = Path(os.path.abspath(os.path.expanduser(folder)))
        if self._is_at(target):
            return target
        with replacing_folder(target, sync=False) as temporary:
            for i, name in enumerate(self.names):
                sample = self.sample(i)
                cell = len(sample.image) // len(sample.mask)
                mask = sample.mask.repeat(cell, 0).repeat(cell, 1).astype(np.uint8) * 255
                for kind, pixels in (("images", sample.image), ("masks", mask)):
                    (temporary / kind / name).parent.mkdir(parents=True, exist_ok=True)
                    Image.fromarray(pixels).save(temporary / kind / name)
                if progress:
                    progress(1)
            (temporary / "oracle.json").write_text(json.dumps(self.facts(), indent=2) + "\n", encoding="utf-8")
            self._is_at(target)  # another process may have written meanwhile: the same data, or an error
        return target

    def _is_at(self, folder: Path) -> bool:
        """Whether the folder contains this data set; ValueError if it contains something else."""
        if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
            return False
        try:
            same = read_json(folder / "oracle.json").get("digest") == self.digest()
        except (OSError, ValueError):
            same = False
        if not same:
            raise ValueError(f"'{folder}' exists and contains other data; name a new folder, or remove it first")
        files = [f"{kind}/{name}" for name in self.names for kind in ("images", "masks")]
        if lost := [file for file in files if not (folder / file).is_file()]:
            raise ValueError(f"'{folder}' has lost {len(lost)} files, first '{lost[0]}'; remove it and write it again")
        return True


class Oracle(ImageSet):
    """The images of the oracle benchmark; the mask (h,w) is C*."""

    spec: OracleSpec

    def sample(self, i: int, *, domain: str | None = None, background: int | None = None) -> Sample:
        """Image i; `domain` and `background` render the same draw in another style or on another background."""
        spec, (home, label, _) = self.spec, self.keys[i]
        shown = home if domain is None else [law.name for law in spec.domains].index(domain)
        kind = self.backgrounds[i] if background is None else background
        dice = [Dice(spec.seed, purpose, *self.keys[i]) for purpose in range(KINDS)]
        order = draw.layout(dice[LAYOUT], spec.grid, spec.predictive, spec.objects)
        mask = np.isin(np.arange(spec.grid**2), order[: spec.predictive]).reshape(spec.grid, spec.grid)
        patch, name = spec.patch_size, list(BACKDROPS)[kind]
        image = draw.motif(spec.class_names[label], dice[MOTIF], spec.image_size, patch)
        inside = mask.repeat(patch, 0).repeat(patch, 1)[:, :, None]
        if mask.all():
            image = draw.stain(image, name)
        else:
            canvas = draw.backdrop(name, dice[BACKDROP], spec.image_size)
            outside = order[spec.predictive :]  # in random order
            for y, x in zip(*np.divmod(outside[: spec.distractors], spec.grid), strict=True):
                tile = draw.distractor(dice[DISTRACTOR], patch)
                canvas[y * patch : (y + 1) * patch, x * patch : (x + 1) * patch] = tile
            image = np.where(inside, image, canvas)
        styled = self.styled(image, shown, dice[NOISE])
        image = np.where(inside, image, styled) if spec.local else styled
        return Sample(draw.to_uint8(image), mask, label, shown, kind)


def suite_spec(name: str) -> OracleSpec:
    if name not in SUITE:
        raise ValueError(f"no oracle set is called {name!r}{did_you_mean(name, SUITE)} (known: {', '.join(SUITE)})")
    return SUITE[name]


def suite_folder(name: str) -> Path:
    """The images folder of a suite member, for `read_table`; written to the user's cache on first use."""
    oracle = Oracle(suite_spec(name))
    return oracle.write(cache_dir() / "oracle" / f"{name}-{oracle.digest()}") / "images"


def true_masks(table: Table, grid: tuple[int, int]) -> np.ndarray | None:
    """C* of a table's rows on any patch grid (h,w): (N,P) bool, or None for a data set without masks."""
    files = [Path(*file.parts[:-4], "masks", *file.parts[-3:]).with_suffix(".png") for file in table.files]
    if not any(file.is_file() for file in files):
        return None
    masks = []
    for file in files:
        try:
            with open_image(file) as image:
                masks.append(half_covered(np.asarray(image.convert("L")) > 127, grid))
        except (OSError, ValueError) as error:
            raise ValueError(f"mask '{file}' cannot be read: {error}; write the data set again") from error
    return np.stack(masks)


def half_covered(pixels: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
    """(P,) bool: the patches of a grid (h,w) of which at least half the area is in the bool mask (H,W)."""

    def overlaps(cells: int, length: int) -> np.ndarray:  # (cells, length) in units of 1/cells pixel
        cell, pixel = np.arange(cells)[:, None] * length, np.arange(length)[None] * cells
        return np.clip(np.minimum(cell + length, pixel + cells) - np.maximum(cell, pixel), 0, None)

    rows, columns = map(overlaps, grid, pixels.shape)
    return (2 * rows @ pixels.astype(np.int64) @ columns.T >= pixels.size).ravel()
