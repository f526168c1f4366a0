"""patchgen explain MODEL IMAGES... --out DIR: a picture and a mask for each image, and a page that shows them all."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from patchgen.commands import announce, check_folder, parse
from patchgen.commands.inputs import find_images, report_unreadable
from patchgen.commands.options import RuntimeOptions
from patchgen.common.files import check_writable, replacing, write_text
from patchgen.common.text import json_text, printable
from patchgen.draw.overlay import UNSELECTIVE

if TYPE_CHECKING:
    from patchgen.predict.predictor import Explanation, Map, Predictor, Unreadable

NAME = 48  # maximum characters of an image's name: at four bytes each they fit into 255 bytes


@dataclass(frozen=True)
class ExplainArguments(RuntimeOptions):
    """Show which patches the classifier reads more than others: a picture and a mask (.npy) per image, and a page."""

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """Model folder of `patchgen fit`, or run folder of `patchgen train`."""
    images: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="IMAGES...")]
    """Image files, folders (searched with their sub-folders) and patterns such as 'photos/**/*.jpg'."""
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
    strict: bool = False
    """Exit with code 1 if any image could not be read, not only if none could."""


def output_names(paths: Sequence[Path]) -> list[str]:
    """`0002_dog`: the unique position in the list, and the image's name in portable characters."""
    digits = max(4, len(str(len(paths))))
    stems = [re.sub(r"[^\w.-]+", "_", path.stem)[:NAME] for path in paths]
    return [f"{i:0{digits}}_{stem}" for i, stem in enumerate(stems, 1)]


def _write_one(found: Explanation, name: str, out: Path, look: dict[str, Any]) -> dict[str, Any]:
    """Picture and mask of one image; returns its entry in the index."""
    import numpy as np

    picture = found.overlay(**look)
    with replacing(out / f"{name}.png") as temporary:
        picture.save(temporary, "PNG")
    with replacing(out / f"{name}.npy") as temporary, temporary.open("wb") as handle:
        np.save(handle, found.mask.astype(np.float32), allow_pickle=False)
    label, confidence = found.top[0]
    return {
        "path": str(found.path),
        "picture": f"{name}.png",
        "mask_file": f"{name}.npy",
        "label": label,
        "confidence": confidence,
        "top": [{"class": one, "probability": probability} for one, probability in found.top],
        "map": found.kind,
        "mask": {"grid": list(found.mask.shape), **found.mask_statistics},
        "reading": found.reading,
    }


def explain_all(
    predictor: Predictor,
    paths: Sequence[Path],
    out: Path,
    look: dict[str, Any],
    tick: Callable[[int], None],
    how: Map = "auto",
) -> tuple[list[dict[str, Any]], list[Unreadable]]:
    """Write every picture and mask; returns the entries of the index, and the unreadable images.

    Args:
        look: Options of `Explanation.overlay`.
    """
    from patchgen.data.images import UnreadableImage
    from patchgen.predict.predictor import Unreadable

    entries, failed = [], []
    for path, name in zip(paths, output_names(paths), strict=True):
        try:
            entries.append(_write_one(predictor.explain(path, how), name, out, look))
        except UnreadableImage as error:
            failed.append(Unreadable(path, error.reason))
        tick(1)
    return entries, failed


def render_page(title: str, entries: Sequence[dict[str, Any]], failed: Sequence[Unreadable], relative: bool) -> str:
    """One HTML page next to the pictures."""
    from patchgen.draw.overlay import AFTERWARDS, MASK, NOTICE
    from patchgen.pages.page import render

    kind = entries[0]["map"] if entries else MASK
    afterwards = kind != MASK

    return render(
        "explain.html",
        title=title,
        notice=f"{kind} {AFTERWARDS}"
        if afterwards
        else f"{NOTICE.capitalize()}: it shows patches that the classifier "
        "reads more than others, not where something is",
        scale="stretched to each image's own range"
        if relative or afterwards
        else "fixed: 0 is left out, 1 is selected",
        images=[_shown(entry) for entry in entries],
        unreadable=[(one.path, one.reason) for one in failed],
    )


def _shown(entry: dict[str, Any]) -> dict[str, Any]:
    """The entry of an image on the page."""
    from patchgen.pages.page import file_address

    mask = "min {min:.2f}, mean {mean:.2f}, max {max:.2f}".format_map(entry["mask"]) + f"; {entry['reading']}"
    path, label = printable(entry["path"]), f"{entry['label']} with {entry['confidence']:.1%}"
    return {
        "path": path,
        "source": file_address(entry["picture"]),
        "alt": f"{path}: predicted {label}; {entry['map']} on the right, {mask}",
        "top": [(one["class"], f"{one['probability']:.1%}") for one in entry["top"]],
        "mask": f"{entry['map']} {mask}",
    }


COMMAND = ExplainArguments


def main(argv: list[str]) -> int:
    arguments = parse(ExplainArguments, "explain", argv)
    announce()
    from patchgen.draw.overlay import check_colours

    check_colours(arguments.colormap, arguments.alpha)
    paths, out = find_images(arguments.images), Path(arguments.out)
    check_folder(out)
    check_writable(out, "--out")
    from patchgen.common.progress import Progress
    from patchgen.pages.page import write_page

    predictor = arguments.load(arguments.run, len(paths))
    out.mkdir(parents=True, exist_ok=True)
    look = {"relative": arguments.relative, "colours": arguments.colormap, "opacity": arguments.alpha}
    with Progress("explaining", len(paths)) as bar:
        entries, failed = explain_all(predictor, paths, out, look, bar.tick, arguments.map)
    facts = {"run": Path(arguments.run).resolve().name, "checkpoint": arguments.checkpoint}
    title = f"Maps of {facts['run']} ({predictor.config.method})"
    unreadable = [{"path": str(one.path), "reason": one.reason} for one in failed]
    index = {**facts, "classes": predictor.classes, "relative": arguments.relative, "images": entries}
    text = json_text({**index, "unreadable": unreadable}) + "\n"
    write_text(out / "index.json", text)
    write_page(out / "index.html", render_page(title, entries, failed, arguments.relative))
    flat = sum(UNSELECTIVE in entry["reading"] for entry in entries)
    if flat:
        print(f"{flat} of {len(entries)} maps select every patch, or none: {UNSELECTIVE} in them", file=sys.stderr)
    print(out)
    return report_unreadable(failed, len(paths), arguments.strict)
