"""The viewer's answers: the same numbers as `patchgen predict` and `diagnose`, and a sentence for every bad file."""

import asyncio
import io
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from PIL import Image

from patchgen.config import Config
from patchgen.data.augment import normalize
from patchgen.data.images import decode
from patchgen.diagnose.faithfulness import OPERATORS
from patchgen.predict.attribution import RANKINGS
from patchgen.predict.predictor import Confidence, Familiar, load_run
from patchgen.viewer import RefusedRequest, answers, library
from patchgen.viewer.app import ModelThread, create_app
from patchgen.viewer.library import Library, find_items
from patchgen.viewer.uploads import clean_name
from tests.viewer.conftest import BAD_FILES, png


def upload(client: Any, *files: tuple[str, bytes], model: str = "1") -> Any:
    return client.post("/api/predict", data={"model": model}, files=[("image", file) for file in files])


def opened(client: Any, seed: int = 0, model: str = "1") -> dict[str, Any]:
    [found] = upload(client, ("a.png", png(seed)), model=model).json()["images"]
    return found


# Models


def test_models_are_listed_without_their_paths(client: Any, run_folders: list[Path]) -> None:
    text = client.get("/api/models").text
    rows = json.loads(text)["models"]
    assert [(row["id"], row["method"], row["unseen"]) for row in rows] == [
        ("1", "patchgen", "studio"), ("2", "lp-ln", "studio")]  # fmt: skip
    assert str(run_folders[0].parent) not in text


def test_a_model_says_what_it_has(client: Any) -> None:
    mask, plain = (client.get(f"/api/models/{i}").json() for i in (1, 2))
    assert mask["has_mask"] and mask["rankings"] == list(RANKINGS) and mask["grid"] == [4, 4]
    assert not plain["has_mask"] and "mask" not in plain["rankings"] and "attention" in plain["rankings"]
    assert not mask["calibrated"] and not mask["knows_unlike"]


@pytest.mark.parametrize("name", ["3", "..", "%2e%2e%2fetc", "1%00"])
def test_an_unknown_id_is_no_path(client: Any, name: str) -> None:
    for path in (f"/api/models/{name}", f"/api/runs/{name}", f"/api/images/{name}"):
        answer = client.get(path)
        assert answer.status_code in (404, 405) and "error" in answer.json()


# Predictions


