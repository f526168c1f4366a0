"""Options that commands share: the model with its device and runtime, the images, and the engine of the work."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import tyro

from patchgen.commands import Maybe
from patchgen.common.files import expanded
from patchgen.common.text import printable

if TYPE_CHECKING:
    from patchgen.predict.predictor import Checkpoint, Predictor, Unreadable
    from patchgen.predict.runtime import RuntimeName
    from patchgen.slides.slide import UnreadableSlide
    from patchgen.sweep.jobs import Unit


@dataclass(frozen=True, kw_only=True)
class WeightsOptions:
    checkpoint: Literal["selected", "swad"] = "selected"
    """Of a run: the checkpoint chosen on source validation, or the weight average of one trained with --swad."""
    backbone: Maybe[str] = None
    """Where the backbone's weights are, if the model leaves them out and they are not where it says."""
    allow_download: bool = False
    """Let the model's own settings choose which backbone is downloaded."""


@dataclass(frozen=True, kw_only=True)
class LoadOptions(WeightsOptions):
    accelerator: Maybe[str] = None
    """cpu, cuda, mps or auto; by default the CPU for a run that was trained on it, else auto."""
    precision: Literal["32-true", "bf16-mixed", "auto"] = "32-true"
    """Precision of the forward pass; `auto`: bf16-mixed where the device has native bfloat16, else 32-true."""

    @property
    def how(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("backbone", "allow_download", "accelerator", "precision")}


@dataclass(frozen=True, kw_only=True)
class ModelOptions(LoadOptions):
    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """Model folder of `patchgen fit`, or run folder of `patchgen train`."""


@dataclass(frozen=True, kw_only=True)
class RuntimeOptions(ModelOptions):
    runtime: Literal["auto", "torch", "onnx", "openvino"] = "auto"
    """Inference runtime; `auto` is the fastest one that is installed and agrees with torch on this machine."""

    def load(self, images: int) -> "Predictor":
        """The classifier on the chosen runtime, which is reported on stderr; for a few images nothing is converted."""
        return _load(self.model, self.checkpoint, self.runtime, images, **self.how)

    def load_once(self) -> "Predictor":
        """The same for many pieces of work of one process, which share the model."""
        # their number is not known yet: `auto` uses what is converted already
        return _load_once(self.model, self.checkpoint, self.runtime, 0, **self.how)

    def resolved_runtime(self, predictor: "Predictor") -> "RuntimeName":
        """The runtime that `auto` resolved to in this process: workers must use the same one or fail."""
        runtime = predictor.runtime
        if self.runtime != "auto" or (runtime and runtime.name.startswith("torch")):  # half, if a worker has a GPU
            return self.runtime
        return cast("RuntimeName", runtime.name.split()[0]) if runtime else "torch"


def _load(model: str, checkpoint: "Checkpoint", runtime: "RuntimeName", images: int, **how: Any) -> "Predictor":
    from patchgen.predict.predictor import load_predictor

    predictor = load_predictor(model, checkpoint, **how)
    return predictor.use(runtime, partial(print, file=sys.stderr, flush=True), images)


_load_once = lru_cache(1)(_load)


@dataclass(frozen=True, kw_only=True)
class StrictOptions:
    strict: bool = False
    """Exit with code 1 if any image could not be read, not only if none could."""


@dataclass(frozen=True, kw_only=True)
class ImageOptions(StrictOptions):
    images: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="IMAGES...")]
    """Image files, folders (searched with their sub-folders) and patterns such as 'photos/**/*.jpg'."""


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    engine: Literal["local", "ray"] = "local"
    """Where to run: processes of this machine, or Ray tasks, also on a cluster (extra `ray`)."""
    workers: int | None = None
    """Parallel processes. Local: 1 by default. Ray: by default as many as its CPUs allow."""
    threads: int | None = None
    """CPU threads of each process; the same number gives the same bytes on every engine."""
    address: str | None = None
    """A Ray cluster's address, such as `auto` or HOST:6379; by default Ray is started on this machine."""

    @property
    def alone(self) -> bool:
        """Whether all work is done in this process."""
        return self.engine == "local" and self.address is None and (self.workers or 1) == 1

    def use_threads(self) -> None:
        """Before a runtime queries them."""
        from patchgen.common.machine import use_threads

        if self.alone:
            use_threads(self.threads)

    def do_units(self, units: "Sequence[Unit]", work: Path, what: str, quiet: bool = False) -> dict[str, str]:
        """Process the units, here or on the engine, with claims in `work`; returns reasons of failures, by label."""
        from patchgen.sweep.launch import LauncherOptions, run_units

        options = LauncherOptions(work, workers=self.workers, threads=self.threads, address=self.address)
        engine = "ray" if self.address else self.engine
        failures = run_units(units, None if self.alone else engine, options, what, quiet)
        return {label: failure.error for label, failure in failures.items()}


# The images that are named on the command line, and those that could not be read


def find_images(words: Sequence[str]) -> list[Path]:
    """Files, images below folders, matches of patterns: each once, in order; other files are counted on stderr."""
    from patchgen.data.image_files import IMAGE_EXTENSIONS, skipped_line

    found: dict[Path, None] = {}
    for word in words:
        images, skipped = _images_of(expanded(word))
        others = printable(skipped_line(skipped)) if skipped else ""
        if not images:
            raise ValueError(
                f"no image found: {printable(word)} is no file, no folder with images below it, and no pattern that "
                f"matches one ({' '.join(IMAGE_EXTENSIONS)})" + f"; {others}" * bool(others)
            )
        if others:
            print(f"{printable(word)}: {others}", file=sys.stderr)
        found.update(dict.fromkeys(images))
    if not found:
        raise ValueError("no image given; name files, folders or patterns such as 'photos/**/*.jpg' after the model")
    return list(found)


def _images_of(path: Path) -> tuple[list[Path], list[str]]:
    """The images that an argument matches, and the names of other files there."""
    from patchgen.data.image_files import is_image, list_files, list_matching

    if path.is_dir():
        files = list_files(path)
        return [path / name for name in files.images], files.skipped
    if path.exists():
        return [path], []
    if "**" in path.parts:
        files = list_matching(path)
        return sorted(map(Path, files.images)), [os.path.basename(name) for name in files.skipped]
    matches = [path for path in sorted(map(Path, glob(str(path)))) if path.is_file()]
    images = [match for match in matches if is_image(match.name)]
    once = {os.path.realpath(image): image for image in reversed(images)}  # a link may lead to a parent folder
    return sorted(once.values()), [match.name for match in matches if not is_image(match.name)]


def report_unreadable(
    failed: "Sequence[Unreadable | UnreadableSlide]", total: int, strict: bool, what: str = "images could not be read"
) -> int:
    """List unreadable images on stderr; the exit code is 1 if all are unreadable or, with `strict`, any."""
    if failed:
        print(f"{len(failed)} of {total} {what}:", file=sys.stderr)
        for one in failed:
            print(f"  {printable(one.path)}: {printable(one.reason)}", file=sys.stderr)
    return 1 if failed and (strict or len(failed) == total) else 0


def report_slides(failures: Mapping[str, str], total: int, strict: bool) -> int:
    """The same for slides and the reasons why they could not be used."""
    from patchgen.slides.slide import UnreadableSlide

    unreadable = [UnreadableSlide(path, reason.removeprefix(f"cannot use slide {path}: ").strip().splitlines()[-1])
                  for path, reason in failures.items()]  # fmt: skip
    return report_unreadable(unreadable, total, strict, "slides could not be read")
