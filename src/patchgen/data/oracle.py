"""The oracle benchmark: images in several domains whose predictive patches C* are known.

    oracle = Oracle(SUITE["oracle-shortcut"])
    oracle.sample(7).mask                              # (6,6) bool: C*
    oracle.sample(7, domain="mist")                    # the same draw in another domain's style
    table = read_table(suite_folder("oracle-shortcut"))
    truth = true_masks(table, grid=(6, 6))             # (N,36) bool

The class depends only on the motif in C*. Backgrounds are correlated with the class in the source domains and not in
the unseen one. Pixels depend only on the spec, on every machine.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from patchgen.common.files import replacing_folder
from patchgen.common.text import did_you_mean
from patchgen.common.untrusted import read_json
from patchgen.data import oracle_draw as draw
from patchgen.data.oracle_draw import Dice
from patchgen.data.oracle_spec import SUITE, Domain, OracleSpec
from patchgen.data.table import Table

__all__ = ["SUITE", "Domain", "Oracle", "OracleSpec", "Sample", "suite_folder", "suite_spec", "true_masks"]
LAYOUT, MOTIF, BACKDROP, DISTRACTOR, NOISE, KINDS = range(6)  # independent random streams


@dataclass(frozen=True, eq=False)
class Sample:
    """One image with its truth."""

    image: np.ndarray  # (S,S,3) uint8
    mask: np.ndarray  # (h,w) bool, True = in C*; patches, or single pixels of a composed photograph
    label: int
    domain: int
    background: int


class Oracle:
    """The images of a spec, ordered by domain, class and number, with random access."""

    def __init__(self, spec: OracleSpec) -> None:
        self.spec = spec
        self._kinds = {
            (d, c): background_kinds(law, c, spec.classes, spec.per_class, Dice(spec.seed, KINDS, d, c))
            for d, law in enumerate(spec.domains)
            for c in range(spec.classes)
        }

    def __len__(self) -> int:
        return len(self._kinds) * self.spec.per_class

    def __iter__(self) -> Iterator[Sample]:
        return (self.sample(i) for i in range(len(self)))

    def place(self, i: int) -> tuple[int, int, int]:
        """Domain, class and number of image i."""
        if not 0 <= i < len(self):
            raise IndexError(f"image {i} of {len(self)}")
        rest, number = divmod(i, self.spec.per_class)
        return *divmod(rest, self.spec.classes), number

    def sample(self, i: int, *, domain: str | None = None, background: int | None = None) -> Sample:
        """Image i; `domain` and `background` render the same draw in another style or on another background."""
        spec, (home, label, number) = self.spec, self.place(i)
        shown = home if domain is None else _position(spec, domain)
        kind = int(self._kinds[home, label][number]) if background is None else background
        if not 0 <= kind < spec.classes:
            raise ValueError(f"background must be 0..{spec.classes - 1}, got {kind}")
        dice = [Dice(spec.seed, purpose, home, label, number) for purpose in range(KINDS)]
        order = draw.layout(dice[LAYOUT], spec.grid, spec.predictive, spec.objects)
        mask = np.isin(np.arange(spec.grid**2), order[: spec.predictive]).reshape(spec.grid, spec.grid)
        image = _picture(spec, dice, mask, order[spec.predictive :], label, kind, shown)
        return Sample(draw.to_uint8(image), mask, label, shown, kind)

    def name(self, i: int) -> str:
        """The path of image i in `images/` and of its mask in `masks/`."""
        domain, label, number = self.place(i)
        return f"{self.spec.domains[domain].name}/{self.spec.class_names[label]}/{number:04d}.png"

    def digest(self) -> str:
        """Twelve hex digits of the spec and the version of the drawing."""
        text = json.dumps([draw.DRAW_VERSION, asdict(self.spec)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def write(self, folder: str | Path, progress: Callable[[int], object] | None = None) -> Path:
        """Write `images/<domain>/<class>/<nnnn>.png`, `masks/` with the same names (S x S, 0 or 255) and `oracle.json`.

        The folder is written atomically; if it already contains this spec, it is returned immediately.

        Args:
            progress: called with 1 after each image.
        """
        names = [self.name(i) for i in range(len(self))]
        return write_samples(folder, names, self.sample, self.facts(), progress)

    def facts(self) -> dict[str, object]:
        """The content of `oracle.json`: the spec, its digest and the names."""
        names = {"class_names": self.spec.class_names, "held_out_names": self.spec.held_out_names}
        return {"digest": self.digest(), "spec": asdict(self.spec), **names, "backgrounds": self._background_facts()}

    def _background_facts(self) -> dict[str, str]:
        kinds = self.spec.background_names
        return {self.name(i): kinds[self._kinds[d, c][k]] for i in range(len(self)) for d, c, k in [self.place(i)]}


def suite_spec(name: str) -> OracleSpec:
    """A spec of the suite; a ValueError with the nearest name otherwise."""
    if name not in SUITE:
        raise ValueError(f"no oracle set is called {name!r}{did_you_mean(name, SUITE)} (known: {', '.join(SUITE)})")
    return SUITE[name]


def suite_folder(name: str, progress: Callable[[int], object] | None = None) -> Path:
    """The images folder of a suite member, for `read_table`; written to the user's cache on first use."""
    from patchgen.common.files import cache_dir

    oracle = Oracle(suite_spec(name))
    return oracle.write(cache_dir() / "oracle" / f"{name}-{oracle.digest()}", progress) / "images"