def test_a_prediction_is_that_of_the_command(client: Any, run_folders: list[Path], tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(png(3))
    [expected] = load_run(run_folders[0]).predict([file])
    [found] = upload(client, ("a.png", png(3))).json()["images"]
    assert found["label"] == expected.label and found["name"] == "a.png"
    order = {row["class"]: row["probability"] for row in found["classes"]}
    np.testing.assert_allclose([order[name] for name in sorted(order)], expected.probabilities, atol=1e-6)
    np.testing.assert_allclose(found["mask"], expected.mask, atol=1e-5)
    assert found["unlike_training"] is None


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_one_sentence(client: Any, name: str) -> None:
    data, reason = BAD_FILES[name]
    answer = upload(client, ("good.png", png(1)), (name, data), ("other.png", png(2)))
    first, found, last = answer.json()["images"]
    assert answer.status_code == 200 and set(found) == {"name", "error"}
    assert (first["name"], found["name"], last["name"]) == ("good.png", name, "other.png") and "error" not in last
    assert reason in found["error"] and "BytesIO" not in found["error"] and "\n" not in found["error"]


def test_names_come_back_harmless(client: Any) -> None:
    names = {
        "../../etc/passwd.png": "passwd.png",
        "c:\\x\\b.png": "b.png",
        "a\x1b[31m\u202egnp.exe": "a\ufffd[31m\ufffdgnp.exe",
    }
    for raw, clean in names.items():
        assert clean_name(raw) == clean
    assert clean_name("/") == "image" and len(clean_name("x" * 999)) == 120
    [found] = upload(client, ("../../<img src=x onerror=alert(1)>.png", png())).json()["images"]
    assert "/" not in found["name"]


def test_the_preview_is_ours_and_upright(client: Any) -> None:
    buffer = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera lay on its side
    Image.new("RGB", (40, 20), "red").save(buffer, "JPEG", exif=exif)
    [found] = upload(client, ("side.jpg", buffer.getvalue())).json()["images"]
    answer = client.get(f"/api/images/{found['image']}")
    assert answer.headers["content-type"] == "image/jpeg"
    shown = Image.open(io.BytesIO(answer.content))
    assert shown.size == (20, 40) and not shown.getexif()


# Another model, rankings, perturbation


def test_a_kept_picture_can_be_asked_again(client: Any) -> None:
    image = opened(client)["image"]
    again = client.post("/api/score", json={"model": "2", "image": image}).json()
    assert again["mask"] is None and again["classes"] == opened(client, model="2")["classes"]


def test_rankings_are_those_of_diagnose(client: Any, run_folders: list[Path]) -> None:
    image = opened(client, 5)["image"]
    found = client.post("/api/rankings", json={"model": "1", "image": image, "names": ["grad-cam", "rollout"]}).json()
    predictor = load_run(run_folders[0])
    inputs = predictor.inputs([decode(io.BytesIO(png(5)), 56)])  # type: ignore[arg-type]
    target = torch.tensor([predictor.classes.index(found["label"])])
    for name, rows in found["rankings"].items():
        expected = RANKINGS[name](predictor.model, inputs, target)[0].reshape(4, 4)
        np.testing.assert_allclose(rows, expected.detach(), rtol=1e-4, atol=1e-6)


def test_nothing_away_is_the_models_own_answer(client: Any) -> None:
    found = opened(client)
    body = {"model": "1", "image": found["image"], "off": []}
    same = client.post("/api/perturb", json=body).json()
    assert [row["class"] for row in same["classes"]] == [row["class"] for row in found["classes"]]
    values = [[row["probability"] for row in rows["classes"]] for rows in (same, found)]
    np.testing.assert_allclose(*values, atol=1e-6)


@pytest.mark.parametrize("operator", ["mean", "blur"])
def test_patches_away_are_pixels_replaced(client: Any, run_folders: list[Path], operator: str) -> None:
    """By hand: the pixels of patches 0 and 6 of a 4 x 4 grid of 14 pixels."""
    predictor = load_run(run_folders[0])
    pixels = torch.from_numpy(decode(io.BytesIO(png(7)), 56)).permute(2, 0, 1)[None].float() / 255  # type: ignore[arg-type]
    changed, other = pixels.clone(), OPERATORS[operator](pixels, pixels, 14)
    changed[:, :, :14, :14] = other[:, :, :14, :14]
    changed[:, :, 14:28, 28:42] = other[:, :, 14:28, 28:42]
    backbone = predictor.model.backbone
    with torch.no_grad():
        expected = predictor.model(normalize(changed, backbone.mean, backbone.std)).logits.softmax(1)[0]
    body = {"model": "1", "image": opened(client, 7)["image"], "off": [0, 6], "operator": operator}
    found = {row["class"]: row["probability"] for row in client.post("/api/perturb", json=body).json()["classes"]}
    np.testing.assert_allclose([found[name] for name in predictor.classes], expected, atol=1e-5)


@pytest.mark.parametrize(("change", "words"), [
    ({"off": [16]}, "0 to 15"), ({"off": [-1]}, "0 to 15"), ({"off": "all"}, "off"), ({"off": [0.5]}, "off"),
    ({"off": list(range(20_000))}, "off"), ({"operator": "swap"}, "blur, mean"),
    ({"names": ["mask"]}, "it has attention"),
])  # fmt: skip
def test_a_wrong_question_is_one_sentence(client: Any, change: dict[str, Any], words: str) -> None:
    body = {"model": "2", "image": opened(client)["image"], "off": [], "operator": "blur"} | change
    answer = client.post("/api/rankings" if "names" in change else "/api/perturb", json=body)
    assert answer.status_code == 422 and words in answer.json()["error"]


@pytest.mark.parametrize("limits", [{"kept_images": 2}, {"kept_bytes": 2 * len(png()) + len(png()) // 2}])
def test_the_uploads_are_bounded(limits: dict[str, int], make_client: Callable[..., Any]) -> None:
    client = make_client(**limits)
    ids = [opened(client, seed)["image"] for seed in range(4)]
    answers = [client.get(f"/api/images/{image}") for image in ids]
    assert [answer.status_code for answer in answers] == [404, 404, 200, 200]
    assert "open it again" in answers[0].json()["error"]


# Examples and runs


def test_examples_are_of_the_unseen_domain(client: Any) -> None:
    rows = client.get("/api/models/1/examples").json()["examples"]
    assert len(rows) == 24 and {row["label"] for row in rows} == {"circle", "cross", "square"}
    found = client.post("/api/example", json={"model": "1", "example": rows[4]["example"]}).json()
    assert found["truth"] == rows[4]["label"] and found["name"] == rows[4]["name"] and found["mask"]
    assert client.post("/api/example", json={"model": "1", "example": 24}).status_code == 404


def test_no_examples_where_the_data_are_gone(run_folders: list[Path], tmp_path: Path) -> None:
    run = tmp_path / "moved"
    run.mkdir()
    text = (run_folders[0] / "config.yaml").read_text()
    (run / "config.yaml").write_text("\n".join(f"data: {tmp_path}/x" if line.startswith("data:") else line
                                               for line in text.splitlines()))  # fmt: skip
    assert Library(find_items([run])).examples("1") == []


def test_runs_have_scores_curves_and_settings(client: Any, run_folders: list[Path]) -> None:
    rows = client.get("/api/runs").json()["runs"]
    records = [json.loads(line) for line in (run_folders[0] / "records.jsonl").read_text().splitlines()]
    test = next(r for r in records if r["kind"] == "test" and r["checkpoint"] == "selected")
    assert rows[0]["scores"]["unseen accuracy"] == test["all"]["accuracy"] and rows[0]["done"]
    assert rows[0]["settings"]["method"] == "patchgen" and rows[1]["settings"]["method"] == "lp-ln"
    detail = client.get("/api/runs/1").json()
    evaluations = [r for r in records if r["kind"] == "evaluation"]
    assert detail["curves"]["training loss"] == [
        [r["step"], r["train"]["main"]] for r in evaluations if "main" in r["train"]
    ]
    assert "mask mean" not in client.get("/api/runs/2").json()["curves"]
    assert detail["summary"].startswith("# patchgen with studio unseen")


def test_an_unfinished_run_is_listed_and_says_why_it_has_no_model(
    run_folders: list[Path], tmp_path: Path, make_client: Any
) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "config.yaml").write_text((run_folders[0] / "config.yaml").read_text())
    client = make_client(Library(find_items([tmp_path / "new"])))
    [row] = client.get("/api/runs").json()["runs"]
    assert row["done"] is False and row["scores"] == {}
    assert "no checkpoint 'selected'" in client.get("/api/models/1").json()["error"]


def test_equal_names_are_told_apart_and_a_backbones_path_is_not_shown(
    run_folders: list[Path], tmp_path: Path, make_client: Any
) -> None:
    text = (run_folders[0] / "config.yaml").read_text()
    place = tmp_path / "private place" / "weights"
    for parent in ("a", "b"):
        (tmp_path / parent / "run").mkdir(parents=True)
        (tmp_path / parent / "run" / "config.yaml").write_text(text.replace("backbone: tiny", f"backbone: {place}"))
    client = make_client(Library(find_items([tmp_path / "a" / "run", tmp_path / "b" / "run"])))
    rows = client.get("/api/models").json()["models"]
    assert [row["name"] for row in rows] == ["a/run", "b/run"] and [row["done"] for row in rows] == [False, False]
    answer = client.get("/api/runs/1")
    assert answer.json()["settings"]["backbone"] == "weights" and "private" not in answer.text


def test_a_model_folder_says_what_to_expect(tmp_path: Path) -> None:
    facts = {"format": "patchgen-model", "settings": {"method": "patchgen", "seed": 1}, "expected": {"mean": 0.75}}
    (tmp_path / "config.json").write_text(json.dumps(facts))
    (tmp_path / "README.md").write_text("# the card")
    [item] = find_items([tmp_path])
    row = library.detail(item)
    assert item.kind == "model" and row["scores"] == {"expected at a new site": 0.75} and row["summary"] == "# the card"
    usual = Config(data="data", unseen="none", method="patchgen").result_settings()
    assert row["settings"] == json.loads(json.dumps(usual))  # what is not written is at its default, not a difference


def test_calibration_and_strangeness_reach_the_answer(
    make_client: Callable[..., Any], run_folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A temperature flattens; with a threshold below every distance each image is unlike the training images."""

    def load(path: Path) -> Any:
        predictor = load_run(path)
        dim = predictor.model.head.in_features
        predictor.confidence = Confidence(4.0, Familiar(torch.full((1, dim), 1e3), torch.eye(dim), threshold=1.0))
        return predictor

    plain = make_client()
    before = opened(plain)
    monkeypatch.setattr(library, "load_predictor", load)
    client = make_client()
    about, found = client.get("/api/models/1").json(), opened(client)
    assert about["calibrated"] and about["temperature"] == 4 and about["knows_unlike"]
    logits = np.log([row["probability"] for row in before["classes"]]) / 4
    expected = np.exp(logits) / np.exp(logits).sum()
    np.testing.assert_allclose([row["probability"] for row in found["classes"]], expected, atol=1e-6)
    moved = client.post("/api/perturb", json={"model": "1", "image": found["image"], "off": [1]}).json()
    assert found["unlike_training"] is True and moved["unlike_training"] is True


# Many at once


def test_parallel_requests_are_all_answered_and_health_stays(run_folders: list[Path]) -> None:
    transport, answered = httpx.ASGITransport(create_app(Library(find_items(run_folders)))), list[str]()

    async def ask(client: httpx.AsyncClient, method: str, place: str, **body: Any) -> Any:
        answer = await client.request(method, f"/api/{place}", **body)
        answered.append(place)
        return answer.json()

    async def all_at_once() -> list[Any]:
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=300) as client:
            files = [{"image": (f"{seed}.png", png(seed % 5))} for seed in range(20)]
            asks = [
                ask(client, "POST", "predict", data={"model": str(1 + i % 2)}, files=f) for i, f in enumerate(files)
            ]
            return await asyncio.gather(*asks, ask(client, "GET", "health"))

    *found, health = asyncio.run(all_at_once())
    assert health["status"] == "ok" and answered.index("health") < answered.index("predict")  # it waits for no model
    rows = [answer["images"][0] for answer in found]
    assert [row["name"] for row in rows] == [f"{seed}.png" for seed in range(20)]
    for first in range(10):  # the same picture and model gave the same answer, whoever asked at the same time
        assert len({json.dumps(row["classes"]) for row in rows[first::10]}) == 1


def test_a_full_queue_is_refused(make_client: Callable[..., Any]) -> None:
    full = upload(make_client(waiting=0), ("a.png", png()))
    assert full.status_code == 503 and "try again" in full.json()["error"]


def test_a_slow_model_is_given_up_and_the_next_question_answered() -> None:
    async def ask() -> tuple[str, int, int]:
        worker, gate = ModelThread(seconds=0.1, waiting=2), threading.Event()
        with pytest.raises(RefusedRequest, match="no answer within 0.1 s") as refused:
            await worker.run(gate.wait)
        gate.set()
        worker.seconds = 60
        return refused.value.message, await worker.run(lambda: 7), worker.queued

    assert asyncio.run(ask())[1:] == (7, 0)


def test_a_defect_says_nothing_of_its_inside(make_client: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise TypeError("secret")

    client = make_client(defects=False)
    monkeypatch.setattr(answers, "scored", fail)
    answer = upload(client, ("a.png", png()))
    assert answer.status_code == 500, answer.text
    assert "secret" not in answer.text and answer.headers["x-content-type-options"]
