import math
from collections.abc import Callable
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from patchgen.data import augment as augment_module
from patchgen.data.augment import LUMA, OPERATIONS, Augment, AugmentDraw, normalize

OFF = Augment(scale=(1, 1), ratio=(1, 1), flip=0, brightness=0, contrast=0, saturation=0, hue=0, grayscale=0)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def still(batch: int) -> AugmentDraw:
    """A draw that changes nothing."""
    return OFF.draw(batch, seeded())


def soft_images(batch: int = 3, size: int = 16) -> Tensor:
    """Random images away from 0 and 1, so that a mild operation does not clamp."""
    return 0.3 + 0.4 * torch.rand(batch, 3, size, size, generator=seeded(5))


def luma(images: Tensor) -> Tensor:
    red, green, blue = images.unbind(1)
    return LUMA[0] * red + LUMA[1] * green + LUMA[2] * blue


@pytest.mark.parametrize(("size", "tolerance"), [(16, 1e-6), (224, 1e-4)])  # coordinates: 1e-7 of the pixels
def test_nothing_drawn_changes_nothing(size: int, tolerance: float) -> None:
    images = torch.rand(2, 3, size, size, generator=seeded())
    torch.testing.assert_close(still(2).apply(images, size), images, atol=tolerance, rtol=0)


def test_an_enlarging_crop_agrees_with_pillow() -> None:
    channel = np.linspace(0, 1, 20 * 20, dtype=np.float32).reshape(20, 20) ** 2
    left, top, width, height = 3.3, 2.6, 11.2, 13.4
    images = torch.from_numpy(channel).expand(1, 3, 20, 20).contiguous()
    crop = replace(still(1), box=torch.tensor([[left, top, width, height]]) / 20)
    box = (left, top, left + width, top + height)
    expected = Image.fromarray(channel).resize((20, 20), Image.Resampling.BILINEAR, box=box)
    difference = (crop.apply(images, 20)[0, 0] - torch.from_numpy(np.array(expected))).abs()
    assert difference[2:-2, 2:-2].max() < 1e-4  # at the box's border Pillow does not look outside, we do


