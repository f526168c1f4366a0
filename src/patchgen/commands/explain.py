"""patchgen explain MODEL IMAGES... --out DIR: a picture and a mask for each image, and a page that shows them all."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from patchgen.commands import check_folder
from patchgen.commands.options import ImageOptions, RuntimeOptions, find_images, report_unreadable
from patchgen.draw.overlay import UNSELECTIVE, check_colours


@dataclass(frozen=True, kw_only=True)
class ExplainArguments(ImageOptions, RuntimeOptions):
    """Show which patches the classifier reads more than others: a picture and a mask (.npy) per image, and a page."""

    out: str
    """Folder for the pictures, masks and index; created if missing, files of the same name are replaced."""
    map: Literal["auto", "mask", "grad-cam", "rollout"] = "auto"
    """The model's mask; Grad-CAM or attention rollout of the predicted class. `auto`: Grad-CAM if there is no mask."""
    relative: bool = False
    """Stretch the colours to each mask's own range; the pictures are labelled accordingly."""
    colormap: str = "viridis"
    """Colours of the mask: a colour map of matplotlib, such as viridis, cividis, magma or gray."""
    alpha: float = 0.6
    """Opacity of the colours: 0 shows the image alone, 1 the map alone."""


def explain(arguments: ExplainArguments) -> int:
    check_colours(arguments.colormap, arguments.alpha)
    paths, out = find_images(arguments.images), check_folder(arguments.out)
    from patchgen.common.progress import Progress
    from patchgen.data.images import UnreadableImage
    from patchgen.predict.predictor import Unreadable
    from patchgen.report import explained

    predictor = arguments.load(len(paths))
    out.mkdir(parents=True, exist_ok=True)
    look = {"relative": arguments.relative, "colours": arguments.colormap, "opacity": arguments.alpha}
    entries, unreadable = [], []
    with Progress("explaining", len(paths)) as bar:
        for path, name in zip(paths, explained.output_names(paths), strict=True):
            try:
                entries.append(explained.write_map(predictor.explain(path, arguments.map), name, out, look))
            except UnreadableImage as error:
                unreadable.append(Unreadable(path, error.reason))
            bar.tick()
    run = Path(arguments.model).resolve().name
    failed = [{"path": str(image.path), "reason": image.reason} for image in unreadable]
    index = {
        "run": run, "checkpoint": arguments.checkpoint, "classes": predictor.classes, "relative": arguments.relative,
        "images": entries, "unreadable": failed,
    }  # fmt: skip
    explained.write_index(index, f"Maps of {run} ({predictor.config.method})", out)
    flat = sum(UNSELECTIVE in entry["reading"] for entry in entries)
    if flat:
        print(f"{flat} of {len(entries)} maps select every patch, or none: {UNSELECTIVE} in them", file=sys.stderr)
    print(out)
    return report_unreadable(unreadable, len(paths), arguments.strict)


COMMAND = explain
