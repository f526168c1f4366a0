"""Export a classifier as one ONNX file that includes preprocessing and calibration, and verify its outputs.

    differences = export(load_predictor("tiles-model"), Path("tiles.onnx"), images)

Input `pixels` (N, 3, S, S) float32: RGB, resized to the square S x S, divided by 255. The backbone's mean and deviation
and the temperature are part of the graph. Outputs: `probabilities` (N, C), calibrated, and where the method has one,
`mask` (N, h, w) in [0, 1]. N is dynamic. Classes, preprocessing and licence are in the file's metadata.
"""

from __future__ import annotations

import copy
import json
import logging
import warnings
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from patchgen import __version__
from patchgen.common.files import replacing
from patchgen.data.augment import normalize
from patchgen.draw.overlay import NOTICE
from patchgen.model.classifier import Classifier
from patchgen.model.tuning import merged
from patchgen.predict.predictor import Predictor

NOISE_FACTOR, LEAST, MOST = 20, 2e-6, 1e-2  # an output may differ by 20 times the network's own rounding in float32
NOISE_IMAGES = 8
NEEDED = ("onnx", "onnxruntime", "onnxscript")
BATCHES = (1, 32)  # a dynamic batch size must work with one image and with many


class Difference(NamedTuple):
    """The largest difference of an output from the original's, and what is allowed."""

    value: float
    allowed: float


class WholeModel(nn.Module):
    """Raw pixels in [0, 1] -> calibrated probabilities (and mask)."""

    def __init__(self, model: Classifier, temperature: float) -> None:
        super().__init__()
        self.model, self.temperature = model, temperature

    def forward(self, pixels: Tensor) -> tuple[Tensor, ...]:
        backbone = self.model.backbone
        out = self.model(normalize(pixels, backbone.mean, backbone.std))
        probabilities = (out.logits / self.temperature).softmax(1)
        return (probabilities,) if out.mask is None else (probabilities, out.mask.unflatten(1, self.model.grid))


def require_extra() -> None:
    """ValueError if the packages of the extra `export` are missing."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise ValueError(f"export needs {', '.join(missing)}: install them with `pip install 'patchgen[export]'`")


def refuse_stain(predictor: Predictor, whose: str) -> None:
    """ValueError for a model with stain normalisation, which cannot be exported."""
    if predictor.stain:
        raise ValueError(
            f"this model normalises the stains of every image first (--stain macenko), which {whose} cannot do; "
            "use `patchgen predict`, or train without --stain"
        )


class _InDouble(TorchFunctionMode):
    """Lets `.float()` inside a model keep double precision."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0].double() if func is Tensor.float else func(*args, **(kwargs or {}))


@torch.inference_mode()
def float32_noise(predictor: Predictor, images: Sequence[np.ndarray]) -> dict[str, float]:
    """How much each output changes when the same network is computed in double precision: its rounding in float32."""
    pixels = torch.from_numpy(pixels_of(images[:NOISE_IMAGES]))
    single = WholeModel(predictor.model, predictor.confidence.temperature)(pixels.to(predictor.device))
    model = copy.deepcopy(predictor.model).cpu().double()
    with _InDouble():
        double = WholeModel(model, predictor.confidence.temperature)(pixels.double())
    assert double[0].dtype == torch.float64
    names = ("probabilities", "mask")
    return {n: float((a.cpu() - b).abs().max()) for n, a, b in zip(names, single, double, strict=False)}


def judged(differences: Mapping[str, float], noise: Mapping[str, float], file: str) -> dict[str, Difference]:
    """The differences with what is allowed of each.

    Raises:
        ValueError: one is larger.
    """
    allowed = {name: min(MOST, max(LEAST, NOISE_FACTOR * noise[name])) for name in differences}
    found = {name: Difference(value, allowed[name]) for name, value in differences.items()}
    wrong = [f"{n} by {d.value:.1e}, allowed {d.allowed:.1e}" for n, d in found.items() if not d.value <= d.allowed]
    if wrong:
        raise ValueError(f"the outputs of {file} differ from the model's ({'; '.join(wrong)}); it was removed")
    return found


def export(predictor: Predictor, target: Path, images: Sequence[np.ndarray]) -> dict[str, Difference]:
    """Write the file and return the largest difference of each output from the original's.

    Args:
        images: (S, S, 3) uint8, on which the outputs are compared.

    Raises:
        ValueError: a difference above `NOISE_FACTOR` times the network's rounding, or a model that cannot be
            exported; then no file is written.
    """
    require_extra()
    refuse_stain(predictor, "an ONNX file")
    predictor.score(images[:1])  # refuses a model whose output is not finite
    with replacing(target) as temporary:
        noise = float32_noise(predictor, images)
        _write(predictor, temporary)
        return judged(compare(predictor, temporary, images), noise, "the ONNX file")


