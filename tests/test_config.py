"""Settings: the hash that names a run, YAML there and back, and contradictions refused before any work."""

import dataclasses
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from patchgen.ccd.settings import StreamConfig
from patchgen.config import PRESETS, Config, dump_config, load_settings, read_settings
from patchgen.methods.presets import preset_settings
from patchgen.runs.folder import run_name
from tests.conftest import interrupt

BASE: dict[str, Any] = {"data": "photos", "unseen": "site_c"}
# another valid value for every field
OTHER: dict[str, Any] = {
    "data": "elsewhere", "unseen": "site_b", "method": "lp", "pool": "cls", "tune": "full", "backbone": "tiny",
    "benchmark": "pacs", "options": {"crctp_fold": "Fold1"}, "image_size": 112, "steps": 7, "batch_per_domain": 8,
    "eval_every": 3, "val_images": 5, "augment": False, "augmentation": "histology",
    "normalization": "imagenet", "split": "group", "holdout": 0.5, "stain": "macenko",
    "task": "mdg_gcd", "hparams": {"miro": 0.5}, "known": "half", "unlabelled": "mixed", "labelled_share": 0.3,
    "num_classes": 9, "dropout": 0.1, "lr": 1e-4, "lr_module": 1e-2, "lr_backbone": 1e-5, "weight_decay": 0.1,
    "optimizer": "adamw", "lr_schedule": "cosine", "warmup": 3, "class_weights": "balanced", "lora_rank": 4,
    "patience": 3, "accumulate": 4, "micro_batch": 8, "precision": "bf16-mixed", "clip_gradients": 1.0,
    "deterministic": True, "checkpoint_activations": True, "compile": True,
    "lambda_ms": 0.5, "lambda_sim": 0.5, "lambda_conf": 0.5, "tau": 0.5, "refine": "linear",
    "rho_start": "conv", "spread": 0.5,
    "swad": True, "swad_ratio": 1.2,
    "swad_compat": True, "select": "last", "seed": 2, "devices": 2, "accelerator": "cpu", "threads": 1, "cache": False,
}  # fmt: skip


def test_every_field_is_covered_here() -> None:
    assert set(OTHER) == {field.name for field in dataclasses.fields(Config)}


@pytest.mark.parametrize("name", OTHER)
def test_hash_changes_with_what_decides_the_numbers_and_with_nothing_else(name: str) -> None:
    plain, changed = Config(**BASE), Config(**{**BASE, name: OTHER[name]})
    assert getattr(plain, name) != getattr(changed, name)
    assert (run_name(plain, "rows") == run_name(changed, "rows")) == (name in Config.not_hashed)


def test_hash_is_the_digest_of_the_settings_that_are_not_usual() -> None:
    text = json.dumps({"data": "rows", "seed": 3, "unseen": "site_c", "weight_decay": 0.5})
    config = Config(**BASE, seed=3, weight_decay=0.5, threads=2)
    assert run_name(config, "rows") == hashlib.sha256(text.encode()).hexdigest()[:12]
    assert run_name(config, "rows") != run_name(config, "other rows")
    assert run_name(Config(**BASE, weight_decay=0), "rows") == run_name(Config(**BASE), "rows")


@pytest.mark.parametrize("settings", [BASE, {**BASE, **PRESETS["small"]}, OTHER, {**BASE, "unseen": "2016"}])
def test_yaml_round_trip(settings: dict[str, Any], tmp_path: Path) -> None:
    config = Config(**settings)
    (tmp_path / "config.yaml").write_text(dump_config(config))
    again = load_settings(tmp_path / "config.yaml")
    assert again == config and run_name(again, "rows") == run_name(config, "rows")


RIGHT = ("data: a", "unseen: b")
WHOLE = ("data: a", "- data\n- unseen", "", "data: [a")  # these are the whole file


def write(folder: Path, text: str) -> Path:
    path = folder / "settings.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_changes_win_over_the_file_and_complete_it(tmp_path: Path) -> None:
    path = write(tmp_path, "data: photos\nseed: 4\n")
    assert load_settings(path, unseen="site_c", seed=5) == Config(**BASE, seed=5)


