"""How an encoder expects its pixels: mean, standard deviation and interpolation, as given in its folder.

pixels = folder_pixels(folder, "siglip_vision_model")
images = (resized / 255 - pixels.mean) / pixels.std           # resized with pixels.interpolation
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from patchgen.common.untrusted import read_json, shortly
from patchgen.data.images import BILINEAR, INTERPOLATIONS

Numbers = tuple[float, ...]  # three, of red, green and blue
NESTED, FLAT = "processor_config.json", "preprocessor_config.json"


class Pixels(NamedTuple):
    """How images are turned into the input of an encoder."""

    mean: Numbers  # of pixels in [0, 1]
    std: Numbers
    interpolation: str = BILINEAR
    assumed: str = ""  # description of the values that were set by default

    def facts(self) -> dict[str, Any]:
        """As a run records them."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in self._asdict().items()}


IMAGENET = Pixels((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
HALF = Pixels((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
CLIP = Pixels((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
RAW = Pixels((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))  # pixels in [0, 1] as they are
# what the published weights of a model type were trained with; ImageNet's for all others
USUAL = {"clip_vision_model": CLIP, "siglip_vision_model": HALF, "siglip2_vision_model": HALF, "beit": HALF,
         "data2vec-vision": HALF, "radio": RAW, "tipsv2_vision_model": RAW}  # fmt: skip
NAMES = {IMAGENET: "ImageNet's mean and std", HALF: "mean and std 0.5", CLIP: "CLIP's mean and std", RAW: "no mean"}


def recorded_pixels(facts: Mapping[str, Any]) -> Pixels | None:
    """The pixels that a run or model folder recorded; None if an earlier version recorded nothing."""
    if "mean" not in facts:
        return None
    interpolation = _interpolation(facts.get("interpolation", BILINEAR), "the record")
    return Pixels(tuple(facts["mean"]), tuple(facts["std"]), interpolation, str(facts.get("assumed", "")))


def earlier_pixels(folder: Path, model_type: str) -> Pixels:
    """What earlier versions used, before runs recorded it: mean and std of a flat file, and bilinear resizing."""
    fields = read_json(folder / FLAT) if (folder / FLAT).is_file() else {}
    if "image_mean" in fields and "image_std" in fields:
        return Pixels(*_normalisation(folder / FLAT, fields["image_mean"], fields["image_std"]))
    return CLIP if model_type == "clip_vision_model" else IMAGENET


def folder_pixels(folder: Path, model_type: str) -> Pixels:
    """The pixels that a transformers folder specifies; as there, a nested image processor comes before a flat file."""
    file = folder / NESTED
    fields = read_json(file).get("image_processor") if file.is_file() else None
    if not isinstance(fields, dict):
        file = folder / FLAT
        fields = read_json(file) if file.is_file() else {}
    normalisation: tuple[Numbers, Numbers] | None = None
    if not fields.get("do_normalize", True):
        normalisation = RAW[:2]
    elif "image_mean" in fields and "image_std" in fields:
        normalisation = _normalisation(file, fields["image_mean"], fields["image_std"])
    resample = fields.get("resample")
    if resample is not None and not (isinstance(resample, int) and 0 <= resample < len(INTERPOLATIONS)):
        raise ValueError(f"{file}: resample must be a whole number from 0 to 5, not {shortly(resample)}")
    pixels = with_defaults(normalisation, None if resample is None else INTERPOLATIONS[resample], model_type)
    factor = fields.get("rescale_factor", 1 / 255) if fields.get("do_rescale", True) else 1
    if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0 < factor < math.inf:
        raise ValueError(f"{file}: rescale_factor must be a number above 0, not {shortly(factor)}")
    scale = 255 * factor
    if math.isclose(scale, 1):
        return pixels
    # pixels x in [0, 1] are scaled first: (x * scale - mean) / std
    return pixels._replace(mean=tuple(x / scale for x in pixels.mean), std=tuple(x / scale for x in pixels.std))


def timm_pixels(file: Path, fields: Mapping[str, Any]) -> Pixels:
    """The pixels that timm's `pretrained_cfg` specifies."""
    mean, std, interpolation = (fields.get(name) for name in ("mean", "std", "interpolation"))
    known = isinstance(mean, list) and isinstance(std, list)
    normalisation = _normalisation(file, mean, std) if known else None
    return with_defaults(normalisation, None if interpolation is None else _interpolation(interpolation, file))


def with_defaults(
    normalisation: tuple[Numbers, Numbers] | None = None, interpolation: str | None = None, model_type: str = ""
) -> Pixels:
    """Pixels with the defaults of a model type where a value is None."""
    usual = USUAL.get(model_type, IMAGENET)
    assumed = [NAMES[usual]] * (normalisation is None) + [f"{BILINEAR} resizing"] * (interpolation is None)
    words = f"{' and '.join(assumed)} by default" if assumed else ""
    return Pixels(*(normalisation or usual[:2]), interpolation or BILINEAR, words)


def is_nested(folder: Path) -> bool:
    """Whether a folder's image processor is in its `processor_config.json`; damaged files are reported on loading."""
    try:
        return isinstance(read_json(folder / NESTED).get("image_processor"), dict)
    except (OSError, ValueError):
        return False


def _interpolation(name: Any, where: object) -> str:
    if name not in INTERPOLATIONS:
        raise ValueError(f"{where}: interpolation must be one of {', '.join(INTERPOLATIONS)}, not {shortly(name)}")
    return str(name)


def _normalisation(file: Path, mean: Any, std: Any) -> tuple[Numbers, Numbers]:
    parts = [[part] * 3 if isinstance(part, float) else part for part in (mean, std)]
    numbers = [x for part in parts if isinstance(part, list) for x in part if isinstance(x, (int, float))]
    if len(numbers) != 6 or len(parts[0]) != 3 or not all(x > 0 for x in parts[1]):
        raise ValueError(f"{file}: image_mean and image_std must be three numbers each, those of image_std above 0")
    return tuple(parts[0]), tuple(parts[1])
