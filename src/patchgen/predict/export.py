"""Export a classifier as one ONNX file, or as a folder for WSInfer and QuPath's WSInfer extension, and verify it.

ONNX: `pixels` (N, 3, S, S), RGB / 255 -> `probabilities` (N, C), calibrated, and `mask` (N, h, w) if there is one; the
metadata says the rest. WSInfer: TorchScript from normalised pixels to logits over the temperature, and config.json.
"""

import copy
import json
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from patchgen import __version__
from patchgen.common.files import replacing, replacing_folder
from patchgen.common.text import first_line, json_text
from patchgen.draw.overlay import NOTICE
from patchgen.model.classifier import Classifier
from patchgen.model.tuning import merged
from patchgen.predict.predictor import Predictor
from patchgen.predict.runtime import missing_packages, open_session

NOISE_FACTOR, LEAST, MOST = 20, 2e-6, 1e-2  # an output may differ by 20 times the network's own rounding in float32
NOISE_IMAGES = 8
TORCHSCRIPT, CONFIG = "torchscript_model.pt", "config.json"
OUTPUTS = ("probabilities", "mask")
BATCH = 32  # a dynamic batch size must work with one image and with many


class Difference(NamedTuple):
    value: float  # the largest difference of an output from the original's
    allowed: float


class Exported(nn.Module):
    """Pixels (N, 3, S, S) in [0, 1], or `raw` (N, S, S, 3) uint8 -> those of `outputs` that the model has, in order."""

    def __init__(self, model: Classifier, temperature: float, outputs: Sequence[str], raw: bool = False) -> None:
        super().__init__()
        self.model, self.temperature, self.raw = model, temperature, raw
        self.outputs = [name for name in outputs if name != "mask" or model.has_mask]

    def forward(self, pixels: Tensor) -> tuple[Tensor, ...]:
        if self.raw:
            pixels = pixels.permute(0, 3, 1, 2).float() / 255
        out = self.model(self.model.backbone.normalised(pixels))
        outputs = {"probabilities": (out.logits / self.temperature).softmax(1), "features": out.features}
        if out.mask is not None:
            outputs["mask"] = out.mask.unflatten(1, self.model.grid)
        return tuple(outputs[name] for name in self.outputs)


class Logits(nn.Module):
    """Normalised pixels -> logits whose softmax is calibrated."""

    def __init__(self, model: Classifier, temperature: float) -> None:
        super().__init__()
        self.model, self.temperature = model, temperature

    def forward(self, pixels: Tensor) -> Tensor:
        return self.model(pixels).logits / self.temperature


def require_extra() -> None:
    """ValueError if the packages of the extra `export` are missing."""
    if missing := missing_packages():
        raise ValueError(f"export needs {', '.join(missing)}: install them with `pip install 'patchgen[export]'`")


def export(predictor: Predictor, target: Path, images: Sequence[np.ndarray]) -> dict[str, Difference]:
    """Write the file and return the largest difference of each output from the original's on images (S, S, 3) uint8.

    ValueError, and no file, for a difference above `NOISE_FACTOR` times the network's own rounding.
    """
    require_extra()
    _check_exportable(predictor, images, "an ONNX file")
    whole = Exported(merged(predictor.model.cpu()), predictor.confidence.temperature, OUTPUTS)
    with replacing(target) as temporary:
        write_graph(predictor, whole, _example(predictor), temporary)
        import onnx

        written = onnx.load(temporary)
        onnx.helper.set_model_props(written, _metadata(predictor))
        onnx.save(written, temporary)
        session = open_session("onnx", str(temporary), torch.get_num_threads(), half=False)
        return _verified(predictor, images, lambda part: session(_pixels_of(part)), "the ONNX file")


def write_graph(predictor: Predictor, whole: Exported, example: Tensor, path: Path) -> None:
    """A module around the predictor's model as ONNX: input `pixels` like the example, of any number."""
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    predictor.model.cpu()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter warns of its own internals
        try:
            torch.onnx.export(
                whole.eval(), (example,), str(path), dynamo=True, external_data=False, input_names=["pixels"],
                output_names=whole.outputs, dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=65536)},),
                verbose=False,
            )  # fmt: skip
        except torch.onnx.errors.OnnxExporterError as error:
            raise ValueError(f"{predictor.config.method!r} cannot be exported to ONNX: {first_line(error)}") from error
        finally:
            predictor.model.to(predictor.device)


def _example(predictor: Predictor) -> Tensor:
    size = predictor.config.image_size
    return torch.rand(2, 3, size, size, generator=torch.Generator().manual_seed(0))


def _metadata(predictor: Predictor) -> dict[str, str]:
    model, size = predictor.model, predictor.config.image_size
    backbone = model.backbone
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
    if model.has_mask:
        facts["mask"] = f"{NOTICE}; {model.grid[0]} x {model.grid[1]} patches, 0 left out, 1 selected"
    return {name: str(value) for name, value in facts.items()}


# WSInfer