def true_masks(table: Table, grid: tuple[int, int]) -> np.ndarray | None:
    """C* of a table's rows on any patch grid (h,w): (N,P) bool, or None for a data set without masks.

    The mask of `images/<domain>/<class>/x.png` is `masks/<domain>/<class>/x.png`. A patch is predictive when at least
    half of its area is.
    """
    files = [_mask_file(table.file(i)) for i in range(len(table))]
    lost = [file for file in files if not file.is_file()]
    if len(lost) == len(files):
        return None
    if lost:
        raise ValueError(f"{len(lost)} of {len(files)} masks are missing, first '{lost[0]}'; write the data set again")
    return np.stack([_on_grid(file, grid) for file in files])


def _mask_file(image: Path) -> Path:
    return Path(*image.parts[:-4], "masks", *image.parts[-3:]).with_suffix(".png")


def _on_grid(file: Path, grid: tuple[int, int]) -> np.ndarray:
    """(P,) bool of one mask file."""
    from PIL import Image

    from patchgen.data.safe_open import open_image

    try:
        with open_image(file) as image:
            pixels = np.asarray(image.convert("L")) > 127  # (H,W)
    except (Image.DecompressionBombError, ValueError) as error:
        raise ValueError(f"mask '{file}' is no mask of this data set: {error}; write the data set again") from error
    return half_covered(pixels, grid)


