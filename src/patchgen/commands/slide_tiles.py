"""patchgen slide tiles SLIDES... --annotations FILES... --out TILES: labelled tiles and a manifest, ready for `fit`."""

import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated

import tyro

from patchgen.commands import Maybe, check_folder, print_table
from patchgen.commands.options import EngineOptions, report_slides
from patchgen.common.files import expanded
from patchgen.common.text import printable


@dataclass(frozen=True, kw_only=True)
class SlideOptions(EngineOptions):
    """The slides, and how tissue is found."""

    slides: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="SLIDES...")]
    """Slide files: .svs, .ndpi, .mrxs, .scn, .tif and other formats that OpenSlide reads; or folders of them."""
    out: str
    """Folder for the results; created if missing. Resumable with the same command."""
    min_tissue: float = 0.5
    """Tiles with a smaller share of tissue are left out."""
    tissue: str = "otsu"
    """How tissue is found: the built-in rule, or the name of a plug-in's function."""
    mask: Maybe[str] = None
    """Your own mask of tissue instead, image or GeoJSON; for several slides a folder of masks named like them."""
    mpp_slide: Maybe[float] = None
    """Microns per pixel of the slides themselves, if missing or wrong in the files."""
    strict: bool = False
    """Exit with code 1 if any slide could not be used, not only if none could."""

    def find_slides(self) -> list[Path]:
        """The slide files, after the checks that all commands of slides need."""
        from patchgen.slides.cut import find_slides
        from patchgen.slides.slide import require_openslide
        from patchgen.slides.tissue import check_rule

        check_folder(self.out)
        slides = find_slides(self.slides)
        check_rule(self.tissue, self.mask, slides)
        require_openslide()
        return slides


@dataclass(frozen=True, kw_only=True)
class TilesArguments(SlideOptions):
    """Cut slides into labelled tiles. Resumable with the same command: finished slides are skipped."""

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
    min_label: float = 0.75
    """Share of a tile that its class must cover, above 0.5; tiles in between are ambiguous and left out."""
    from_corner: bool = False
    """Annotation coordinates start at the corner of the scanned area (as in QuPath with MIRAX), not of level 0."""


def cut_tiles(arguments: TilesArguments) -> int:
    if not arguments.annotations and not arguments.labels:
        raise ValueError("nothing says what the tiles show: give --annotations FILES, or --labels FILE.csv")
    slides = arguments.find_slides()
    from patchgen.slides import cut
    from patchgen.sweep.jobs import Needs, Unit

    settings = cut.CutSettings(**{field.name: getattr(arguments, field.name) for field in fields(cut.CutSettings)})
    labels = cut.read_rows(arguments.labels) if arguments.labels else {}
    plan = cut.make_plan(
        slides, cut.find_annotations(arguments.annotations), labels, classes=arguments.classes, ignore=arguments.ignore,
        outside=arguments.outside,
    )  # fmt: skip
    if not plan.slides:
        raise ValueError("no slide has an annotation or a label; annotations and rows are named like the slides")
    out, needs, units = expanded(arguments.out), Needs(arguments.threads, "cpu"), []
    for slide in plan.slides:
        folder, annotation = out / cut.IMAGES / slide.folder, str(slide.annotation) if slide.annotation else None
        facts = cut.description(str(slide.path), annotation, slide.label, settings)
        cut.check_settings(folder / cut.DESCRIPTION, facts)
        call = {
            "slide": str(slide.path), "annotation": annotation, "label": slide.label, "settings": asdict(settings),
            "result": str(folder.absolute()),
        }  # fmt: skip
        claim = out / ".work" / slide.folder.replace("/", "+")
        units.append(Unit("patchgen.slides.cut:cut_slide", call, claim, folder, str(slide.path), needs))
    out.mkdir(parents=True, exist_ok=True)
    failures = arguments.do_units(units, out / ".work", "slides")
    done = [slide for slide in plan.slides if str(slide.path) not in failures]
    count = cut.write_manifest(out, done, settings)
    sites = cut.write_summary(out, plan, failures)
    if sites:
        header = ("site", "slides", *plan.classes, "ambiguous", "outside")
        print_table(header, [[site, *numbers] for site, numbers in sites.items()])
    if len(sites) == 1:
        print(
            f"all tiles are of one site, {next(iter(sites))!r}, and `fit` needs two or more: put the slides of each "
            "site into a separate folder, or name the sites in the column `domain` of --labels",
            file=sys.stderr,
        )
    for reason, number in plan.ignored.items():
        print(f"annotations ignored: {number} x {printable(reason)}", file=sys.stderr)
    failures |= {str(path): "it has neither an annotation nor a label" for path in plan.unlabelled}
    if count:
        print(out / cut.MANIFEST)
    elif done:
        raise ValueError(
            f"no tile has a label: all tissue is outside the annotations or ambiguous ({out / cut.SUMMARY} counts it); "
            "check --mpp and --tile, lower --min-label, or add --from-corner"
        )
    return report_slides(failures, len(units) + len(plan.unlabelled), arguments.strict)
