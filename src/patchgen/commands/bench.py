"""patchgen bench SUBJECT: the cost of training and prediction on this machine. Subjects are listed in `SUBJECTS`."""

from __future__ import annotations

import json as to_json
import sys
from collections.abc import Callable, Mapping
from typing import Any, Literal

from patchgen.commands import announce, choose, parse, print_table


def bench_step(
    backbone: str = "dinov2-small", image_size: int = 224, batch: int = 8, repeats: int = 5, json: bool = False
) -> None:
    """Time a training step of PatchGen and patchgen-select against LP+LN, and LP+LN against itself.

    Args:
        backbone: A name (its architecture, random weights), or a hub id, folder or .safetensors file.
        image_size: Pixels of the square images.
        batch: Images per step.
        repeats: Timed steps of each method, after a warm-up.
        json: Print JSON instead of tables.
    """
    announce()
    from patchgen.common.progress import Progress
    from patchgen.diagnose import cost

    with Progress("bench step", cost.pieces(repeats)) as bar:
        found = cost.measure_step(backbone, image_size=image_size, batch=batch, repeats=repeats, report=_reporter(bar))
    if json:
        print(to_json.dumps(found, indent=2))
    else:
        _print_step(found)


def _print_step(found: Mapping[str, Any]) -> None:
    from patchgen.diagnose.cost import AGAIN, BASELINE, TARGET

    print(
        f"{found['backbone']['resolved']}, {found['image_size']} px ({found['patches']} patches), batch "
        f"{found['batch']}, {_machine(found)}"
    )
    header = (
        "method", "median s", "fastest s", "CPU s", "GFLOPs per image", "peak MB", "trained parameters",
        "module's, of the backbone",
    )  # fmt: skip
    rows = [
        (name, f"{m['median_seconds']:.3f}", f"{m['fastest_seconds']:.3f}", f"{m['median_cpu_seconds']:.3f}",
         f"{m['gflops_per_image']:.2f}", f"{m['peak_bytes'] / 1e6:.1f}", f"{m['trainable_parameters']:,}",
         f"{m['module_parameters']:,}, {m['module_of_backbone']:.1%}" if m["module_parameters"] else "")
        for name, m in found["methods"].items()
    ]  # fmt: skip
    print_table(header, rows)
    ratios = []
    for name, method in found["methods"].items():
        r = method["ratio"]
        ratios.append((
            AGAIN if name == BASELINE else name,
            f"{r['of_medians']:.3f}", f"{r['lower_quartile']:.3f}-{r['upper_quartile']:.3f}", f"{r['of_fastest']:.3f}",
            f"{r['of_cpu_medians']:.3f}", f"{r['floor']:.3f}", f"<= {TARGET:.2f}" if name == "patchgen" else "",
            "" if r["conclusive"] else "inconclusive",
        ))  # fmt: skip
    print_table(("step time / LP+LN's", "medians", "quartiles", "fastest", "CPU s", "arithmetic", "target", ""), ratios)
    if not all(method["ratio"]["conclusive"] for method in found["methods"].values()):
        print("inconclusive: the quartiles are too far apart; use more --repeats, or a machine with less to do")


def bench_predict(
    model: str | None = None,
    backbone: str = "dinov2-small",
    method: str = "patchgen-select",
    image_size: int = 224,
    images: int = 64,
    pixels: int = 512,
    batches: tuple[int, ...] = (1, 8, 32),
    repeats: int = 3,
    json: bool = False,
) -> None:
    """Images per second of the model alone and of all of `predict` on generated JPEG files, per batch size.

    Args:
        model: A model or run folder to measure, instead of an untrained model of --backbone, --method, --image-size.
        backbone: A name (its architecture, random weights), or a hub id, folder or .safetensors file.
        method: Method of the untrained model.
        image_size: Pixels of the square images that the untrained model reads.
        images: JPEG files, written to a temporary folder.
        pixels: Side of the JPEG files.
        batches: Images per forward pass; each is measured.
        repeats: Timed passes over all files, at least 2, after a warm-up.
        json: Print JSON instead of a table.
    """
    announce()
    from patchgen.common.progress import Progress
    from patchgen.predict.predictor import load_predictor
    from patchgen.predict.throughput import measure_predict, untrained_predictor

    predictor = load_predictor(model) if model else untrained_predictor(backbone, method, image_size)
    with Progress("bench predict", len(batches) * repeats) as bar:
        found = measure_predict(
            predictor, images=images, pixels=pixels, batches=batches, repeats=repeats, report=_reporter(bar)
        )
    if json:
        print(to_json.dumps(found, indent=2))
    else:
        _print_predict(found)


