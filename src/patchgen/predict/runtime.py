"""Predictions with ONNX Runtime or OpenVINO: converted once, cached, and checked against torch before use.

The cache folder has the ONNX file under a digest of the model's weights and of the versions that wrote it. The runtime
first predicts a few images in a child process: one that uses instructions which the machine only claims to support is
killed together with its process. If its outputs differ from torch's, it is not used.
"""

import hashlib
import io
import json
import platform
import sys
import tempfile
import timeit
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from patchgen import __version__
from patchgen.common.child_process import Child, ChildDied, ChildError, Message, serve
from patchgen.common.files import cache_dir, replacing, write_text
from patchgen.common.plugins import used_by
from patchgen.common.untrusted import read_json
from patchgen.model.tuning import merged
from patchgen.predict.predictor import Outputs, Predictor

Session = Callable[[np.ndarray], Mapping[str, np.ndarray]]  # images (N, S, S, 3) uint8 -> outputs by name
RuntimeName = Literal["auto", "torch", "onnx", "openvino"]
PACKAGES = {"openvino": "openvino", "onnx": "onnxruntime"}
NEEDED = ("onnx", "onnxruntime", "onnxscript")  # the extra `export`: for the conversion
EXTRAS = {"onnx": "export", "openvino": "openvino"}
IMAGES = 8  # number of images for the check
TOLERANCE = {"probabilities": 0.01, "mask": 0.02}  # largest differences from torch
HALF_TOLERANCE = {"probabilities": 0.02, "mask": 0.05}  # in bfloat16
WORTH = 1000  # images from which `auto` converts a model, which takes as long as some hundred predictions
SECONDS = 600  # timeout of the check
MEMORY = 1 << 40  # bytes of address space for the check: no limit
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


def missing_packages(*more: str) -> list[str]:
    """The packages of the extra `export`, and `more`, that are not installed."""
    return sorted(name for name in {*NEEDED, *more} if find_spec(name) is None)


def _check(predictor: Predictor, runtime: str, say: Callable[[str], None]) -> dict[str, float]:
    """Differences from torch and speed beside it; an earlier check counts if machine and versions are the same."""
    if missing := missing_packages(PACKAGES[runtime]):
        raise RefusedRuntime(f"it needs {', '.join(missing)} (pip install 'patchgen[{EXTRAS[runtime]}]')")
    from patchgen.predict.export import drawn_images

    session = _session(predictor, runtime)
    _, name, threads, half = session
    if not (file := Path(name)).is_file():
        say(f"converting the model for {runtime}; the result is cached")
        _convert(predictor, file)
    about = f"{runtime} {version(PACKAGES[runtime])} {threads} {_processor()} {half}"
    record = file.with_name(f"{runtime}-{hashlib.sha256(about.encode()).hexdigest()[:16]}.json")
    with suppress(OSError, ValueError):
        gap = read_json(record)
        if {"classes", "probabilities", "speed"} <= gap.keys():
            return _allowed(gap, half)
    images = drawn_images(IMAGES, predictor.config.image_size)
    seconds, answers = _ask_child(session, predictor.stained(images))
    gap = compare(predictor.outputs(images), answers)
    gap["speed"] = _seconds(lambda: predictor.outputs(images)) / seconds
    write_text(record, json.dumps(gap) + "\n")
    return _allowed(gap, half)


def _open(predictor: Predictor, runtime: str, gap: Mapping[str, float], say: Callable[[str], None]) -> Runtime:
    words = _session(predictor, runtime)
    name = f"{runtime} {version(PACKAGES[runtime])}" + " bf16" * words[-1]
    say(f"runtime {name}: {gap['speed']:.1f} times as fast as torch, {_text(gap)}")
    session = open_session(*words)

    def answer(images: Sequence[np.ndarray]) -> Outputs:
        outputs = session(predictor.stained(images))
        return Outputs(outputs["probabilities"], outputs.get("mask"), outputs["features"])

    return Runtime(name, answer)


