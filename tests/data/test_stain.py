import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from patchgen.data.stain import STAINS, Histology, HistologyDraw

OFF = Histology(turn=0, flip=0, scale=0, shift=0)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def still(batch: int) -> HistologyDraw:
    """A draw that changes nothing."""
    return OFF.draw(batch, seeded())


def some_images(batch: int = 3, size: int = 16) -> Tensor:
    return torch.rand(batch, 3, size, size, generator=seeded(5))


def test_zero_strength_changes_nothing() -> None:
    images = some_images(4)
    images[0, 0, 0, :4] = torch.tensor([0.0, 1.0, 1 / 255, 254 / 255])  # black and white too
    torch.testing.assert_close(still(4).apply(images, 16), images, atol=2e-6, rtol=0)


@pytest.mark.parametrize("turns", range(4))
@pytest.mark.parametrize("flip", [False, True])
def test_positions_are_exact_rearrangements(turns: int, flip: bool) -> None:
    images = some_images(2, 9)
    draws = replace(still(2), turns=torch.tensor([turns, 0]), flip=torch.tensor([flip, False]))
    expected = torch.rot90(images[0].flip(-1) if flip else images[0], turns, (-2, -1))
    found = draws.apply(images, 9)
    torch.testing.assert_close(found[0], expected, atol=2e-6, rtol=0)
    torch.testing.assert_close(found[1], images[1], atol=2e-6, rtol=0)


def by_hand(colour: tuple[float, float, float], scale: list[float], shift: list[float]) -> list[float]:
    """One pixel: its densities solved for amounts of the stains, each amount changed, mixed again."""
    rows = [[value / math.sqrt(sum(v * v for v in row)) for value in row] for row in STAINS]
    density = [-math.log10((255 * value + 1) / 256) for value in colour]
    amounts = np.linalg.solve(np.array(rows).T, np.array(density))
    changed = [a * amount + b for a, amount, b in zip(scale, amounts, shift, strict=True)]
    mixed = [sum(changed[s] * rows[s][channel] for s in range(3)) for channel in range(3)]
    return [min(1.0, max(0.0, (256 * 10**-d - 1) / 255)) for d in mixed]


@pytest.mark.parametrize("colour", [(0.8, 0.5, 0.7), (0.3, 0.2, 0.5), (1.0, 1.0, 1.0), (0.02, 0.0, 0.9)])
def test_densities_by_hand(colour: tuple[float, float, float]) -> None:
    scale, shift = [1.2, 0.8, 1.05], [0.03, -0.02, 0.04]
    draws = replace(still(1), scale=torch.tensor([scale]), shift=torch.tensor([shift]))
    images = torch.tensor(colour).view(1, 3, 1, 1).expand(1, 3, 4, 4).contiguous()
    expected = torch.tensor(by_hand(colour, scale, shift), dtype=torch.float32).view(3, 1, 1).expand(3, 4, 4)
    torch.testing.assert_close(draws.apply(images, 4)[0], expected, atol=1e-5, rtol=0)


def test_draws_fill_their_ranges() -> None:
    draws = Histology(scale=0.2, shift=0.1).draw(8000, seeded())
    assert 0.8 <= draws.scale.min() < 0.801 and 1.199 < draws.scale.max() <= 1.2
    assert -0.1 <= draws.shift.min() < -0.099 and 0.099 < draws.shift.max() <= 0.1
    assert all(abs((draws.turns == turn).float().mean() - 0.25) < 0.02 for turn in range(4))
    assert abs(draws.flip.float().mean() - 0.5) < 0.02
