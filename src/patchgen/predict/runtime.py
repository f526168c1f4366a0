"""Predictions with a faster runtime than torch: converted once, cached, and checked against torch before use.

A model is converted to ONNX and stored in the cache folder under a digest of its weights and of the versions that wrote
it. The runtime first predicts a few images in a child process, so that a crash becomes an error message. If its outputs
differ from torch's by more than `TOLERANCE`, or in a class, it is not used. `auto` uses the fastest on these images.
"""

import hashlib
import json
import platform
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch

from patchgen import __version__
from patchgen.common.child_process import child_environment, python
from patchgen.common.files import cache_dir, replacing, write_text
from patchgen.common.plugins import used_by
from patchgen.common.untrusted import read_json
from patchgen.model.tuning import merged
from patchgen.predict.export import Exported, drawn_images, missing_packages, write_graph
from patchgen.predict.predictor import Outputs, Predictor
from patchgen.predict.sessions import PACKAGES, open_session, seconds_of

RuntimeName = Literal["auto", "torch", "onnx", "openvino"]
EXTRAS = {"onnx": "export", "openvino": "openvino"}
IMAGES = 8  # number of images for the check
TOLERANCE = {"probabilities": 0.01, "mask": 0.02}  # largest differences from torch
HALF_TOLERANCE = {"probabilities": 0.02, "mask": 0.05}  # in bfloat16
WORTH = 1000  # images from which `auto` converts a model, which takes as long as some hundred predictions
SECONDS = 600  # timeout of the check in seconds
GRAPH_VERSION = 1  # of `Exported`; part of the digest


class RefusedRuntime(ValueError):
    """A runtime that cannot be used, and why."""


class Runtime(NamedTuple):
    name: str  # with its version
    answer: Callable[[Sequence[np.ndarray]], Outputs]  # images (S, S, 3) uint8, before their stains are normalised


def open_runtime(
    predictor: Predictor, runtime: RuntimeName, say: Callable[[str], None], images: int | None = None
) -> Runtime | None:
    """The runtime for a predictor; None for plain torch. For less than `WORTH` images `auto` converts no model."""
    on_cpu = predictor.device.type == "cpu"
    if runtime == "torch" or (runtime == "auto" and not on_cpu):
        return None
    if not on_cpu:
        raise ValueError(f"--runtime {runtime} works on the CPU, and this model is on {predictor.device.type}; "
                         "choose auto, or --accelerator cpu")  # fmt: skip
    if runtime == "auto":
        return _fastest(predictor, say, images is not None and images < WORTH)
    try:
        return _open(predictor, runtime, _check(predictor, runtime, say), say)
    except RefusedRuntime as error:
        raise ValueError(f"--runtime {runtime}: {error}; choose --runtime torch") from error


def _fastest(predictor: Predictor, say: Callable[[str], None], few: bool) -> Runtime | None:
    names = [name for name, package in PACKAGES.items() if not missing_packages(package)]
    if not names or (few and not _file(predictor).is_file()):
        return None
    checks: dict[str, dict[str, float]] = {}
    for name in names:
        try:
            checks[name] = _check(predictor, name, say)
        except RefusedRuntime as error:
            say(f"{name}: {error}")
    fastest = max(checks, key=lambda name: checks[name]["speed"], default="")
    if fastest and checks[fastest]["speed"] > 1:
        return _open(predictor, fastest, checks[fastest], say)
    say(f"runtime torch: {fastest} is no faster on this machine" if fastest else "runtime torch")
    return None


def _check(predictor: Predictor, runtime: str, say: Callable[[str], None]) -> dict[str, float]:
    """Differences from torch and speed beside it; an earlier check counts if machine and versions are the same."""
    if missing := missing_packages(PACKAGES[runtime]):
        raise RefusedRuntime(f"it needs {', '.join(missing)} (pip install 'patchgen[{EXTRAS[runtime]}]')")
    file, half, threads = _file(predictor), _half(predictor, runtime), torch.get_num_threads()
    if not file.is_file():
        say(f"converting the model for {runtime}; the result is cached")
        _convert(predictor, file)
    about = f"{runtime} {version(PACKAGES[runtime])} {threads} {_processor()} {half}"
    record = file.with_name(f"{runtime}-{hashlib.sha256(about.encode()).hexdigest()[:16]}.json")
    with suppress(OSError, ValueError):
        gap = read_json(record)
        if {"classes", "probabilities", "speed"} <= gap.keys():
            return _allowed(gap, half)
    images = drawn_images(IMAGES, predictor.config.image_size)
    answers = _in_child(runtime, file, threads, predictor.stained(images), half)
    gap = compare(predictor.outputs(images), answers)
    gap["speed"] = seconds_of(lambda: predictor.outputs(images)) / float(answers["seconds"])
    write_text(record, json.dumps(gap) + "\n")
    return _allowed(gap, half)


