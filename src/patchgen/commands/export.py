"""patchgen export MODEL --out model.onnx: export a model and verify that its outputs are the same."""

import sys
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from patchgen.commands import check_file
from patchgen.commands.options import WeightsOptions, find_images
from patchgen.common.files import check_writable, expanded
from patchgen.common.text import printable


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
    onnx = arguments.format == "onnx"
    if onnx and (arguments.spacing or arguments.patch):
        raise ValueError("--spacing and --patch are for --format wsinfer; an ONNX file has no such fields")
    target = check_file(arguments.out, "--out", ".onnx") if onnx else expanded(arguments.out)
    from patchgen.data.inputs import squares
    from patchgen.predict.export import NOISE_FACTOR, check_folder, drawn_images, export, export_wsinfer, require_extra
    from patchgen.predict.predictor import load_predictor

    if onnx:
        require_extra()
    else:
        check_writable(target, "--out")
        check_folder(target)
    files = find_images(arguments.images)[: arguments.count] if arguments.images else []
    where = {"backbone": arguments.backbone, "allow_download": arguments.allow_download}
    predictor = load_predictor(arguments.model, arguments.checkpoint, **where)
    size, tiles = predictor.config.image_size, predictor.tiles
    images = list(squares(files, size, predictor.interpolation)) if files else drawn_images(arguments.count, size)
    print(f"converting the model, then comparing outputs on {len(images)} images", file=sys.stderr, flush=True)
    if onnx:
        differences = export(predictor, target, images)
    elif spacing := arguments.spacing or (tiles.mpp if tiles else None):
        patch = arguments.patch or (tiles.side if tiles else size)
        differences = export_wsinfer(predictor, target, images, spacing=spacing, patch=patch)
    else:
        raise ValueError(
            "--format wsinfer needs --spacing, the microns per pixel of the tiles (such as 0.5): this model was not "
            "trained on tiles of `patchgen slide tiles`, which remember it"
        )
    for name, (value, allowed) in differences.items():
        print(f"{name}: largest difference {value:.1e} on {len(images)} images (allowed: {allowed:.1e}, at most "
              f"{NOISE_FACTOR} times the network's own rounding in float32)")  # fmt: skip
    print(printable(target))
    return 0


COMMAND = export_model
