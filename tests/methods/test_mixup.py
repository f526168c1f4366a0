"""Mixup and BFMix: pairs, shares and the main loss against loops, and what a blend may touch."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from patchgen.config import Config
from patchgen.data.loaders import Batch
from patchgen.methods import make_method
from patchgen.methods.mixup import ThreeBatches, blend_patches, foreground, mix, mix_parts, mixed_cross_entropy
from patchgen.model.backbone import load_backbone
from patchgen.model.tuning import patch_attention
from patchgen.train.loop import Step, make_optimizer

DOMAIN = [5, 0, 2, 0, 5, 2]  # in no order; equally many of each


def batch_of(label: list[int]) -> Batch:
    image = torch.randn(len(DOMAIN), 3, 4, 4, generator=torch.Generator().manual_seed(2))
    return Batch(image, torch.tensor(label), torch.tensor(DOMAIN), torch.arange(len(DOMAIN)) + 10)


def test_pairs_go_round_with_one_share_each() -> None:
    batch = batch_of([0, 1, 2, 3, 4, 5])  # a label of its own for each image: it tells the partner
    circles = set()
    for seed in range(30):
        torch.manual_seed(seed)
        found = mix(batch, 0.2)
        own, partner = found.labels.tolist()
        assert own == list(range(6)) and sorted(partner) == own
        shares: dict[int, set[float]] = {}
        follows: dict[int, int] = {}
        for i, j in enumerate(partner):
            share = float(found.share[i])
            shares.setdefault(DOMAIN[i], set()).add(share)
            assert follows.setdefault(DOMAIN[i], DOMAIN[j]) == DOMAIN[j] != DOMAIN[i]
            torch.testing.assert_close(found.image[i], share * batch.image[i] + (1 - share) * batch.image[j])
            assert int(found.label[i]) == (i if share >= 0.5 else j)
        assert all(len(values) == 1 for values in shares.values()) and len(set.union(*shares.values())) == 3
        assert follows[follows[follows[0]]] == 0  # one circle through all
        circles.add(tuple(sorted(follows.items())))
        assert found.index.tolist() == batch.index.tolist() and torch.equal(found.domain, batch.domain)
    assert len(circles) == 2  # both ways round


def test_the_main_loss_is_that_of_a_loop() -> None:
    torch.manual_seed(1)
    found = mix(batch_of([0, 2, -1, 1, 1, 0]), 2.0)
    logits = torch.randn(6, 3)
    total = count = 0.0
    for i in range(6):
        p = [math.exp(float(value)) for value in logits[i]]
        for label, share in zip(found.labels[:, i].tolist(), (found.share[i], 1 - found.share[i]), strict=True):
            if label >= 0:
                total -= float(share) * math.log(p[label] / sum(p))
                count += float(share)
    assert count < 6 and float(mixed_cross_entropy(logits, found)) == pytest.approx(total / count, rel=1e-5)


@pytest.mark.parametrize("name", ["mixup", "patchgen+mixup"])
def test_a_step_sees_the_blended_batch(name: str, scene: Callable[..., Any]) -> None:
    s = scene(name)
    step = Step(s.method, s.model, make_optimizer(s.model, s.method), lambda: s.batch)
    torch.manual_seed(3)
    wanted = mix(s.batch, 0.2)
    torch.manual_seed(3)
    batch = step.batch()
    main = s.method.losses(step.forward(batch), batch)["main"]
    torch.testing.assert_close(main, mixed_cross_entropy(s.model(wanted.image).logits, wanted))


# Backgrounds and foregrounds


def test_attention_is_that_of_the_network(clip_folder: Path) -> None:
    """transformers can hand out its attention when it computes it the slow way."""
    from transformers import CLIPVisionModel

    images = torch.randn(2, 3, 56, 56)
    slow = CLIPVisionModel.from_pretrained(clip_folder, attn_implementation="eager").eval()
    with torch.no_grad():
        expected = slow(images, output_attentions=True).attentions[-1].mean(1)[:, 0, 1:]
    found = patch_attention(load_backbone(str(clip_folder)), images)
    assert found.shape == (2, 16)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_half_of_the_patches_are_foreground() -> None:
    found = foreground(torch.tensor([[0.1, 0.4, 0.3, 0.2], [5.0, 1.0, 2.0, 3.0]]))
    assert found.tolist() == [[False, True, True, False], [True, False, False, True]]


def test_no_pixel_outside_the_chosen_patches_changes() -> None:
    images, partner = torch.randn(2, 3, 4, 4), torch.tensor([1, 0])
    patches = torch.tensor([[True, False, False, True], [False] * 4])
    found = blend_patches(images, partner, torch.tensor([0.25, 0.25]), patches, 2)
    assert torch.equal(found[1], images[1])
    for y in range(4):
        for x in range(4):
            inside = (y < 2) == (x < 2)  # patches 0 and 3
            wanted = 0.25 * images[0, :, y, x] + 0.75 * images[1, :, y, x] if inside else images[0, :, y, x]
            torch.testing.assert_close(found[0, :, y, x], wanted)


def test_mixes_touch_what_both_images_have(scene: Callable[..., Any]) -> None:
    s = scene("bfmix-like", sources=(0, 2))
    torch.manual_seed(0)
    found = mix_parts(s.model.backbone, s.batch, 5.0)
    clean, back, front = found.image.chunk(3)
    assert torch.equal(clean, s.batch.image) and found.label.tolist() == s.batch.label.tolist() * 3
    own = foreground(patch_attention(s.model.backbone, s.batch.image))
    partner = torch.tensor([3, 4, 5, 0, 1, 2])  # two domains: each meets the other
    for part, images in ((~own, back), (own, front)):
        pixels = (images != clean).any(1).unflatten(1, (2, 14)).unflatten(3, (2, 14))
        changed = pixels.any(4).any(2).flatten(1)  # (B, P)
        assert torch.equal(changed, part & part[partner])
    assert found.foreground.labels[1].tolist() == s.batch.label[partner].tolist()


def test_whole_shares_give_three_equal_terms(scene: Callable[..., Any]) -> None:
    s = scene("bfmix-like", sources=(0, 2))
    three = mix_parts(s.model.backbone, s.batch, 5.0)
    one = torch.ones(len(s.batch.label))
    same = ThreeBatches(
        image=s.batch.image.repeat(3, 1, 1, 1), label=three.label, domain=three.domain, index=three.index,
        clean=s.batch, foreground=type(three.foreground)(**{**vars(three.foreground), "share": one}),
    )  # fmt: skip
    found = s.method.losses(s.model(same.image), same)
    assert list(found) == ["main", "L_background", "L_foreground"]
    for value in found.values():
        torch.testing.assert_close(value, found["main"])
    plain = make_method(Config("p", "q", method="lp-ln")).losses(s.forward(), s.batch)["main"]
    torch.testing.assert_close(found["main"], plain)


def test_unlabelled_images_count_with_their_partners_share(scene: Callable[..., Any]) -> None:
    s = scene("bfmix-like", sources=(0, 2))
    s.batch.label[:] = -1
    three = mix_parts(s.model.backbone, s.batch, 1.0)
    found = s.method.losses(s.model(three.image), three)
    assert all(float(value.detach()) == 0 for value in found.values())
