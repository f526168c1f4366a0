"""The run folder: config.yaml, env.json, splits.csv, records.jsonl, checkpoints/*.safetensors, summary.md and done.

A kill at any moment loses nothing: every file is written under a temporary name and renamed, records are appended, and
the training state stores their length, so those that a killed run wrote later are dropped and recomputed.
"""

import hashlib
import json
import os
import platform
import shutil
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from torch import Tensor

import patchgen
from patchgen.common import plugins
from patchgen.common.files import lock, not_through_links, refuse_links, replacing, write_text
from patchgen.common.machine import computes_bf16
from patchgen.common.text import json_text
from patchgen.common.untrusted import read_json, shortly
from patchgen.config import Config, Settings, dump_config, load_settings
from patchgen.model.weights import content, local_path
from patchgen.runs.tensors import load_tensors

S = TypeVar("S", bound=Settings)
Precision = Literal["32-true", "bf16-mixed"]
AUTO = "auto"
RESTORE = "restore the file, or delete the run's folder and train again"
CONTENT = "content.npy"  # a digest of each image
WORKING = ("state", "kept", "untrained")  # checkpoints needed only until a run is done; `kept` belongs to streams
LOCK_ATTEMPTS, LOCK_PAUSE = 4, 0.05  # `busy` holds the lock for microseconds
# errors when reading a damaged folder
UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, IndexError, StopIteration, RecursionError, OverflowError,
              OSError)  # fmt: skip


class ProcessDied(ValueError):
    """One of a run's processes died; another attempt resumes from the last evaluation."""


class RunBusy(ValueError):
    """Another process works in this folder."""


