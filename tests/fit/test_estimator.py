"""The classifier with the habits of scikit-learn: what goes in, what it knows after a fit, and what it hands on."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from sklearn.base import clone, is_classifier
from sklearn.exceptions import NotFittedError

from patchgen.data.table import read_table
from patchgen.fit import BEST, COMPARED, procedure
from patchgen.fit.estimator import SETTINGS, PatchGenClassifier
from patchgen.fit.inputs import as_data
from patchgen.model.backbone import Backbone
from patchgen.model.convert import Loaded, build
from patchgen.model.preprocessing import Pixels
from patchgen.predict.model_folder import FILES, backbone_facts
from patchgen.predict.model_folder import _backbone as rebuilt
from patchgen.runs.folder import RunFolder
from tests.conftest import interrupt

CHEAP: dict[str, Any] = {
    "backbone": "tiny", "image_size": 56, "steps": 3, "eval_every": 2, "batch_per_domain": 4, "val_images": 4,
    "lr": 1e-2, "quiet": True, "precision": "32-true",
}  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fit")


@pytest.fixture(scope="module")
def fitted(image_folder: Path, home: Path) -> PatchGenClassifier:
    return PatchGenClassifier(**CHEAP, method="patchgen-select", runs=str(home / "runs")).fit(image_folder)


@pytest.fixture(scope="module")
def without_studio(image_folder: Path, home: Path) -> PatchGenClassifier:
    return PatchGenClassifier(**CHEAP, runs=str(home / "runs")).fit(image_folder, unseen="studio")


@pytest.fixture(scope="module")
def files(image_folder: Path) -> list[Path]:
    table = read_table(image_folder)
    return [table.file(i) for i in range(len(table))]


class Photos(torch.utils.data.Dataset[Any]):
    """A Dataset of (image, label)."""

    def __init__(self, images: Any, labels: Any) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int) -> tuple[Any, Any]:
        return self.images[i], self.labels[i]


@pytest.fixture
def saved(fitted: PatchGenClassifier, tmp_path: Path) -> Path:
    return fitted.save(tmp_path / "model")


# Habits


def test_parameters_are_those_of_scikit_learn() -> None:
    model = PatchGenClassifier(steps=7, hparams={"miro": 0.1}, method="lp")
    copy = clone(model)
    assert copy is not model and copy.get_params() == model.get_params() and is_classifier(model)
    assert {name: value for name, value in model.get_params().items() if value is not None} == {
        "method": "lp", "methods": COMPARED, "backbone": "auto", "preset": "small", "runs": "runs", "expect": True,
        "track": False, "quiet": False, "runtime": "torch", "steps": 7, "hparams": {"miro": 0.1},
    }  # fmt: skip
    assert model.set_params(seed=3, method="lp-ln").get_params()["seed"] == 3
    assert (model.method, model.steps) == ("lp-ln", 7) and copy.get_params()["seed"] is None
    assert repr(model) == "PatchGenClassifier(hparams={'miro': 0.1}, method='lp-ln', seed=3, steps=7)"
    assert set(SETTINGS) < set(model.get_params())  # a setting added to Config is a parameter


def test_settings_are_those_of_a_training() -> None:
    config = PatchGenClassifier(steps=7, split="group").config("tiles", "x")
    assert (config.steps, config.split, config.unseen, config.image_size, config.lr) == (7, "group", "x", 112, 3e-3)
    assert (config.method, config.lr_module) == (BEST, 1e-3)
    assert PatchGenClassifier(random_state=4).config("tiles").seed == 4
    with pytest.raises(ValueError, match="seed 3 and random_state 4 differ"):
        PatchGenClassifier(random_state=4, seed=3).config("tiles")
    assert PatchGenClassifier(preset="paper").config("tiles").normalization == "imagenet"
    assert PatchGenClassifier().config("tiles").unseen == "none"
    with pytest.raises(ValueError, match="preset must be one of"):
        PatchGenClassifier(preset="smal").config("x")


def test_methods_that_are_compared_have_their_own_settings() -> None:
    methods = ("lp-ln", "patchgen-select")
    simple, other = PatchGenClassifier(methods=methods, hparams={"share": 0.2})._configs("tiles", None)
    assert (simple.method, simple.hparams, other.method, other.hparams) == (
        "lp-ln", {}, "patchgen-select", {"share": 0.2})  # fmt: skip
    assert [config.method for config in PatchGenClassifier()._configs("tiles", None)] == list(COMPARED)
    for alone in (PatchGenClassifier(expect=False), PatchGenClassifier(preset="quick")):
        assert [config.method for config in alone._configs("tiles", None)] == [BEST]
    assert [config.method for config in PatchGenClassifier()._configs("tiles", "x")] == [BEST]
    with pytest.raises(ValueError, match="hparams odd: none of the methods"):
        PatchGenClassifier(hparams={"odd": 1})._configs("tiles", None)


def test_nothing_works_before_a_fit(tmp_path: Path) -> None:
    for use in ("predict", "predict_proba", "explain", "save"):
        with pytest.raises(NotFittedError, match="not fitted yet"):
            getattr(PatchGenClassifier(), use)(tmp_path)


# What is known after a fit


def test_every_site_was_left_out_once(fitted: PatchGenClassifier, home: Path) -> None:
    assert fitted.classes_.tolist() == ["circle", "cross", "square"]
    assert fitted.domains_ == ("clinic", "field", "studio")
    assert [fold["site"] for fold in fitted.folds_] == list(fitted.domains_)
    accuracies = []
    for fold in fitted.folds_:
        run = RunFolder.open(home / "runs" / fold["run"])
        assert run.config.unseen == fold["site"] and fold["images"] == 30
        accuracies.append(run.records("test")[0]["all"]["accuracy"])
    assert fitted.expected_accuracy_ is not None
    assert list(fitted.expected_accuracy_.folds.values()) == accuracies
    assert fitted.expected_accuracy_.mean == pytest.approx(np.mean(accuracies))


def test_the_model_is_trained_on_all_sites(fitted: PatchGenClassifier) -> None:
    run = RunFolder.open(fitted.run_)
    assert run.config.unseen == "none" and run.done and not run.records("test")
    assert set(fitted.history_[0]["validation"]) == set(fitted.domains_) and len(fitted.history_) == 2
    assert fitted.model_.about["data"]["trained_on"] == 72  # 80 % of 90
    assert fitted.calibration_["images"] == 18  # every held-out image, not the sample of --val-images


def test_an_unseen_site_is_left_out_and_scored(
    without_studio: PatchGenClassifier, image_folder: Path, files: list[Path]
) -> None:
    studio = [file for file in files if "studio" in file.parts]
    [fold] = without_studio.folds_
    assert fold["site"] == "studio"
    assert fold["accuracy"] == pytest.approx(without_studio.score(studio, [file.parent.name for file in studio]))
    assert without_studio.expected_accuracy_ is not None and without_studio.expected_accuracy_.interval is None
    assert without_studio.model_.about["data"]["trained_on"] == 48 and without_studio.domains_ == ("clinic", "field")


def test_an_image_from_nowhere_is_unlike_training(fitted: PatchGenClassifier, files: list[Path]) -> None:
    assert fitted.unlike_training(files).mean() <= 0.1
    noise = np.random.default_rng(0).integers(0, 256, (4, 56, 56, 3), dtype=np.uint8)
    assert fitted.unlike_training(noise).all()


# What goes in


def test_images_in_every_form_are_the_same_image(fitted: PatchGenClassifier, files: list[Path]) -> None:
    stack = np.stack([np.asarray(Image.open(file)) for file in files[:4]])
    expected, tensor = fitted.predict_proba(files[:4]), torch.from_numpy(stack)
    frame = pd.DataFrame({"path": [str(file) for file in files[:4]], "label": [f.parent.name for f in files[:4]]})
    for form in (
        stack, stack / 255, (stack / 255).astype(np.float32), stack.transpose(0, 3, 1, 2), tensor,
        tensor.permute(0, 3, 1, 2) / 255, list(tensor), list(stack), Photos(tensor, [0] * 4), frame,
    ):  # fmt: skip
        np.testing.assert_allclose(fitted.predict_proba(form), expected, atol=1e-6)
    for single in (stack[0], stack[0].transpose(2, 0, 1)[None], tensor[0].permute(2, 0, 1), Image.open(files[0])):
        np.testing.assert_allclose(fitted.predict_proba(single), expected[:1], atol=1e-6)
    gray = np.array(Image.open(files[0]).convert("L"))
    of_gray = fitted.predict_proba(np.repeat(gray[:, :, None], 3, 2))
    for form in (gray, gray[None], gray[None, :, :, None], torch.from_numpy(gray)[None]):
        np.testing.assert_allclose(fitted.predict_proba(form), of_gray, atol=1e-6)
    assert fitted.score(frame) == pytest.approx((fitted.predict(files[:4]) == frame["label"].to_numpy()).mean())


def test_features_and_decisions_are_those_of_the_head(fitted: PatchGenClassifier, files: list[Path]) -> None:
    features, head = fitted.transform(files[:5]), fitted.predictor.model.head
    with torch.no_grad():
        plain = (head(torch.from_numpy(features).float()) / fitted.temperature_).log_softmax(1)
    np.testing.assert_allclose(fitted.decision_function(files[:5]), plain, atol=1e-4)


def test_data_in_memory_is_the_same_data(files: list[Path], tmp_path: Path) -> None:
    y, sites = [file.parent.name for file in files], [file.parts[-3] for file in files]
    groups = [f"{site}-{i % 5}" for i, site in enumerate(sites)]
    frame = pd.DataFrame({"path": list(map(str, files)), "label": y, "site": sites, "group": groups})
    listed = as_data(files, y, sites, groups, tmp_path)
    assert as_data(frame, None, None, None, tmp_path) == listed
    assert as_data(frame.rename(columns={"site": "domain"}), None, None, None, tmp_path) == listed
    images = [np.asarray(Image.open(file)) for file in files]
    table = read_table(as_data(Photos(images, y), None, sites, None, tmp_path)[0])
    assert [table.label_name(i) for i in range(90)] == y and table.domains == ("clinic", "field", "studio")
    np.testing.assert_array_equal(np.asarray(Image.open(table.file(89))), images[89])
    assert read_table(as_data(frame.drop(columns="site"), None, None, None, tmp_path)[0]).domains == ("images",)


@pytest.mark.parametrize("kind", ["int", "bool"])
def test_labels_keep_their_kind(kind: str, files: list[Path], tmp_path: Path) -> None:
    names = [file.parent.name for file in files]
    y: list[Any] = [name == "circle" for name in names]
    sites = {"domains": [file.parts[-3] for file in files], "unseen": "field"} if kind == "int" else {}
    if kind == "int":
        y = [("circle", "cross", "square").index(name) + 9 for name in names]  # 10 and 11 sort before 9 as text
    model = PatchGenClassifier(**CHEAP, method="lp", runs=str(tmp_path / "runs"), augment=False).fit(files, y, **sites)
    for estimator in (model, PatchGenClassifier.load(model.save(tmp_path / "model"))):
        assert sorted(estimator.classes_.tolist()) == sorted(set(y))
        assert estimator.predict(files[:2]).dtype.kind == kind[0]
        assert estimator.score(files, y) == pytest.approx((estimator.predict(files) == np.array(y)).mean())
        if kind == "bool":
            odds = np.log(estimator.predict_proba(files[:3]))
            np.testing.assert_allclose(estimator.decision_function(files[:3]), odds[:, 1] - odds[:, 0], atol=1e-5)
            assert estimator.expected_accuracy_ is None and estimator.folds_ == []  # all images are of one site
            assert "all images come from one site, images" in (tmp_path / "model/README.md").read_text()


@pytest.mark.slow  # type checking the package takes a minute
def test_a_type_checker_finds_a_misspelt_setting(tmp_path: Path) -> None:
    from mypy import api

    (tmp_path / "user.py").write_text("from patchgen import PatchGenClassifier\nPatchGenClassifier(stepz=4)\n")
    out, _, code = api.run(["--follow-imports=silent", str(tmp_path / "user.py")])
    assert code == 1 and 'Unexpected keyword argument "stepz" for "PatchGenClassifier"' in out


def test_a_manifest_has_groups(files: list[Path], tmp_path: Path) -> None:
    names = [f"p{i % 7}-{file.parts[-3]}" for i, file in enumerate(files)]
    y, domains = [file.parent.name for file in files], [file.parts[-3] for file in files]
    data, _ = as_data([*files[:-1], Image.open(files[-1])], y, domains, names, tmp_path)
    table = read_table(data)
    assert table.group == tuple(names) and table.file(0) == files[0].absolute()
    np.testing.assert_array_equal(np.asarray(Image.open(table.file(89))), np.asarray(Image.open(files[-1])))
    assert as_data([*files[:-1], Image.open(files[-1])], y, domains, names, tmp_path) == (data, None)
    assert as_data(files, y, domains, None, tmp_path)[0] != data
    model = PatchGenClassifier(**CHEAP, method="lp", augment=False, runs=str(tmp_path)).fit(data, unseen="field")
    assert (model.model_.about["data"]["groups"], model.model_.about["data"]["split"]) == (21, "group")


def test_images_are_weighted(files: list[Path], tmp_path: Path) -> None:
    y, sites = [file.parent.name for file in files], [file.parts[-3] for file in files]
    settings = {**CHEAP, "method": "lp", "augment": False, "runs": str(tmp_path)}

    def fit(weight: Any = None, **more: Any) -> PatchGenClassifier:
        model = PatchGenClassifier(**{**settings, **more})
        return model.fit(files, y, domains=sites, unseen="field", sample_weight=weight)

    plain, equal = fit(), fit(np.full(len(files), 0.3))
    assert plain.run_ != equal.run_
    assert (plain.predict_proba(files) == equal.predict_proba(files)).all()  # to the last bit
    crosses = np.where(np.array(y) == "cross", 1.0, 0.0)
    model = fit(crosses, lr=0.1)
    assert set(model.predict(files)) == {"cross"} != set(fit(lr=0.1).predict(files))  # nothing else counts
    assert "sample_weight is 0 to " in (Path(model.run_) / "summary.md").read_text()
    assert "(`sample_weight`)" in (model.save(tmp_path / "model") / "README.md").read_text()
    frame = pd.DataFrame({"path": list(map(str, files)), "label": y, "site": sites, "sample_weight": crosses})
    assert PatchGenClassifier(**{**settings, "lr": 0.1}).fit(frame, unseen="field").run_ == model.run_
    with pytest.raises(ValueError, match="sample_weight applies to a cross-entropy over images.*'groupdro'"):
        fit(crosses, method="groupdro")


@pytest.mark.parametrize(("data", "more", "message"), [
    (np.zeros((4, 8, 8, 3), np.int64), {"y": [0, 1] * 2, "domains": [0] * 4}, r"\(N, 3, H, W\).*got .* int64"),
    (np.full((4, 8, 8, 3), 7.5), {"y": [0, 1] * 2, "domains": [0] * 4}, "floats from 7.5 to 7.5.*divide by 255"),
    (np.zeros((4, 8, 8, 5), np.uint8), {"y": [0, 1] * 2, "domains": [0] * 4}, r"got \(8, 8, 5\) uint8"),
    (np.zeros((4, 8, 8, 3), np.uint8), {}, "need y="),
    (np.zeros((8, 8, 3), np.uint8), {"y": ["cat"]}, "at least two classes are needed, and every label is 'cat'"),
    (pd.DataFrame({"path": ["a"], "class": ["b"]}), {}, r"has no label \(it has path, class\)"),
    (pd.DataFrame({"path": ["a"], "label": ["b"]}), {"y": ["b"]}, "leave y, domains and groups out"),
    (Photos([np.zeros((8, 8))] * 2, [0.5, 0.5]), {}, "whole numbers"),
    (np.zeros((4, 8, 8), np.uint8), {"y": [0, 1] * 2, "sample_weight": [1, 1, -1, 1]}, "least 0 for each of the 4"),
    (np.zeros((4, 8, 8, 3), np.uint8), {"y": [0] * 3, "domains": [0] * 4}, "y must have one value for each of"),
    (np.zeros((4, 8, 8, 3), np.uint8), {"y": [0, 1] * 2, "domains": ["a", "b", " ", "a"]}, "none empty"),
    ([], {"y": [], "domains": []}, "empty"),
    ([3, 4], {"y": [0, 1], "domains": [0, 1]}, "images are paths, PIL images, or arrays.*got int"),
    ("photos", {"y": [0]}, "leave y, domains, groups and sample_weight out"),
    (7, {"y": [0], "domains": [0]}, "images are paths, .* or a Dataset of such images; got int"),
])  # fmt: skip
def test_wrong_data_is_one_sentence(data: Any, more: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        PatchGenClassifier(**CHEAP, runs=str(tmp_path)).fit(data, **more)
    assert not list(tmp_path.iterdir())


def test_a_folder_is_predicted_and_scored(
    fitted: PatchGenClassifier, image_folder: Path, files: list[Path], tmp_path: Path
) -> None:
    inside = sorted((image_folder / "studio").rglob("*.png"))
    np.testing.assert_allclose(fitted.predict_proba(image_folder / "studio"), fitted.predict_proba(inside), atol=1e-6)
    assert fitted.score(image_folder) == pytest.approx(fitted.score(files, [file.parent.name for file in files]))
    (tmp_path / "x.png").write_bytes(b"nothing")
    for images, message in (([tmp_path / "x.png"], "read image"), ([], "empty"), (tmp_path / "no.png", "cannot")):
        with pytest.raises(ValueError, match=message):
            fitted.predict(images)
    with pytest.raises(ValueError, match="needs y="):
        fitted.score([tmp_path / "x.png"])


def test_explanations_of_files_and_arrays_agree(fitted: PatchGenClassifier, files: list[Path]) -> None:
    of_file, of_array = fitted.explain(files[0]), fitted.explain(np.asarray(Image.open(files[0])))
    np.testing.assert_allclose(of_file.mask, of_array.mask, atol=1e-6)
    assert of_file.top[0][1] == pytest.approx(fitted.predict_proba(files[:1]).max(), abs=1e-5)
    assert of_array.path is None and of_array.overlay().width > 600


# Going on


def test_a_stopped_fit_goes_on(image_folder: Path, tmp_path: Path) -> None:
    model = PatchGenClassifier(**CHEAP, methods=("lp", "lp@mean"), augment=False, runs=str(tmp_path))
    interrupt(procedure, "train", 3, lambda: model.fit(image_folder))
    done = {file: file.stat().st_mtime_ns for file in tmp_path.glob("*/done")}
    assert sorted(RunFolder.open(file.parent).config.unseen for file in done) == ["clinic", "field"]
    model.fit(image_folder)
    assert len(list(tmp_path.glob("*/done"))) == 7 and model.choice_ is not None
    assert list(model.choice_["accuracy"]) == ["lp", "lp@mean"] and model.choice_["chosen"] in model.choice_["accuracy"]
    saved = PatchGenClassifier.load(model.save(tmp_path / "model"))
    assert saved.choice_ == model.choice_ and saved.config("x") == model.config("x", method=model.choice_["chosen"])
    assert {file: file.stat().st_mtime_ns for file in done} == done


def test_nothing_is_trained_when_a_fold_cannot_be(image_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(image_folder, tmp_path / "photos")
    for file in (folder / "field").rglob("0[1-9].png"):
        file.unlink()
    shutil.rmtree(folder / "field" / "cross")
    shutil.rmtree(folder / "field" / "square")
    with pytest.raises(ValueError, match="field"):
        PatchGenClassifier(**CHEAP, runs=str(tmp_path / "runs")).fit(folder)
    assert not (tmp_path / "runs").exists()


def test_a_site_may_not_be_called_none(image_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(image_folder, tmp_path / "photos")
    (folder / "field").rename(folder / "none")
    with pytest.raises(ValueError, match="rename it"):
        PatchGenClassifier(**CHEAP, runs=str(tmp_path / "runs")).fit(folder)


# Handing on


@pytest.mark.parametrize("with_backbone", [True, False])
def test_saved_and_loaded_predict_the_same(
    with_backbone: bool, fitted: PatchGenClassifier, files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fitted.save(tmp_path / "deep" / "model", with_backbone=with_backbone)
    assert sorted(p.name for p in folder.iterdir()) == sorted(FILES)
    assert [p.name for p in folder.parent.iterdir()] == ["model"]
    if with_backbone:  # the backbone's source is not asked
        monkeypatch.setattr("patchgen.methods.build.load_backbone", None)
    loaded = PatchGenClassifier.load(folder)
    np.testing.assert_array_equal(loaded.predict_proba(files), fitted.predict_proba(files))
    np.testing.assert_array_equal(loaded.explain(files[0]).mask, fitted.explain(files[0]).mask)
    np.testing.assert_array_equal(loaded.unlike_training(files), fitted.unlike_training(files))
    for name in ("domains_", "expected_accuracy_", "temperature_", "folds_", "calibration_"):
        assert getattr(loaded, name) == getattr(fitted, name)
    assert loaded.config("x") == fitted.config("x")
    assert json.loads((folder / "config.json").read_text())["settings"].get("data") is None


def test_saving_again_replaces_and_other_folders_are_safe(
    fitted: PatchGenClassifier, without_studio: PatchGenClassifier, saved: Path
) -> None:
    without_studio.save(saved)
    assert PatchGenClassifier.load(saved).folds_ == without_studio.folds_
    (saved / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="not a model folder .it holds notes.txt"):
        fitted.save(saved)
    with pytest.raises(ValueError, match="is a file"):
        fitted.save(saved / "notes.txt")
    assert PatchGenClassifier.load(saved).folds_ == without_studio.folds_


def change(folder: Path, **facts: Any) -> None:
    found = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(found | facts))


def test_a_damaged_folder_says_what_is_wrong(saved: Path, fitted: PatchGenClassifier, tmp_path: Path) -> None:
    def fails(message: str) -> None:
        with pytest.raises(ValueError, match=message):
            PatchGenClassifier.load(saved)

    weights, config = (saved / "model.safetensors").read_bytes(), (saved / "config.json").read_text()
    (saved / "model.safetensors").write_bytes(weights[:-4] + b"\0\1\2\3")
    fails("damaged or exchanged")
    (saved / "model.safetensors").unlink()
    fails("has no model.safetensors")
    (saved / "model.safetensors").write_bytes(weights)
    for facts, message in (
        ({"version": 9}, "version 9"),
        ({"format": "bert"}, "has format bert, not patchgen-model"),
        ({"classes": ["a", "b"]}, "head.weight has shape .3, 64. for 2 classes"),
        ({"settings": json.loads(config)["settings"] | {"stesp": 3}}, "did you mean 'steps'"),
    ):
        change(saved, **facts)
        fails(message)
        (saved / "config.json").write_text(config)
    (saved / "config.json").write_text("{")
    fails("not readable JSON")
    (saved / "config.json").unlink()
    fails("has no config.json")
    with pytest.raises(ValueError, match="it is a run folder"):
        PatchGenClassifier.load(fitted.run_)
    with pytest.raises(ValueError, match="did you mean 'model'"):
        PatchGenClassifier.load(tmp_path / "modle")


def test_another_backbone_is_noticed(fitted: PatchGenClassifier, tmp_path: Path) -> None:
    folder = fitted.save(tmp_path / "model", with_backbone=False)
    facts = json.loads((folder / "config.json").read_text())
    change(folder, backbone={**facts["backbone"], "digest": "0" * 64})
    with pytest.raises(ValueError, match="digest differs"):
        PatchGenClassifier.load(folder)


VIT = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1}
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}


@pytest.mark.parametrize(("family", "settings"), [
    ("dinov2", {**VIT, "image_size": 28}),
    ("vit", {**VIT, "intermediate_size": 64}),
    pytest.param("vit_mae", {**VIT, "intermediate_size": 64}, marks=pytest.mark.slow),
    ("clip_vision_model", {**VIT, "patch_size": 16}),
    ("resnet", {**RESNET, "layer_type": "basic"}),
    pytest.param("regnet", {**RESNET, "groups_width": 8}, marks=pytest.mark.slow),
])  # fmt: skip
def test_every_family_of_backbones_comes_back(family: str, settings: dict[str, Any]) -> None:
    mean = (0.1, 0.2, 0.3)
    backbone = Backbone(Loaded(build(family, settings), Pixels(mean, mean), "MIT", "a note"), "here", "seen")
    predictor = SimpleNamespace(model=SimpleNamespace(backbone=backbone))
    facts = backbone_facts(predictor, {"digest": backbone.digest()})  # type: ignore[arg-type]
    weights = {f"backbone.{name}": tensor for name, tensor in backbone.state_dict().items()}
    again = rebuilt(json.loads(json.dumps(facts)), weights)
    again.load_state_dict(backbone.state_dict())
    assert again.digest() == backbone.digest() == facts["digest"]
    assert (again.mean, again.licence, again.note, again.resolved) == (mean, "MIT", "a note", "seen")
    side = 64 if "depths" in settings else 4 * backbone.patch_size
    images = torch.randn(1, 3, side, side)
    assert torch.equal(again(images).patches, backbone(images).patches)


def test_hub_gets_and_gives_the_same_folder(
    fitted: PatchGenClassifier, files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, Any]] = []

    def asked(repo: str, more: Any) -> None:
        calls.append((repo, more))
        if repo != "me/tiles":
            raise OSError("404: no such model")

    class Hub:
        def create_repo(self, repo: str, **more: Any) -> None:
            asked(repo, more)

        def upload_folder(self, *, repo_id: str, folder_path: Path, **more: Any) -> str:
            shutil.copytree(folder_path, tmp_path / repo_id)
            return f"hub/{repo_id}"

    def download(repo: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked(repo, (revision, sorted(allow_patterns)))
        return str(tmp_path / repo)

    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.chdir(tmp_path.parent)
    assert fitted.push_to_hub("me/tiles", private=True) == "hub/me/tiles"
    found = PatchGenClassifier.from_pretrained("me/tiles", revision="v1")
    assert calls == [
        ("me/tiles", {"private": True, "exist_ok": True}),
        ("me/tiles", ("v1", ["README.md", "config.json", "model.safetensors"])),
    ]
    np.testing.assert_array_equal(found.predict_proba(files[:3]), fitted.predict_proba(files[:3]))
    with pytest.raises(ValueError, match="did not take 'me/other' .OSError: 404"):
        fitted.push_to_hub("me/other")
    with pytest.raises(ValueError, match="the hub gave no model of that name .OSError: 404"):
        PatchGenClassifier.from_pretrained("me/tils")
    assert PatchGenClassifier.from_pretrained(tmp_path / "me/tiles").folds_ == fitted.folds_
