"""Find slides and their annotations, labels, sites and patients, before the first slide is opened.

An annotation belongs to the slide with the same name: `b.geojson` or `b.svs.geojson` to `b.svs`. The site is the column
`domain` of the CSV file, else the folder of the slide; the group is the column `group` (or `patient`), else the
slide itself.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from patchgen.common.files import expanded, read_csv
from patchgen.common.text import did_you_mean, printable
from patchgen.slides.annotations import summarise

ENDINGS = (".svs", ".ndpi", ".mrxs", ".scn", ".tif", ".tiff", ".bif", ".svslide", ".vms", ".vmu", ".dcm", ".czi")
GEOJSON = (".geojson", ".json")
GROUP = ("group", "patient")  # either is the name of the column
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
        raise ValueError(
            f"{file} needs the column `slide` and one or more of {', '.join(columns)} (found: {', '.join(header)})"
            f"{did_you_mean('slide', header)}"
        )
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
    """Plan which slides to cut, to tiles of the allowed `classes` (all by default), but not of those to `ignore`.

    `outside` is the label of tissue outside all annotations.
    """
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
            raise ValueError(
                f"unknown class {name!r} in {place}{did_you_mean(name, classes)} (--classes: {', '.join(classes)}); "
                "correct it, add it to --classes, or ignore its annotations with --ignore"
            )
    plan.classes.extend(sorted(places))
    first: dict[str, PlannedSlide] = {}
    for slide in plan.slides:
        if (other := first.setdefault(slide.folder.lower(), slide)) is not slide:
            raise ValueError(
                f"{other.path} and {slide.path} are both called {slide.path.stem!r} at site {slide.domain!r}; rename "
                "one, or give them different sites in the column `domain` of --labels"
            )
    return plan


def _match(slides: Sequence[Path], annotations: Sequence[Path]) -> dict[Path, Path]:
    """The annotation of each slide that has one."""
    annotation_of: dict[Path, Path] = {}
    for file in annotations:
        name = file.name[: -len(file.suffix)]
        fitting = [path for path in slides if name in (path.name, path.stem)]
        if not fitting:
            hint = did_you_mean(name, [path.stem for path in slides])
            raise ValueError(
                f"{file} is the annotation of no slide{hint}: it must be called like one, such as "
                f"{slides[0].stem}.geojson; add its slide, or take it out of --annotations"
            )
        beside = [path for path in fitting if path.parent.resolve() == file.parent.resolve()]
        slide, *others = beside if len(fitting) > 1 and beside else fitting
        if others or slide in annotation_of:
            other = others[0] if others else annotation_of[slide]
            raise ValueError(f"{file} fits {slide} and {other}; give them different names")
        annotation_of[slide] = file
    return annotation_of
