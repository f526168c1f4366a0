"""The loop's promises: exact resume, the same numbers on one device and two, and no look at the unseen domain."""

from __future__ import annotations

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
from patchgen.train.close import close_run
from patchgen.train.fold import FoldTrainer
from patchgen.train.lifecycle import train


def plain(run: RunFolder) -> list[dict[str, Any]]:
    """Records without what the clock decides."""
    return [{k: v for k, v in record.items() if k != "seconds"} for record in run.records()]


def same_checkpoints(one: RunFolder, other: RunFolder) -> bool:
    for name in ("selected", "swad"):
        a, b = load_tensors(one.checkpoint(name))[0], load_tensors(other.checkpoint(name))[0]
        if a.keys() != b.keys() or not all(torch.equal(a[k], b[k]) for k in a):
            return False
    return True


@pytest.fixture(scope="module")
def unbroken(tiny_settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
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


def test_the_untrained_mask_is_that_of_a_run_that_learns_nothing(tiny_settings: dict[str, Any], tmp_path: Path) -> None:
    settings = {**tiny_settings, "steps": 3, "swad": False}
    trained = train(Config(**settings), tmp_path, quiet=True).records("test")[0]["mask"]
    idle = train(Config(**{**settings, "lr": 0.0}), tmp_path, quiet=True).records("test")[0]["mask"]
    for name in ("mean", "spread", "weak", "strong"):
        assert trained[f"untrained_{name}"] == idle[f"untrained_{name}"] == pytest.approx(idle[name], abs=1e-6)
    assert trained["spread"] != trained["untrained_spread"]


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


@pytest.mark.parametrize(
    "moment",
    [
        (FoldTrainer, "take_step", 2),
        (FoldTrainer, "take_step", 3),
        (FoldTrainer, "save_state", 2),
        (close, "_score", 2),
    ],
)
def test_an_interrupted_run_goes_on_to_the_same_records(
    moment: tuple[Any, str, int], unbroken: RunFolder, tiny_settings: dict[str, Any], tmp_path: Path, monkeypatch: Any
) -> None:
    place, name, count = moment
    whole = getattr(place, name)
    calls = {"n": 0}

    def breaks(self: FoldTrainer, *args: Any) -> Any:
        calls["n"] += 1
        if calls["n"] == count:
            raise KeyboardInterrupt
        return whole(self, *args)

    monkeypatch.setattr(place, name, breaks)
    with pytest.raises(KeyboardInterrupt):
        train(Config(**tiny_settings), tmp_path, quiet=True)
    monkeypatch.setattr(place, name, whole)
    run = train(Config(**tiny_settings), tmp_path, quiet=True)
    assert plain(run) == plain(unbroken)
    assert same_checkpoints(run, unbroken)


def test_two_processes_share_the_batch_of_one(tiny_settings: dict[str, Any], tmp_path: Path) -> None:
    settings = {**tiny_settings, "steps": 3, "accelerator": "cpu", "threads": 1}
    one = train(Config(**settings), tmp_path / "one", quiet=True)
    two = train(Config(**settings, devices=2), tmp_path / "two", quiet=True)
    for a, b in zip(one.records(), two.records(), strict=True):
        assert a["kind"] == b["kind"]
        if a["kind"] == "evaluation":
            assert b["train"] == pytest.approx(a["train"], abs=2e-5)
            for domain, scores in a["validation"].items():
                found = b["validation"][domain]
                assert found.pop("mask") == pytest.approx(scores.pop("mask"), abs=2e-4)
                assert found == pytest.approx(scores, abs=2e-4)
    weights = [load_tensors(run.checkpoint("swad"))[0] for run in (one, two)]
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, atol=2e-4, rtol=0)