def half_covered(pixels: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
    """(P,) bool: the patches of a grid (h,w) of which at least half the area is in the bool mask (H,W)."""
    rows, columns = (_overlaps(cells, length) for cells, length in zip(grid, pixels.shape, strict=True))
    return (2 * rows @ pixels.astype(np.int64) @ columns.T >= pixels.size).ravel()


def _overlaps(cells: int, length: int) -> np.ndarray:
    """(cells, length): overlap of each pixel with each cell, in units of 1/cells pixel; rows sum to length."""
    cell, pixel = np.arange(cells)[:, None] * length, np.arange(length)[None] * cells
    return np.clip(np.minimum(cell + length, pixel + cells) - np.maximum(cell, pixel), 0, None)


def background_kinds(law: Domain, label: int, classes: int, per_class: int, dice: Dice) -> np.ndarray:
    """(per_class,) background kinds of one domain and class: exact shares, rounded once, in random order."""
    own = int(law.correlation * per_class + 0.5)
    others = (label + 1 + np.arange(classes - 1)) % classes
    others = others[:1] if law.turned else others[dice.order(len(others))]
    kinds = np.concatenate([np.full(own, label), np.resize(others, per_class - own)])
    return kinds[dice.order(per_class)]


def in_domain(image: np.ndarray, position: int, law: Domain, noise: int, dice: Dice) -> np.ndarray:
    """The image (S,S,3) in the style of the domain at this position, with pixel noise; not yet clipped."""
    look = list(draw.LOOKS.values())[position]
    return draw.styled(image, look, law.style) + dice.field(-noise, noise, *image.shape)


def _picture(
    spec: OracleSpec, dice: list[Dice], mask: np.ndarray, rest: np.ndarray, label: int, kind: int, domain: int
) -> np.ndarray:
    """The pixels (S,S,3), not yet clipped; `rest` are the patches outside C* in random order."""
    size, patch, background = spec.image_size, spec.patch_size, spec.background_names[kind]
    texture = draw.motif(spec.class_names[label], dice[MOTIF], size, patch)
    inside = mask.repeat(patch, 0).repeat(patch, 1)[:, :, None]
    if mask.all():
        image = draw.stain(texture, background)
    else:
        canvas = draw.backdrop(background, dice[BACKDROP], size)
        for y, x in zip(*np.divmod(rest[: spec.distractors], spec.grid), strict=True):
            tile = draw.distractor(dice[DISTRACTOR], patch)
            canvas[y * patch : (y + 1) * patch, x * patch : (x + 1) * patch] = tile
        image = np.where(inside, texture, canvas)
    shifted = in_domain(image, domain, spec.domains[domain], spec.noise, dice[NOISE])
    return np.where(inside, image, shifted) if spec.local else shifted


def _position(spec: OracleSpec, domain: str) -> int:
    names = [d.name for d in spec.domains]
    if domain not in names:
        raise ValueError(f"no domain is called {domain!r}{did_you_mean(domain, names)} (known: {', '.join(names)})")
    return names.index(domain)


def write_samples(
    folder: str | Path,
    names: Sequence[str],
    sample: Callable[[int], Sample],
    facts: Mapping[str, object],
    progress: Callable[[int], object] | None = None,
) -> Path:
    """Write `images/<name>`, `masks/<name>` (0 or 255) and `oracle.json`; return the folder as an absolute path.

    The folder is written atomically; if it already contains this data set, it is returned immediately.

    Args:
        names: `<domain>/<class>/<nnnn>.png` of each image.
        sample: returns image i and its mask, whose sides divide the image's.
        facts: content of `oracle.json`; its "digest" identifies the data set.
        progress: called with 1 after each image.
    """
    target = Path(os.path.abspath(os.path.expanduser(folder)))
    if _is_at(target, names, facts):
        return target
    with replacing_folder(target, sync=False) as temporary:
        for i, name in enumerate(names):
            drawn = sample(i)
            cell = len(drawn.image) // len(drawn.mask)
            _save(temporary / "images" / name, drawn.image)
            _save(temporary / "masks" / name, drawn.mask.repeat(cell, 0).repeat(cell, 1).astype(np.uint8) * 255)
            if progress:
                progress(1)
        (temporary / "oracle.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
        _is_at(target, names, facts)  # another process may have written meanwhile: the same data, or an error
    return target


def _save(path: Path, pixels: np.ndarray) -> None:
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def _is_at(folder: Path, names: Sequence[str], facts: Mapping[str, object]) -> bool:
    """Whether the folder contains this data set; ValueError if it contains something else."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return False
    try:
        same = read_json(folder / "oracle.json").get("digest") == facts["digest"]
    except (OSError, ValueError):
        same = False
    if not same:
        raise ValueError(f"'{folder}' exists and contains other data; name a new folder, or remove it first")
    files = [f"{kind}/{name}" for name in names for kind in ("images", "masks")]
    lost = [file for file in files if not (folder / file).is_file()]
    if lost:
        raise ValueError(f"'{folder}' has lost {len(lost)} files, first '{lost[0]}'; remove it and write it again")
    return True
