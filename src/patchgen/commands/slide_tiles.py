"""patchgen slide tiles SLIDES... --annotations FILES... --out TILES: labelled tiles and a manifest, ready for `fit`."""

from __future__ import annotations

import csv
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from patchgen.commands import COUNT, POSITIVE, check_bounds, check_folder, print_table
from patchgen.commands.inputs import report_slides
from patchgen.commands.options import EngineOptions
from patchgen.common.text import printable
from patchgen.common.untrusted import read_json

if TYPE_CHECKING:
    from patchgen.slides.cut import CutSettings
    from patchgen.slides.plan import PlannedSlide, TilesPlan
    from patchgen.sweep.jobs import Unit

IMAGES, MANIFEST, SUMMARY = "images", "manifest.csv", "slides.csv"


@dataclass(frozen=True, kw_only=True)
class TilesArguments(EngineOptions):
    """Cut slides into labelled tiles. Resumable with the same command: finished slides are skipped."""

    slides: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="SLIDES...")]
    """Slide files, or folders that are searched for slides with their sub-folders."""
    out: str
    """Folder for manifest.csv, slides.csv and the images; created if missing."""
    annotations: tuple[str, ...] = ()
    """GeoJSON files of QuPath (or folders of them), each named like its slide: a tile's class is the region's."""
    labels: str | None = None
    """CSV file with the column slide and any of label, domain, group: one row per slide."""
    classes: tuple[str, ...] = ()
    """The allowed classes; any other name is an error. By default all are allowed."""
    ignore: tuple[str, ...] = ()
    """Annotation classes to ignore."""
    outside: str | None = None
    """The class of tissue outside all annotations of an annotated slide; by default such tiles are left out."""
    mpp: float = 0.5
    """Resolution of the tiles in microns per pixel (0.5 is 20x); models trained on them remember it."""
    tile: int = 224
    """Side of a tile in pixels at that resolution."""
    overlap: float = 0.0
    """Overlap of neighbouring tiles as a share of their side, from 0 to below 1."""
    min_tissue: float = 0.5
    """Tiles with a smaller share of tissue are left out."""
    min_label: float = 0.75
    """Share of a tile that its class must cover, above 0.5; tiles in between are ambiguous and left out."""
    tissue: str = "otsu"
    """How tissue is found: the built-in rule, or the name of a plug-in's function."""
    mask: str | None = None
    """Your own mask of tissue instead, image or GeoJSON; for several slides a folder of masks named like them."""
    mpp_slide: float | None = None
    """Microns per pixel of the slides themselves, if missing or wrong in the files."""
    from_corner: bool = False
    """Annotation coordinates start at the corner of the scanned area (as in QuPath with MIRAX), not of level 0."""
    strict: bool = False
    """Exit with code 1 if any slide could not be used, not only if none could."""

    @property
    def settings(self) -> CutSettings:
        """The settings that the tiles depend on."""
        from patchgen.slides.cut import CutSettings

        return CutSettings(**{field.name: getattr(self, field.name) for field in fields(CutSettings)})


def _check(arguments: TilesArguments) -> None:
    """Check the options that apply to all slides, before any work."""
    arguments.check_engine()
    if not arguments.annotations and not arguments.labels:
        raise ValueError("nothing says what the tiles show: give --annotations FILES, or --labels FILE.csv")
    check_bounds(arguments, overlap="[0, 1)", min_tissue="[0, 1]", min_label="(0.5, 1]")
    check_bounds(arguments, mpp=POSITIVE, mpp_slide=POSITIVE, tile=COUNT)
    check_folder(arguments.out)


def _plan(arguments: TilesArguments) -> TilesPlan:
    from patchgen.slides.plan import find_annotations, find_slides, make_plan, read_labels
    from patchgen.slides.tissue import check_rule

    labels = read_labels(arguments.labels) if arguments.labels else {}
    slides, annotations = find_slides(arguments.slides), find_annotations(arguments.annotations)
    check_rule(arguments.tissue, arguments.mask, slides)
    plan = make_plan(
        slides, annotations, labels, classes=arguments.classes, ignore=arguments.ignore, outside=arguments.outside
    )
    if not plan.slides:
        raise ValueError("no slide has an annotation or a label; annotations and rows are named like the slides")
    return plan


