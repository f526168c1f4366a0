"""Find slides, annotations, labels, sites and patients, and cut the slides into labelled tiles for training.

A tile takes the class that covers at least `min_label` of it, if all others together, and the tissue outside every
annotation, cover no more than the rest; a tile without such a class is ambiguous and left out.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from patchgen.common.files import expanded, read_csv, refuse_links, replacing_folder, write_csv, write_text
from patchgen.common.reading import DECODERS
from patchgen.common.text import did_you_mean, json_text, printable
from patchgen.common.untrusted import read_json, shortly
from patchgen.slides.annotations import shares, summarise
from patchgen.slides.slide import Slide, TileGrid, open_slide
from patchgen.slides.tissue import Window, find_tiles, tissue_facts

ENDINGS = (".svs", ".ndpi", ".mrxs", ".scn", ".tif", ".tiff", ".bif", ".svslide", ".vms", ".vmu", ".dcm", ".czi")
GEOJSON = (".geojson", ".json")
GROUP = ("group", "patient")  # either is the name of the column
TILES, DESCRIPTION = "tiles.csv", "slide.json"
IMAGES, MANIFEST, SUMMARY = "images", "manifest.csv", "slides.csv"
COLUMNS = ("file", "label", "x", "y", "width", "height", "tissue", "cover")
AMBIGUOUS, OUTSIDE = "(ambiguous)", "(outside)"  # why tiles are left out; no class is written in brackets
Rows = Mapping[str, Mapping[str, str]]  # slide, with or without its extension -> its cells in a table


@dataclass(frozen=True)
class PlannedSlide:
    path: Path
    domain: str
    group: str
    label: str  # empty if annotations give it
    annotation: Path | None

    @property
    def folder(self) -> str:
        """`site/slide`, in portable characters."""
        return "/".join(re.sub(r"[^\w.-]+", "_", name).lstrip(".") or "_" for name in (self.domain, self.path.stem))


@dataclass(frozen=True)
class TilesPlan:
    slides: list[PlannedSlide]
    classes: list[str]
    unlabelled: list[Path]  # neither annotation nor label
    ignored: Counter[str]  # features of annotations, by the reason


def find_slides(words: Sequence[str]) -> list[Path]:
    """Slide files as they are, and those below folders, each once."""
    slides = _files(words, ENDINGS, f"hold no slide ({' '.join(ENDINGS)})")
    if not slides:
        raise ValueError("no slide given; name slide files or folders of slides")
    return slides


def find_annotations(words: Sequence[str]) -> list[Path]:
    files = _files(words, GEOJSON, "hold no .geojson file for --annotations")
    if missing := [file for file in files if not file.is_file()]:
        raise ValueError(f"--annotations: {printable(missing[0])} does not exist; export it from QuPath")
    return files


def _files(words: Sequence[str], endings: tuple[str, ...], rule: str) -> list[Path]:
    files: dict[Path, None] = {}
    for path in map(expanded, words):
        named = [file for file in sorted(path.rglob("[!.]*")) if file.suffix.lower() in endings and file.is_file()]
        if path.is_dir() and not named:
            raise ValueError(f"the folder {printable(path)} and its sub-folders {rule}")
        files |= dict.fromkeys(named if path.is_dir() else [path])
    return list(files)


def read_patients(path: str | Path) -> dict[str, str]:
    """The patient of each slide, by its name in the file."""
    return {slide: _group(cells) or slide for slide, cells in read_rows(path, "--patients", GROUP).items()}


def read_rows(path: str | Path, option: str = "--labels", columns: Sequence[str] = ("label", "domain", *GROUP)) -> Rows:
    file = expanded(path)
    if not file.is_file():
        raise ValueError(f"{option}: there is no file {printable(path)}")
    header, lines = read_csv(file)
    if "slide" not in header or not {*columns} & {*header}:
        rule = f"needs the column `slide` and one or more of {', '.join(columns)}"
        raise ValueError(f"{file} {rule} (found: {', '.join(header)}){did_you_mean('slide', header)}")
    rows: dict[str, dict[str, str]] = {}
    for line, cells in lines:
        name = Path(cells["slide"].strip()).name
        if not name or name in rows:
            raise ValueError(f"{file}, line {line}: the slide {name!r} is {'there twice' if name else 'not named'}")
        rows[name] = {key: cell.strip() for key, cell in cells.items()}
    return rows


def _group(cells: Mapping[str, str]) -> str:
    return next((cells[name] for name in GROUP if cells.get(name)), "")


def make_plan(
    slides: Sequence[Path], annotations: Sequence[Path], labels: Rows, *, classes: Sequence[str] = (),
    ignore: Sequence[str] = (), outside: str | None = None,
) -> TilesPlan:  # fmt: skip
    """Plan which slides to cut to tiles of the allowed `classes`; `outside` labels tissue outside all annotations."""
    annotation_of, plan = _match(slides, annotations), TilesPlan([], [], [], Counter())
    places: dict[str, str] = {outside: "--outside"} if outside else {}  # class -> where it first appears
    for path in slides:
        cells = labels.get(path.name) or labels.get(path.stem) or {}
        annotation, label = annotation_of.get(path), cells.get("label", "")
        if annotation:
            areas, ignored = summarise(annotation)
            plan.ignored.update(ignored)
            plan.ignored.update({f"class {name}": count for name, count in areas.items() if name in ignore})
            names = {name: str(annotation) for name in areas if name not in ignore}
        else:
            names = {label: f"the row of {path.name}"} if label else {}
        places = {**names, **places}
        if not names:
            plan.unlabelled.append(path)
            continue
        domain = cells.get("domain") or path.absolute().parent.name or "slides"
        label = "" if annotation else label
        plan.slides.append(PlannedSlide(path, domain, _group(cells) or path.stem, label, annotation))
    for name, place in places.items():
        if classes and name not in classes:
            known = f"(--classes: {', '.join(classes)}); correct it, add it to --classes, or use --ignore"
            raise ValueError(f"unknown class {name!r} in {place}{did_you_mean(name, classes)} {known}")
    plan.classes.extend(sorted(places))
    first: dict[str, PlannedSlide] = {}
    for slide in plan.slides:
        if (other := first.setdefault(slide.folder.lower(), slide)) is not slide:
            both = f"{other.path} and {slide.path} are both called {slide.path.stem!r} at site {slide.domain!r}"
            raise ValueError(f"{both}; rename one, or give them different sites in the column `domain` of --labels")
    return plan


def _match(slides: Sequence[Path], annotations: Sequence[Path]) -> dict[Path, Path]:
    """The annotation of each slide that has one."""
    annotation_of: dict[Path, Path] = {}
    for file in annotations:
        name = file.name[: -len(file.suffix)]
        fitting = [path for path in slides if name in (path.name, path.stem)]
        if not fitting:
            hint = did_you_mean(name, [path.stem for path in slides])
            rule = f"it must be called like one, such as {slides[0].stem}.geojson"
            raise ValueError(f"{file} is the annotation of no slide{hint}: {rule}; add the slide, or leave it out")
        beside = [path for path in fitting if path.parent.resolve() == file.parent.resolve()]
        slide, *others = beside if len(fitting) > 1 and beside else fitting
        if others or slide in annotation_of:
            other = others[0] if others else annotation_of[slide]
            raise ValueError(f"{file} fits {slide} and {other}; give them different names")
        annotation_of[slide] = file
    return annotation_of


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
    """Cut one slide into `result`, by its annotations or, where it has none, all with the slide's own label."""
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
    """The label of a tile, OUTSIDE or AMBIGUOUS; `covered` is the share that any of the classes covers."""
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
