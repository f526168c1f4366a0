"""Backgrounds and foregrounds: attention against the network's own, and what a blend may touch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from patchgen.cli import main
from patchgen.config import Config
from patchgen.data.loaders import Batch
from patchgen.methods import make_method
from patchgen.methods.build import build_on
from patchgen.methods.mixup import ThreeBatches, blend_patches, foreground, mix_parts
from patchgen.model.attention import patch_attention
from patchgen.model.backbone import load_backbone
from patchgen.train.loop import Step, take_step
from patchgen.train.optim import make_optimizer


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
        changed = (
            (images != clean).any(1).unflatten(1, (2, 14)).unflatten(3, (2, 14)).any(4).any(2).flatten(1)
        )  # (B, P)
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


def test_a_step_trains_on_all_three(scene: Callable[..., Any]) -> None:
    s = scene("bfmix-like", sources=(0, 2))
    before = s.model.head.weight.detach().clone()
    noted: list[set[str]] = []
    step = Step(s.method, s.model, make_optimizer(s.model, s.method.config, s.method), lambda: s.batch)
    whole = step.backward
    step.backward = lambda losses, watched=None: (noted.append(set(losses)), whole(losses))[1]  # type: ignore[method-assign,func-returns-value]
    take_step(step)
    assert noted == [{"main", "L_background", "L_foreground"}] and not torch.equal(before, s.model.head.weight)


def test_it_trains_and_predicts_from_the_command_line(
    clip_folder: Path, image_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"--image-size": 56, "--steps": 3, "--eval-every": 2, "--batch-per-domain": 4, "--val-images": 3}
    words = [str(word) for item in sizes.items() for word in item]
    words += ["--unseen", "studio", "--method", "bfmix-like", "--backbone", str(clip_folder), "--out", str(tmp_path)]
    assert main(["train", str(image_folder), *words, "--quiet"]) == 0
    run = capsys.readouterr().out.strip().splitlines()[-1]
    assert main(["predict", run, str(image_folder / "studio" / "cross"), "--csv", str(tmp_path / "p.csv")]) == 0


def test_what_cannot_be_mixed_is_refused() -> None:
    config = Config("photos", "site_c", method="bfmix-like", backbone="resnet50", image_size=32)
    method = make_method(config)
    with pytest.raises(ValueError, match="has none that are known; choose a ViT"):
        method.setup(build_on(load_backbone("resnet50", pretrained=False), config, method, 3))
    with pytest.raises(ValueError, match="blends images at every pass, but with tune 'head' and --no-augment"):
        make_method(Config("photos", "site_c", method="bfmix-like", tune="head", augment=False))


def test_unlabelled_images_count_with_their_partners_share(scene: Callable[..., Any]) -> None:
    s = scene("bfmix-like", sources=(0, 2))
    unlabelled = Batch(s.batch.image, torch.full((6,), -1), s.batch.domain, s.batch.index)
    found = s.method.losses(
        s.model(mix_parts(s.model.backbone, unlabelled, 1.0).image), mix_parts(s.model.backbone, unlabelled, 1.0)
    )
    assert all(float(value.detach()) == 0 for value in found.values())