@pytest.mark.parametrize("finished", [True, False])
def test_a_process_that_dies_matters_only_before_the_end(
    finished: bool, tiny_settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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


def test_half_precision_follows_full(unbroken: RunFolder, tiny_settings: dict[str, Any], tmp_path: Path) -> None:
    half = train(Config(**tiny_settings, precision="bf16-mixed"), tmp_path, quiet=True)
    for a, b in zip(unbroken.records("evaluation"), half.records("evaluation"), strict=True):
        assert b["train"]["main"] == pytest.approx(a["train"]["main"], rel=0.05)
        assert b["mask"] == pytest.approx(a["mask"], abs=0.05)
    tensors, _ = load_tensors(half.checkpoint("selected"))
    assert all(tensor.dtype == torch.float32 for tensor in tensors.values())


def test_kept_features_change_nothing(tiny_settings: dict[str, Any], tmp_path: Path, monkeypatch: Any) -> None:
    settings = {**tiny_settings, "method": "lp", "augment": False, "steps": 6}
    kept = train(Config(**settings), tmp_path / "kept", quiet=True)
    monkeypatch.setattr("patchgen.train.evaluate.MEMORY", 0)
    fresh = train(Config(**settings), tmp_path / "fresh", quiet=True)
    for a, b in zip(kept.records("evaluation"), fresh.records("evaluation"), strict=True):
        assert b["train"] == pytest.approx(a["train"], abs=1e-5)


@pytest.mark.parametrize("select", ["source-validation", "oracle"])
def test_the_unseen_domain_is_scored_only_for_what_is_reported(
    select: str, tiny_settings: dict[str, Any], tmp_path: Path, monkeypatch: Any
) -> None:
    seen: list[tuple[str, set[int]]] = []
    for place, name in ((FoldTrainer, "evaluation"), (close, "_score")):
        whole = getattr(place, name)

        def spy(self: FoldTrainer, *args: Any, _whole: Any = whole, _name: str = name) -> Any:
            inner = self.evaluate
            whole_call = type(inner).__call__

            def note(evaluator: Any, rows: Any, *more: Any, **named: Any) -> Any:
                seen.append((_name, set(rows.tolist())))
                return whole_call(evaluator, rows, *more, **named)

            with monkeypatch.context() as patch:
                patch.setattr(type(inner), "__call__", note)
                return _whole(self, *args)

        monkeypatch.setattr(place, name, spy)
    run = train(Config(**{**tiny_settings, "select": select, "swad": False}), tmp_path, quiet=True)
    unseen = set(range(60, 90))  # "studio" is the last of three domains with 30 images each
    during = [rows & unseen for name, rows in seen if name == "evaluation"]
    assert any(during) == (select == "oracle")
    assert set().union(*(rows for name, rows in seen if name == "_score")) == unseen
    assert run.records("test")[0]["rule"] == select
    assert ("LOOKS AT THE UNSEEN" in (run.path / "summary.md").read_text()) == (select == "oracle")


def test_training_learns(tiny_settings: dict[str, Any], tmp_path: Path) -> None:
    settings = {**tiny_settings, "tune": "full", "batch_per_domain": 8, "steps": 61, "eval_every": 30}
    run = train(Config(**settings, augment=False), tmp_path, quiet=True)
    first, *_, last = run.records("evaluation")
    assert last["train"]["main"] < 0.7 * first["train"]["main"]


def test_a_damaged_state_is_refused_and_kept(tiny_settings: dict[str, Any], tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(trainer_module, "close_run", lambda trainer: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        train(Config(**tiny_settings), tmp_path, quiet=True)
    [state] = tmp_path.glob("*/checkpoints/state.safetensors")
    cut = state.read_bytes()[:-100]
    state.write_bytes(cut)
    with pytest.raises(ValueError, match="damaged"):
        train(Config(**tiny_settings), tmp_path, quiet=True)
    assert state.read_bytes() == cut


def test_another_backbone_is_not_mixed_in(tiny_settings: dict[str, Any], tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(trainer_module, "close_run", lambda trainer: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        train(Config(**tiny_settings), tmp_path, quiet=True)
    monkeypatch.setattr(trainer_module, "close_run", close_run)
    monkeypatch.setattr("patchgen.model.backbone.Backbone.digest", lambda self: "another")
    with pytest.raises(ValueError, match="another backbone"):
        train(Config(**tiny_settings), tmp_path, quiet=True)


def test_nan_names_the_images_of_its_step_and_keeps_the_last_state(
    tiny_settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, seen = FoldTrainer.take_step, {}

    def step(self: FoldTrainer, number: int) -> None:
        seen[number] = {str(self.fold.table.file(row)) for row in self.batches.rows_at(number)[0]}
        if number == 3:
            next(self.model.head.parameters()).data.fill_(float("nan"))
        whole(self, number)

    monkeypatch.setattr(FoldTrainer, "take_step", step)
    with pytest.raises(ValueError, match="diverged at step 3: .*lower --lr") as caught:
        train(Config(**tiny_settings), tmp_path, quiet=True)
    [run] = tmp_path.iterdir()
    found = json.loads((run / "diverged.json").read_text())
    assert found["step"] == 3 and set(found["images"]) == seen[3] and "main" in found["values"]
    assert any(name in str(caught.value) for name in seen[3])
    assert load_tensors(run / "checkpoints" / "state.safetensors")[1]["step"] == 2


def test_weights_alone_that_are_not_finite_name_the_last_step(
    tiny_settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, seen = FoldTrainer.take_step, {}

    def step(self: FoldTrainer, number: int) -> None:
        whole(self, number)
        seen[number] = {str(self.fold.table.file(row)) for row in self.batches.rows_at(number)[0]}
        if number == 2:  # evaluated right after it, and its losses were fine
            next(self.model.head.parameters()).data[0, 0] = float("inf")

    monkeypatch.setattr(FoldTrainer, "take_step", step)
    with pytest.raises(ValueError, match="diverged at step 2: weights is not finite"):
        train(Config(**tiny_settings), tmp_path, quiet=True)
    [file] = tmp_path.glob("*/diverged.json")
    found = json.loads(file.read_text())
    assert found["values"] == ["weights"] and set(found["images"]) == seen[2]
    monkeypatch.setattr(FoldTrainer, "take_step", whole)
    assert train(Config(**tiny_settings), tmp_path, quiet=True).done and not file.exists()


def test_an_unfinished_run_gets_its_settings_back(
    tiny_settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_module, "close_run", lambda trainer: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        train(Config(**tiny_settings), tmp_path, quiet=True)
    monkeypatch.setattr(trainer_module, "close_run", close_run)
    [file] = tmp_path.glob("*/config.yaml")
    good = file.read_bytes()
    file.write_bytes(good.replace(b"data: /", b"data: .", 1))  # one bit of the path
    assert file.read_bytes() != good
    assert train(Config(**tiny_settings), tmp_path, quiet=True).done
    assert file.read_bytes() == good
