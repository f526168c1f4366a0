"""patchgen explain MODEL IMAGES... --out DIR: a picture and a mask for each image, and a page that shows them all."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from patchgen.commands import announce, check_folder
from patchgen.commands.inputs import find_images, report_unreadable
from patchgen.commands.options import ImageOptions, RuntimeOptions
from patchgen.common.files import replacing, write_text
from patchgen.common.text import json_text, printable
from patchgen.draw.overlay import UNSELECTIVE

if TYPE_CHECKING:
    from patchgen.predict.predictor import Explanation

NAME = 48  # maximum characters of an image's name: at four bytes each they fit into 255 bytes


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


def output_names(paths: Sequence[Path]) -> list[str]:
    """`0002_dog`: the unique position in the list, and the image's name in portable characters."""
    digits = max(4, len(str(len(paths))))
    stems = [re.sub(r"[^\w.-]+", "_", path.stem)[:NAME] for path in paths]
    return [f"{i:0{digits}}_{stem}" for i, stem in enumerate(stems, 1)]


def _write_image(explanation: Explanation, name: str, out: Path, look: dict[str, Any]) -> dict[str, Any]:
    """Picture and mask of one image; returns its entry in the index."""
    import numpy as np

    picture = explanation.overlay(**look)
    with replacing(out / f"{name}.png") as temporary:
        picture.save(temporary, "PNG")
    with replacing(out / f"{name}.npy") as temporary, temporary.open("wb") as handle:
        np.save(handle, explanation.mask.astype(np.float32), allow_pickle=False)
    label, confidence = explanation.top[0]
    return {
        "path": str(explanation.path),
        "picture": f"{name}.png",
        "mask_file": f"{name}.npy",
        "label": label,
        "confidence": confidence,
        "top": [{"class": label, "probability": probability} for label, probability in explanation.top],
        "map": explanation.kind,
        "mask": {"grid": list(explanation.mask.shape), **explanation.mask_statistics},
        "reading": explanation.reading,
    }


def _render_page(index: dict[str, Any], title: str) -> str:
    """One HTML page next to the pictures."""
    from patchgen.draw.overlay import AFTERWARDS, MASK, NOTICE
    from patchgen.pages.page import render

    kind = index["images"][0]["map"] if index["images"] else MASK
    notice = (
        f"{NOTICE.capitalize()}: it shows patches that the classifier reads more than others, not where something is"
    )
    stretched = index["relative"] or kind != MASK
    return render(
        "explain.html",
        title=title,
        notice=notice if kind == MASK else f"{kind} {AFTERWARDS}",
        scale="stretched to each image's own range" if stretched else "fixed: 0 is left out, 1 is selected",
        images=[_picture(entry) for entry in index["images"]],
        unreadable=[(image["path"], image["reason"]) for image in index["unreadable"]],
    )


def _picture(entry: dict[str, Any]) -> dict[str, Any]:
    """The entry of an image on the page."""
    from patchgen.pages.page import file_address

    mask = "min {min:.2f}, mean {mean:.2f}, max {max:.2f}".format_map(entry["mask"]) + f"; {entry['reading']}"
    path, label = printable(entry["path"]), f"{entry['label']} with {entry['confidence']:.1%}"
    return {
        "path": path,
        "source": file_address(entry["picture"]),
        "alt": f"{path}: predicted {label}; {entry['map']} on the right, {mask}",
        "top": [(row["class"], f"{row['probability']:.1%}") for row in entry["top"]],
        "mask": f"{entry['map']} {mask}",
    }


def explain(arguments: ExplainArguments) -> int:
    announce()
    from patchgen.draw.overlay import check_colours

    check_colours(arguments.colormap, arguments.alpha)
    paths, out = find_images(arguments.images), check_folder(arguments.out)
    from patchgen.common.progress import Progress
    from patchgen.data.images import UnreadableImage
    from patchgen.pages.page import write_page
    from patchgen.predict.predictor import Unreadable

    predictor = arguments.load(len(paths))
    out.mkdir(parents=True, exist_ok=True)
    look = {"relative": arguments.relative, "colours": arguments.colormap, "opacity": arguments.alpha}
    entries, unreadable = [], []
    with Progress("explaining", len(paths)) as bar:
        for path, name in zip(paths, output_names(paths), strict=True):
            try:
                entries.append(_write_image(predictor.explain(path, arguments.map), name, out, look))
            except UnreadableImage as error:
                unreadable.append(Unreadable(path, error.reason))
            bar.tick()
    run = Path(arguments.model).resolve().name
    index = {
        "run": run,
        "checkpoint": arguments.checkpoint,
        "classes": predictor.classes,
        "relative": arguments.relative,
        "images": entries,
        "unreadable": [{"path": str(image.path), "reason": image.reason} for image in unreadable],
    }
    write_text(out / "index.json", json_text(index) + "\n")
    write_page(out / "index.html", _render_page(index, f"Maps of {run} ({predictor.config.method})"))
    flat = sum(UNSELECTIVE in entry["reading"] for entry in entries)
    if flat:
        print(f"{flat} of {len(entries)} maps select every patch, or none: {UNSELECTIVE} in them", file=sys.stderr)
    print(out)
    return report_unreadable(unreadable, len(paths), arguments.strict)


COMMAND = explain
