"""The loop over a stream: what it leaves behind, exact resume at any moment, and what it may look at."""

import csv
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from patchgen.ccd import close as stream_close
from patchgen.ccd.images import StreamImages, epoch_parts, num_steps
from patchgen.ccd.loop import StreamTrainer
from patchgen.ccd.mixture import SphericalMixture
from patchgen.ccd.pool import MixturePool
from patchgen.ccd.settings import StreamConfig
from patchgen.common import machine
from patchgen.data.table import Table
from patchgen.runs.folder import RunFolder
from patchgen.runs.tensors import load_tensors
from patchgen.train.lifecycle import train
from tests.conftest import interrupt

COLOURS = {"blue": (30, 30, 200), "green": (30, 200, 30), "pink": (200, 30, 200), "red": (200, 30, 30),
           "sand": (200, 200, 30)}  # fmt: skip
SCHEDULE = "groups: [[blue, green], [red], [sand, pink]]\nratios: [[0.6, 0.5, 1.0], [0.6, 1.0], [1.0]]\n"


def write_classes(root: Path, images: int = 15) -> Path:
    rng = np.random.default_rng(0)
    for name, colour in COLOURS.items():
        (root / name).mkdir(parents=True)
        for i in range(images):
            pixels = rng.integers(0, 60, (32, 32, 3))
            y, x = rng.integers(2, 14, 2)
            pixels[y : y + 14, x : x + 14] = np.array(colour) + rng.integers(-20, 20, 3)
            Image.fromarray(pixels.astype(np.uint8)).save(root / name / f"{i:02d}.png")
    return root


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("stream")
    (root / "stages.yaml").write_text(SCHEDULE)
    return {
        "data": str(write_classes(root / "shapes")), "schedule": str(root / "stages.yaml"), "backbone": "tiny",
        "image_size": 28, "epochs": 3, "batch": 6, "lr": 0.05, "warm_up": 1, "refit_every": 1, "val_every": 2,
        "projection_hidden": 16, "projection_bottleneck": 8, "projection_out": 32, "prompts": 2, "replay": 5,
        "holdout": 0.3, "inits": 2, "accelerator": "cpu",
    }  # fmt: skip