def _units(arguments: TilesArguments, plan: TilesPlan) -> dict[PlannedSlide, Unit]:
    """The work of each slide; ValueError for finished slides with other settings."""
    from patchgen.slides.cut import DESCRIPTION, check_settings, description
    from patchgen.sweep.jobs import Needs, Unit

    out, needs, units = Path(arguments.out), Needs(arguments.threads, "cpu"), {}
    for slide in plan.slides:
        folder, annotation = out / IMAGES / slide.folder, str(slide.annotation) if slide.annotation else None
        check_settings(folder / DESCRIPTION, description(str(slide.path), annotation, slide.label, arguments.settings))
        call = {
            "slide": str(slide.path), "annotation": annotation, "label": slide.label,
            "settings": asdict(arguments.settings), "result": str(folder.absolute()),
        }  # fmt: skip
        claim = out / ".work" / slide.folder.replace("/", "+")
        units[slide] = Unit("patchgen.slides.cut:cut_slide", call, claim, folder, str(slide.path), needs)
    return units


def _write_manifest(out: Path, slides: Sequence[PlannedSlide], settings: CutSettings) -> int:
    """All tiles of the slides that are cut, with their scale, which models remember; returns how many."""
    from patchgen.common.files import write_csv
    from patchgen.slides.cut import TILES

    rows, scale = [], (f"{settings.mpp:g}", str(settings.tile))
    for slide in slides:
        with (out / IMAGES / slide.folder / TILES).open(newline="", encoding="utf-8") as stream:
            rows += [
                (f"{IMAGES}/{slide.folder}/{tile['file']}", slide.domain, tile["label"], slide.group, *scale)
                for tile in csv.DictReader(stream)
            ]
    if rows:
        write_csv(out / MANIFEST, ("path", "domain", "label", "group", "mpp", "tile"), rows)
    return len(rows)


def _counts(file: Path) -> dict[str, int]:
    """Tiles of each class, as the folder of a slide says."""
    counts = read_json(file).get("counts")
    if not isinstance(counts, dict) or not all(isinstance(count, int) for count in counts.values()):
        raise ValueError(f"{file} has no counts of tiles; remove {file.parent}, and the same command cuts it again")
    return counts


def _summarise(out: Path, plan: TilesPlan, failures: dict[str, str]) -> list[str]:
    """Write a row per slide, print a row per site, and return the sites."""
    from patchgen.common.files import write_csv
    from patchgen.slides.cut import AMBIGUOUS, DESCRIPTION, OUTSIDE

    names = [*plan.classes, AMBIGUOUS, OUTSIDE]
    rows: list[list[str]] = []
    sites: dict[str, Counter[str]] = {}
    for slide in plan.slides:
        error, counts = failures.get(str(slide.path), ""), Counter[str]()
        if not error:
            counts.update(_counts(out / IMAGES / slide.folder / DESCRIPTION))
            sites.setdefault(slide.domain, Counter()).update({**counts, "slides": 1})
        rows.append([str(slide.path), slide.domain, slide.group, *(str(counts[name]) for name in names), error])
    header = ["slide", "domain", "group", *plan.classes, "ambiguous", "outside", "error"]
    write_csv(out / SUMMARY, header, rows, people=True)
    if sites:
        table = [[site, *(str(counts[name]) for name in ("slides", *names))] for site, counts in sites.items()]
        print_table(("site", "slides", *plan.classes, "ambiguous", "outside"), table)
    return list(sites)


def cut_tiles(arguments: TilesArguments) -> int:
    _check(arguments)
    from patchgen.slides.slide import require_openslide

    require_openslide()
    plan, out = _plan(arguments), Path(arguments.out)
    units = _units(arguments, plan)
    out.mkdir(parents=True, exist_ok=True)
    failures = arguments.do_units(list(units.values()), out / ".work", "slides")
    done = [slide for slide in plan.slides if str(slide.path) not in failures]
    count = _write_manifest(out, done, arguments.settings)
    sites = _summarise(out, plan, failures)
    if len(sites) == 1:
        print(
            f"all tiles are of one site, {sites[0]!r}, and `fit` needs two or more: put the slides of each "
            "site into a separate folder, or name the sites in the column `domain` of --labels",
            file=sys.stderr,
        )
    for reason, number in plan.ignored.items():
        print(f"annotations ignored: {number} x {printable(reason)}", file=sys.stderr)
    failures |= {str(path): "it has neither an annotation nor a label" for path in plan.unlabelled}
    if count:
        print(out / MANIFEST)
    elif done:
        raise ValueError(
            f"no tile has a label: all tissue is outside the annotations or ambiguous ({out / SUMMARY} counts it); "
            "check --mpp and --tile, lower --min-label, or add --from-corner"
        )
    return report_slides(failures, len(units) + len(plan.unlabelled), arguments.strict)
