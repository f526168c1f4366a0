"""patchgen discover RUN IMAGES... --out DIR: groups of images that fit no known class, as sheets, CSV and a page."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from patchgen.commands import COUNT, announce, check_bounds, check_folder, print_table, require_data
from patchgen.commands.inputs import find_images, report_unreadable
from patchgen.commands.options import ImageOptions, ModelOptions
from patchgen.common.text import json_text

if TYPE_CHECKING:
    from patchgen.predict.discover import Features
    from patchgen.predict.predictor import Predictor


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


def _check(arguments: DiscoverArguments, images: int) -> Path:
    """The output folder, after checks before any work of what would otherwise fail at its end."""
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
    return check_folder(arguments.out)


def _read_known(predictor: "Predictor", arguments: DiscoverArguments) -> "tuple[Features, list[str]]":
    """Features and labels of the run's own images of known classes."""
    from patchgen.common.progress import Progress
    from patchgen.predict.discover import read_features, reference_images
    from patchgen.runs.folder import RunFolder

    known = reference_images(RunFolder.open(arguments.model), arguments.data)
    label_of = {file: name for name, files in known.items() for file in files}
    with Progress("known classes", len(label_of), quiet=arguments.quiet) as bar:
        features = read_features(predictor, label_of, arguments.batch, bar.tick)
    labels = [label_of[prediction.path] for prediction in features.predictions]
    lost = [name for name in known if name not in labels]
    if not labels:
        raise ValueError(f"none of the {len(label_of)} training images of known classes could be read")
    if lost and not arguments.quiet:
        print(f"no readable training image of {', '.join(lost)}: images of such a class will look new", file=sys.stderr)
    return features, labels


def discover(arguments: DiscoverArguments) -> int:
    paths = find_images(arguments.images)
    out = _check(arguments, len(paths))
    announce(arguments.quiet)
    from patchgen.common.progress import Progress
    from patchgen.predict.discover import calibrated_rule, group_features, read_features
    from patchgen.report import discovered
    from patchgen.runs.folder import RunFolder

    predictor = arguments.load()
    known, labels = _read_known(predictor, arguments)
    with Progress("images", len(paths), quiet=arguments.quiet) as bar:
        features = read_features(predictor, paths, arguments.batch, bar.tick)
        groups = group_features(
            features, known.vectors, labels, new_classes=arguments.new_classes, at_most=arguments.at_most,
            seed=predictor.config.seed, rule=calibrated_rule(RunFolder.open(arguments.model), arguments.checkpoint),
        )  # fmt: skip
    rows = discovered.summarise(groups)
    run = f"{Path(arguments.model).resolve().name} ({predictor.config.method})"
    page = discovered.write(groups, rows, f"Images that fit no known class of {run}", out)
    if arguments.json:
        print(json_text(discovered.as_json(groups, rows, page)))
    else:
        if groups.estimate:
            print(discovered.describe_estimate(groups))
        print(discovered.describe_rule(groups))
        head = ("group", "images", "fits known", "median confidence", "nearest known", "sheet")
        print_table(head, [[*discovered.cells(row), row["sheet"] or ""] for row in rows])
        print(page)
    return report_unreadable(groups.unreadable, len(paths), arguments.strict)


COMMAND = discover
