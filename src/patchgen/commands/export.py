"""patchgen export MODEL --out model.onnx: export a model and verify that its outputs are the same."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from patchgen.commands import announce, parse
from patchgen.commands.inputs import find_images
from patchgen.common.files import check_writable
from patchgen.common.text import printable

if TYPE_CHECKING:
    from patchgen.data.table import TileScale
    from patchgen.predict.predictor import Predictor


@dataclass(frozen=True)
class ExportArguments:
    """Export a model or run, as ONNX or for QuPath and WSInfer, and compare its outputs with the original's."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """Model folder of `patchgen fit`, or run folder of `patchgen train`."""
    out: str
    """The .onnx file to write; with `--format wsinfer` a folder."""
    format: Literal["onnx", "wsinfer"] = "onnx"
    """An ONNX file, or a folder with TorchScript and config.json for WSInfer and its QuPath extension."""
    spacing: float | None = None
    """wsinfer: microns per pixel of the training tiles; by default as the model remembers from `slide tiles`."""
    patch: int | None = None
    """wsinfer: side of such a tile in pixels, before it was resized; by default as the model remembers."""
    images: tuple[str, ...] = ()
    """Images, folders or patterns for the comparison; generated ones by default."""
    count: int = 32
    """Maximum number of images to compare."""
    checkpoint: Literal["selected", "swad"] = "selected"
    """Of a run: the checkpoint chosen on source validation, or the weight average of one trained with --swad."""


COMMAND = ExportArguments


def main(argv: list[str]) -> int:
    arguments = parse(ExportArguments, "export", argv)
    target = Path(arguments.out)
    _check_target(arguments, target)
    if arguments.count < 1:
        raise ValueError(f"--count must be at least 1, not {arguments.count}")
    check_writable(target, "--out")
    announce()
    from patchgen.predict.export import NOISE_FACTOR, check_folder, drawn_images, export, export_wsinfer, require_extra
    from patchgen.predict.predictor import load_predictor

    if arguments.format == "onnx":
        require_extra()
    else:
        check_folder(target)
    files = find_images(arguments.images)[: arguments.count] if arguments.images else []
    predictor = load_predictor(arguments.model, arguments.checkpoint)
    from patchgen.data.inputs import squares

    size = predictor.config.image_size
    images = list(squares(files, size, predictor.interpolation)) if files else drawn_images(arguments.count, size)
    print(f"converting the model, then comparing outputs on {len(images)} images", file=sys.stderr, flush=True)
    if arguments.format == "onnx":
        differences = export(predictor, target, images)
    else:
        scale = _scale(arguments, predictor)
        differences = export_wsinfer(predictor, target, images, spacing=scale.mpp, patch=scale.side)
    for name, (value, allowed) in differences.items():
        print(f"{name}: largest difference {value:.1e} on {len(images)} images (allowed: {allowed:.1e}, at most "
              f"{NOISE_FACTOR} times the network's own rounding in float32)")  # fmt: skip
    print(printable(target))
    return 0


def _scale(arguments: ExportArguments, predictor: Predictor) -> TileScale:
    """The scale of the training tiles: as given, else as the model remembers it."""
    from patchgen.data.table import TileScale

    known = predictor.tiles
    spacing = arguments.spacing or (known.mpp if known else None)
    if spacing is None:
        raise ValueError(
            "--format wsinfer needs --spacing, the microns per pixel of the tiles (such as 0.5): this model was not "
            "trained on tiles of `patchgen slide tiles`, which remember it"
        )
    return TileScale(spacing, arguments.patch or (known.side if known else predictor.config.image_size))


def _check_target(arguments: ExportArguments, target: Path) -> None:
    """Check that the options fit the format, before the model is loaded."""
    if arguments.format == "onnx":
        if target.is_dir() or target.suffix != ".onnx":
            raise ValueError(f"--out must be a file that ends in .onnx, not {arguments.out!r}")
        for name in ("spacing", "patch"):
            if getattr(arguments, name) is not None:
                raise ValueError(f"--{name} is for --format wsinfer; an ONNX file has no such field")
    elif arguments.spacing is not None and not 0 < arguments.spacing < 1000:
        raise ValueError(
            f"--spacing is the number of microns per pixel of the tiles (such as 0.5), not {arguments.spacing}"
        )
    elif arguments.patch is not None and arguments.patch < 1:
        raise ValueError(f"--patch must be at least 1 pixel, not {arguments.patch}")
    if not target.absolute().parent.is_dir():
        raise ValueError(f"--out {target}: the folder {target.parent} does not exist; make it first")
