"""TensorBoard: the numbers of the records, once each, also after a resume; nothing else of the run changes."""

import re
import time
from pathlib import Path
from typing import Any

import pytest

from patchgen.config import Config
from patchgen.runs.folder import RunFolder
from patchgen.train import track
from patchgen.train.fold import FoldTrainer
from patchgen.train.lifecycle import train
from patchgen.train.track import Tracker, make_tracker
from tests.conftest import interrupt

pytest.importorskip("tensorboard", reason="the extra `track` is not installed")


def events(run: RunFolder) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(run.path / "tensorboard")).Reload()
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def test_a_resumed_run_is_one_line_and_has_the_same_name(tiny_settings: dict[str, Any], tmp_path: Path) -> None:
    config = Config(**{**tiny_settings, "method": "lp", "image_size": 28, "swad": False})
    interrupt(FoldTrainer, "take_step", 4, lambda: train(config, tmp_path / "runs", quiet=True, track=True))
    run = train(config, tmp_path / "runs", quiet=True, track=True)
    recorded = run.records("evaluation")
    assert [step for step, _ in events(run)["train/main"]] == [record["step"] for record in recorded] == [0, 2, 4]
    values = [value for _, value in events(run)["validation/field/accuracy"]]
    assert values == pytest.approx([record["validation"]["field"]["accuracy"] for record in recorded])
    untracked = train(config, tmp_path / "plain", quiet=True)
    assert untracked.path.name == run.path.name and not (untracked.path / "tensorboard").exists()


def test_epochs_are_counted_through_the_stages(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.listeners.append(Tracker())
    for stage, epoch, loss in ((0, 0, 1.0), (0, 1, 0.5), (1, 0, 0.25)):
        run.append({"kind": "epoch", "stage": stage, "epoch": epoch, "lr": 0.5, "train": {"main": loss}})
    assert events(run)["train/main"] == [(0, 1.0), (1, 0.5), (2, 0.25)]


RECORDS = [
    {"kind": "evaluation", "step": 2 * i, "train": {"main": 1 / (1 + i)}, "validation": {"art": {"accuracy": i / 4}}}
    for i in range(3)
]


def recorded(fold: Any, name: str) -> RunFolder:
    """A run of three evaluations, the last of them by a second process."""
    run = RunFolder(fold(0.5))
    for records in (RECORDS[:2], RECORDS[2:]):
        run.listeners = [tracker := make_tracker(name)]
        if len(records) == 2:
            (run.path / "records.jsonl").write_text("")
        for record in records:
            run.append(record)
        tracker.close()
    return run


def test_wandb_writes_offline_into_the_run_folder(fold: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="the extra `wandb` is not installed")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    run = recorded(fold, "wandb")
    [file] = (run.path / "wandb").glob("offline-run-*/*.wandb")  # that of the first process is gone
    values: dict[str, list[float]] = {}
    deadline = time.monotonic() + 20
    while len(values.get("train/main", [])) < 3 and time.monotonic() < deadline:  # W&B's own process writes it
        time.sleep(0.1)
        for name in ("_step", "train/main"):  # then the tag and length of a field with the number as text
            numbers = re.findall(name.encode() + rb"\W{3}([\d.]+)", file.read_bytes())
            values[name] = list(dict.fromkeys(map(float, numbers)))  # W&B repeats them in its summaries
    assert values == {"_step": [0, 2, 4], "train/main": [1.0, 0.5, pytest.approx(1 / 3)]}
    assert not any(path.is_symlink() for path in (run.path / "wandb").iterdir())
    RunFolder.open(run.path)


def test_mlflow_writes_into_a_store_of_files_that_runs_share(fold: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow", reason="the extra `mlflow` is not installed")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run = recorded(fold, "mlflow")
    from mlflow.tracking import MlflowClient

    client = MlflowClient((run.path.parent / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("patchgen")
    assert experiment is not None
    [found] = client.search_runs([experiment.experiment_id])  # one line a run, also after a second process
    assert (found.info.run_name, found.info.status, found.data.params["method"]) == (run.path.name, "FINISHED", "lp-ln")
    history = client.get_metric_history(found.info.run_id, "validation/art/accuracy")
    assert [(one.step, one.value) for one in history] == [(0, 0.0), (2, 0.25), (4, 0.5)]


@pytest.mark.parametrize(("name", "extra"), [("tensorboard", "track"), ("wandb", "wandb"), ("mlflow", "mlflow")])
def test_a_missing_extra_is_named(name: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(track, "find_spec", lambda package: None)
    with pytest.raises(ValueError, match=rf'pip install "patchgen\[{extra}\]"'):
        make_tracker(name)


def test_track_alone_is_tensorboard() -> None:
    from patchgen.commands import expand_track

    assert expand_track(["--track", "photos"]) == ["--track", "tensorboard", "photos"]
    assert expand_track(["photos", "--track", "wandb"]) == ["photos", "--track", "wandb"]
    assert expand_track(["photos", "--track"]) == ["photos", "--track", "tensorboard"]
