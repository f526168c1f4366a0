"""patchgen discover RUN IMAGES... --out DIR: groups of images that fit no known class, as sheets, CSV and a page."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from patchgen.commands import check_folder, print_table
from patchgen.commands.options import ImageOptions, ModelOptions, find_images, report_unreadable
from patchgen.common.text import json_text


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


def discover(arguments: DiscoverArguments) -> int:
    paths, out = find_images(arguments.images), check_folder(arguments.out)
    if arguments.new_classes is not None and arguments.at_most is not None:
        raise ValueError("--at-most limits the estimate, which --new-classes replaces: choose one")
    for option, value in (("--new-classes", arguments.new_classes), ("--at-most", arguments.at_most)):
        if value is not None and value > len(paths):
            raise ValueError(f"{option} {value} needs as many images, but {len(paths)} were found; give more")
    from patchgen.common.progress import Progress
    from patchgen.predict.discover import calibrated_rule, group_features, read_features, reference_images
    from patchgen.predict.predictor import load_predictor
    from patchgen.report import discovered
    from patchgen.runs.folder import RunFolder

    predictor = load_predictor(arguments.model, arguments.checkpoint, **arguments.how)
    run = RunFolder.open(arguments.model)
    known = reference_images(run, arguments.data)
    label_of = {file: name for name, files in known.items() for file in files}
    with Progress("known classes", len(label_of), quiet=arguments.quiet) as bar:
        references = read_features(predictor, label_of, arguments.batch, bar.tick)
    labels = [label_of[prediction.path] for prediction in references.predictions]
    lost = [name for name in known if name not in labels]
    if not labels:
        raise ValueError(f"none of the {len(label_of)} training images of known classes could be read")
    if lost and not arguments.quiet:
        print(f"no readable training image of {', '.join(lost)}: images of such a class will look new", file=sys.stderr)
    with Progress("images", len(paths), quiet=arguments.quiet) as bar:
        features = read_features(predictor, paths, arguments.batch, bar.tick)
        groups = group_features(
            features, references.vectors, labels, new_classes=arguments.new_classes, at_most=arguments.at_most,
            seed=predictor.config.seed, rule=calibrated_rule(run, arguments.checkpoint),
        )  # fmt: skip
    rows = discovered.summarise(groups)
    name = f"{Path(arguments.model).resolve().name} ({predictor.config.method})"
    page = discovered.write(groups, rows, f"Images that fit no known class of {name}", out)
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
