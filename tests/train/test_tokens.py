"""Stored tokens of the frozen lower blocks: the same network in two halves, computed once, named by what they hold."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from patchgen.config import Config
from patchgen.model.backbone import load_backbone
from patchgen.model.tuning import set_tuning
from patchgen.train import tokens
from patchgen.train.lifecycle import train

Captured = pytest.CaptureFixture[str]


def settings(data: Path, **changes: object) -> Config:
    quick = {"tune": "upper-layernorm", "augment": False, "backbone": "tiny", "image_size": 56, "steps": 3}
    usual = {"method": "patchgen-cls", "eval_every": 2, "batch_per_domain": 4, "lr": 1e-3, "cache": False}
    return Config(str(data), "studio", **{**quick, **usual, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("source", ["tiny", "dinov2-small", "clip-b16"])
def test_the_two_halves_are_the_whole(source: str) -> None:
    backbone = load_backbone(source, pretrained=False)
    names = set_tuning(backbone, "upper-layernorm")
    blocks = backbone.model.get_submodule(backbone.family.blocks)
    assert backbone.tuned_from == len(blocks) // 2
    lower = [f"{backbone.family.blocks}.{i}." for i in range(backbone.tuned_from)]
    assert names and not any(part in name for part in lower for name in names)
    images = torch.randn(3, 3, 112, 112, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole, halves = backbone(images), backbone.upper(backbone.lower(images), 112)
    torch.testing.assert_close(halves.patches, whole.patches)
    torch.testing.assert_close(halves.cls, whole.cls)
    assert len(backbone.model.get_submodule(backbone.family.blocks)) == len(blocks)  # nothing is left changed


def test_a_convolutional_network_is_refused() -> None:
    with pytest.raises(ValueError, match="upper-layernorm needs transformer blocks"):
        set_tuning(load_backbone("resnet50", pretrained=False), "upper-layernorm")


def test_a_run_on_tokens_is_the_run_on_pixels(
    image_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    stored = train(settings(image_folder), tmp_path / "a")
    assert "tokens of 1 blocks" in capsys.readouterr().err
    monkeypatch.setattr(tokens, "_is_divisible", lambda model, images: False)  # every step runs the whole network
    whole = train(settings(image_folder), tmp_path / "b")
    err = capsys.readouterr().err
    assert "cannot be run in two halves" in err and "tokens of" not in err
    for a, b in zip(stored.records("evaluation"), whole.records("evaluation"), strict=True):
        for site, values in b["validation"].items():
            assert a["validation"][site]["loss"] == pytest.approx(values["loss"], abs=5e-3)  # half precision


def test_tokens_are_computed_once_until_something_changes(
    image_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setenv("PATCHGEN_CACHE", str(tmp_path / "cache"))
    photos, folder = shutil.copytree(image_folder, tmp_path / "photos"), tmp_path / "cache/tokens"

    def computed(**changes: object) -> bool:
        capsys.readouterr()
        train(settings(photos, cache=True, steps=1, **changes), tmp_path / "runs")
        return "tokens of" in capsys.readouterr().err

    assert computed()
    assert not computed(method="lp-ln", lr=1e-2) and computed(image_size=70)  # other heads; another size
    file = min(folder.glob("*.npy"), key=lambda file: file.stat().st_size)  # 56 px
    file.write_bytes(file.read_bytes()[:200])
    assert computed(lr=2e-2)  # damaged
    first = sorted(photos.rglob("*.png"))[0]
    shutil.copy(sorted(photos.rglob("*.png"))[-1], first)
    assert computed(lr=3e-2)  # other pixels


def test_a_full_disk_is_found_before_the_work(
    image_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(tokens.shutil, "disk_usage", lambda folder: usage._replace(free=1000))
    with pytest.raises(ValueError, match="0.0 GB, and .* PATCHGEN_CACHE to a larger disk, or use --no-cache"):
        train(settings(image_folder, cache=True, lr=0.5), tmp_path)


def test_old_files_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATCHGEN_CACHE", str(tmp_path))
    for i in range(tokens.FILES + 2):
        stored = tokens._from_disk(f"{i:016x}", (2, 1, 1), lambda i=i: np.full((2, 1, 1), i, np.float16))  # type: ignore[misc]
        assert (stored == i).all()
    assert len(list((tmp_path / "tokens").iterdir())) == tokens.FILES