@pytest.mark.parametrize(("text", "message"), [
    ("evel_every: 3", "unknown setting 'evel_every'; did you mean 'eval_every'"),
    ("data: a", "unseen are required"),
    ("- data\n- unseen", "must hold settings as `name: value` lines, found list"),
    ("", "found NoneType"),
    ("data: [a", "not readable YAML"),
    ("lr: 1e-3", r"lr must be a finite number, not '1e-3'; YAML .* 1.0e-3"),
    ("steps: many", "steps must be a whole number, not 'many'"),
    ("swad: 1", "swad must be true or false, not 1"),
    ("unseen: 2016", "unseen must be text, not 2016; put it in quotes"),
    ("select: orcale", "select must be one of .*, not 'orcale'; did you mean 'oracle'"),
    ("pool: max", "pool must be one of .*, patchgen-cls, select or null, not 'max'"),
    ("split: null", "split must be one of domainbed, group, not None"),
    ("backbone: {a: 1}", "backbone must be text"),
    ("hparams: {miro: x}", "hparams must be `name: value` pairs, each a finite number, .*'x'"),
    ("options: {1: a}", "options must be `name: value` pairs, not .*1"),
    ("hparams: {miro: 1.0e+290}", r"hparams must be at most 1000000000, not .*miro"),
    ("seed: 4294967296", "seed must be at most 4294967295"),
    ("tau: 2024-13-45", "is not readable YAML: month must be in 1..12"),
    ("tau: " + "[" * 3000, "is not readable YAML"),
])  # fmt: skip
def test_a_wrong_file_is_one_sentence(text: str, message: str, tmp_path: Path) -> None:
    """The line replaces one of a right file, or is added to it."""
    whole = text if text in WHOLE else "\n".join([*(line for line in RIGHT if line[:4] != text[:4]), text])
    path = write(tmp_path, whole)
    with pytest.raises(ValueError, match=message) as caught:
        load_settings(path)
    assert str(caught.value).startswith(str(path)) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", Config.bounds)
def test_too_small_is_refused(name: str) -> None:
    least = float(Config.bounds[name][1:].partition(",")[0])
    number = least - 1 if "float" in str(Config.__annotations__.get(name)) else int(least) - 1
    value = {"any": number} if name == "hparams" else number
    with pytest.raises(ValueError, match=rf"{name} must be (at least|above) .*, not "):
        Config(**BASE, **{name: value})


@pytest.mark.parametrize(("name", "value"), [
    ("lr", float("nan")), ("lr", float("inf")), ("holdout", 0.0), ("holdout", 1.0), ("tau", 0.0), ("tau", 1.0),
    *(("micro_batch", value) for value in (2.5, True, "all")),
])  # fmt: skip
def test_numbers_that_are_none_and_open_ends_are_refused(name: str, value: Any) -> None:
    rule = "above 0|below 1|a finite number|auto or a whole number"
    with pytest.raises(ValueError, match=f"{name} must be ({rule})"):
        Config(**BASE, **{name: value})


@pytest.mark.parametrize(("batch", "devices", "suggestion"), [(10, 4, 8), (3, 2, 4), (1, 4, 4), (31, 4, 32)])
def test_a_batch_must_divide_into_its_devices(batch: int, devices: int, suggestion: int) -> None:
    with pytest.raises(ValueError, match=f"batch_per_domain {batch} must be divisible .*; try {suggestion}$"):
        Config(**BASE, batch_per_domain=batch, devices=devices)
    Config(**BASE, batch_per_domain=suggestion, devices=devices)


def test_a_micro_batch_leaves_the_name_and_an_old_one_keeps_its_own() -> None:
    plain, old = Config(**BASE), Config(**BASE, accumulate=4)
    assert run_name(Config(**BASE, micro_batch=8), "rows") == run_name(plain, "rows")
    assert old.hashed()["accumulate"] == 4 and old.images_at_once(30) == 8
    assert plain.images_at_once(30) is None and Config(**BASE, micro_batch=8).images_at_once(30) == 8
    assert Config(**BASE, accumulate=4, micro_batch="auto").images_at_once(30) is None


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_valid(preset: str) -> None:
    config = Config(**{**BASE, **preset_settings(preset, "patchgen")})
    assert {name: getattr(config, name) for name in PRESETS[preset]} == PRESETS[preset]
    assert config.lr == (5e-5 if preset == "paper" else 3e-3)  # the lineage's, or what our own search found