def check_folder(target: Path) -> None:
    """Raise ValueError if the target is anything but an earlier export for WSInfer."""
    if target.is_file():
        raise ValueError(f"--out {target} is a file; for WSInfer it is a folder: choose another name")
    names = sorted(path.name for path in target.iterdir()) if target.is_dir() else []
    if other := [name for name in names if name not in (TORCHSCRIPT, CONFIG)]:
        raise ValueError(f"--out {target} is not empty (it holds {other[0]}); choose another folder")


def export_wsinfer(
    predictor: Predictor, target: Path, images: Sequence[np.ndarray], *, spacing: float, patch: int
) -> dict[str, Difference]:
    """The same as a folder for WSInfer: patches of `patch` pixels, before resizing, at `spacing` microns per pixel."""
    check_folder(target)
    _check_exportable(predictor, images, "WSInfer")
    with replacing_folder(target) as temporary, warnings.catch_warnings():
        # of TorchScript's age, and of fixed shapes, which are intended except for N: `_verified` checks that
        warnings.simplefilter("ignore")
        file = str(temporary / TORCHSCRIPT)
        try:
            # on the CPU, from which any device can load it
            whole = Logits(merged(predictor.model.cpu()), predictor.confidence.temperature).eval()
            with torch.inference_mode():
                torch.jit.trace(whole, _example(predictor), check_trace=False).save(file)
        except (RuntimeError, torch.jit.TracingCheckError) as error:
            raise ValueError(f"{predictor.config.method!r} cannot become TorchScript: {first_line(error)}") from error
        finally:
            predictor.model.to(predictor.device)
        (temporary / CONFIG).write_text(json_text(_wsinfer_config(predictor, spacing, patch)) + "\n", encoding="utf-8")
        loaded = torch.jit.load(file, map_location="cpu")

        @torch.inference_mode()
        def run(part: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
            return {"probabilities": loaded(predictor.inputs(part).cpu()).softmax(1).numpy()}

        return _verified(predictor, images, run, "the TorchScript file")


def _wsinfer_config(predictor: Predictor, spacing: float, patch: int) -> dict[str, Any]:
    """The fields that WSInfer's schema 1.0 requires."""
    backbone, size = predictor.model.backbone, predictor.config.image_size
    return {
        "spec_version": "1.0",
        "architecture": f"patchgen {predictor.config.method} on {backbone.resolved}",
        "num_classes": len(predictor.classes),
        "class_names": list(predictor.classes),
        "patch_size_pixels": patch,
        "spacing_um_px": spacing,
        "transform": [
            {"name": "Resize", "arguments": {"size": size}},
            {"name": "ToTensor"},
            {"name": "Normalize", "arguments": {"mean": list(backbone.mean), "std": list(backbone.std)}},
        ],
    }


def _check_exportable(predictor: Predictor, images: Sequence[np.ndarray], format: str) -> None:
    """ValueError for a model with stain normalisation, or with outputs that are not finite."""
    if predictor.stain:
        raise ValueError(f"this model normalises stains (--stain macenko), which {format} cannot do; use `patchgen "
                         "predict`, or train without --stain")  # fmt: skip
    predictor.score(images[:1])


def _verified(
    predictor: Predictor, images: Sequence[np.ndarray], run: Callable[[Sequence[np.ndarray]], Mapping[str, np.ndarray]],
    file: str,
) -> dict[str, Difference]:  # fmt: skip
    """The largest difference of each output of `run`, at several batch sizes; ValueError for one that is too large."""
    parts = [images[:1], *(images[start : start + BATCH] for start in range(0, len(images), BATCH))]
    gaps = [predictor.outputs(part).differences(run(part)) for part in parts]
    noise = _float32_noise(predictor, images)
    differences = {
        name: Difference(float(np.max([gap[name] for gap in gaps])), min(MOST, max(LEAST, NOISE_FACTOR * noise[name])))
        for name in gaps[0]
    }
    far = {name: each for name, each in differences.items() if not each.value <= each.allowed}  # also nan
    if wrong := [f"{name} by {each.value:.1e}, allowed {each.allowed:.1e}" for name, each in far.items()]:
        raise ValueError(f"the outputs of {file} differ from the model's ({'; '.join(wrong)}); it was removed")
    return differences


class _InDouble(TorchFunctionMode):
    """Lets `.float()` inside a model keep double precision."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0].double() if func is Tensor.float else func(*args, **(kwargs or {}))


@torch.inference_mode()
def _float32_noise(predictor: Predictor, images: Sequence[np.ndarray]) -> dict[str, float]:
    """How much each output changes when the same network is computed in double precision: its rounding in float32."""
    pixels = torch.from_numpy(_pixels_of(images[:NOISE_IMAGES]))
    whole = Exported(predictor.model, predictor.confidence.temperature, OUTPUTS)
    single = whole(pixels.to(predictor.device))
    with _InDouble():
        double = copy.deepcopy(whole).cpu().double()(pixels.double())
    assert double[0].dtype == torch.float64
    return {n: float((a.cpu() - b).abs().max()) for n, a, b in zip(whole.outputs, single, double, strict=True)}


def _pixels_of(images: Sequence[np.ndarray]) -> np.ndarray:
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
