"""A benchmark on photographs whose predictive pixels C* are known: objects of the user's images on drawn backgrounds.

The class decides which photograph the object is cut from. Backgrounds follow the class in the source domains and are
independent of it in the unseen one, as in the oracle suite. No photograph is used twice.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from hashlib import sha256
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from patchgen.common.text import did_you_mean
from patchgen.data import oracle, oracle_draw
from patchgen.data.cub import is_cub, read_cub
from patchgen.data.image_files import RefusedImage, is_image, list_images, open_image, visible_folders
from patchgen.data.images import reporting, square
from patchgen.data.oracle_draw import Dice

COMPOSE_VERSION = 1  # raise it when the cut-outs or their places change
PHOTOGRAPHS = oracle.KINDS + 1  # the random stream that assigns the photographs
DOMAINS, STYLES = ("amber", "dusk", "jade", "mist"), (0.6, 0.6, 0.6, 1.0)  # mist is the unseen one
CORRELATION = (0.99, 0.97, 0.95)  # of the sources: that of oracle-shortcut
ATTEMPTS = 100  # positions tried for a cut-out so thin that not every position makes a patch predictive


@dataclass(frozen=True)
class ComposeSpec:
    """Equal specs and photographs give equal pixels."""

    class_names: tuple[str, ...]  # sorted, so that labels are the ids `read_table` gives
    domains: tuple[oracle.Domain, ...]
    unseen: str
    per_class: int  # images per domain and class
    image_size: int
    object_size: int  # longer side of the cut-out
    seed: int
    noise: int = 8  # pixels move by at most this, of 255
    held_out_names = ()  # all classes have labels

    def __post_init__(self) -> None:
        # two patches of the coarsest usual grid (16 px, or 14 patches a side): any position then covers one of them
        least, most = max(32, -(-self.image_size // 7)), 3 * self.image_size // 4
        oracle.check_ranges({
            "--per-class": (self.per_class, 1, 9999),
            "--image-size": (self.image_size, 56, 1024),
            "--object": (self.object_size, least, most),
            "--seed": (self.seed, 0, 2**32 - 1),
        })  # fmt: skip


class Composition(oracle.ImageSet):
    """Cut-outs on backgrounds; the mask (S,S) has single pixels."""

    spec: ComposeSpec

    def __init__(self, spec: ComposeSpec, root: Path, photographs: Sequence[Mapping[str, str]]) -> None:
        # photographs: for each class {sha256: path relative to root}, `per_class` for every domain in turn
        super().__init__(spec)
        self.root, self._hashes = root, [list(of_class) for of_class in photographs]
        paths = [list(of_class.values()) for of_class in photographs]
        self.photographs = [paths[c][d * spec.per_class + n] for d, c, n in self.keys]

    def sample(self, i: int) -> oracle.Sample:
        spec, (domain, label, _), kind = self.spec, self.keys[i], self.backgrounds[i]
        streams = (oracle.LAYOUT, oracle.BACKDROP, oracle.NOISE)
        place, texture, noise = (Dice(spec.seed, stream, *self.keys[i]) for stream in streams)
        photograph = self.root / self.photographs[i]
        pixels, shape = cut_out(photograph, spec.object_size)
        mask = self._placed(shape, place, photograph)
        image = oracle_draw.backdrop(list(oracle_draw.BACKDROPS)[kind], texture, spec.image_size)
        image[mask] = pixels[shape]  # both run row by row
        return oracle.Sample(oracle_draw.to_uint8(self.styled(image, domain, noise)), mask, label, domain, kind)

    def _placed(self, shape: np.ndarray, dice: Dice, photograph: Path) -> np.ndarray:
        """The shape (h,w) at a random position of the image (S,S) at which it covers half a patch or more."""
        size, (h, w) = self.spec.image_size, shape.shape
        for _ in range(ATTEMPTS):
            y, x = dice.between(0, size - h), dice.between(0, size - w)
            mask = np.zeros((size, size), dtype=bool)
            mask[y : y + h, x : x + w] = shape
            grids = {min(size // 16, 14), min(size // 14, 16)}  # of patches of 16 and 14 px at up to 224 px
            if all(oracle.half_covered(mask, (grid, grid)).any() for grid in grids):
                return mask
        fix = f"remove the file, or make --object larger than {self.spec.object_size}"
        raise ValueError(f"the object in '{photograph}' is too thin: at {h} x {w} px it covers half of no patch; {fix}")

    def law(self) -> list[object]:
        return [oracle_draw.DRAW_VERSION, COMPOSE_VERSION, asdict(self.spec), self._hashes]

    def facts(self) -> dict[str, object]:
        return {**super().facts(), "photographs": dict(zip(self.names, self.photographs, strict=True))}


def compose(
    data: str | Path, *, domain: str | None = None, classes: Sequence[str] | None = None, num_classes: int = 4,
    correlation: Sequence[float] = CORRELATION, per_class: int = 60, object_size: int = 48, image_size: int = 112,
    seed: int = 1,
) -> Composition:  # fmt: skip
    """A benchmark made from the photographs in a folder; the arguments are those of `patchgen oracle compose`."""
    root = Path(os.path.abspath(os.path.expanduser(data)))
    if len(correlation) != len(DOMAINS) - 1 or not all(0 <= share <= 1 for share in correlation):
        raise ValueError(f"--correlation must be three shares in [0,1], of amber, dusk and jade, got {[*correlation]}")
    files = _choose(_read_photographs(root, domain), classes, num_classes)
    domains = tuple(map(oracle.Domain, DOMAINS, (*correlation, 1 / len(files)), STYLES))
    spec = ComposeSpec(tuple(files), domains, DOMAINS[-1], per_class, image_size, object_size, seed)
    return Composition(spec, root, _deal(root, files, per_class, len(domains), seed))


def _read_photographs(root: Path, domain: str | None) -> dict[str, list[str]]:
    """{class: paths of its images relative to root}, both in order."""
    folders = visible_folders(root) if root.is_dir() else []
    flat = is_cub(root) or any(is_image(file.name) for folder in folders for file in folder.iterdir())
    domains = [] if flat else [folder.name for folder in folders if visible_folders(folder)]
    if not flat and not domains:
        why = "holds no folders with images" if root.is_dir() else "is no folder" if root.exists() else "does not exist"
        raise ValueError(f"'{root}' {why}. Expected class/image or domain/class/image in it, or CUB_200_2011.")
    if (domain or len(domains) > 1) and domain not in domains:
        rule = f"--domain must be one of {', '.join(domains)}" if domains else "it has no domains; leave out --domain"
        raise ValueError(f"'{root}': {rule}, got {domain or 'none'}{did_you_mean(domain or '', domains)}")
    if is_cub(root):
        cub, _, _ = read_cub(root)
        return {name: [cub.paths[i] for i in np.flatnonzero(cub.label == c)] for c, name in enumerate(cub.classes)}
    parents = folders if flat else visible_folders(root / (domain or domains[0]))
    return {f.name: [(f / name).relative_to(root).as_posix() for name in list_images(f)] for f in parents}


def _choose(files: Mapping[str, list[str]], classes: Sequence[str] | None, num_classes: int) -> dict[str, list[str]]:
    """The photographs of the chosen classes, sorted by name; `name=pattern|pattern` merges all folders that match."""
    known = ", ".join([*files][:10] + ["..."] * (len(files) > 10))
    entries = sorted(files)[:num_classes] if classes is None else classes
    most = min(len(oracle_draw.BACKDROPS), len(files))
    if not 2 <= (count := num_classes if classes is None else len(classes)) <= most:
        raise ValueError(f"there must be 2..{most} classes, with a background each, got {count} (known: {known})")
    of_class: dict[str, list[str]] = {}
    owner: dict[str, str] = {}
    for entry in entries:
        name, _, pattern = (entry, "", "") if entry in files else entry.partition("=")
        folders = [f for f in files if f == entry or any(fnmatchcase(f, p) for p in pattern.split("|"))]
        if not folders:
            hint = did_you_mean(pattern or name, files)
            raise ValueError(f"--classes: no class is called {pattern or name!r}{hint} (known: {known})")
        if not name or name in of_class or "/" in name or name.startswith("."):
            raise ValueError(f"--classes: each class needs a unique name that can name a folder, got {entry!r}")
        if shared := [folder for folder in folders if owner.setdefault(folder, name) != name]:
            raise ValueError(f"--classes: {shared[0]!r} belongs to both {owner[shared[0]]!r} and {name!r}")
        of_class[name] = [path for folder in folders for path in files[folder]]
    return dict(sorted(of_class.items()))


def _deal(root: Path, files: Mapping[str, list[str]], per_class: int, domains: int, seed: int) -> list[dict[str, str]]:
    """For each class {sha256: path} of the photographs used, in random order; copies of a photograph count once."""
    needed, dealt = per_class * domains, list[dict[str, str]]()
    for label, paths in enumerate(files.values()):
        dealt.append({})
        for k in Dice(seed, PHOTOGRAPHS, label).order(len(paths)):
            if len(dealt[-1]) == needed:
                break
            key = sha256((root / paths[k]).read_bytes()).hexdigest()
            if all(key not in photographs for photographs in dealt):
                dealt[-1][key] = paths[k]
    if short := {name: len(deal) for name, deal in zip(files, dealt, strict=True) if len(deal) < needed}:
        there = ", ".join(f"{name!r} has {count}" for name, count in short.items())
        fix = f"use --per-class {fits}" if (fits := min(short.values()) // domains) else "add photographs"
        rule = f"--per-class {per_class} needs {needed} different photographs per class ({domains} domains)"
        raise ValueError(f"{rule}, and {there}; {fix}, or choose other --classes")
    return dealt


def cut_out(path: Path, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Pixels (h,w,3) uint8 and shape (h,w) bool of the opaque part or middle square, whose longer side is `side`."""
    with reporting(path), open_image(path) as image:
        image.draft(None, (2 * side, 2 * side))  # decodes a large JPEG at reduced size, never below 2 x side
        upright = ImageOps.exif_transpose(image)
        rgba = upright.convert("RGBA") if upright.has_transparency_data else None
        if rgba and (np.asarray(rgba)[:, :, 3] < 128).any():
            return _opaque_part(rgba, side)
        short = min(upright.size)
        left, top = (upright.width - short) // 2, (upright.height - short) // 2
        middle = upright.crop((left, top, left + short, top + short))
        return square(middle, side), np.ones((side, side), dtype=bool)


def _opaque_part(rgba: Image.Image, side: int) -> tuple[np.ndarray, np.ndarray]:
    box = Image.fromarray(np.asarray(rgba)[:, :, 3] >= 128).getbbox()
    if box is None:
        raise RefusedImage("it is transparent everywhere (alpha below 128): remove the file")
    part = rgba.crop(box)
    width, height = (max(1, round(length * side / max(part.size))) for length in part.size)
    pixels = np.asarray(part.resize((width, height), Image.Resampling.BILINEAR))  # weights colours by their alpha
    return pixels[:, :, :3], pixels[:, :, 3] >= 128
