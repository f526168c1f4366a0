"""Tokens of the frozen lower blocks, computed once per image and stored in half precision for every run on them.

The file is named by all that the tokens depend on, so a fit with other folds, methods or learning rates only reads it.
"""

import hashlib
import json
import shutil
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import torch

from patchgen.common.files import cache_dir, replacing
from patchgen.common.progress import Progress, is_first, logger
from patchgen.config import Config
from patchgen.data.images import ImageStore, digests
from patchgen.data.stain import Macenko
from patchgen.data.table import Table
from patchgen.model.classifier import Classifier

BATCH = 32
FILES = 8  # in the cache; the one that was not used for longest is removed first
_held: dict[str, np.ndarray] = {}  # without a cache on disk: the last tokens, for the other runs of this process


def stored_tokens(
    model: Classifier, config: Config, table: Table, store: ImageStore, device: torch.device, quiet: bool = False
) -> np.ndarray | None:
    """The input of block `tuned_from`, (N, T, D) float16, by row; None if this network cannot be run in two halves."""
    backbone, rows = model.backbone, np.flatnonzero(table.label >= 0)

    def images(rows: np.ndarray) -> torch.Tensor:
        return backbone.normalised(store.load(rows).to(device))

    @torch.no_grad()
    def lower(rows: np.ndarray) -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=config.precision == "bf16-mixed"):
            return backbone.lower(images(rows)).float()

    if not _is_divisible(model, images(rows[:2])):
        text = f"{backbone.resolved} cannot be run in two halves: each step runs all of its blocks"
        if not quiet and is_first(text):
            logger.info(text)
        return None
    shape = (len(table), *lower(rows[:1]).shape[1:])

    def compute() -> np.ndarray:
        tokens = np.zeros(shape, np.float16)
        text = f"tokens of {backbone.tuned_from} blocks, {tokens.nbytes / 1e6:,.0f} MB in half precision"
        with Progress(text, len(rows), quiet=quiet) as bar:
            for start in range(0, len(rows), BATCH):
                part = rows[start : start + BATCH]
                tokens[part] = lower(part).half().cpu().numpy()
                bar.tick(len(part))
        return tokens

    key = _key(model, config, table, store)
    if config.cache:
        return _from_disk(key, shape, compute)
    if key not in _held:
        _held.clear()
        _held[key] = compute()
    return _held[key]


@torch.no_grad()
def _is_divisible(model: Classifier, images: torch.Tensor) -> bool:
    """Whether the two halves of the network give what the whole gives."""
    backbone = model.backbone
    try:
        halves = backbone.upper(backbone.lower(images), model.size).patches
    except (AttributeError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError):
        return False
    return torch.allclose(halves, backbone(images).patches, rtol=1e-4, atol=1e-4)


def _key(model: Classifier, config: Config, table: Table, store: ImageStore) -> str:
    backbone, stain = model.backbone, store.stain.facts() if isinstance(store.stain, Macenko) else None
    facts = [backbone.pixels.facts(), backbone.tuned_from, model.size, config.precision, stain, table.label.tolist()]
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    key.update(digests(table).tobytes())
    tuned = {name for name, parameter in backbone.named_parameters() if parameter.requires_grad}
    for name, tensor in sorted(backbone.state_dict().items()):
        if name not in tuned:  # a trained model has the same tokens
            key.update(name.encode() + tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return key.hexdigest()[:16]


def _from_disk(key: str, shape: tuple[int, ...], compute: Callable[[], np.ndarray]) -> np.ndarray:
    """The stored tokens, mapped into memory; computed and written first if there are none."""
    folder = cache_dir() / "tokens"
    file = folder / f"{key}.npy"
    with suppress(OSError, ValueError, EOFError):  # missing or damaged
        stored: np.ndarray = np.load(file, mmap_mode="r", allow_pickle=False)
        if stored.shape == shape and stored.dtype == np.float16:
            file.touch()
            return stored
    folder.mkdir(parents=True, exist_ok=True)
    size = 2 * int(np.prod(shape))
    if (free := shutil.disk_usage(folder).free) < size:
        raise ValueError(
            f"the tokens of all images need {size / 1e9:.1f} GB, and {folder} has {free / 1e9:.1f} GB free; set "
            "PATCHGEN_CACHE to a larger disk, or use --no-cache to hold them in memory"
        )
    tokens = compute()
    with replacing(file) as temporary, open(temporary, "wb") as stream:
        np.save(stream, tokens)
    with suppress(FileNotFoundError):  # another process removes some, too
        for old in sorted(folder.glob("*.npy"), key=lambda path: path.stat().st_mtime)[:-FILES]:
            old.unlink()
    return np.load(file, mmap_mode="r", allow_pickle=False)