@pytest.mark.parametrize("path", sorted((Path(__file__).parents[1] / "configs").rglob("*.yaml")), ids=lambda p: p.name)
def test_shipped_files_are_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe, a file of settings, or a schedule of classes; each says in its header how it is used."""
    from patchgen.ccd.stages import get_schedule
    from patchgen.methods import make_method
    from patchgen.model.backbone import BACKBONES
    from patchgen.sweep.recipe import expand, is_recipe, read_recipe

    assert path.read_text().startswith("# ") and f"configs/{path.parent.name}/{path.name}" in path.read_text()
    if is_recipe(read_settings(path)):
        monkeypatch.setenv("PATCHGEN_DATA", "data")
        runs = [planned.config for planned in expand(read_recipe(path), lambda settings: ("a", "b"))]
        for config in runs:
            assert config.backbone in BACKBONES or config.backbone.startswith("data/")
            if isinstance(config, Config):
                make_method(config)
        assert len({str(config) for config in runs}) == len(runs) > 1
    elif path.name.startswith("ccd-"):
        assert len(get_schedule(path).groups) == 4
    else:
        assert load_settings(path).unseen


@pytest.fixture
def backbone(tmp_path: Path) -> Path:
    """The tiny backbone as a folder of transformers."""
    from patchgen.model.backbone import load_backbone

    load_backbone("tiny").model.save_pretrained(tmp_path / "here" / "vit")
    return tmp_path / "here" / "vit"


def of_stream(image_folder: Path, where: Path) -> dict[str, Any]:
    (where / "stages.yaml").write_text("groups: [[circle, cross], [square]]\nratios: [[0.6, 1.0], [1.0]]\n")
    return {
        "data": str(image_folder), "schedule": str(where / "stages.yaml"), "image_size": 28, "epochs": 2, "batch": 6,
        "warm_up": 1, "refit_every": 1, "projection_hidden": 16, "projection_bottleneck": 8, "projection_out": 16,
        "method": "gcd", "inits": 2, "holdout": 0.3, "val_images": 6, "accelerator": "cpu",
    }  # fmt: skip


@pytest.mark.parametrize("kind", [Config, StreamConfig])
def test_a_backbone_that_moves_keeps_its_runs(
    kind: Any, backbone: Path, image_folder: Path, tiny_settings: dict[str, Any], tmp_path: Path
) -> None:
    """A run begun with a folder that lies elsewhere by now goes on, and a finished one is found again."""
    from patchgen.ccd.loop import StreamTrainer
    from patchgen.train.fold import FoldTrainer
    from patchgen.train.lifecycle import train

    trainer: Any = FoldTrainer if kind is Config else StreamTrainer
    settings = tiny_settings if kind is Config else of_stream(image_folder, tmp_path)
    out, config = tmp_path / "runs", kind(**{**settings, "backbone": str(backbone)})
    interrupt(trainer, "save_state", 2, lambda: train(config, out, quiet=True))
    [begun] = out.iterdir()
    assert (begun / "checkpoints" / "state.safetensors").exists() and not (begun / "done").exists()
    there = backbone.rename(tmp_path / "moved")
    config = kind(**{**settings, "backbone": str(there)})
    run = train(config, out, quiet=True)
    done = (begun / "done").stat().st_mtime_ns
    assert run.path == begun and run.settings.backbone == str(there)
    copy = shutil.copytree(there, tmp_path / "copy" / "vit")
    assert train(kind(**{**settings, "backbone": str(copy)}), out, quiet=True).path == begun
    assert list(out.iterdir()) == [begun] and (begun / "done").stat().st_mtime_ns == done  # nothing was trained again


@pytest.mark.parametrize("kind", [Config, StreamConfig])
def test_other_weights_at_the_same_name_are_another_run(kind: Any, tmp_path: Path) -> None:
    needed = {"data": "photos"} | ({"unseen": "site_c"} if kind is Config else {})
    places = [tmp_path / name / "model.safetensors" for name in ("w1", "w2", "w1_copy")]
    for path, content in zip(places, (b"one", b"two", b"one"), strict=True):
        path.parent.mkdir()
        path.write_bytes(content)
    one, two, copy, gone = (
        run_name(kind(**needed, backbone=str(path)), "rows")
        for path in (*places, tmp_path / "w3" / "model.safetensors")
    )
    assert one == copy and len({one, two, gone, run_name(kind(**needed), "rows")}) == 4


def test_a_backbone_that_is_not_there_is_one_sentence(tiny_settings: dict[str, Any], tmp_path: Path) -> None:
    from patchgen.train.lifecycle import train

    for name, message in (("none.safetensors", "there is no weight file"), ("none", "backbone must be one of")):
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            train(Config(**{**tiny_settings, "backbone": str(tmp_path / name)}), tmp_path / "runs", quiet=True)
