"""patchgen discover RUN IMAGES... --out DIR: groups of images that fit no known class, as sheets, CSV and a page."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from patchgen.commands import COUNT, announce, check_bounds, check_folder, print_table, require_data
from patchgen.commands.inputs import find_images, report_unreadable
from patchgen.commands.options import ImageOptions, ModelOptions
from patchgen.common.text import json_text, printable

if TYPE_CHECKING:
    from patchgen.predict.discover import Features, Groups, Member
    from patchgen.predict.predictor import Predictor

CENTRAL = 24  # images of a group that its sheet shows
CSV_HEADER = ("path", "group", "fits_known", "confidence", "nearest_known", "distance_ratio")


@dataclass(frozen=True, kw_only=True)
class DiscoverArguments(ImageOptions, ModelOptions):
    """Group images that fit no known class: a contact sheet (.png) per group, assignments.csv and index.html."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Run folder, as `patchgen train` prints it, of any method and task."""
    out: str
    """Folder for the sheets, the CSV and the page; created if missing, files of the same name are replaced."""
    new_classes: int | None = None
    """Number of groups in addition to the known classes; estimated by default."""
    at_most: int | None = None
    """Maximum number of new classes that the estimate considers; by default the number of known ones, at least 10."""
    data: str | None = None
    """The run's training data, if its path has changed: its images show the known classes."""
    batch: int = 64
    """Images per forward pass."""
    json: bool = False
    """Print one JSON object instead of tables."""
    quiet: bool = False
    """No progress."""


def _check(arguments: DiscoverArguments, images: int) -> None:
    """Check before any work what would otherwise fail at its end."""
    check_bounds(arguments, batch=COUNT, new_classes=COUNT, at_most=COUNT)
    for option, value in (("--new-classes", arguments.new_classes), ("--at-most", arguments.at_most)):
        if value is not None and value > images:
            raise ValueError(
                f"{option} {value} needs as many images, but {images} were found; give more, or a lower number"
            )
    if arguments.new_classes is not None and arguments.at_most is not None:
        raise ValueError("--at-most limits the estimate, which --new-classes replaces: choose one")
    if arguments.data is not None:
        require_data(arguments.data)
    check_folder(arguments.out)


def _read_known(predictor: Predictor, arguments: DiscoverArguments) -> tuple[Features, list[str]]:
    """Features and labels of the run's own images of known classes."""
    from patchgen.common.progress import Progress
    from patchgen.predict.discover import read_features, reference_images
    from patchgen.runs.folder import RunFolder

    known = reference_images(RunFolder.open(arguments.model), arguments.data)
    with Progress("known classes", len(known.files), quiet=arguments.quiet) as bar:
        features = read_features(predictor, known.files, arguments.batch, bar.tick)
    label_of = dict(zip(known.files, known.labels, strict=True))
    labels = [label_of[prediction.path] for prediction in features.predictions]
    lost = [name for name in dict.fromkeys((*known.without, *known.labels)) if name not in labels]
    if not labels:
        raise ValueError(f"none of the {len(known.files)} training images of known classes could be read")
    if lost and not arguments.quiet:
        print(f"no readable training image of {', '.join(lost)}: images of such a class will look new", file=sys.stderr)
    return features, labels


def _describe_estimate(groups: Groups) -> str:
    """The number of new classes, and the score of every number that was tried; nothing if it was given."""
    if groups.estimate is None:
        return ""
    known = len(groups.known)
    curve = ", ".join(f"{k - known}: {score:.1%}" for k, score in groups.estimate.curve.items())
    number = groups.estimate.num_classes - known
    return (
        f"new classes: {number} (an estimate, often off by a few; `--new-classes` sets it)\n"
        f"  known images in the right cluster for each number tried: {curve}"
    )


def _describe_rule(groups: Groups) -> str:
    """What made a group a known class, and what remains uncertain."""
    renamed = ", ".join(f"{count} of {name}" for name, count in groups.renamed.items())
    return (
        f"{groups.rule}."
        + (f" So the classifier named whole groups: {renamed}; a new site is not a new class." if renamed else "")
        + " A new class that the classifier takes confidently for a known one cannot be told from it, and a group may"
        " be a known class that looks different here: look at the sheets."
    )


def _summarise(groups: Groups) -> list[dict[str, Any]]:
    """One row per group: the new ones, largest first, then the known classes with images."""
    rows = []
    for name in (*groups.new, *groups.known):
        members, new = groups.of(name), name in groups.new
        if members:
            near = [member.nearest_known for member in members]
            rows.append({
                "group": name,
                "images": len(members),
                "fits_known": not new,
                "confidence": median(member.confidence for member in members),
                "nearest_known": max(sorted(set(near)), key=near.count),
                "sheet": f"{name}.png" if new else None,
            })  # fmt: skip
    return rows


