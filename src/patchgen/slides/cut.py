"""Cut a slide into labelled tiles for training, from tissue with unambiguous annotations.

A tile takes the class that covers at least `min_label` of it, if all others together cover no more than the rest;
tissue outside every annotation counts as a separate class. A tile without such a class is ambiguous and left out.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from patchgen.common.files import read_csv, refuse_links, replacing_folder, write_csv, write_text
from patchgen.common.reading import DECODERS
from patchgen.common.text import json_text
from patchgen.common.untrusted import read_json, shortly
from patchgen.slides.annotations import shares
from patchgen.slides.plan import PlannedSlide, TilesPlan
from patchgen.slides.slide import Slide, TileGrid, open_slide
from patchgen.slides.tissue import Window, find_tiles, tissue_facts

TILES, DESCRIPTION = "tiles.csv", "slide.json"
IMAGES, MANIFEST, SUMMARY = "images", "manifest.csv", "slides.csv"
COLUMNS = ("file", "label", "x", "y", "width", "height", "tissue", "cover")
AMBIGUOUS, OUTSIDE = "(ambiguous)", "(outside)"  # why tiles are left out; no class is written in brackets


@dataclass(frozen=True)
class CutSettings:
    """The settings that the tiles of a slide depend on."""

    mpp: float  # microns per pixel of the tiles
    tile: int  # their side in pixels
    overlap: float  # overlap of neighbouring tiles as a share of their side
    min_tissue: float
    min_label: float
    outside: str | None  # the label of tissue outside all annotations; None leaves it out
    ignore: tuple[str, ...]  # ignored annotation classes
    mpp_slide: float | None
    from_corner: bool  # annotation coordinates start at the corner of the scanned area
    tissue: str = "otsu"  # how tissue is found
    mask: str | None = None  # the user's masks of tissue


def cut_slide(
    folder: Path, slide: str, annotation: str | None, label: str, settings: dict[str, Any], result: str
) -> None:
    """Cut one slide into `result`, by its annotations or, where it has none, all with the slide's own label.

    The folder for partial results is not used, because cutting a slide takes only minutes.
    """
    rules = CutSettings(**{**settings, "ignore": tuple(settings["ignore"])})
    with open_slide(slide, rules.mpp_slide) as opened:
        grid, _, _, windows = find_tiles(
            opened, mpp=rules.mpp, tile=rules.tile, tissue=rules.tissue, mask=rules.mask,
            min_tissue=rules.min_tissue, overlap=rules.overlap,
        )  # fmt: skip
        tiles = list(_labelled(opened, grid, windows, annotation, label, rules))
        labelled = [tile for tile in tiles if tile[1] not in (AMBIGUOUS, OUTSIDE)]
        opened.allow(len(labelled))
        with replacing_folder(result, sync=False) as temporary:
            _write_tiles(temporary, opened, grid, labelled, rules.tile)
            counts = dict(Counter(name for _, name, _ in tiles))
            facts = {**description(slide, annotation, label, rules), "tissue": len(windows), "counts": counts}
            write_text(temporary / DESCRIPTION, json_text(facts) + "\n")


def description(slide: str, annotation: str | None, label: str, rules: CutSettings) -> dict[str, Any]:
    """The settings that the tiles depend on, as JSON, so that folders with other settings are never mixed."""
    drawn = hashlib.sha256(Path(annotation).read_bytes()).hexdigest()[:16] if annotation else None
    size = Path(slide).stat().st_size if Path(slide).exists() else -1
    settings = {**asdict(rules), "ignore": list(rules.ignore)}
    del settings["tissue"], settings["mask"]
    settings |= tissue_facts(Path(slide), rules.tissue, rules.mask)
    return {"slide": Path(slide).name, "bytes": size, "annotation": drawn, "label": label, **settings}


def check_settings(file: Path, settings: Mapping[str, Any]) -> None:
    """Raise ValueError if the description of a result, `file`, has other settings."""
    if not file.is_file():
        return
    refuse_links(file.parent)
    try:
        was = read_json(file)
    except ValueError as error:
        raise ValueError(f"{file} is damaged ({error}); remove it with its results, or choose another --out") from error
    if changed := [name for name, value in settings.items() if was.get(name) != value]:
        change = f"{changed[0]} {shortly(was.get(changed[0]))}, now {shortly(settings[changed[0]])}"
        place = file.parent if file.name == DESCRIPTION else file.with_suffix("")
        raise ValueError(f"{place} was started with other settings ({change}); remove it, or choose another --out")


def write_manifest(out: Path, slides: Sequence[PlannedSlide], settings: CutSettings) -> int:
    """All tiles of the slides that are cut, with their scale, which models remember; returns how many."""
    rows, scale = list[tuple[str, ...]](), (f"{settings.mpp:g}", str(settings.tile))
    for slide in slides:
        folder = f"{IMAGES}/{slide.folder}"
        for _, tile in read_csv(out / folder / TILES)[1]:
            rows.append((f"{folder}/{tile['file']}", slide.domain, tile["label"], slide.group, *scale))
    if rows:
        write_csv(out / MANIFEST, ("path", "domain", "label", "group", "mpp", "tile"), rows)
    return len(rows)


def write_summary(out: Path, plan: TilesPlan, failures: Mapping[str, str]) -> dict[str, list[str]]:
    """Write a row per slide; returns site -> its numbers of slides, of tiles of each class, ambiguous and outside."""
    names = [*plan.classes, AMBIGUOUS, OUTSIDE]
    rows: list[list[str]] = []
    sites: dict[str, Counter[str]] = {}
    for slide in plan.slides:
        error, counts = failures.get(str(slide.path), ""), Counter[str]()
        if not error:
            counts.update(read_json(out / IMAGES / slide.folder / DESCRIPTION)["counts"])
            sites.setdefault(slide.domain, Counter()).update({**counts, "slides": 1})
        rows.append([str(slide.path), slide.domain, slide.group, *(str(counts[name]) for name in names), error])
    header = ["slide", "domain", "group", *plan.classes, "ambiguous", "outside", "error"]
    write_csv(out / SUMMARY, header, rows, people=True)
    return {site: [str(counts[name]) for name in ("slides", *names)] for site, counts in sites.items()}


def choose_label(shares: Mapping[str, float], covered: float, least: float) -> str:
    """The class that covers at least `least` (above one half) of a tile, where the others leave the rest alone.

    OUTSIDE or AMBIGUOUS if there is none. `covered` is the share that any class covers; classes may overlap.
    """
    candidates = {**shares, OUTSIDE: 1 - covered}
    best = max(candidates, key=lambda name: candidates[name])
    others = sum(candidates.values()) - candidates[best]
    return best if candidates[best] >= least - 1e-9 and others <= 1 - least + 1e-9 else AMBIGUOUS


def _labelled(
    slide: Slide, grid: TileGrid, windows: Sequence[Window], annotation: str | None, label: str, rules: CutSettings
) -> Iterator[tuple[Window, str, float]]:
    """Each window with its label, or why it has none, and the share that the label covers."""
    if annotation is None:
        yield from ((window, label, 1.0) for window in windows)
        return
    origin = slide.origin if rules.from_corner else (0, 0)
    boxes = [(x, y, x + grid.step[0], y + grid.step[1]) for x, y in (window.corner for window in windows)]
    covers = shares(boxes, annotation, ignore=rules.ignore, origin=origin)
    for window, (by_class, covered) in zip(windows, covers, strict=True):
        name = choose_label(by_class, covered, rules.min_label)
        share = by_class.get(name, 1 - covered)
        yield window, rules.outside if name == OUTSIDE and rules.outside else name, share


def _write_tiles(
    folder: Path, slide: Slide, grid: TileGrid, tiles: Sequence[tuple[Window, str, float]], size: int
) -> None:
    """Write one PNG per tile, and their list."""

    def write(window: Window, label: str, share: float) -> tuple[str, ...]:
        (x, y), (width, height) = window.corner, grid.step
        left, top, right, bottom = (round(n) for n in (x, y, x + width, y + height))
        name = f"x{left}_y{top}.png"
        Image.fromarray(slide.read(window.corner, grid.step, (size, size))).save(folder / name, "PNG")
        place = [str(n) for n in (left, top, right - left, bottom - top)]
        return name, label, *place, f"{window.tissue:.4f}", f"{share:.4f}"

    with ThreadPoolExecutor(DECODERS) as pool:
        write_csv(folder / TILES, COLUMNS, pool.map(write, *zip(*tiles, strict=True)))