@pytest.mark.parametrize(("name", "values", "expected"), [
    ("flip", [True, False], lambda images: images.flip(-1)),
    ("brightness", [2.0, 1.0], lambda images: (2 * images).clamp(max=1)),
    ("grayscale", [True, False], lambda images: luma(images)[:, None].expand_as(images)),
])  # fmt: skip
def test_an_operation_changes_its_image_alone(
    name: str, values: list[float], expected: Callable[[Tensor], Tensor]
) -> None:
    images = soft_images(2)
    changed = replace(still(2), **{name: torch.tensor(values)}).apply(images, 16)
    torch.testing.assert_close(changed[0], expected(images)[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(changed[1], images[1], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["contrast", "saturation"])
def test_a_blend_with_gray(name: str) -> None:
    """Contrast moves from the mean gray, saturation from each pixel's."""
    images, factor = soft_images(), torch.tensor([0.0, 0.7, 1.3])
    gray = luma(images)[:, None] if name == "saturation" else luma(images).mean(dim=(1, 2)).view(-1, 1, 1, 1)
    share = factor.view(-1, 1, 1, 1)
    expected = share * images + (1 - share) * gray
    torch.testing.assert_close(replace(still(3), **{name: factor}).apply(images, 16), expected, atol=1e-5, rtol=0)


def test_contrast_takes_the_mean_of_the_crop() -> None:
    images = torch.zeros(1, 3, 16, 16)
    images[:, :, :, 8:] = 0.8
    left = replace(still(1), box=torch.tensor([[0, 0, 0.25, 0.25]]), contrast=torch.tensor([0.5]))
    assert left.apply(images, 4).abs().max() < 1e-6  # the whole image's mean would give 0.2


def turned(colour: tuple[float, float, float], turns: float) -> list[float]:
    """One pixel's hue turned in YUV, from the definitions U = 0.492 (B - Y), V = 0.877 (R - Y)."""
    y = sum(weight * value for weight, value in zip(LUMA, colour, strict=True))
    u, v = 0.492 * (colour[2] - y), 0.877 * (colour[0] - y)
    angle = 2 * math.pi * turns
    u, v = u * math.cos(angle) - v * math.sin(angle), u * math.sin(angle) + v * math.cos(angle)
    red, blue = y + v / 0.877, y + u / 0.492
    return [red, (y - LUMA[0] * red - LUMA[2] * blue) / LUMA[1], blue]


@pytest.mark.parametrize("turns", [-0.3, 0.1, 0.25])
def test_hue_turns_each_pixels_chroma(turns: float) -> None:
    colour = (0.55, 0.45, 0.5)
    images = torch.tensor(colour).view(1, 3, 1, 1).expand(1, 3, 4, 4).contiguous()
    result = replace(still(1), hue=torch.tensor([turns])).apply(images, 4)
    expected = torch.tensor(turned(colour, turns)).view(3, 1, 1).expand(3, 4, 4)
    torch.testing.assert_close(result[0], expected, atol=1e-5, rtol=0)


def test_operations_follow_the_images_own_order() -> None:
    images = soft_images(2, 8)
    orders = [("brightness", "contrast", "saturation", "hue"), ("saturation", "hue", "contrast", "brightness")]
    factors = {"brightness": 1.1, "contrast": 0.6, "saturation": 0.7, "hue": 0.15}
    draws = replace(
        still(2),
        **{name: torch.full((2,), value) for name, value in factors.items()},
        order=torch.tensor([[OPERATIONS.index(name) for name in order] for order in orders]),
    )
    expected = []
    for image, order in zip(images, orders, strict=True):  # one operation at a time, each alone in a draw
        for name in order:
            alone = replace(still(1), **{name: torch.full((1,), factors[name])})
            image = alone.apply(image[None], 8)[0]
        expected.append(image)
    torch.testing.assert_close(draws.apply(images, 8), torch.stack(expected), atol=1e-5, rtol=0)


def test_a_ranks_slice_gives_its_part_of_the_batch() -> None:
    images = torch.rand(6, 3, 12, 12, generator=seeded(1))
    draws = Augment().draw(6, seeded(2))
    whole = draws.apply(images, 12)
    torch.testing.assert_close(draws[2:5].apply(images[2:5], 12), whole[2:5], atol=1e-6, rtol=0)
    rank = torch.tensor([1, 3, 5])
    torch.testing.assert_close(draws[rank].apply(images[rank], 12), whole[rank], atol=1e-6, rtol=0)


def test_the_generator_decides_and_the_amount_drawn_does_not_depend_on_the_ranges() -> None:
    first, second, other = (Augment().draw(8, seeded(seed)) for seed in (3, 3, 4))
    for field in fields(AugmentDraw):
        assert torch.equal(getattr(first, field.name), getattr(second, field.name))
    assert not torch.equal(first.box, other.box) and not torch.equal(first.hue, other.hue)
    generators = [seeded(9), seeded(9)]
    for augment, generator in zip((Augment(), OFF), generators, strict=True):
        augment.draw(8, generator)
    assert torch.equal(generators[0].get_state(), generators[1].get_state())


def test_boxes_have_the_statistics_of_random_resized_crop() -> None:
    left, top, width, height = Augment().draw(20_000, seeded()).box.unbind(1)
    ratio, area = width / height, width * height
    assert 3 / 4 - 1e-5 <= ratio.min() < 0.77 and 1.3 < ratio.max() <= 4 / 3 + 1e-5
    assert area.min() >= 0.7 - 1e-5 and area.max() <= 1 + 1e-5
    assert min(left.min(), top.min()) >= 0 and max((left + width).max(), (top + height).max()) <= 1 + 1e-6
    assert abs(ratio.log().mean()) < 0.005  # symmetric in the logarithm, not in the ratio
    assert abs((left / (1 - width).clamp(min=1e-6)).mean() - 0.5) < 0.01  # uniform over the places that fit
    areas = torch.linspace(0.7, 1, 10_000)  # an area fits where |log ratio| <= -log area: large ones are rarer
    fitting = (-areas.log() / math.log(4 / 3)).clamp(max=1)
    assert abs(area.mean() - (areas * fitting).sum() / fitting.sum()) < 0.003


def test_a_crop_that_never_fits_is_the_whole_image() -> None:
    whole = Augment(scale=(2.0, 3.0)).draw(5, seeded()).box
    torch.testing.assert_close(whole, torch.tensor([0.0, 0, 1, 1]).expand(5, 4))


def test_colour_draws_stay_in_their_ranges_and_fill_them() -> None:
    draws = Augment(contrast=1.5).draw(5_000, seeded())
    ranges = {"brightness": (0.7, 1.3), "contrast": (0, 2.5), "saturation": (0.7, 1.3), "hue": (-0.3, 0.3)}
    for name, (low, high) in ranges.items():
        values = getattr(draws, name)
        assert low <= values.min() < low + 0.01 and high - 0.01 < values.max() <= high
    assert 0.47 < draws.flip.float().mean() < 0.53
    assert 0.08 < draws.grayscale.float().mean() < 0.12
    assert len({tuple(order) for order in draws.order.tolist()}) == math.factorial(len(OPERATIONS))


def test_normalize_is_per_channel() -> None:
    images = torch.ones(2, 3, 2, 2)
    expected = torch.tensor([0.5 / 0.25, 0.0, -1.0]).view(1, 3, 1, 1).expand(2, 3, 2, 2)
    torch.testing.assert_close(normalize(images, (0.5, 1.0, 2.0), (0.25, 0.5, 1.0)), expected)


def by_grid_sample(images: Tensor, draws: AugmentDraw, size: int) -> Tensor:
    """The crop of an accelerator, and the colours by the definition of each operation's map."""
    cropped = augment_module._crop(images, draws, size)
    pixel, mean = augment_module.colour_maps(draws)
    shift = mean @ cropped.mean((2, 3))[:, :, None]
    return (pixel @ cropped.flatten(2) + shift).clamp(0, 1).view_as(cropped)


@pytest.mark.parametrize(("height", "width", "size"), [(24, 24, 24), (17, 30, 12), (9, 8, 20), (1, 5, 4)])
def test_a_cpu_gives_what_an_accelerator_gives(height: int, width: int, size: int) -> None:
    images = torch.rand(6, 3, height, width, generator=seeded(1))
    draws = Augment(scale=(0.1, 1.0)).draw(6, seeded(2))
    torch.testing.assert_close(draws.apply(images, size), by_grid_sample(images, draws, size), atol=2e-5, rtol=0)