def _cells(row: dict[str, Any]) -> list[str]:
    fits = "yes" if row["fits_known"] else "no"
    return [row["group"], str(row["images"]), fits, f"{row['confidence']:.2f}", row["nearest_known"]]


def _write_sheet(row: dict[str, Any], members: Sequence[Member], out: Path) -> None:
    from patchgen.draw.overlay import original
    from patchgen.draw.sheet import Tile, contact_sheet, write_sheet

    tiles = [
        Tile(original(member.path), member.path.name, f"confidence {member.confidence:.2f}", member.mask)
        for member in members[:CENTRAL]
    ]
    count = row["images"]
    part = f", the {len(tiles)} most central shown" if len(tiles) < count else ", most central first"
    caption = f"{count} image{'s' * (count > 1)} that fit no known class{part}"
    columns = 6 if members[0].mask is None else 4
    write_sheet(out / row["sheet"], contact_sheet(row["group"], tiles, columns, caption))


def _render_page(title: str, groups: Groups, rows: list[dict[str, Any]]) -> str:
    """One HTML page next to the sheets."""
    from patchgen.draw.overlay import NOTICE
    from patchgen.pages.page import file_address, render

    new = sum(row["images"] for row in rows if not row["fits_known"])
    return render(
        "discover.html",
        title=title,
        lead=f"{len(groups.members)} images: {new} fit no known class (groups: {len(groups.new)}).",
        rows=list(map(_cells, rows)),
        estimate=_describe_estimate(groups),
        rule=_describe_rule(groups),
        notice=NOTICE,
        sheets=[{"group": row["group"], "source": file_address(row["sheet"]),
                 "alt": f"Contact sheet of {row['group']}, {row['images']} images, the most central first"}
                for row in rows if row["sheet"]],
    )  # fmt: skip


def _write(groups: Groups, rows: list[dict[str, Any]], title: str, out: Path) -> Path:
    """All files, the page last; returns the page."""
    from patchgen.common.files import write_csv
    from patchgen.pages.page import write_page

    out.mkdir(parents=True, exist_ok=True)
    for row in rows:
        if row["sheet"]:
            _write_sheet(row, groups.of(row["group"]), out)
    lines = (
        [printable(member.path), member.group, "yes" if member.fits_known else "no", f"{member.confidence:.4f}",
         member.nearest_known, f"{member.distance_ratio:.4f}"] for member in groups.members
    )  # fmt: skip
    write_csv(out / "assignments.csv", CSV_HEADER, lines, people=True)
    return write_page(out / "index.html", _render_page(title, groups, rows))


def _as_json(groups: Groups, rows: list[dict[str, Any]], page: Path) -> str:
    known, estimate = len(groups.known), None
    if groups.estimate:
        curve = {str(k - known): score for k, score in groups.estimate.curve.items()}
        estimate = {"new_classes": groups.estimate.num_classes - known, "known_accuracy": curve}
    unreadable = [{"path": str(image.path), "reason": image.reason} for image in groups.unreadable]
    files = {"assignments": str(page.with_name("assignments.csv")), "page": str(page)}
    rule = asdict(groups.rule) | {"named_by_classifier": groups.renamed}
    return json_text({"groups": rows, "estimate": estimate, "rule": rule, "unreadable": unreadable, **files})


def discover(arguments: DiscoverArguments) -> int:
    paths = find_images(arguments.images)
    _check(arguments, len(paths))
    announce(arguments.quiet)
    from patchgen.common.progress import Progress
    from patchgen.predict.discover import calibrated_rule, group_features, read_features
    from patchgen.runs.folder import RunFolder

    predictor = arguments.load()
    known, labels = _read_known(predictor, arguments)
    with Progress("images", len(paths), quiet=arguments.quiet) as bar:
        features = read_features(predictor, paths, arguments.batch, bar.tick)
        groups = group_features(
            features, known.vectors, labels, new_classes=arguments.new_classes, at_most=arguments.at_most,
            seed=predictor.config.seed, rule=calibrated_rule(RunFolder.open(arguments.model), arguments.checkpoint),
        )  # fmt: skip
    rows = _summarise(groups)
    run = f"{Path(arguments.model).resolve().name} ({predictor.config.method})"
    page = _write(groups, rows, f"Images that fit no known class of {run}", Path(arguments.out))
    if arguments.json:
        print(_as_json(groups, rows, page))
    else:
        if groups.estimate:
            print(_describe_estimate(groups))
        print(_describe_rule(groups))
        head = ("group", "images", "fits known", "median confidence", "nearest known", "sheet")
        print_table(head, [[*_cells(row), row["sheet"] or ""] for row in rows])
        print(page)
    return report_unreadable(groups.unreadable, len(paths), arguments.strict)


COMMAND = discover
