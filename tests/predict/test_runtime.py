"""Other runtimes than torch: their answers, what is kept in the cache, and what is refused in words."""

import dataclasses
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks.predict import untrained_predictor
from patchgen.commands.options import RuntimeOptions
from patchgen.common import child_process
from patchgen.common.files import cache_dir
from patchgen.predict import runtime
from patchgen.predict.export import drawn_images
from patchgen.predict.predictor import Outputs, Predictor
from patchgen.predict.runtime import PACKAGES, missing_packages

onnx = pytest.importorskip("onnx")

KILLED = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"


@pytest.fixture(scope="module")
def predictor() -> Predictor:
    return untrained_predictor("tiny", "patchgen-select", 28)


@pytest.fixture
def tiny_half(predictor: Predictor) -> Predictor:
    return Predictor(predictor.model, predictor.classes, predictor.config, precision="bf16-mixed")


@pytest.mark.parametrize("name", [name for name, package in PACKAGES.items() if not missing_packages(package)])
def test_a_runtime_answers_as_torch_does_and_is_converted_once(predictor: Predictor, name: str) -> None:
    images, lines = drawn_images(5, 28), list[str]()
    truth = predictor.use("torch").score(images)
    assert predictor.runtime is None and predictor.variant == ""
    found = predictor.use(name, lines.append).score(images)  # type: ignore[arg-type]
    assert predictor.variant == f"{name} {version(PACKAGES[name])}"
    for a, b in zip(truth, found, strict=True):
        np.testing.assert_allclose(a.probabilities, b.probabilities, atol=1e-3)
        np.testing.assert_allclose(a.mask, b.mask, atol=1e-2)
    assert lines[-1].startswith(f"runtime {name}") and "same classes as torch on 8 images" in lines[-1]
    [file] = (cache_dir() / "runtimes" / runtime.digest(predictor)).glob("*.onnx")
    assert "Resize" not in {node.op_type for node in onnx.load(file).graph.node}  # of position embeddings: computed
    before, again = file.stat().st_mtime_ns, list[str]()
    predictor.use(name, again.append)  # type: ignore[arg-type]
    assert file.stat().st_mtime_ns == before and again == lines[-1:]
    predictor.use("torch")


