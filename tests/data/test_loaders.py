"""Balanced batches as a pure function of (seed, step), and parts that are exactly the whole."""

from contextlib import nullcontext
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from patchgen.data.augment import Augment, normalize
from patchgen.data.loaders import Batch, DomainBatches, prepare
from patchgen.data.stain import Histology

ROWS = {0: np.array([1, 3, 5, 7, 9]), 2: np.array([20, 22, 24]), 5: np.array([40])}  # domain id -> training rows
LABEL = np.arange(50) % 4
PER_DOMAIN = 6


class Store:
    """Pixels that say which row they are, and a list of what was read."""

    def __init__(self) -> None:
        self.read: list[list[int]] = []

    def load(self, rows: np.ndarray) -> torch.Tensor:
        self.read.append(rows.tolist())
        return torch.tensor(rows, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, 2, 2)


def make(seed: int = 1, augment: Augment | None = None) -> DomainBatches:
    return DomainBatches(Store(), LABEL, ROWS, PER_DOMAIN, seed, augment)  # type: ignore[arg-type]


def tensors(batch: Batch) -> tuple[torch.Tensor, ...]:
    return batch.image, batch.label, batch.domain, batch.index


def same(one: Batch, other: Batch) -> bool:
    return all(torch.equal(a, b) for a, b in zip(tensors(one), tensors(other), strict=True))


def test_a_batch_is_balanced_and_says_what_it_holds() -> None:
    batch = make().at(3)
    assert batch.domain.tolist() == [0] * 6 + [2] * 6 + [5] * 6
    assert batch.image.shape == (18, 3, 2, 2) and batch.draw is None
    assert torch.equal(batch.image[:, 0, 0, 0].long(), batch.index)
    assert batch.label.tolist() == [row % 4 for row in batch.index.tolist()]
    for domain, row in zip(batch.domain.tolist(), batch.index.tolist(), strict=True):
        assert row in ROWS[domain]


def test_rows_are_drawn_with_replacement_and_evenly() -> None:
    batches = make()
    drawn = np.concatenate([batches.rows_at(step)[0][:PER_DOMAIN] for step in range(500)])
    rows, counts = np.unique(drawn, return_counts=True)
    assert rows.tolist() == ROWS[0].tolist()
    # 3,000 draws, a fifth each: 600 with a standard deviation of 22
    assert np.abs(counts - 600).max() < 5 * 22
    assert batches.at(0).index[12:].tolist() == [40] * 6  # one image fills its domain's share


def test_a_batch_depends_on_seed_and_step_alone() -> None:
    one, other = make(augment=Augment()), make(augment=Augment())
    wanted = {step: one.at(step) for step in (0, 1, 2)}
    for step in (2, 0, 1):  # in another order
        again = other.at(step)
        assert same(again, wanted[step])
        assert again.draw is not None and torch.equal(again.draw.box, wanted[step].draw.box)  # type: ignore[union-attr]
    assert not torch.equal(wanted[0].index, wanted[1].index)
    assert not torch.equal(make(seed=2).at(0).index, wanted[0].index)


@pytest.mark.parametrize("parts", [1, 2, 3, 6])
def test_parts_partition_the_batch_and_each_is_balanced(parts: int) -> None:
    batches = make(augment=Augment())
    whole = batches.at(7)
    positions = np.concatenate([batches._slice(part, parts) for part in range(parts)])
    assert sorted(positions.tolist()) == list(range(18))
    for part in range(parts):
        mine, where = batches.at(7, part, parts), torch.from_numpy(batches._slice(part, parts))
        assert mine.domain.bincount(minlength=6).tolist() == [6 // parts, 0, 6 // parts, 0, 0, 6 // parts]
        for found, everything in zip(tensors(mine), tensors(whole), strict=True):
            assert torch.equal(found, everything[where])
        assert mine.draw is not None and whole.draw is not None
        for field in fields(mine.draw):
            assert torch.equal(getattr(mine.draw, field.name), getattr(whole.draw, field.name)[where]), field.name


def test_a_batch_read_ahead_is_the_same_and_read_once() -> None:
    plain, ahead = make(), make()
    wanted = plain.at(5, 1, 2)
    ahead.expect(5, 1, 2)
    assert same(ahead.at(5, 1, 2), wanted)
    assert ahead.store.read == plain.store.read == [wanted.index.tolist()]  # type: ignore[attr-defined]
    assert same(ahead.at(5, 0, 2), plain.at(5, 0, 2))  # what was not expected is read at once


@pytest.mark.parametrize("augment", [None, Augment(), Histology()])
def test_prepare_is_scaling_augmenting_and_normalising(augment: Augment | Histology | None) -> None:
    generator = torch.Generator().manual_seed(3)
    pixels = torch.randint(0, 256, (4, 3, 12, 12), dtype=torch.uint8, generator=generator)
    draw, before = augment.draw(4, generator) if augment else None, pixels.clone()
    scaled = pixels.float() / 255
    expected = normalize(draw.apply(scaled, 12) if draw else scaled, (0.5, 0.4, 0.3), (0.2, 0.3, 0.25))
    found = prepare(pixels, draw, 12, (0.5, 0.4, 0.3), (0.2, 0.3, 0.25))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert torch.equal(pixels, before)


# Nothing of a training step's input waits for the device: every copy to it is asked for without blocking


class Copies(TorchDispatchMode):
    """Notes for each copy from the host to the device `meta`, which stands for an accelerator, whether it waits."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and args[0].device.type == "cpu":
            device = kwargs.get("device")
            if device is not None and torch.device(device).type == "meta":
                self.waits.append(not kwargs.get("non_blocking", False))
        return func(*args, **kwargs)


@pytest.mark.parametrize("augment", [Augment(), Histology()])
def test_the_input_of_a_step_waits_for_nothing(augment: Augment | Histology, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "autocast", lambda *args, **kwargs: nullcontext())  # there is none for `meta`
    draw = augment.draw(4, torch.Generator().manual_seed(1))
    pixels = torch.zeros(4, 3, 28, 28, dtype=torch.uint8, device="meta")
    with Copies() as copies:
        torch.zeros(3).to("meta")  # a plain copy is noticed
        image = prepare(pixels, draw.to("meta"), 28, (0.5,) * 3, (0.2,) * 3)
    assert image.device.type == "meta" and image.shape == (4, 3, 28, 28)
    assert len(copies.waits) > 6 and copies.waits[0] and not any(copies.waits[1:])