def _print_predict(found: Mapping[str, Any]) -> None:
    print(
        f"{found['backbone']}, {found['method']}, {found['image_size']} px, {found['images']} JPEG files of "
        f"{found['pixels']} px, {_machine(found)}"
    )
    rows = [
        (str(row["batch"]), *(f"{row['images_per_second'][name]:.1f}" for name in ("model", "predict")),
         f"{row['predict_over_model']:.2f}", f"{row['model_over_first']:.2f}",
         " / ".join(f"{100 * row['spread'][name]:.0f} %" for name in ("model", "predict")),
         "" if row["conclusive"] else "inconclusive")
        for row in found["batches"]
    ]  # fmt: skip
    against = f"model / at batch {found['batches'][0]['batch']}"
    header = ("batch", "model, images/s", "predict, images/s", "predict / model", against, "spread", "")
    print_table(header, rows)
    if not all(row["conclusive"] for row in found["batches"]):
        print(
            "inconclusive: repeated measurements of the same thing differ by more than 15 %; use more --images and "
            "--repeats, or a machine with less to do"
        )


def bench_runtime(
    model: str,
    files: tuple[str, ...] = (),
    runtimes: tuple[Literal["auto", "torch", "onnx", "openvino"], ...] = ("torch", "auto"),
    images: int = 64,
    pixels: int = 512,
    batch: int = 32,
    repeats: int = 5,
    json: bool = False,
) -> None:
    """Compare `predict` on each runtime with the first one: speed-up and difference of the predictions.

    Args:
        model: A model or run folder.
        files: Images, folders or patterns; generated JPEG files by default.
        runtimes: Two or more; the others are compared with the first.
        images: Maximum number of files.
        pixels: Side of generated files.
        batch: Images per forward pass.
        repeats: Timed turns, at least 2, after a warm-up.
        json: Print JSON instead of a table.
    """
    announce()
    import tempfile
    from pathlib import Path

    from patchgen.commands.predict import find_images
    from patchgen.common.progress import Progress
    from patchgen.predict.predictor import load_predictor
    from patchgen.predict.throughput import measure_runtimes, write_images

    predictor = load_predictor(model)
    with tempfile.TemporaryDirectory() as place, Progress("bench runtime", repeats) as bar:
        found_files = find_images(files)[:images] if files else write_images(Path(place), images, pixels)
        found = measure_runtimes(
            predictor, found_files, runtimes, batch=batch, repeats=repeats, report=_reporter(bar), say=bar.say
        )
    if json:
        print(to_json.dumps(found, indent=2))
    else:
        _print_runtime(found)


def _print_runtime(found: Mapping[str, Any]) -> None:
    print(f"{found['backbone']}, {found['image_size']} px, {found['images']} images, {_machine(found)}")
    rows = [
        (row["engine"], _ratio(row["speed"]), _ratio(row["predict_over_model"]), f"{100 * row['same_class']:.1f}",
         f"{row['probabilities']:.1e}", "" if row["masks"] is None else f"{row['masks']:.1e}",
         "" if row["speed"]["conclusive"] and row["predict_over_model"]["conclusive"] else "inconclusive")
        for row in found["runtimes"].values()
    ]  # fmt: skip
    print_table(("runtime", "predict: times as fast", "predict / model", "same class, %", "probabilities", "masks", ""),
                rows)  # fmt: skip
    if any(row[-1] for row in rows):
        print("inconclusive: the quartiles are too far apart; use more --repeats, or a machine with less to do")


def _ratio(ratio: Mapping[str, Any]) -> str:
    return f"{ratio['median']:.2f} ({ratio['quartiles'][0]:.2f}-{ratio['quartiles'][1]:.2f})"


def _machine(found: Mapping[str, Any]) -> str:
    return f"{found['machine']['device']}, {found['machine']['threads']} threads"


def _reporter(bar: Any) -> Callable[[str], None]:
    """A callback that prints a line and advances the bar."""

    def report(line: str) -> None:
        bar.advance()
        bar.say(line)

    return report


SUBJECTS: dict[str, Callable[..., None]] = {
    "step": bench_step,
    "predict": bench_predict,
    "runtime": bench_runtime,
}


def main(argv: list[str]) -> int:
    subject, rest = choose(SUBJECTS, "bench", argv)
    try:
        if subject is not None:
            parse(subject, f"bench {argv[0]}", rest)
    except KeyboardInterrupt:
        print("patchgen bench: stopped before the end; nothing is reported", file=sys.stderr)
        return 130
    return 0
