"""Tokens of the frozen lower blocks, computed once per image and stored in half precision for every run on them.

    tokens = stored_tokens(model, config, table, store, device)      # (N, T, D) float16, one entry for each row

The file is named by all that the tokens depend on: the content of the images, the weights, the image size and the
number of blocks. A second fit with other folds, methods or learning rates only reads it.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch

from patchgen.common.files import cache_dir, replacing
from patchgen.common.progress import Progress, is_first, logger
from patchgen.common.reading import cached
from patchgen.config import Config
from patchgen.data.augment import normalize
from patchgen.data.content import digests
from patchgen.data.images import ImageStore
from patchgen.data.macenko import Macenko
from patchgen.data.table import Table
from patchgen.model.classifier import Classifier

BATCH = 32
KEPT = 8  # files in the cache; the one that was not used for longest is removed first


def stored_tokens(
    model: Classifier,
    config: Config,
    table: Table,
    store: ImageStore,
    device: torch.device,
    quiet: bool = False,
) -> np.ndarray | None:
    """The input of block `tuned_from` for each labelled row; None if this network cannot be run in two halves."""
    backbone, rows = model.backbone, np.flatnonzero(table.label >= 0)
    images = Lower(model, config, store, device)
    if not images.agrees(rows[:2]):
        text = f"{backbone.resolved} cannot be run in two halves: each step runs all of its blocks"
        if not quiet and is_first(text):
            logger.info(text)
        return None
    shape = (len(table), *images(rows[:1]).shape[1:])
    size = 2 * int(np.prod(shape))

    def compute() -> np.ndarray:
        tokens = np.zeros(shape, np.float16)
        text = f"tokens of {backbone.tuned_from} blocks, {size / 1e6:,.0f} MB in half precision"
        with Progress(text, len(rows), quiet=quiet) as bar:
            for start in range(0, len(rows), BATCH):
                some = rows[start : start + BATCH]
                tokens[some] = images(some).half().cpu().numpy()
                bar.tick(len(some))
        return tokens

    key = _key(model, config, table, store)
    return cached("tokens", key, lambda: _from_disk(key, shape, size, compute) if config.cache else compute())


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


def _from_disk(key: str, shape: tuple[int, ...], size: int, compute: Callable[[], np.ndarray]) -> np.ndarray:
    """The stored tokens, mapped into memory; computed and written first if there are none."""
    folder = cache_dir() / "tokens"
    file = folder / f"{key}.npy"
    try:
        stored: np.ndarray = np.load(file, mmap_mode="r", allow_pickle=False)
        if stored.shape == shape and stored.dtype == np.float16:
            file.touch()
            return stored
    except (OSError, ValueError, EOFError):  # missing or damaged
        pass
    folder.mkdir(parents=True, exist_ok=True)
    if (free := shutil.disk_usage(folder).free) < size:
        raise ValueError(
            f"the tokens of all images need {size / 1e9:.1f} GB, and {folder} has {free / 1e9:.1f} GB free; set "
            "PATCHGEN_CACHE to a larger disk, or use --no-cache to hold them in memory"
        )
    tokens = compute()
    with replacing(file) as temporary, open(temporary, "wb") as stream:
        np.save(stream, tokens)
    for old in sorted(folder.glob("*.npy"), key=_last_used, reverse=True)[KEPT:]:
        old.unlink(missing_ok=True)
    return np.load(file, mmap_mode="r", allow_pickle=False)


def _last_used(file: Path) -> float:
    return file.stat().st_mtime if file.exists() else 0.0


class Lower:
    """Rows of the table -> (B, T, D), by the frozen blocks."""

    def __init__(self, model: Classifier, config: Config, store: ImageStore, device: torch.device) -> None:
        self.model, self.store, self.device = model, store, device
        self.half = config.precision == "bf16-mixed"

    @torch.no_grad()
    def __call__(self, rows: np.ndarray) -> torch.Tensor:
        with torch.autocast(self.device.type, torch.bfloat16) if self.half else nullcontext():
            return self.model.backbone.lower(self._images(rows)).float()

    def _images(self, rows: np.ndarray) -> torch.Tensor:
        backbone = self.model.backbone
        return normalize(self.store.load(rows).to(self.device).float() / 255, backbone.mean, backbone.std)

    @torch.no_grad()
    def agrees(self, rows: np.ndarray) -> bool:
        """Whether the two halves of the network give what the whole gives."""
        backbone, images = self.model.backbone, self._images(rows)
        try:
            halves = backbone.upper(backbone.lower(images), self.model.size).patches
        except (AttributeError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError):
            return False
        return torch.allclose(halves, backbone(images).patches, rtol=1e-4, atol=1e-4)
