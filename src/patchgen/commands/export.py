"""patchgen export MODEL --out model.onnx: an ONNX file that answers as the model does, or none at all."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from patchgen.commands import announce, parse
from patchgen.commands.predict import find_images, shown
from patchgen.common.files import check_writable


@dataclass(frozen=True)
class ExportArguments:
    """Export a model or run to ONNX and compare its answers with the original's."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """Model folder of `patchgen fit`, or run folder of `patchgen train`."""
    out: str
    """The .onnx file to write."""
    images: tuple[str, ...] = ()
    """Images, folders or patterns to compare the answers on; generated ones when left out."""
    count: int = 100
    """At most so many images are compared."""
    checkpoint: Literal["selected", "swad"] = "selected"
    """Of a run: the checkpoint chosen on source validation, or the weight average of one trained with --swad."""


def main(argv: list[str]) -> int:
    arguments = parse(ExportArguments, "export", argv)
    target = Path(arguments.out)
    if target.is_dir() or target.suffix != ".onnx":
        raise ValueError(f"--out must be a file that ends in .onnx, not {arguments.out!r}")
    if not target.absolute().parent.is_dir():
        raise ValueError(f"--out {target}: the folder {target.parent} does not exist; make it first")
    if arguments.count < 1:
        raise ValueError(f"--count must be at least 1, not {arguments.count}")
    check_writable(target, "--out")
    announce()
    from patchgen.predict.export import TOLERANCE, drawn_images, export, require_extra
    from patchgen.predict.predictor import load_predictor

    require_extra()
    files = find_images(arguments.images)[: arguments.count] if arguments.images else []
    predictor = load_predictor(arguments.model, arguments.checkpoint)
    from patchgen.data.given import squares

    size = predictor.config.image_size
    images = list(squares(files, size)) if files else drawn_images(arguments.count, size)
    differences = export(predictor, target, images)
    for name, difference in differences.items():
        print(f"{name}: largest difference {difference:.1e} on {len(images)} images (at most {TOLERANCE:g} is allowed)")
    print(shown(target))
    return 0
