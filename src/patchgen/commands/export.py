"""patchgen export MODEL --out model.onnx: export a model and verify that its outputs are the same."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from patchgen.commands import COUNT, announce, check_bounds, check_file
from patchgen.commands.inputs import find_images
from patchgen.commands.options import WeightsOptions
from patchgen.common.files import check_writable, expanded
from patchgen.common.text import printable

if TYPE_CHECKING:
    from patchgen.data.table import TileScale
    from patchgen.predict.predictor import Predictor


@dataclass(frozen=True)
class ExportArguments(WeightsOptions):
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


def export_model(arguments: ExportArguments) -> int:
    check_bounds(arguments, count=COUNT, patch=COUNT, spacing="(0, 1000)")
    target = _target(arguments)
    announce()
    from patchgen.predict.export import NOISE_FACTOR, check_folder, drawn_images, export, export_wsinfer, require_extra
    from patchgen.predict.predictor import load_predictor

    if arguments.format == "onnx":
        require_extra()
    else:
        check_folder(target)
    files = find_images(arguments.images)[: arguments.count] if arguments.images else []
    predictor = load_predictor(arguments.model, arguments.checkpoint, **arguments.weights)
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


def _scale(arguments: ExportArguments, predictor: "Predictor") -> "TileScale":
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


def _target(arguments: ExportArguments) -> Path:
    """The file or folder to write, after checks that need no model."""
    if arguments.format == "onnx":
        for name in ("spacing", "patch"):
            if getattr(arguments, name) is not None:
                raise ValueError(f"--{name} is for --format wsinfer; an ONNX file has no such field")
        return check_file(arguments.out, "--out", ".onnx")
    check_writable(arguments.out, "--out")
    return expanded(arguments.out)


COMMAND = export_model
