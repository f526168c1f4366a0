"""What a folder says of its pixels, against transformers' own processor, and the table of all families in the docs."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from benchmarks import encoders
from patchgen.data.images import ImageStore, decode
from patchgen.model.backbone import Backbone, load_backbone
from patchgen.model.preprocessing import CLIP, RAW, Pixels, earlier_pixels, folder_pixels, recorded_pixels
from patchgen.model.weights import content

ROUNDING = 1e-6


def expecting(pixels: Pixels) -> Backbone:
    backbone = load_backbone("tiny")
    backbone.expect(pixels)
    return backbone


@pytest.mark.parametrize("said", [
    {"do_rescale": False, "image_mean": [120.0, 110.0, 100.0], "image_std": [60.0, 50.0, 40.0]},
    {"rescale_factor": 1 / 127.5, "image_mean": [1.0, 1.0, 1.0], "image_std": [1.0, 1.0, 1.0]},
    {"rescale_factor": 0.5, "do_normalize": False},
    {"resample": 0}, {"resample": 1}, {"resample": 4}, {"resample": 5},
], ids=str)  # fmt: skip
def test_scale_and_interpolation_are_followed(said: dict[str, Any], tmp_path: Path) -> None:
    example = encoders.Example("odd", "vit", {}, "ViTImageProcessor", said)
    encoders.write_processor(example, tmp_path, nested=False)
    pixels = folder_pixels(tmp_path, "vit")
    scale = 1 if "resample" in said else 1 / min(pixels.std)
    assert encoders.pixel_difference(
        expecting(pixels), encoders.reference(example, tmp_path), tmp_path
    ) <= ROUNDING * max(1.0, scale)


def test_a_nested_file_comes_before_a_flat_one(tmp_path: Path) -> None:
    flat = {"image_mean": [0.1] * 3, "image_std": [0.2] * 3, "resample": 3}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(flat))
    (tmp_path / "processor_config.json").write_text(json.dumps({"processor_class": "CLIPProcessor"}))
    assert folder_pixels(tmp_path, "vit") == Pixels((0.1,) * 3, (0.2,) * 3, "bicubic")
    nested = {"image_processor": {"image_mean": 0.3, "image_std": 0.4, "resample": 2}}
    (tmp_path / "processor_config.json").write_text(json.dumps(nested))
    assert folder_pixels(tmp_path, "vit") == Pixels((0.3,) * 3, (0.4,) * 3, "bilinear")


def test_defaults_are_named(tmp_path: Path) -> None:
    assert folder_pixels(tmp_path, "dinov2").assumed == "ImageNet's mean and std and bilinear resizing by default"
    assert folder_pixels(tmp_path, "clip_vision_model")[:2] == CLIP[:2]
    assert folder_pixels(tmp_path, "siglip_vision_model").assumed.startswith("mean and std 0.5")
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"resample": 3}))
    found = folder_pixels(tmp_path, "dinov2")
    assert (found.interpolation, found.assumed) == ("bicubic", "ImageNet's mean and std by default")
    said = {"image_mean": [0.1] * 3, "image_std": [0.2] * 3}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(said))
    assert folder_pixels(tmp_path, "dinov2").assumed == "bilinear resizing by default"


def test_the_backbone_line_and_record_say_what_was_assumed(tmp_path: Path) -> None:
    [vit] = [example for example in encoders.EXAMPLES if example.name == "DINOv2"]
    encoders.write_transformers(vit, tmp_path)
    backbone = load_backbone(str(tmp_path))
    assert "ImageNet's mean and std and bilinear resizing by default" in backbone.description
    assert backbone.record()["assumed"] in backbone.description
    encoders.write_processor(vit, tmp_path, nested=False)
    backbone = load_backbone(str(tmp_path))
    assert "default" not in backbone.description
    assert backbone.record()["interpolation"] == "bicubic" and backbone.record()["assumed"] == ""


@pytest.mark.parametrize(("said", "field"), [
    ({"resample": 9}, "resample"),
    ({"rescale_factor": 0}, "rescale_factor"),
    ({"rescale_factor": "1/255"}, "rescale_factor"),
    ({"image_mean": [0.5], "image_std": [0.5] * 3}, "image_mean"),
    ({"image_mean": [0.5] * 3, "image_std": [0.5, 0.5, 0]}, "image_std"),
])  # fmt: skip
def test_values_that_cannot_be_followed_are_refused(said: dict[str, Any], field: str, tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(said))
    with pytest.raises(ValueError, match=rf"preprocessor_config\.json.*{field}"):
        folder_pixels(tmp_path, "vit")


def test_a_run_keeps_the_pixels_it_was_trained_on(tmp_path: Path) -> None:
    """Runs that recorded none were trained on bilinear images and the mean of a flat file, whatever it said."""
    [radio] = [example for example in encoders.EXAMPLES if example.name == "RADIO"]
    encoders.write_transformers(radio, tmp_path)
    encoders.write_processor(radio, tmp_path, nested=False)
    now = load_backbone(str(tmp_path))
    before = load_backbone(str(tmp_path), recorded={"resolved": "folder", "digest": "0"})
    assert before.pixels == CLIP
    assert before.pixels == earlier_pixels(tmp_path, "radio")
    again = load_backbone(str(tmp_path), recorded=now.record())
    assert again.pixels == now.pixels == RAW._replace(interpolation="bicubic")
    assert before.digest() == now.digest()
    assert recorded_pixels({"mean": [0.1] * 3, "std": [0.2] * 3}) == Pixels((0.1,) * 3, (0.2,) * 3, "bilinear")
    with pytest.raises(ValueError, match="interpolation must be one of"):
        recorded_pixels({"mean": [0.1] * 3, "std": [0.2] * 3, "interpolation": "magic"})


def test_the_cache_tells_interpolations_apart(tmp_path: Path) -> None:
    file = tmp_path / "image.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 30, 3), dtype=np.uint8)).save(file)
    for _ in range(2):  # decoded, then from the cache
        for name in ("bilinear", "bicubic", "nearest"):
            stored = ImageStore([file], 16, tmp_path / "cache", interpolation=name).load([0])[0]
            assert np.array_equal(stored.permute(1, 2, 0).numpy(), decode(file, 16, name))
    with pytest.raises(ValueError, match="interpolation must be one of"):
        ImageStore([file], 16, None, interpolation="magic")


def test_a_run_is_named_by_a_nested_file_only_where_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    before = content(str(tmp_path))
    (tmp_path / "processor_config.json").write_text('{"processor_class": "CLIPProcessor"}')
    assert content(str(tmp_path)) == before
    (tmp_path / "processor_config.json").write_text('{"image_processor": {"image_mean": [0.5, 0.5, 0.5]}}')
    assert content(str(tmp_path)) != before


# The table of docs/use/encoders.md has every family, loaded or refused as it is, and its figures are rounding.

PAGE = (Path(__file__).parents[2] / "docs" / "use" / "encoders.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("example", encoders.EXAMPLES, ids=[example.name for example in encoders.EXAMPLES])
def test_a_family_of_transformers_is_as_the_page_says(example: encoders.Example, tmp_path: Path) -> None:
    row = encoders.transformers_row(example, tmp_path)
    assert encoders.line(row) in PAGE.splitlines()
    assert row.difference is None or row.difference <= ROUNDING
    assert row.loaded == row.selects == (row.difference is not None) != bool(row.reason)


@pytest.mark.parametrize("name", encoders.TIMM)
def test_a_network_of_timm_is_as_the_page_says(name: str, tmp_path: Path) -> None:
    row = encoders.timm_row(name, encoders.TIMM[name], tmp_path)
    assert encoders.line(row) in PAGE.splitlines() and row.selects
    assert row.difference is not None and row.difference <= ROUNDING


@pytest.mark.parametrize("name", encoders.REFUSED)
def test_a_refused_network_is_as_the_page_says(name: str, tmp_path: Path) -> None:
    row = encoders.refused_row(name, tmp_path)
    assert encoders.line(row) in PAGE.splitlines() and "timm:NAME" in row.reason
