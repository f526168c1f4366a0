"""A converted model in ONNX Runtime or OpenVINO. Nothing here imports torch.

    python -m patchgen.predict.sessions openvino model.onnx 2 0 images.npy answers.npz

As a program it predicts a few images in a separate process, because a runtime that uses instructions that the machine
only claims to support is killed together with its process. It also times them.
"""

import sys
import timeit
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

Answer = Callable[[np.ndarray], Mapping[str, np.ndarray]]
PACKAGES = {"openvino": "openvino", "onnx": "onnxruntime"}
REPEATS = 3


def open_session(runtime: str, file: Path, threads: int, half: bool) -> Answer:
    """A function from images (N, S, S, 3) uint8 to the model's outputs by name; `half`: bfloat16 in OpenVINO."""
    if runtime == "openvino":
        return _openvino(file, threads, half)
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3  # errors alone
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return lambda pixels: dict(zip(names, session.run(names, {"pixels": pixels}), strict=True))


def _openvino(file: Path, threads: int, half: bool) -> Answer:
    # with this package installed, importing openvino sends telemetry; PatchGen never does
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    import openvino

    settings: dict[str, Any] = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": threads}
    settings["INFERENCE_PRECISION_HINT"] = "bf16" if half else "f32"  # by default it chooses bfloat16 by itself
    compiled = openvino.Core().compile_model(str(file), "CPU", settings)
    request, names = compiled.create_infer_request(), [output.any_name for output in compiled.outputs]

    def answer(pixels: np.ndarray) -> dict[str, np.ndarray]:
        request.infer([pixels])
        return {name: request.get_output_tensor(i).data.copy() for i, name in enumerate(names)}

    return answer


def seconds_of(work: Callable[[], object]) -> float:
    """The shortest of a few times, which other programs disturb least."""
    return min(timeit.repeat(work, number=1, repeat=REPEATS))


def main(runtime: str, file: str, threads: str, half: str, images: str, answers: str) -> None:
    answer, pixels = open_session(runtime, Path(file), int(threads), half == "1"), np.load(images, allow_pickle=False)
    alone = answer(pixels[:1])["probabilities"]  # a free batch size must work at one image and at many
    together = answer(pixels)
    np.savez(answers, alone=alone, seconds=seconds_of(lambda: answer(pixels)), **together)  # type: ignore[arg-type]


if __name__ == "__main__":
    main(*sys.argv[1:])