@pytest.fixture(scope="module")
def unbroken(settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return train(StreamConfig(**settings), tmp_path_factory.mktemp("unbroken"), quiet=True)


def same(one: RunFolder, other: RunFolder) -> bool:
    """Equal tensors and assignments."""
    for stage in range(3):
        a, b = (load_tensors(run.checkpoint(f"stage-{stage}"))[0] for run in (one, other))
        if a.keys() != b.keys() or not all(torch.equal(a[k], b[k]) for k in a):
            return False
    files = [f"stage-{stage}/assignments.csv" for stage in (1, 2)]
    return all((one.path / file).read_bytes() == (other.path / file).read_bytes() for file in files)


def test_a_run_folder_is_complete(unbroken: RunFolder) -> None:
    names = {p.relative_to(unbroken.path).as_posix() for p in unbroken.path.rglob("*") if p.is_file()}
    expected = {"config.yaml", "content.npy", "env.json", "stages.csv", "records.jsonl", "summary.md", "done"}
    expected |= {f"stage-{stage}/assignments.csv" for stage in (1, 2)}
    for stage, components in enumerate((2, 3, 5)):
        expected.add(f"checkpoints/stage-{stage}.safetensors")
        tensors, facts = load_tensors(unbroken.checkpoint(f"stage-{stage}"))
        assert tensors["mixture.means"].shape == (components, 64) and facts["stage"] == stage
        assert facts["known_classes"] == ["blue", "green"]
    assert names - {".lock"} - {name for name in names if name.endswith(".png")} == expected
    with pytest.raises(ValueError, match="run of task ccd"):
        _ = unbroken.config


def test_records_tell_the_story(unbroken: RunFolder) -> None:
    kinds = [record["kind"] for record in unbroken.records()]
    assert kinds == (["epoch"] * 3 + ["stage"] * 2) * 3 + ["average"] * 2
    epochs = unbroken.records("epoch")
    assert [("mixture" in e, "validation" in e) for e in epochs[:3]] == [(False, False), (True, True), (True, True)]
    assert [e["mixture"]["components"] for e in epochs if "mixture" in e] == [2, 2, 3, 3, 5, 5]
    assert {"sup_con", "L_conf", "L_sim"} <= epochs[0]["train"].keys()  # labels from the first epoch on
    assert epochs[3]["train"].keys() == {"info_nce", "L_ms", "weak_share"}  # no pseudo-label before the mixture
    assert {"L_conf", "L_sim", "L_neg"} <= epochs[4]["train"].keys() and "sup_con" not in epochs[4]["train"]
    assert epochs[0]["lr"] > epochs[1]["lr"] > epochs[2]["lr"] and epochs[3]["lr"] == epochs[0]["lr"]
    stages = [record for record in unbroken.records("stage") if record["checkpoint"] == "kept"]
    assert [s["clusters"] for s in stages] == [2, 3, 5] and "transductive" not in stages[0]
    best = {
        s["stage"]: max(e["validation"]["known"] for e in epochs[3 * s["stage"] :][:3] if "validation" in e)
        for s in stages
    }
    for s in stages:
        assert epochs[3 * s["stage"] + s["epoch"]]["validation"]["known"] == best[s["stage"]]
    mean = unbroken.records("average")[0]["transductive"]["all"]
    assert mean == pytest.approx(np.mean([s["transductive"]["all"]["accuracy"] for s in stages[1:]]))


def test_assignments_name_each_image_of_a_stage(unbroken: RunFolder) -> None:
    with open(unbroken.path / "stages.csv") as handle:
        stage = {row["path"]: row["stage"] for row in csv.DictReader(handle)}
    for number in (1, 2):
        with open(unbroken.path / f"stage-{number}" / "assignments.csv") as handle:
            rows = list(csv.DictReader(handle))
        assert {row["path"] for row in rows} == {path for path, s in stage.items() if s == str(number)}
        for row in rows:
            assert (row["known_class"] == "yes") == (row["group"] in ("blue", "green"))
    found = [r.get("found", {}) for r in unbroken.records("stage") if r["checkpoint"] == "kept"]
    assert set(found[1]) <= {"new-1"} and set(found[2]) <= {"new-2", "new-3"}
    sheets = {p.relative_to(unbroken.path).as_posix() for p in unbroken.path.rglob("*.png")}
    assert sheets == {f"stage-{stage}/{name}.png" for stage in (1, 2) for name in found[stage]}


MOMENTS = [
    (StreamTrainer, "_step", 12),
    (stream_close, "_save_stage", 2),
    pytest.param(StreamTrainer, "save_state", 2, marks=pytest.mark.slow),
    pytest.param(StreamTrainer, "_validate", 3, marks=pytest.mark.slow),
    pytest.param(stream_close, "averages", 2, marks=pytest.mark.slow),
    pytest.param(stream_close, "write_text", 1, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("place", "name", "count"), MOMENTS, ids=lambda value: str(getattr(value, "__name__", value)))
def test_resuming_reproduces_the_uninterrupted_run(
    place: Any, name: str, count: int, unbroken: RunFolder, settings: dict[str, Any], tmp_path: Path, plain: Any
) -> None:
    interrupt(place, name, count, lambda: train(StreamConfig(**settings), tmp_path, quiet=True))
    resumed = train(StreamConfig(**settings), tmp_path, quiet=True)
    assert plain(resumed) == plain(unbroken) and same(resumed, unbroken)


@pytest.mark.parametrize("more", [
    {"method": "gcd", "keep_aspect": True, "pool": "mean"},
    {"method": "simgcd", "selection": "last", "epochs": 2},
    {"method": "promptccd", "components": "grow", "test_prompts": True},
    {"method": "promptccd", "components": "half", "tune": "layernorm"},
    {"method": "gcd+patchgen-select"},
    {"method": "promptccd+patchgen-select", "test_prompts": True},
    {"method": "gcd+patchgen", "pseudo_labels": "none", "replay": 0, "lr_module": 0.01},
])  # fmt: skip
def test_every_method_runs_through(more: dict[str, Any], settings: dict[str, Any], tmp_path: Path) -> None:
    run = train(StreamConfig(**{**settings, "epochs": 1, "warm_up": 0, **more}), tmp_path, quiet=True)
    stages = run.records("stage")
    assert len(stages) == 6 and "NOT FINISHED" not in (run.path / "summary.md").read_text()
    if more.get("selection") == "last":
        assert {s["epoch"] for s in stages} == {1}
    if more.get("components") != "grow":
        assert [s["clusters"] for s in stages] == [2, 2, 3, 3, 5, 5]


def test_parts_and_half_precision_follow_the_whole_run(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "native_bf16", lambda: True)
    settings = {**settings, "warm_up": 0, "epochs": 1}
    more: dict[str, dict[str, Any]] = {"whole": {}, "parts": {"micro_batch": 5}, "half": {"precision": "auto"}}
    runs = {name: train(StreamConfig(**settings, **given), tmp_path / name, quiet=True) for name, given in more.items()}
    assert runs["parts"].path.name == runs["whole"].path.name != runs["half"].path.name
    assert runs["half"].settings.precision == "bf16-mixed"
    sizes = [json.loads((run.path / "env.json").read_text())["micro_batch"] for run in runs.values()]
    assert sizes == [12, 5, 12]
    for name, near in (("parts", 1e-4), ("half", 0.05)):
        first, other = (runs[each].records("epoch")[0]["train"] for each in ("whole", name))
        assert other == pytest.approx(first, rel=near, abs=near)


def test_training_sees_no_label_and_no_image_that_it_may_not(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: Any
) -> None:
    whole_see, whole_features, stages = StreamTrainer._see, StreamTrainer.features, set[int]()

    def see(self: StreamTrainer, rows: np.ndarray, images: torch.Tensor) -> Any:
        views = whole_see(self, rows, images)
        assert set(rows.tolist()) <= set(self.stream.train[self.stage].tolist())
        assert set(views.target.tolist()) <= ({0, 1} if self.stage == 0 else {-1})
        return views

    def features(self: StreamTrainer, rows: np.ndarray, prompts: bool = False) -> Any:
        """Fits, validation and scores: no image of a class that is still to come."""
        assert set(self.stream.label[rows]) <= set(self.stream.stages.entered(self.stage))
        assert self.stream.stages.stage[rows].max() <= self.stage
        stages.add(self.stage)
        return whole_features(self, rows, prompts)

    monkeypatch.setattr(StreamTrainer, "_see", see)
    monkeypatch.setattr(StreamTrainer, "features", features)
    train(StreamConfig(**{**settings, "epochs": 2}), tmp_path, quiet=True)
    assert stages == {0, 1, 2}


def test_an_epoch_has_whole_batches_of_different_images() -> None:
    assert num_steps(20, 6) == 3 and num_steps(4, 6) == 1
    first, again, other = (np.concatenate(epoch_parts(np.arange(20), 6, (1, 0, epoch))) for epoch in (4, 4, 5))
    assert len(set(first)) == 18 and (first == again).all() and (first != other).any()


def test_views_that_keep_the_aspect_are_crops_of_the_resized_image(tmp_path: Path) -> None:
    for i, (width, height) in enumerate([(60, 40), (30, 50)]):
        pixels = np.random.default_rng(i).integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{i}.png")
    table = Table(tmp_path, ("0.png", "1.png"), ("x",), ("a",), np.zeros(2, int), np.zeros(2, int))
    backbone = SimpleNamespace(normalised=lambda pixels: pixels.float() / 255, interpolation="bilinear")
    images = StreamImages(table, backbone, 28, torch.device("cpu"), None, True)  # type: ignore[arg-type]
    whole = [np.asarray(Image.open(tmp_path / f"{i}.png").resize(shape, Image.Resampling.BICUBIC)).transpose(2, 0, 1)
             for i, shape in enumerate([(48, 32), (32, 53)])]  # fmt: skip
    # CenterCrop(28): the room of 4 and of 20 pixels is halved; of 21, round(10.5) is 10
    centre = images.centre(np.array([0, 1])).numpy()
    assert np.array_equal(centre[0], whole[0][:, 2:30, 10:38]) and np.array_equal(centre[1], whole[1][:, 12:40, 2:30])
    places, mirrored = set(), set()
    for epoch in range(60):
        for i, view in enumerate(next(images.views([np.array([0, 1])], (1, 0, epoch)))):
            view = (view * 255).round().to(torch.uint8).numpy()
            image = whole[i % 2]
            windows = np.lib.stride_tricks.sliding_window_view(image, (28, 28), axis=(1, 2))  # (3, y, x, 28, 28)
            found = [(flip, *place) for flip, looked in ((False, view), (True, view[:, :, ::-1]))
                     for place in np.argwhere((windows == looked[:, None, None]).all((0, 3, 4))).tolist()]  # fmt: skip
            assert len(found) == 1, "a view is one window of the resized image, mirrored or not"
            places.add((i % 2, *found[0][1:]))
            mirrored.add(found[0][0])
    assert mirrored == {True, False}
    assert {y for i, y, _ in places if i == 0} == set(range(5)) == {x for i, _, x in places if i == 1}  # both ends, too


def test_selection_needs_held_out_images_and_a_refused_run_leaves_nothing(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="--selection last"):
        train(StreamConfig(**{**settings, "holdout": 0.0}), tmp_path, quiet=True)
    assert not list(tmp_path.iterdir())
    run = train(StreamConfig(**{**settings, "holdout": 0.0, "selection": "last", "epochs": 2}), tmp_path, quiet=True)
    assert "held_out" not in run.records("stage")[2]


@pytest.mark.parametrize("more", [{}, {"method": "simgcd"}], ids=["promptccd+patchgen", "simgcd"])
def test_a_step_asks_the_device_for_nothing(
    more: dict[str, Any], settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asks: Any
) -> None:
    whole, prompted = StreamTrainer._step, []

    def watched(self: StreamTrainer, rows: np.ndarray, images: torch.Tensor) -> dict[str, torch.Tensor]:
        prompted.append(self.pool.mixture is not None)
        with asks:
            values = whole(self, rows, images)
        if self.stage:
            raise KeyboardInterrupt  # one step without labels is enough
        return values

    monkeypatch.setattr(StreamTrainer, "_step", watched)
    with pytest.raises(KeyboardInterrupt):
        train(StreamConfig(**{**settings, "epochs": 1, "warm_up": 0, **more}), tmp_path, quiet=True)
    assert not asks.who and any(prompted) == (not more)


def test_both_views_of_an_image_have_the_label_of_their_mean(settings: dict[str, Any]) -> None:
    pool = MixturePool(StreamConfig(**settings), known=2)
    query = torch.randn(12, 8, generator=torch.Generator().manual_seed(0))
    pool.mixture = SphericalMixture.fit(query, 4)
    views = [pool.mixture.log_responsibilities(view) for view in query.chunk(2)]
    likely = pool.likely(query)
    assert torch.equal(pool.labels(likely), torch.stack(views).mean(0).argmax(1).repeat(2))
    assert torch.equal(pool.prompts(likely), pool.mixture.means[pool.mixture.nearest(query, 2)])


def test_a_backbone_without_prompts_is_refused_before_the_first_epoch(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StreamTrainer, "fit", lambda self: None)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 1, "intermediate_size": 64}
    more = {"patch_size": 14, "image_size": 28, "use_mean_pooling": False, "use_relative_position_bias": True}
    config = transformers.AutoConfig.for_model("beit", **sizes, **more)
    transformers.AutoModel.from_config(config).save_pretrained(tmp_path / "beit")
    chosen = {**settings, "backbone": str(tmp_path / "beit")}
    with pytest.raises(ValueError, match=r"beit.* takes none .*--method gcd\+patchgen"):
        train(StreamConfig(**chosen), tmp_path / "runs", quiet=True)
    assert not list(tmp_path.glob("runs/*/records.jsonl"))
    train(StreamConfig(**{**chosen, "method": "gcd+patchgen"}), tmp_path / "runs", quiet=True)  # has none