def test_auto_converts_nothing_for_a_few_images(predictor: Predictor, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []

    def check(_: object, name: str, say: object) -> dict[str, float]:
        checked.append(name)
        return {"speed": 0.5, "classes": 0, "probabilities": 0}

    monkeypatch.setattr(runtime, "_check", check)
    monkeypatch.setattr(runtime, "_file", lambda _: Path("none.onnx"))
    assert predictor.use("auto", images=runtime.WORTH - 1).runtime is None and not checked
    assert predictor.use("auto", images=runtime.WORTH).runtime is None and checked


def test_half_precision(tiny_half: Predictor, monkeypatch: pytest.MonkeyPatch) -> None:
    """In torch by autocast, in OpenVINO by its own setting; ONNX Runtime has none."""
    images = drawn_images(4, 28)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        expected = tiny_half.model(tiny_half.inputs(images)).logits.float().softmax(1).detach().numpy()
    found = np.stack([one.probabilities for one in tiny_half.score(images)])
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert tiny_half.variant == "bf16-mixed"
    assert runtime._session(tiny_half, "openvino")[-1] and not runtime._session(tiny_half, "onnx")[-1]
    assert runtime._allowed({"classes": 0, "probabilities": 0, "mask": 0.04}, half=True)
    with pytest.raises(runtime.RefusedRuntime):
        runtime._allowed({"classes": 0, "probabilities": 0, "mask": 0.04})


def test_stains_are_normalised_once_on_every_runtime(predictor: Predictor, monkeypatch: pytest.MonkeyPatch) -> None:
    images = drawn_images(5, 28)
    plain = predictor.use("torch").outputs(images).probabilities
    monkeypatch.setattr(predictor, "stain", lambda image: 255 - image // 2)  # twice is something else
    truth = predictor.outputs(images).probabilities
    assert np.abs(truth - plain).max() > 1e-3
    for record in (cache_dir() / "runtimes" / runtime.digest(predictor)).glob("*.json"):
        record.unlink()  # the check itself must see normalised images too
    monkeypatch.setitem(runtime.TOLERANCE, "probabilities", 1e-4)
    found = np.stack([one.probabilities for one in predictor.use("onnx").score(images)])
    np.testing.assert_allclose(found, truth, atol=1e-4)
    predictor.use("torch")


def test_the_digest_follows_weights_and_what_shapes_do_not_show(
    predictor: Predictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = runtime.digest(predictor)
    with torch.no_grad():
        predictor.model.head.bias[0] += 1
        weights = runtime.digest(predictor)
        predictor.model.head.bias[0] -= 1
    network = predictor.model.backbone.model
    monkeypatch.setattr(network, "config", dataclasses.replace(network.config, layer_norm_eps=0.01))
    changed = runtime.digest(predictor)
    monkeypatch.setattr(runtime, "used_by", lambda config: [{"name": "own.py", "version": "2"}])
    assert len({before, weights, changed, runtime.digest(predictor)}) == 4


def test_a_crash_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = np.zeros((2, 2, 2, 3), np.uint8)
    with pytest.raises(runtime.RefusedRuntime, match="failed on its first images .*none.onnx"):
        runtime._ask_child(["onnx", "none.onnx", 1, False], pixels)
    monkeypatch.setattr(child_process, "python", lambda *_: [sys.executable, "-c", KILLED])
    with pytest.raises(runtime.RefusedRuntime, match="failed on its first images .a crash with exit code -4"):
        runtime._ask_child(["onnx", "none.onnx", 1, False], pixels)


def test_what_disagrees_is_refused_by_name_and_skipped_by_auto(
    predictor: Predictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def disagree(*_: object) -> None:
        raise runtime.RefusedRuntime("its outputs differ from torch's")

    monkeypatch.setattr(runtime, "_check", disagree)
    with pytest.raises(ValueError, match="--runtime onnx: its outputs differ from torch's; choose --runtime torch"):
        predictor.use("onnx")
    lines: list[str] = []
    monkeypatch.setattr(runtime, "missing_packages", lambda *names: [])
    assert predictor.use("auto", lines.append).runtime is None
    assert lines == [f"{name}: its outputs differ from torch's" for name in PACKAGES] + ["runtime torch"]
    monkeypatch.setattr(runtime, "missing_packages", lambda *names: [*names])
    assert predictor.use("auto").runtime is None


@pytest.mark.parametrize(
    ("speeds", "chosen"),
    [({"openvino": 1.2, "onnx": 1.3}, "onnx"), ({"openvino": 2.6, "onnx": 1.3}, "openvino"), ({"onnx": 0.9}, None)],
)
def test_auto_takes_the_fastest(
    predictor: Predictor, monkeypatch: pytest.MonkeyPatch, speeds: dict[str, float], chosen: str | None
) -> None:
    monkeypatch.setattr(runtime, "PACKAGES", dict.fromkeys(speeds, ""))
    monkeypatch.setattr(runtime, "missing_packages", lambda *names: [])
    monkeypatch.setattr(runtime, "version", lambda name: "1.0")
    gap = {"classes": 0.0, "probabilities": 0.0}
    monkeypatch.setattr(runtime, "_check", lambda _, name, say: gap | {"speed": speeds[name]})
    monkeypatch.setattr(runtime, "open_session", lambda name, file, threads, half: name)
    lines: list[str] = []
    engine = predictor.use("auto", lines.append).runtime
    if chosen is None:
        assert engine is None and lines == ["runtime torch: onnx is no faster on this machine"]
    else:
        assert engine is not None and engine.name == f"{chosen} 1.0"
        assert lines[0].startswith(f"runtime {chosen} 1.0: {speeds[chosen]} times as fast as torch, same classes")
    predictor.use("torch")


def test_differences_by_hand() -> None:
    truth = Outputs(np.array([[0.6, 0.4], [0.1, 0.9]]), np.array([[[0.5]], [[1.0]]]), np.zeros((2, 1)))
    found = {"probabilities": np.array([[0.59, 0.41], [0.1, 0.9]]), "mask": np.array([[[0.49]], [[1.0]]])}
    gap = runtime.compare(truth, found)
    assert gap == {"classes": 0, "probabilities": pytest.approx(0.01), "mask": pytest.approx(0.01)}
    other = runtime.compare(truth, found | {"probabilities": np.array([[0.4, 0.6], [0.1, 0.9]])})
    assert other["classes"] == 1
    for wrong in (other, gap | {"mask": 0.03}, gap | {"probabilities": float("nan")}):
        with pytest.raises(runtime.RefusedRuntime, match="differ from torch's"):
            runtime._allowed(wrong)


def test_workers_use_the_runtime_that_auto_has_found() -> None:
    def here(name: str | None) -> Predictor:
        return SimpleNamespace(runtime=name and SimpleNamespace(name=name))  # type: ignore[return-value]

    auto = RuntimeOptions(model="m", runtime="auto").resolved_runtime
    assert auto(here("openvino 2026.1")) == "openvino" and auto(here(None)) == "torch"
    assert RuntimeOptions(model="m", runtime="onnx").resolved_runtime(here("onnxruntime 1.2")) == "onnx"
    assert auto(here("torch autocast bfloat16")) == "auto"  # no name of its own: each has its device's