def open_session(runtime: str, file: str, threads: int, half: bool) -> Session:
    """A function from images to the model's outputs by name; `half`: bfloat16 in OpenVINO."""
    if runtime == "openvino":
        # with this package installed, importing openvino sends telemetry; PatchGen never does
        sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
        import openvino

        settings: dict[str, Any] = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": threads}
        settings["INFERENCE_PRECISION_HINT"] = "bf16" if half else "f32"  # by default it chooses bfloat16 by itself
        request = openvino.Core().compile_model(file, "CPU", settings).create_infer_request()
        return lambda pixels: {port.any_name: data for port, data in request.infer([pixels]).items()}
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3  # errors alone
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return lambda pixels: dict(zip(names, session.run(names, {"pixels": pixels}), strict=True))


def _session(predictor: Predictor, runtime: str) -> tuple[str, str, int, bool]:
    """The arguments of `open_session`; ONNX Runtime always computes in float32."""
    return runtime, str(_file(predictor)), torch.get_num_threads(), predictor.half and runtime == "openvino"


def _file(predictor: Predictor) -> Path:
    return cache_dir() / "runtimes" / digest(predictor) / "model.onnx"


def digest(predictor: Predictor) -> str:
    """Digest of everything that affects the converted file: weights, calibration, settings and versions."""
    backbone = predictor.model.backbone
    about = [GRAPH_VERSION, __version__, torch.__version__, *map(version, ("onnx", "onnxscript")), predictor.config]
    about += [predictor.confidence.temperature, backbone.model_type, backbone.mean, backbone.std]
    about += [used_by(predictor.config), sorted(backbone.model.config.to_diff_dict().items())]  # heads and the like
    sha = hashlib.sha256(repr(about).encode())
    for name, tensor in sorted(predictor.model.state_dict().items()):
        sha.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        sha.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return sha.hexdigest()[:32]


def _convert(predictor: Predictor, file: Path) -> None:
    """Convert the model; two processes may do so at once, each under its own temporary name."""
    import onnxruntime

    from patchgen.predict.export import Exported, write_graph

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


def compare(truth: Outputs, answers: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Largest differences, and the number of images with another class."""
    gap = truth.differences({name: answers[name] for name in TOLERANCE if name in answers})
    gap["classes"] = float((truth.probabilities.argmax(1) != answers["probabilities"].argmax(1)).sum())
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


def _ask_child(session: Sequence[Any], pixels: np.ndarray) -> tuple[float, dict[str, np.ndarray]]:
    """The seconds and the outputs of a session in a child process."""
    child = Child(__name__, SECONDS)
    try:
        answer, data = child.ask({"session": session, "shape": pixels.shape}, pixels.tobytes())
    except (ChildDied, ChildError) as error:
        raise RefusedRuntime(f"it failed on its first images ({error})") from error
    finally:
        child.close()
    with np.load(io.BytesIO(data), allow_pickle=False) as outputs:
        return answer["seconds"], dict(outputs)


def _answer_in_child(request: dict[str, Any], data: bytes) -> Message:
    pixels, session = np.frombuffer(data, np.uint8).reshape(request["shape"]), open_session(*request["session"])
    first, rest = session(pixels[:1]), session(pixels[1:])  # a free batch size must work at one image and at many
    outputs = io.BytesIO()
    np.savez(outputs, **{name: np.concatenate([first[name], rest[name]]) for name in first})  # type: ignore[arg-type]
    return {"seconds": _seconds(lambda: session(pixels))}, outputs.getvalue()


def _seconds(work: Callable[[], object]) -> float:
    """The shortest of three times, which other programs disturb least."""
    return min(timeit.repeat(work, number=1, repeat=3))


def _processor() -> str:
    """The features of the processor: another machine may share the cache."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return "".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
    return f"{platform.machine()} {platform.processor()}"


if __name__ == "__main__":
    serve(_answer_in_child, MEMORY)
