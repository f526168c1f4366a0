"""How an encoder expects its pixels: mean, standard deviation and interpolation, as given in its folder.

    pixels = folder_pixels(folder, "siglip_vision_model")
    images = (resized / 255 - pixels.mean) / pixels.std           # resized with pixels.interpolation

Two layouts are supported, as in transformers: `processor_config.json` with a nested image processor takes precedence
over a flat `preprocessor_config.json`. timm stores the same in `pretrained_cfg` of its config.json. Values that a
folder leaves out get a default, and `Pixels.assumed` names them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from patchgen.common.untrusted import read_json, shortly
from patchgen.data.images import BILINEAR, INTERPOLATIONS

Triple = tuple[float, float, float]
Normalisation = tuple[Triple, Triple]  # mean, std

IMAGENET: Normalisation = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
HALF: Normalisation = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
CLIP: Normalisation = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
RAW: Normalisation = ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))  # pixels in [0, 1] as they are
# normalisation that the published weights of a model type were trained with; ImageNet's for all others
USUAL = {"clip_vision_model": CLIP, "siglip_vision_model": HALF, "siglip2_vision_model": HALF, "beit": HALF,
         "data2vec-vision": HALF, "radio": RAW, "tipsv2_vision_model": RAW}  # fmt: skip
NAMES = {IMAGENET: "ImageNet's mean and std", HALF: "mean and std 0.5", CLIP: "CLIP's mean and std", RAW: "no mean"}
NESTED, FLAT = "processor_config.json", "preprocessor_config.json"


class Pixels(NamedTuple):
    """How images are turned into the input of an encoder."""

    mean: Triple  # of pixels in [0, 1]
    std: Triple
    interpolation: str = BILINEAR
    assumed: str = ""  # description of the values that were set by default

    def facts(self) -> dict[str, Any]:
        """As a run records them."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in self._asdict().items()}


def default_pixels(model_type: str) -> Pixels:
    """The defaults for a model type."""
    usual = USUAL.get(model_type, IMAGENET)
    return Pixels(*usual, assumed=f"{NAMES[usual]} and {BILINEAR} resizing by default")


def recorded_pixels(facts: Mapping[str, Any]) -> Pixels | None:
    """The pixels that a run or model folder recorded; None if an earlier version recorded nothing."""
    if "mean" not in facts:
        return None
    interpolation = facts.get("interpolation", BILINEAR)
    if interpolation not in INTERPOLATIONS:
        raise ValueError(f"interpolation must be one of {', '.join(INTERPOLATIONS)}, not {shortly(interpolation)}")
    mean, std = facts["mean"], facts["std"]
    return Pixels((mean[0], mean[1], mean[2]), (std[0], std[1], std[2]), interpolation, str(facts.get("assumed", "")))


def earlier_pixels(folder: Path, model_type: str) -> Pixels:
    """What earlier versions used, before runs recorded it: mean and std of a flat file, and bilinear resizing."""
    said = read_json(folder / FLAT) if (folder / FLAT).is_file() else {}
    if "image_mean" in said and "image_std" in said:
        return Pixels(*_normalisation(folder / FLAT, said))
    return Pixels(*(CLIP if model_type == "clip_vision_model" else IMAGENET))


def folder_pixels(folder: Path, model_type: str) -> Pixels:
    """The pixels that a transformers folder specifies.

    Raises:
        ValueError: a field has an unsupported value; the message names the file and the field.
    """
    file, said = _processor(folder)
    if said is None:
        return default_pixels(model_type)
    usual, assumed = USUAL.get(model_type, IMAGENET), []
    if not said.get("do_normalize", True):
        mean, std = RAW
    elif "image_mean" in said and "image_std" in said:
        mean, std = _normalisation(file, said)
    else:
        mean, std = usual
        assumed.append(NAMES[usual])
    resample = said.get("resample")
    if resample is None:
        assumed.append(f"{BILINEAR} resizing")
    elif not isinstance(resample, int) or not 0 <= resample < len(INTERPOLATIONS):
        raise ValueError(f"{file}: resample must be a whole number from 0 to 5, not {shortly(resample)}")
    scale = _scale(file, said)
    if not math.isclose(scale, 1):  # x * scale normalised is x normalised by mean / scale and std / scale
        mean, std = _divided(mean, scale), _divided(std, scale)
    words = f"{' and '.join(assumed)} by default" if assumed else ""
    return Pixels(mean, std, BILINEAR if resample is None else INTERPOLATIONS[resample], words)


def timm_pixels(file: Path, said: Mapping[str, Any]) -> Pixels:
    """The pixels that timm's `pretrained_cfg` specifies."""
    known = isinstance(said.get("mean"), list) and isinstance(said.get("std"), list)
    mean, std = _normalisation(file, {"image_mean": said["mean"], "image_std": said["std"]}) if known else IMAGENET
    interpolation = said.get("interpolation")
    if interpolation is not None and interpolation not in INTERPOLATIONS:
        raise ValueError(
            f"{file}: interpolation must be one of {', '.join(INTERPOLATIONS)}, not {shortly(interpolation)}"
        )
    assumed = ([] if known else [NAMES[IMAGENET]]) + ([] if interpolation else [f"{BILINEAR} resizing"])
    return Pixels(mean, std, interpolation or BILINEAR, f"{' and '.join(assumed)} by default" if assumed else "")


def is_nested(folder: Path) -> bool:
    """Whether a folder's image processor is in its `processor_config.json`; damaged files are reported on loading."""
    try:
        return isinstance(read_json(folder / NESTED).get("image_processor"), dict)
    except (OSError, ValueError):
        return False


def _processor(folder: Path) -> tuple[Path, dict[str, Any] | None]:
    """The image processor's settings and the file they are in; None if there is none."""
    for name in (NESTED, FLAT):
        said = read_json(folder / name) if (folder / name).is_file() else {}
        if isinstance(said.get("image_processor"), dict):
            return folder / name, said["image_processor"]
        if name == FLAT and said:
            return folder / name, said
    return folder, None


def _scale(file: Path, said: Mapping[str, Any]) -> float:
    """The factor between an encoder's pixels and pixels in [0, 1]."""
    factor = said.get("rescale_factor", 1 / 255) if said.get("do_rescale", True) else 1
    if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0 < factor < math.inf:
        raise ValueError(f"{file}: rescale_factor must be a number above 0, not {shortly(factor)}")
    return 255 * factor


def _divided(values: Triple, by: float) -> Triple:
    return values[0] / by, values[1] / by, values[2] / by


def _normalisation(file: Path, said: Mapping[str, Any]) -> Normalisation:
    parts = [[part] * 3 if isinstance(part, float) else part for part in (said["image_mean"], said["image_std"])]
    numbers = [x for part in parts if isinstance(part, list) for x in part if isinstance(x, (int, float))]
    if len(numbers) != 6 or len(parts[0]) != 3 or not all(x > 0 for x in parts[1]):
        raise ValueError(f"{file}: image_mean and image_std must be three numbers each, those of image_std above 0")
    return tuple(parts[0]), tuple(parts[1])  # type: ignore[return-value]