def _open(predictor: Predictor, runtime: str, gap: Mapping[str, float], say: Callable[[str], None]) -> Runtime:
    name = f"{runtime} {version(PACKAGES[runtime])}" + " bf16" * _half(predictor, runtime)
    say(f"runtime {name}: {gap['speed']:.1f} times as fast as torch, {_text(gap)}")
    session = open_session(runtime, _file(predictor), torch.get_num_threads(), _half(predictor, runtime))

    def answer(images: Sequence[np.ndarray]) -> Outputs:
        outputs = session(predictor.stained(images))
        return Outputs(outputs["probabilities"], outputs.get("mask"), outputs["features"])

    return Runtime(name, answer)


def _half(predictor: Predictor, runtime: str) -> bool:
    """Whether it computes in bfloat16; ONNX Runtime always computes in float32."""
    return predictor.half and runtime == "openvino"


def _file(predictor: Predictor) -> Path:
    return cache_dir() / "runtimes" / digest(predictor) / "model.onnx"


# Conversion


def digest(predictor: Predictor) -> str:
    """Digest of everything that affects the converted file: weights, calibration, settings and versions."""
    about = [GRAPH_VERSION, __version__, torch.__version__, *map(version, ("onnx", "onnxscript"))]
    about += [predictor.config.method, predictor.config.image_size, predictor.confidence.temperature]
    about += [predictor.config.pool, json.dumps(predictor.config.hparams, sort_keys=True, default=str)]
    backbone = predictor.model.backbone
    about += [backbone.model_type, backbone.mean, backbone.std, used_by(predictor.config)]
    about += [json.dumps(backbone.model.config.to_diff_dict(), sort_keys=True, default=str)]  # heads and the like
    sha = hashlib.sha256(repr(about).encode())
    for name, tensor in sorted(predictor.model.state_dict().items()):
        sha.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        sha.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return sha.hexdigest()[:32]


def _convert(predictor: Predictor, file: Path) -> None:
    """Convert the model; two processes may do so at once, each under its own temporary name."""
    import onnxruntime

    size, temperature = predictor.config.image_size, predictor.confidence.temperature
    graph = Exported(merged(predictor.model), temperature, ("probabilities", "features", "mask"), raw=True)
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        with replacing(file) as temporary, tempfile.TemporaryDirectory(prefix="patchgen-") as place:
            plain = Path(place) / "model.onnx"
            write_graph(predictor, graph, torch.zeros(2, size, size, 3, dtype=torch.uint8), plain)
            # fold constants: runtimes differ in how they resize position embeddings
            options = onnxruntime.SessionOptions()
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
            options.optimized_model_filepath, options.log_severity_level = str(temporary), 3
            onnxruntime.InferenceSession(plain, options, providers=["CPUExecutionProvider"])
    except ValueError as error:
        raise RefusedRuntime(str(error)) from error


# Check


def compare(truth: Outputs, answers: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Largest differences, and the number of images with another class."""
    gap = truth.differences({name: answers[name] for name in TOLERANCE if name in answers})
    gap["classes"] = float((truth.probabilities.argmax(1) != answers["probabilities"].argmax(1)).sum())
    if "alone" in answers:  # of the first image without the others
        gap["probabilities"] = max(
            gap["probabilities"], float(np.abs(truth.probabilities[:1] - answers["alone"]).max())
        )
    return gap


def _allowed(gap: dict[str, float], half: bool = False) -> dict[str, float]:
    allowed = HALF_TOLERANCE if half else TOLERANCE
    far = [name for name, most in allowed.items() if name in gap and not gap[name] <= most]  # nan is far
    if gap["classes"] or far:
        raise RefusedRuntime(f"its outputs differ from torch's ({_text(gap)})")
    return gap


def _text(gap: Mapping[str, float]) -> str:
    mask = f", mask {gap['mask']:.1e}" if "mask" in gap else ""
    same = "same classes" if not gap["classes"] else f"another class for {gap['classes']:.0f}"
    return f"{same} as torch on {IMAGES} images, probabilities within {gap['probabilities']:.1e}{mask}"


def _in_child(runtime: str, file: Path, threads: int, pixels: np.ndarray, half: bool = False) -> dict[str, np.ndarray]:
    with tempfile.TemporaryDirectory(prefix="patchgen-") as place:
        images, answers = Path(place) / "images.npy", Path(place) / "answers.npz"
        np.save(images, pixels, allow_pickle=False)
        words = runtime, str(file), str(threads), str(int(half)), str(images), str(answers)
        command = python("-m", "patchgen.predict.sessions", *words)
        try:
            child = subprocess.run(command, env=child_environment(), capture_output=True, text=True, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            raise RefusedRuntime(f"it gave no answer within {SECONDS} seconds") from None
        if child.returncode < 0:
            names = {number.value: number.name for number in signal.Signals}
            raise RefusedRuntime(f"it was killed by {names.get(-child.returncode, 'a signal')} on its first image")
        if child.returncode:
            last = (child.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise RefusedRuntime(f"it failed on its first image ({last[:200]})")
        with np.load(answers, allow_pickle=False) as outputs:
            return dict(outputs)


def _processor() -> str:
    """The features of the processor: another machine may share the cache."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return "".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
    return f"{platform.machine()} {platform.processor()}"