class WorkFolder:
    """A folder in which one process works at a time, until `mark` exists."""

    verb = "worked on"  # for messages

    def __init__(self, path: str | Path, mark: Path) -> None:
        self.path, self.mark = Path(path), mark

    @property
    def done(self) -> bool:
        return self.mark.exists()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock inside this context; it is released when the process ends, in whatever way."""
        with open(self.path / ".lock", "w", opener=not_through_links) as handle:
            for _ in range(LOCK_ATTEMPTS):
                if lock(handle.fileno()):
                    break
                time.sleep(LOCK_PAUSE)
            else:
                raise RunBusy(f"{self.path} is being {self.verb} by another process; wait for it, or end it")
            yield

    @property
    def busy(self) -> bool:
        """True while a process holds the lock."""
        if not (self.path / ".lock").exists():
            return False
        with open(self.path / ".lock", "a", opener=not_through_links) as handle:
            return not lock(handle.fileno())

    def write_json(self, name: str, value: Any) -> None:
        write_text(self.path / name, json_text(value) + "\n")


class RunFolder(WorkFolder):
    """A run on disk: its settings, records and checkpoints, and whether it is done."""

    verb = "trained"

    def __init__(self, path: str | Path) -> None:
        super().__init__(path, Path(path) / "done")
        self.records_file = self.path / "records.jsonl"
        self.data = ""
        self.listeners: list[Callable[[RunFolder], object]] = []  # called after each record

    @classmethod
    def create(cls, parent: str | Path, config: Settings, name: str, data: str = "") -> "RunFolder":
        """Open or create the folder ``parent/name``; `data` is the fingerprint of the data, for ``env.json``."""
        run = cls(Path(parent) / name)
        run.data = data
        run.refuse_links()
        (run.path / "checkpoints").mkdir(parents=True, exist_ok=True)
        if not (run.path / "config.yaml").exists():
            write_text(run.path / "config.yaml", dump_config(config))
        now, then = config.result_settings(), run.settings.result_settings()
        if local_path(config.backbone) is not None:  # its content is part of the name: the path may have changed
            del now["backbone"]
        changed = [f"{key} {shortly(then[key])} (now {shortly(now[key])})" for key in now if now[key] != then[key]]
        if changed:
            raise ValueError(f"{run.path} was made with other settings, {', '.join(changed)}; train into another --out")
        if run.done:
            run._drop_state()
        return run

    @classmethod
    def open(cls, path: str | Path) -> "RunFolder":
        """An existing run folder; otherwise an error that suggests the right one."""
        if not (Path(path) / "config.yaml").is_file():
            other = "it is a model folder: use a run of its fit, below --runs (`patchgen runs` lists them)"
            hint = other if is_model_folder(path) else "`patchgen train` prints one"
            raise ValueError(f"{path} is not a run folder (it has no config.yaml); {hint}")
        cls(path).refuse_links()
        return cls(path)

    def refuse_links(self) -> None:
        """Reject links in an untrusted folder, through which a resumed run would write elsewhere."""
        refuse_links(self.path, self.path / "checkpoints")

    @property
    def settings(self) -> Settings:
        """The settings of a run of any task."""
        return load_settings(self.path / "config.yaml")

    @property
    def config(self) -> Config:
        """The settings of a run that has an unseen domain."""
        settings = self.settings
        if not isinstance(settings, Config):
            raise ValueError(f"{self.path} is a run of task ccd, a stream of stages; this needs a run of task mdg")
        return settings

    def checkpoint(self, name: str) -> Path:
        return self.path / "checkpoints" / f"{name}.safetensors"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock; removes the partial checkpoints of a killed process first."""
        self.refuse_links()
        with super().locked():
            for stray in (self.path / "checkpoints").glob(".*"):  # our temporary files, and those of safetensors
                stray.unlink(missing_ok=True)
            yield

    def renew_settings(self, config: Settings) -> None:
        """Write the settings of this process: the current path of the data, and no values corrupted on disk."""
        text = dump_config(config)
        if (self.path / "config.yaml").read_bytes() != text.encode():
            write_text(self.path / "config.yaml", text)

    def remove_refused(self) -> None:
        """Remove the folder of a training that was refused before anything was trained."""
        worth = ("records.jsonl", "diverged.json", "state.safetensors")
        if not any(file.name in worth for file in self.path.rglob("*")):
            shutil.rmtree(self.path, ignore_errors=True)

    def check_content(self, digests: np.ndarray, names: Sequence[str]) -> None:
        """Check that the images are those that the run was started with; a new run records their `digests` (N,)."""
        file = self.path / CONTENT
        if not file.exists():
            if not self.done:
                with replacing(file) as temporary, open(temporary, "wb") as stream:
                    np.save(stream, digests)
            return
        try:
            changed = np.flatnonzero(np.broadcast_to(np.load(file, allow_pickle=False), digests.shape) != digests)
        except (OSError, ValueError, EOFError, MemoryError) as error:  # a forged header can request any size
            raise ValueError(f"{file} is damaged; {RESTORE}") from error
        if len(changed):
            first = ", ".join(names[i] for i in changed[:3]) + ", ..." * (len(changed) > 3)
            raise ValueError(
                f"{len(changed)} of {len(names)} images have changed since {self.path} was started, with the same "
                f"names and sizes: {first}; restore them, or train into another --out"
            )

    # Records

    def append(self, record: Mapping[str, Any]) -> None:
        with open(self.records_file, "a", encoding="utf-8", opener=not_through_links) as handle:
            handle.write(json_text(record, None) + "\n")
            handle.flush()
            os.fsync(handle.fileno())
        for listener in self.listeners:
            listener(self)

    def records(self, kind: str | None = None) -> list[dict[str, Any]]:
        """All complete lines, without a last one truncated by a kill; ValueError if they are damaged or changed."""
        content = self._records_bytes()
        *lines, torn = content.split(b"\n")
        records = [_parse(line) for line in lines]
        words = self.mark.read_bytes().split() if self.done else []
        crc = int(words[-1]) if len(words) == 3 and words[-1].isdigit() else None  # older versions wrote none
        if None in records or crc not in (None, zlib.crc32(content)):
            line = f", line {records.index(None) + 1}," if None in records else ""
            raise ValueError(f"{self.records_file}{line} is damaged; {RESTORE}")
        return [record for record in [*records, _parse(torn)] if record and kind in (None, record.get("kind"))]

    def records_mark(self) -> dict[str, int]:
        """Length in bytes and checksum of the records, for a saved state."""
        content = self._records_bytes()
        return {"records": len(content), "records_crc32": zlib.crc32(content)}

    def rewind_records(self, size: int, crc: int | None = None) -> None:
        """Drop records written after the state from which training resumes; ValueError if others have changed."""
        seen = self._records_bytes()[:size]
        if len(seen) < size or crc not in (None, zlib.crc32(seen)):
            raise ValueError(f"{self.records_file} is damaged: it does not match the saved state; {RESTORE}")
        if self.records_file.exists():
            os.truncate(self.records_file, size)

    def _records_bytes(self) -> bytes:
        return self.records_file.read_bytes() if self.records_file.exists() else b""

    # Files

    def write_environment(self, backbone: Mapping[str, Any], **more: Any) -> None:
        """What the results may depend on besides the settings, and the fingerprint of the data."""
        import torch

        facts: dict[str, Any] = {"backbone": dict(backbone), "data": self.data, **more}
        if used := plugins.used_by(self.settings):
            facts["plugins"] = used
        self.write_json("env.json", environment(torch.get_num_threads()) | facts)

    def recorded_backbone(self) -> dict[str, Any] | None:
        """The run's record of its backbone; None if it has not started."""
        backbone = self._environment().get("backbone")
        return backbone if isinstance(backbone, dict) else None

    def require_plugins(self) -> None:
        """Load the plug-ins that the run was made with; the error names those that are missing."""
        plugins.require(self._environment().get("plugins"), self.path)

    def _environment(self) -> dict[str, Any]:
        """The content of `env.json`; empty if it is missing or damaged."""
        try:
            return dict(read_json(self.path / "env.json"))
        except (OSError, ValueError, TypeError):
            return {}

    def state(self, backbone: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Tensors and facts of the state to resume from; None at the beginning, ValueError with another backbone."""
        path = self.checkpoint("state")
        if not path.exists():
            return None
        tensors, facts = load_tensors(path)
        if facts["backbone"]["digest"] != backbone["digest"]:
            raise ValueError(
                f"{self.path} was started with another backbone ({facts['backbone']['resolved']}); give that one with "
                "--backbone, or train into another folder"
            )
        return tensors, facts

    def finish(self, summary: str) -> None:
        write_text(self.path / "summary.md", summary)
        (self.path / "diverged.json").unlink(missing_ok=True)  # of an earlier attempt
        now, crc = time.strftime("%Y-%m-%dT%H:%M:%S%z"), self.records_mark()["records_crc32"]
        write_text(self.mark, f"{now}\nrecords {crc}\n")
        self._drop_state()

    def _drop_state(self) -> None:
        """Called after `done`, and again at the next start if the process was killed in between."""
        with suppress(OSError):
            for name in WORKING:
                self.checkpoint(name).unlink(missing_ok=True)


def other_weights(run: RunFolder, backbone: Mapping[str, Any]) -> str:
    """A warning if `--backbone auto`, now `backbone`, was other weights in this run before, or in one beside it."""
    files = sorted(run.path.parent.glob("*/config.yaml")) if run.settings.backbone == "auto" else []
    for config in files:
        then = RunFolder(config.parent).recorded_backbone()
        if then and then.get("digest") != backbone["digest"] and b"\nbackbone: auto\n" in config.read_bytes():
            return (
                f"--backbone auto is {backbone['resolved']} on this machine, and was {then.get('resolved')} in "
                f"{config.parent}: results of both are not comparable; name one with --backbone"
            )
    return ""


def run_folders(folders: Iterable[str | Path]) -> Iterator[Path]:
    """All run folders at or below some folders, each once: those with records, or with settings and checkpoints."""
    seen = set()
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise FileNotFoundError(f"there is no folder {folder}; give the folder that holds the runs")
        for file in sorted([*folder.rglob("config.yaml"), *folder.rglob("records.jsonl")]):
            real, hidden = file.parent.resolve(), any(p.startswith(".") for p in file.relative_to(folder).parts)
            is_run = file.name == "records.jsonl" or (file.parent / "checkpoints").is_dir()
            if real not in seen and is_run and not hidden:
                seen.add(real)
                yield file.parent


def run_name(config: Settings, data: str) -> str:
    """The folder's name: a digest of the settings that determine the results, and of the data's fingerprint."""
    settings, used = config.hashed(), plugins.used_by(config)
    if digest := content(settings.get("backbone", "")):
        settings["backbone"] = digest  # of local weights the content counts, not the path; of plug-in files too
    if used:
        settings["plugins"] = [p["version"] if p["name"].endswith(".py") else p["name"] for p in used]
    text = json.dumps({**settings, "data": data}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def with_precision(config: S, out: str | Path, data: str) -> S:
    """The settings with `auto` replaced by a precision, which affects results; `out` is the parent of runs."""
    return replace(config, precision=choose_precision([config], out, data)) if config.precision == AUTO else config


def choose_precision(configs: Sequence[Settings], out: str | Path, data: str) -> Precision:
    """One precision for runs that belong together: the device's, unless only runs in the other were started."""

    def started(precision: Precision) -> bool:
        names = (run_name(replace(config, precision=precision), data) for config in configs)
        return any((Path(out) / name / "config.yaml").exists() for name in names)

    choices: list[Precision] = ["32-true", "bf16-mixed"]
    other, native = choices if computes_bf16(configs[0].accelerator) else choices[::-1]
    return other if started(other) and not started(native) else native


MODEL_CONFIG, MODEL_FORMAT = "config.json", "patchgen-model"  # of a model folder (`patchgen.predict.model_folder`)


def is_model_folder(path: str | Path) -> bool:
    """Whether a folder has a config.json that says it is a model folder."""
    file = Path(path) / MODEL_CONFIG
    try:
        return file.is_file() and read_json(file).get("format") == MODEL_FORMAT
    except (OSError, ValueError):
        return False


def environment(threads: int) -> dict[str, Any]:
    """What the results may depend on."""
    import torch

    packages = {name: version(name) for name in ("torch", "transformers", "lightning-fabric", "numpy", "pillow")}
    return {
        "python": sys.version.split()[0], "system": platform.platform(), "processor": platform.machine(),
        "cpus": os.cpu_count(), "threads": threads, "cuda": torch.version.cuda,
        "packages": {"patchgen": patchgen.__version__, **packages},
    }  # fmt: skip


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):  # no JSON, or no UTF-8
        return None
    return record if isinstance(record, dict) else None