def _write(predictor: Predictor, path: Path) -> None:
    import onnx

    size = predictor.config.image_size
    whole = WholeModel(merged(predictor.model.cpu()), predictor.confidence.temperature)
    example = torch.rand(2, 3, size, size, generator=torch.Generator().manual_seed(0))
    names = ["probabilities", "mask"] if predictor.model.has_mask else ["probabilities"]
    write_graph(predictor, whole, example, names, path)
    written = onnx.load(path)
    onnx.helper.set_model_props(written, _metadata(predictor))
    onnx.save(written, path)


def write_graph(predictor: Predictor, whole: nn.Module, example: Tensor, names: Sequence[str], path: Path) -> None:
    """A module around the predictor's model as ONNX: input `pixels` like the example, of any number, outputs by name.

    Raises:
        ValueError: the model cannot be exported.
    """
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    predictor.model.cpu()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter warns of its own internals
        try:
            torch.onnx.export(
                whole.eval(), (example,), str(path), dynamo=True, external_data=False, input_names=["pixels"],
                output_names=list(names), dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=65536)},),
                verbose=False,
            )  # fmt: skip
        except torch.onnx.errors.OnnxExporterError as error:
            reason = str(error).strip().splitlines()[0]
            raise ValueError(f"method {predictor.config.method!r} cannot be exported to ONNX: {reason}") from error
        finally:
            predictor.model.to(predictor.device)


def _metadata(predictor: Predictor) -> dict[str, str]:
    backbone = predictor.model.backbone
    size = predictor.config.image_size
    facts: dict[str, Any] = {
        "classes": json.dumps(list(predictor.classes)),
        "preprocessing": f"RGB, upright, resized to {size} x {size} ({backbone.interpolation}, antialiased), divided "
        f"by 255, as (N, 3, {size}, {size}) float32; mean and deviation are subtracted in the graph",
        "image_size": size,
        "interpolation": backbone.interpolation,
        "temperature": predictor.confidence.temperature,
        "method": predictor.config.method,
        "backbone": backbone.resolved,
        "backbone_licence": backbone.licence,
        "patchgen": __version__,
    }
    if predictor.model.has_mask:
        facts["mask"] = (
            f"{NOTICE}; {predictor.model.grid[0]} x {predictor.model.grid[1]} patches, 0 left out, 1 selected"
        )
    return {name: str(value) for name, value in facts.items()}


def compare(predictor: Predictor, path: Path, images: Sequence[np.ndarray]) -> dict[str, float]:
    """The largest absolute difference of each output over the images, at several batch sizes."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    worst = dict.fromkeys(names, 0.0)
    for batch in BATCHES:
        for start in range(0, len(images) if batch > 1 else 1, batch):
            part = images[start : start + batch]
            found = session.run(names, {"pixels": pixels_of(part)})
            expected = predictor.score(part)
            truth: dict[str, Any] = {name: [getattr(one, name) for one in expected] for name in names}
            for name, values in zip(names, found, strict=True):
                # comparisons with nan are always false, and must not look like agreement
                gap = float(np.abs(np.asarray(values) - np.stack(truth[name])).max())
                worst[name] = gap if np.isnan(gap) else max(worst[name], gap)
    return worst


def pixels_of(images: Sequence[np.ndarray]) -> np.ndarray:
    """(S, S, 3) uint8 images -> the file's input, (N, 3, S, S) float32 in [0, 1]."""
    return np.stack(images).transpose(0, 3, 1, 2).astype(np.float32) / 255


def drawn_images(count: int, size: int) -> list[np.ndarray]:
    """Generated images for the comparison if none are given: smooth colour fields with noise."""
    rng = np.random.default_rng(0)
    down, right = np.mgrid[:size, :size] / size  # (S, S) each
    fields = []
    for _ in range(count):
        a, b, phase = rng.uniform(1, 12, 3), rng.uniform(1, 12, 3), rng.uniform(0, 6, 3)
        waves = np.sin(down[..., None] * a + right[..., None] * b + phase)  # (S, S, 3)
        fields.append((127 + 100 * waves + rng.normal(0, 10, waves.shape)).clip(0, 255).astype(np.uint8))
    return fields
