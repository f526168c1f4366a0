"""Settings: the hash that names a run, YAML there and back, and contradictions refused before any work."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from patchgen.config import LEAST, NOT_HASHED, PRESETS, Config, dump_config, load_config, preset_settings, read_settings
from patchgen.config_stream import StreamConfig

BASE: dict[str, Any] = {"data": "photos", "unseen": "site_c"}
# another valid value for every field
OTHER: dict[str, Any] = {
    "data": "elsewhere", "unseen": "site_b", "method": "lp", "pool": "cls", "tune": "full", "backbone": "tiny",
    "benchmark": "pacs", "options": {"crctp_fold": "Fold1"}, "image_size": 112, "steps": 7, "batch_per_domain": 8,
    "eval_every": 3, "val_images": 5, "augment": False, "augmentation": "histology",
    "normalization": "imagenet", "split": "group", "holdout": 0.5,
    "task": "mdg_gcd", "hparams": {"miro": 0.5}, "known": "half", "unlabelled": "mixed", "labelled_share": 0.3,
    "num_classes": 9, "dropout": 0.1, "lr": 1e-4, "lr_module": 1e-2, "lr_backbone": 1e-5, "weight_decay": 0.1,
    "accumulate": 4, "precision": "bf16-mixed", "clip_gradients": 1.0, "deterministic": True,
    "checkpoint_activations": True,
    "lambda_ms": 0.5, "lambda_sim": 0.5, "lambda_conf": 0.5, "tau": 0.5, "refine": "linear",
    "swad": True, "swad_ratio": 1.2,
    "swad_compat": True, "select": "last", "seed": 2, "devices": 2, "accelerator": "cpu", "threads": 1, "cache": False,
}  # fmt: skip


def test_every_field_is_covered_here() -> None:
    assert set(OTHER) == {field.name for field in dataclasses.fields(Config)}


@pytest.mark.parametrize("name", OTHER)
def test_hash_changes_with_what_decides_the_numbers_and_with_nothing_else(name: str) -> None:
    plain, changed = Config(**BASE), Config(**{**BASE, name: OTHER[name]})
    assert getattr(plain, name) != getattr(changed, name)
    assert (plain.hash("rows") == changed.hash("rows")) == (name in NOT_HASHED)


def test_hash_is_the_digest_of_the_settings_that_are_not_usual() -> None:
    text = json.dumps({"data": "rows", "seed": 3, "unseen": "site_c", "weight_decay": 0.5})
    config = Config(**BASE, seed=3, weight_decay=0.5, threads=2)
    assert config.hash("rows") == hashlib.sha256(text.encode()).hexdigest()[:12]
    assert config.hash("rows") != config.hash("other rows")
    assert Config(**BASE, weight_decay=0).hash("rows") == Config(**BASE).hash("rows")


@pytest.mark.parametrize("settings", [BASE, {**BASE, **PRESETS["small"]}, OTHER, {**BASE, "unseen": "2016"}])
def test_yaml_round_trip(settings: dict[str, Any], tmp_path: Path) -> None:
    config = Config(**settings)
    (tmp_path / "config.yaml").write_text(dump_config(config))
    again = load_config(tmp_path / "config.yaml")
    assert again == config and again.hash("rows") == config.hash("rows")


def write(folder: Path, text: str) -> Path:
    path = folder / "settings.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_changes_win_over_the_file_and_complete_it(tmp_path: Path) -> None:
    path = write(tmp_path, "data: photos\nseed: 4\n")
    assert load_config(path, unseen="site_c", seed=5) == Config(**BASE, seed=5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data: a\nunseen: b\nevel_every: 3", "unknown setting 'evel_every'; did you mean 'eval_every'"),
        ("data: a\nunseen: b\nzzz: 3", "unknown setting 'zzz'$"),
        ("data: a\nunseen: b\n7: 3", "unknown setting 7"),
        ("data: a", "unseen are required"),
        ("- data\n- unseen", "must hold settings as `name: value` lines, found list"),
        ("", "found NoneType"),
        ("data: [a", "not readable YAML"),
        ("data: a\nunseen: b\nlr: 1e-3", r"lr must be a number, not '1e-3'; YAML .* 1.0e-3"),
        ("data: a\nunseen: b\nsteps: many", "steps must be a whole number, not 'many'"),
        ("data: a\nunseen: b\nsteps: true", "steps must be a whole number, not True"),
        ("data: a\nunseen: b\nsteps: 1.5", "steps must be a whole number, not 1.5"),
        ("data: a\nunseen: b\nswad: 1", "swad must be true or false, not 1"),
        ("data: a\nunseen: 2016", r"unseen must be text \(in quotes\), not 2016"),
        ("data: a\nunseen: b\nselect: orcale", "select must be one of .*, not 'orcale'; did you mean 'oracle'"),
        ("data: a\nunseen: b\npool: max", "pool must be one of cls, mean, patchgen, not 'max'"),
        ("data: a\nunseen: b\nsplit: null", "split must be one of domainbed, group, not None"),
    ],
)
def test_a_wrong_file_is_one_sentence(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        load_config(write(tmp_path, text))


@pytest.mark.parametrize("name", LEAST)
def test_too_small_is_refused(name: str) -> None:
    value = LEAST[name] - 1
    with pytest.raises(ValueError, match=f"{name} must be at least {LEAST[name]}, not {value}"):
        Config(**BASE, **{name: value})


@pytest.mark.parametrize("value", [-1e-3, float("nan"), float("inf")])
@pytest.mark.parametrize(
    "name", ["lr", "lr_module", "lr_backbone", "weight_decay", "lambda_ms", "lambda_sim", "lambda_conf"]
)
def test_rates_and_weights_are_not_negative(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} must be a number that is not negative, not {value}"):
        Config(**BASE, **{name: value})


@pytest.mark.parametrize("name", ["holdout", "tau"])
@pytest.mark.parametrize("value", [0.0, 1.0, -0.5, float("nan")])
def test_shares_lie_between_0_and_1(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} is .* between 0 and 1, not {value}"):
        Config(**BASE, **{name: value})


@pytest.mark.parametrize(
    ("batch", "devices", "accumulate", "suggestion"), [(10, 2, 2, 8), (3, 1, 2, 4), (1, 4, 1, 4), (31, 4, 2, 32)]
)
def test_a_batch_must_divide_into_its_parts(batch: int, devices: int, accumulate: int, suggestion: int) -> None:
    with pytest.raises(ValueError, match=f"batch_per_domain {batch} must divide .*; try {suggestion}$"):
        Config(**BASE, batch_per_domain=batch, devices=devices, accumulate=accumulate)
    Config(**BASE, batch_per_domain=suggestion, devices=devices, accumulate=accumulate)


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_valid(preset: str) -> None:
    config = Config(**{**BASE, **preset_settings(preset, "patchgen")})
    assert {name: getattr(config, name) for name in PRESETS[preset]} == PRESETS[preset]
    assert config.lr == (1e-3 if preset == "small" else 5e-5)  # the lineage's, or what our own search found


@pytest.mark.parametrize("path", sorted((Path(__file__).parents[1] / "configs").glob("*.yaml")), ids=lambda p: p.name)
def test_shipped_files_are_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe, a file of settings, or a schedule of classes; each says in its header how it is used."""
    from patchgen.data.stages import read_schedule
    from patchgen.methods import make_method
    from patchgen.model.backbone import BACKBONES
    from patchgen.sweep.recipe import expand, is_recipe, read_recipe

    assert path.read_text().startswith("# ") and f"configs/{path.name}" in path.read_text()
    if is_recipe(read_settings(path)):
        monkeypatch.setenv("PATCHGEN_DATA", "data")
        runs = [planned.config for planned in expand(read_recipe(path), lambda settings: ("a", "b"))]
        for config in runs:
            assert config.backbone in BACKBONES or config.backbone.startswith("data/")
            if isinstance(config, Config):
                make_method(config)
        assert len({str(config) for config in runs}) == len(runs) > 1
    elif path.name.startswith("ccd-"):
        assert len(read_schedule(path).groups) == 4
    else:
        assert load_config(path).unseen


@pytest.mark.parametrize("kind", [Config, StreamConfig])
def test_a_backbone_that_moves_keeps_its_runs(kind: Any) -> None:
    needed = {"data": "photos"} | ({"unseen": "site_c"} if kind is Config else {})
    here, there, other, hub = (
        kind(**needed, backbone=where).hash("rows")
        for where in ("/a/vit.safetensors", "weights/vit.safetensors", "/a/vit2.safetensors", "facebook/vit.safetensor")
    )
    assert here == there and len({here, other, hub}) == 3
