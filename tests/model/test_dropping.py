"""Patches that leave the pass: against one image at a time, whose tokens are removed by indexing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from patchgen.model.backbone import Backbone, Origin, load_backbone
from patchgen.model.classifier import Classifier
from patchgen.model.convert import Loaded, build
from patchgen.model.dropping import drop_unselected, require_sets
from patchgen.model.selector import Selector

SIZES = {"hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 2, "intermediate_size": 128}
SIDE = 4


def small(family: str = "vit", **more: object) -> Backbone:
    """Six blocks, so that the early one is the second."""
    torch.manual_seed(0)
    network = build(family, {**SIZES, "image_size": 64, "patch_size": 16, **more})
    return Backbone(Loaded(network), Origin(family, family))


def images_for(backbone: Backbone, count: int = 4) -> Tensor:
    side = SIDE * backbone.patch_size
    return torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(1))


def started(backbone: Backbone, level: tuple[float, float] = (2.0, 0.3)) -> Classifier:
    torch.manual_seed(2)
    model = Classifier(backbone, 3, image_size=SIDE * backbone.patch_size, pool="select").eval()
    model.start(images_for(backbone))
    model.select.level.copy_(torch.tensor(level))
    return model


@torch.no_grad()
def slow(backbone: Backbone, image: Tensor, mask: Tensor, keep: Tensor, gain: float = 2.0) -> Tensor:
    """CLS (D,) of a ViT of transformers for one image, in float64; the other patches are gone after the early block."""
    model = backbone.model.double()
    hidden = model.embeddings(image[None].double(), interpolate_pos_encoding=True)
    bias = None
    for number, block in enumerate(model.layers):
        if number == backbone.early_block:
            hidden = torch.cat([hidden[:, :1], hidden[:, 1:][:, keep]], 1)
            weight = torch.where(keep, mask.double() ** gain, 0)
            bias = torch.zeros(1, 1, hidden.shape[1], hidden.shape[1], dtype=torch.float64)
            bias[0, 0, 0, 1:] = (weight / weight.mean())[keep].log()
        hidden = block(hidden, bias)
    found: Tensor = model.layernorm(hidden)[0, 0]
    model.float()
    return found


def test_it_is_the_slow_version_image_by_image() -> None:
    """Images keep different numbers of patches, so some of them are padded in the batch."""
    backbone = small()
    model, images = started(backbone), images_for(backbone)
    whole = model(images)
    drop_unselected(model)
    found = model(images)
    keep = whole.mask >= 0.5
    assert len(set(keep.sum(1).tolist())) > 1 and not keep.all()
    for i, image in enumerate(images):
        expected = slow(backbone, image, whole.own_mask[i], keep[i])
        torch.testing.assert_close(found.features[i].double(), expected, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(found.mask, whole.mask)  # what is shown is the whole mask
    assert (found.features - whole.features).abs().max() > 1e-3


@pytest.mark.parametrize("family", ["dinov2", "dinov2_with_registers", "vit_mae", "clip_vision_model"])
def test_an_image_alone_and_in_a_batch(family: str) -> None:
    """Padding counts for nothing, whatever the family."""
    backbone = small(family)
    model, images = started(backbone), images_for(backbone, 3)
    drop_unselected(model)
    together = model(images)
    assert len({int(row.sum()) for row in together.mask >= 0.5}) > 1
    alone = torch.cat([model(image[None]).features for image in images])
    torch.testing.assert_close(together.features, alone, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["tiny", "siglip_vision_model"])
def test_a_given_mask_of_zeros_and_ones(name: str) -> None:
    """r is 0 for what leaves, so nothing changes for the class token where it leaves before the last block."""
    backbone = load_backbone("tiny") if name == "tiny" else small(name)
    model, images = started(backbone), images_for(backbone)
    last = len(backbone.model.get_submodule(backbone.family.blocks)) - 1
    mask = torch.zeros(len(images), SIDE**2)
    for i, row in enumerate(mask):
        row[: 3 + 2 * i] = 1
    whole = model(images, mask)
    drop_unselected(model, last)
    dropped = model(images, mask)
    if name == "tiny":  # in the last block the class token reads the same keys
        torch.testing.assert_close(dropped.features, whole.features, rtol=1e-3, atol=1e-4)
    alone = torch.cat([model(image[None], row[None]).features for image, row in zip(images, mask, strict=True)])
    torch.testing.assert_close(dropped.features, alone, rtol=1e-3, atol=1e-4)


def test_a_mask_that_selects_everything_changes_nothing() -> None:
    backbone = load_backbone("tiny")
    model, images = started(backbone, level=(1.0, 10.0)), images_for(backbone)
    whole = model(images)
    drop_unselected(model)
    torch.testing.assert_close(model(images).logits, whole.logits, rtol=0, atol=0)


def test_one_patch_stays_where_none_is_selected() -> None:
    backbone = load_backbone("tiny")
    model, images = started(backbone, level=(1.0, -50.0)), images_for(backbone)
    drop_unselected(model)
    found = model.select(backbone, images)
    assert found.tokens.patches.shape[1] == 1 and found.tokens.cls.isfinite().all()


@pytest.mark.parametrize("after", [2, 4])
def test_later_blocks_read_fewer_tokens(after: int) -> None:
    backbone = small()
    model, images, lengths = started(backbone), images_for(backbone), []
    for block in backbone.model.layers:
        block.register_forward_hook(lambda module, inputs, output: lengths.append(inputs[0].shape[1]))
    drop_unselected(model, after)
    most = int((model(images).mask >= 0.5).sum(1).max())
    assert lengths[-6:] == [17] * after + [1 + most] * (6 - after) and most < 16


@pytest.mark.parametrize(("family", "more"), [("dinov3_vit", {}), ("beit", {"use_relative_position_bias": True})])
def test_blocks_that_know_positions_are_refused(family: str, more: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"cannot be dropped with '{family}'.*predict without dropping"):
        backbone = small(family, **more)
        for name, table in backbone.named_parameters():
            if name.endswith("bias_table"):  # zero at the start, where it says nothing
                torch.nn.init.normal_(table)
        require_sets(backbone)


class Numbered(torch.nn.Module):
    """A later block that scales each place by a number of its own, and takes any number of tokens."""

    def __init__(self, block: torch.nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, hidden: Tensor, *more: object, **options: object) -> Tensor:
        places = torch.arange(hidden.shape[1]).cos()[None, :, None]
        return self.block(hidden * places, *more, **options)


def test_positions_that_fit_any_length_are_noticed() -> None:
    backbone = small()
    require_sets(backbone)
    backbone.model.layers[4] = Numbered(backbone.model.layers[4])
    with pytest.raises(ValueError, match="positions of their own"):
        require_sets(backbone)


def test_models_without_a_level_or_a_selection_are_refused() -> None:
    backbone = load_backbone("tiny")
    with pytest.raises(ValueError, match="no calibrated level"):
        drop_unselected(started(backbone, level=(0.0, 0.0)))
    with pytest.raises(ValueError, match="inside the backbone"):
        drop_unselected(Classifier(backbone, 3, image_size=56, pool="patchgen"))
    with pytest.raises(ValueError, match="after 2 to 5 of the 6 blocks, not 6"):
        drop_unselected(started(small()), 6)
    convolutional = started(load_backbone("resnet50", pretrained=False))
    assert isinstance(convolutional.select, Selector)
    with pytest.raises(ValueError, match="it is convolutional"):
        drop_unselected(convolutional)
