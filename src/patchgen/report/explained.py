"""What `patchgen explain` writes: a picture and a mask for each image, an index and a page."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from patchgen.common.files import replacing, write_text
from patchgen.common.text import json_text, printable
from patchgen.draw.overlay import AFTERWARDS, MASK, NOTICE
from patchgen.pages.page import file_address, render, write_page
from patchgen.predict.predictor import Explanation

NAME = 48  # maximum characters of an image's name: at four bytes each they fit into 255 bytes


def output_names(paths: Sequence[Path]) -> list[str]:
    """`0002_dog`: the unique position in the list, and the image's name in portable characters."""
    digits = max(4, len(str(len(paths))))
    stems = [re.sub(r"[^\w.-]+", "_", path.stem)[:NAME] for path in paths]
    return [f"{i:0{digits}}_{stem}" for i, stem in enumerate(stems, 1)]


def write_map(explanation: Explanation, name: str, out: Path, look: dict[str, Any]) -> dict[str, Any]:
    """Picture and mask of one image; returns its entry in the index."""
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


def write_index(index: dict[str, Any], title: str, out: Path) -> None:
    """The index, and a page that shows all of it."""
    kind = index["images"][0]["map"] if index["images"] else MASK
    notice = (
        f"{NOTICE.capitalize()}: it shows patches that the classifier reads more than others, not where something is"
    )
    stretched = index["relative"] or kind != MASK
    html = render(
        "explain.html",
        title=title,
        notice=notice if kind == MASK else f"{kind} {AFTERWARDS}",
        scale="stretched to each image's own range" if stretched else "fixed: 0 is left out, 1 is selected",
        images=[_picture(entry) for entry in index["images"]],
        unreadable=[(image["path"], image["reason"]) for image in index["unreadable"]],
    )
    write_text(out / "index.json", json_text(index) + "\n")
    write_page(out / "index.html", html)


def _picture(entry: dict[str, Any]) -> dict[str, Any]:
    """The entry of an image on the page."""
    mask = "min {min:.2f}, mean {mean:.2f}, max {max:.2f}".format_map(entry["mask"]) + f"; {entry['reading']}"
    path, label = printable(entry["path"]), f"{entry['label']} with {entry['confidence']:.1%}"
    return {
        "path": path,
        "source": file_address(entry["picture"]),
        "alt": f"{path}: predicted {label}; {entry['map']} on the right, {mask}",
        "top": [(row["class"], f"{row['probability']:.1%}") for row in entry["top"]],
        "mask": f"{entry['map']} {mask}",
    }
