"""The plain pipeline of the bench: right on fixed draws, and drawn as the batch pipeline draws."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks import input as pipeline
from benchmarks.common import write_images
from benchmarks.input import PlainDraw, plain_apply, plain_draw
from patchgen.data.augment import OPERATIONS, Augment, AugmentDraw
from patchgen.data.images import ImageStore

STILL = PlainDraw((0, 0, 20, 20), False, OPERATIONS, 1.0, 1.0, 1.0, 0.0, False)


def soft_image(side: int = 20) -> Image.Image:
    small = np.random.default_rng(0).integers(60, 190, (4, 4, 3), np.uint8)
    return Image.fromarray(small).resize((side, side), Image.Resampling.BILINEAR)


def changed(**what: object) -> PlainDraw:
    return PlainDraw(**{**vars(STILL), **what})  # type: ignore[arg-type]


def as_fused(drawn: PlainDraw, side: int) -> AugmentDraw:
    """The same numbers in the form of the batch pipeline."""
    left, top, right, bottom = drawn.box
    box = torch.tensor([[left, top, right - left, bottom - top]]) / side
    order = torch.tensor([[OPERATIONS.index(name) for name in drawn.order]])
    numbers = [torch.tensor([value]) for value in (drawn.brightness, drawn.contrast, drawn.saturation, drawn.hue)]
    return AugmentDraw(torch.tensor([drawn.flip]), box, *numbers, torch.tensor([drawn.grayscale]), order)


@pytest.mark.parametrize("drawn", [
    changed(flip=True),
    changed(box=(3, 5, 13, 18)),
    changed(brightness=1.2, contrast=0.8, saturation=1.3),
    changed(contrast=1.3, brightness=0.8, order=("contrast", "hue", "brightness", "saturation")),
    changed(grayscale=True, saturation=0.7, box=(0, 2, 16, 19), flip=True),
])  # fmt: skip
def test_agrees_with_the_batch_pipeline_on_the_same_draw(drawn: PlainDraw) -> None:
    image = soft_image()
    plain = torch.from_numpy(np.array(plain_apply(image, drawn, 20))).permute(2, 0, 1) / 255
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None]
    fused = as_fused(drawn, 20).apply(pixels, 20)[0]
    assert float((plain - fused).abs().max()) < 0.02  # 8 bits after each of five operations


def test_draws_have_the_ranges_and_the_spread_of_the_batch_pipeline() -> None:
    source, augment = random.Random(0), Augment()
    drawn = [plain_draw(200, 200, augment, source) for _ in range(3000)]
    ours = augment.draw(3000, torch.Generator().manual_seed(0))
    area = np.array([(d.box[2] - d.box[0]) * (d.box[3] - d.box[1]) / 200**2 for d in drawn])
    assert area.mean() == pytest.approx(float(ours.box[:, 2:].prod(1).mean()), abs=0.01)
    assert all(0 <= d.box[0] < d.box[2] <= 200 and 0 <= d.box[1] < d.box[3] <= 200 for d in drawn)
    for name in (*OPERATIONS, "flip", "grayscale"):
        theirs, values = np.array([getattr(d, name) for d in drawn], float), getattr(ours, name).double().numpy()
        assert theirs.mean() == pytest.approx(values.mean(), abs=0.03), name
        assert theirs.std() == pytest.approx(values.std(), abs=0.03), name
    assert len({d.order for d in drawn}) == 24


def test_both_pipelines_read_the_same_pixels(tmp_path: Path) -> None:
    files = write_images(tmp_path, 3, 32)
    plain = pipeline.plain_batch(files, 32, None)
    mean, std = (torch.tensor(each).view(3, 1, 1) for each in (pipeline.MEAN, pipeline.STD))
    pixels = ImageStore(files, 32, None).load([0, 1, 2])
    torch.testing.assert_close(plain, (pixels / 255 - mean) / std)
    assert pipeline.our_batch(ImageStore(files, 32, None), np.arange(3), 32).shape == plain.shape
