"""The loop's promises: exact resume, the same numbers on one device and two, and no look at the unseen domain."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.multiprocessing import ProcessExitedException

from patchgen.config import Config
from patchgen.predict.predictor import load_run
from patchgen.runs.folder import RunFolder
from patchgen.runs.tensors import load_tensors, read_predictions
from patchgen.train import close
from patchgen.train import fold as trainer_module
from patchgen.train.evaluate import Evaluator
from patchgen.train.fold import FoldTrainer
from patchgen.train.lifecycle import train
from patchgen.train.loop import Step
from tests.conftest import interrupt

Patch = pytest.MonkeyPatch
Settings = dict[str, Any]


def same_checkpoints(one: RunFolder, other: RunFolder) -> bool:
    for name in ("selected", "swad"):
        a, b = load_tensors(one.checkpoint(name))[0], load_tensors(other.checkpoint(name))[0]
        if a.keys() != b.keys() or not all(torch.equal(a[k], b[k]) for k in a):
            return False
    return True


@pytest.fixture(scope="module")
def unbroken(tiny_settings: Settings, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return train(Config(**tiny_settings), tmp_path_factory.mktemp("unbroken"), quiet=True)


def test_a_run_folder_is_complete(unbroken: RunFolder) -> None:
    names = {p.relative_to(unbroken.path).as_posix() for p in unbroken.path.rglob("*") if p.is_file()}
    expected = {"config.yaml", "content.npy", "env.json", "splits.csv", "records.jsonl", "summary.md", "done"}
    for checkpoint in ("selected", "swad"):
        expected |= {f"checkpoints/{checkpoint}.safetensors", f"{checkpoint}_predictions.safetensors"}
    assert expected == names - {".lock"}
    kinds = [r["kind"] for r in unbroken.records()]
    assert kinds == ["evaluation"] * 3 + ["test"] * 2
    test = unbroken.records("test")[0]
    assert test["in"]["images"] + test["out"]["images"] == test["all"]["images"] == 30
    health = {"mean", "spread", "weak", "strong"}
    assert health | {f"untrained_{name}" for name in health} == set(test["mask"])
    assert health == set(unbroken.records()[0]["mask"])
    assert {"main", "L_ms", "L_conf", "L_sim", "L_neg", "weak_share"} <= set(unbroken.records()[0]["train"])
    assert json.loads((unbroken.path / "env.json").read_text())["threads"] >= 1


def test_the_untrained_mask_is_that_of_a_run_that_learns_nothing(tiny_settings: Settings, tmp_path: Path) -> None:
    settings = {**tiny_settings, "steps": 3, "swad": False}
    trained = train(Config(**settings), tmp_path, quiet=True).records("test")[0]["mask"]
    idle = train(Config(**{**settings, "lr": 0.0}), tmp_path, quiet=True).records("test")[0]["mask"]
    for name in ("mean", "spread", "weak", "strong"):
        assert trained[f"untrained_{name}"] == idle[f"untrained_{name}"] == pytest.approx(idle[name], abs=1e-6)
    assert trained["spread"] != trained["untrained_spread"]


def test_the_untrained_mask_is_read_on_some_images(
    tiny_settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config(**{**tiny_settings, "steps": 3, "swad": False})
    whole = train(config, tmp_path / "whole", quiet=True).records("test")[0]["mask"]
    monkeypatch.setattr("patchgen.train.close.CONTROLS", 2)
    some = train(config, tmp_path / "some", quiet=True).records("test")[0]["mask"]
    assert some["untrained_mean"] != whole["untrained_mean"] and some["mean"] == whole["mean"]


@pytest.mark.parametrize("checkpoint", ["selected", "swad"])
def test_predictions_are_those_of_the_model_loaded_again(checkpoint: str, unbroken: RunFolder) -> None:
    predictor = load_run(unbroken.path, checkpoint)
    with open(unbroken.path / "splits.csv", newline="") as stream:
        files = [row["path"] for row in csv.DictReader(stream)]
    saved = read_predictions(unbroken.path, checkpoint)
    assert saved is not None and saved.rows.tolist() == list(range(60, 90))
    names = [files[row] for row in saved.rows]
    assert saved.label.tolist() == [predictor.classes.index(Path(name).parent.name) for name in names]
    answers = list(predictor.predict([Path(unbroken.config.data) / name for name in names]))
    np.testing.assert_allclose(saved.probabilities, [answer.probabilities for answer in answers], atol=1e-5)


def test_missing_or_damaged_predictions_are_none(unbroken: RunFolder, tmp_path: Path) -> None:
    assert read_predictions(tmp_path) is None
    content = (unbroken.path / "selected_predictions.safetensors").read_bytes()
    (tmp_path / "selected_predictions.safetensors").write_bytes(content[:-1] + b"x")
    assert read_predictions(tmp_path) is None


MOMENTS = [(FoldTrainer, "take_step", 2), (FoldTrainer, "take_step", 3), (FoldTrainer, "save_state", 2)]


@pytest.mark.parametrize("moment", [*MOMENTS, (close, "_score", 2)])
def test_resuming_reproduces_the_uninterrupted_run(
    moment: tuple[Any, str, int], unbroken: RunFolder, tiny_settings: Settings, tmp_path: Path, plain: Any
) -> None:
    interrupt(*moment, lambda: train(Config(**tiny_settings), tmp_path, quiet=True))
    run = train(Config(**tiny_settings), tmp_path, quiet=True)
    assert plain(run) == plain(unbroken)
    assert same_checkpoints(run, unbroken)


def test_two_processes_share_the_batch_of_one(tiny_settings: Settings, tmp_path: Path) -> None:
    settings = {**tiny_settings, "steps": 2, "eval_every": 1, "accelerator": "cpu", "threads": 1}
    one = train(Config(**settings), tmp_path / "one", quiet=True)
    two = train(Config(**settings, devices=2, micro_batch=3), tmp_path / "two", quiet=True)
    for a, b in zip(one.records("evaluation"), two.records("evaluation"), strict=True):
        assert b["train"] == pytest.approx(a["train"], abs=2e-5)
        for domain, scores in a["validation"].items():
            found = b["validation"][domain]
            assert found.pop("mask") == pytest.approx(scores.pop("mask"), abs=2e-4)
            assert found == pytest.approx(scores, abs=2e-4)
    weights = [load_tensors(run.checkpoint("swad"))[0] for run in (one, two)]
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, atol=2e-4, rtol=0)
    predictions = [read_predictions(run.path) for run in (one, two)]
    np.testing.assert_allclose(predictions[1].probabilities, predictions[0].probabilities, atol=2e-4)


@pytest.mark.parametrize("finished", [True, False])
def test_a_process_that_dies_matters_only_before_the_end(
    finished: bool, tiny_settings: Settings, tmp_path: Path, monkeypatch: Patch
) -> None:
    def launch(self: object, work: Any) -> None:
        if finished:
            work.keywords["run"].finish("summary")
        raise ProcessExitedException("process 1 terminated with signal SIGABRT", 1, 1, -6, "SIGABRT")

    monkeypatch.setattr("patchgen.model.device.SingleDevice.launch", launch)
    if finished:
        assert train(Config(**tiny_settings), tmp_path, quiet=True).done
    else:
        with pytest.raises(ValueError, match="died .*SIGABRT.*the same command resumes"):
            train(Config(**tiny_settings), tmp_path, quiet=True)


def test_half_precision_follows_full(unbroken: RunFolder, tiny_settings: Settings, tmp_path: Path) -> None:
    half = train(Config(**{**tiny_settings, "steps": 1}, precision="bf16-mixed"), tmp_path, quiet=True)
    [b], a = half.records("evaluation"), unbroken.records("evaluation")[0]
    assert b["train"]["main"] == pytest.approx(a["train"]["main"], rel=0.05)
    assert b["mask"] == pytest.approx(a["mask"], abs=0.05)
    tensors, _ = load_tensors(half.checkpoint("selected"))
    assert all(tensor.dtype == torch.float32 for tensor in tensors.values())


def test_cached_features_change_nothing(tiny_settings: Settings, tmp_path: Path, monkeypatch: Patch) -> None:
    settings = {**tiny_settings, "method": "lp", "augment": False}
    cached = train(Config(**settings), tmp_path / "cached", quiet=True)
    monkeypatch.setattr("patchgen.train.evaluate.MEMORY", 0)
    fresh = train(Config(**settings), tmp_path / "fresh", quiet=True)
    for a, b in zip(cached.records("evaluation"), fresh.records("evaluation"), strict=True):
        assert b["train"] == pytest.approx(a["train"], abs=1e-5)


@pytest.mark.parametrize("select", ["source-validation", "oracle"])
def test_the_unseen_domain_is_scored_only_for_what_is_reported(
    select: str, tiny_settings: Settings, tmp_path: Path, monkeypatch: Patch
) -> None:
    score, evaluate = close._score, Evaluator.__call__
    scored: dict[bool, set[int]] = {False: set(), True: set()}  # in training, and at its end
    closing: list[bool] = []

    def note(self: Evaluator, rows: np.ndarray, *more: Any, **named: Any) -> Any:
        scored[bool(closing)] |= set(rows.tolist())
        return evaluate(self, rows, *more, **named)

    monkeypatch.setattr(Evaluator, "__call__", note)
    monkeypatch.setattr(close, "_score", lambda *args: (closing.append(True), score(*args), closing.pop())[1])
    run = train(Config(**{**tiny_settings, "method": "lp-ln", "select": select, "swad": False}), tmp_path, quiet=True)
    unseen = set(range(60, 90))  # "studio" is the last of three domains with 30 images each
    assert bool(scored[False] & unseen) == (select == "oracle") and scored[True] == unseen
    assert run.records("test")[0]["rule"] == select
    assert ("LOOKS AT THE UNSEEN" in (run.path / "summary.md").read_text()) == (select == "oracle")


def test_a_resumed_run_refuses_a_damaged_state_or_another_backbone_and_restores_its_settings(
    tiny_settings: Settings, tmp_path: Path, monkeypatch: Patch
) -> None:
    interrupt(trainer_module, "close_run", 1, lambda: train(Config(**tiny_settings), tmp_path, quiet=True))
    [state], [file] = tmp_path.glob("*/checkpoints/state.safetensors"), tmp_path.glob("*/config.yaml")
    whole, settings = state.read_bytes(), file.read_bytes()
    state.write_bytes(whole[:-100])
    with pytest.raises(ValueError, match="damaged"):
        train(Config(**tiny_settings), tmp_path, quiet=True)
    assert state.read_bytes() == whole[:-100]
    state.write_bytes(whole)
    with monkeypatch.context() as patch, pytest.raises(ValueError, match="another backbone"):
        patch.setattr("patchgen.model.backbone.Backbone.digest", lambda self: "another")
        train(Config(**tiny_settings), tmp_path, quiet=True)
    file.write_bytes(settings.replace(b"data: /", b"data: .", 1))  # one bit of the path
    assert file.read_bytes() != settings
    assert train(Config(**tiny_settings), tmp_path, quiet=True).done
    assert file.read_bytes() == settings


@pytest.mark.parametrize(("at", "value", "before"), [(3, "main", True), (2, "weights", False)])
def test_divergence_names_the_images_of_its_step_and_keeps_the_last_state(
    at: int, value: str, before: bool, tiny_settings: Settings, tmp_path: Path, monkeypatch: Patch
) -> None:
    """Before a step its losses are not finite; after it, before an evaluation, only the weights."""
    whole, seen = FoldTrainer.take_step, {}

    def step(self: FoldTrainer, number: int) -> None:
        seen[number] = {str(self.fold.table.file(row)) for row in self.batches.rows_at(number)[0]}
        if not before:
            whole(self, number)
        if number == at:
            next(self.model.head.parameters()).data[0, 0] = float("nan")
        if before:
            whole(self, number)

    with monkeypatch.context() as patch:
        patch.setattr(FoldTrainer, "take_step", step)
        with pytest.raises(ValueError, match=f"diverged at step {at}: .*{value}.*lower --lr") as caught:
            train(Config(**tiny_settings), tmp_path, quiet=True)
    [run] = tmp_path.iterdir()
    written = json.loads((run / "diverged.json").read_text())
    assert written["step"] == at and set(written["images"]) == seen[at] and value in written["values"]
    assert any(name in str(caught.value) for name in seen[at])
    assert load_tensors(run / "checkpoints" / "state.safetensors")[1]["step"] == (2 if before else 0)
    assert train(Config(**tiny_settings), tmp_path, quiet=True).done and not (run / "diverged.json").exists()


# --deterministic


def test_the_switch_lasts_as_long_as_the_training(tiny_settings: Settings, tmp_path: Path, monkeypatch: Patch) -> None:
    whole, seen = Step.apply, list[int]()
    monkeypatch.setattr(Step, "apply", lambda self: (seen.append(torch.get_deterministic_debug_mode()), whole(self))[1])
    settings = {**tiny_settings, "steps": 2, "swad": False}
    runs = [train(Config(**settings, deterministic=on), tmp_path / f"{on}", quiet=True) for on in (False, True)]
    assert seen == [0, 0, 1, 1] and torch.get_deterministic_debug_mode() == 0  # 1: it warns
    assert runs[0].path.name == runs[1].path.name
    losses = [[record["train"] for record in run.records("evaluation")] for run in runs]
    assert losses[0] == losses[1]
