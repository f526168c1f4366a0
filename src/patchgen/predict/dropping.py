"""Measure the effect of dropping unselected patches: images per second and accuracy on the unseen domain of a run.

    found = measure_drop(subject, unseen_rows(subject.fold, 400, seed=0))
    found["speed"]["median"], found["accuracy"]      # speed-up over the full pass; {"whole": ..., "dropped": ...}

Both passes read the same decoded images and alternate, so that each ratio compares passes that are close in time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from patchgen.model.dropping import drop_unselected
from patchgen.model.selector import SELECTED, Selector
from patchgen.predict.subjects import Subject
from patchgen.predict.throughput import ratio_of

WAYS = ("whole", "dropped")


@torch.inference_mode()
def measure_drop(
    subject: Subject,
    rows: np.ndarray,
    after: int | None = None,
    *,
    batch: int = 16,
    repeats: int = 5,
    report: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Time both passes over the rows of one run, and compare their predictions.

    Args:
        rows: Of the run's table.
        after: Number of blocks before unselected patches are dropped; None: up to the early block.
        batch: Images per forward pass, which keeps as many patches as its image with the most selected ones.
        repeats: Timed turns, after a warm-up.
        report: Called with one line per turn.
    """
    if batch < 1 or repeats < 2:
        raise ValueError(f"batch must be at least 1 and repeats at least 2, not {batch} and {repeats}")
    model = subject.model
    drop_unselected(model, after)
    assert isinstance(model.select, Selector)
    blocks = {"whole": None, "dropped": model.select.drop}
    parts = [subject.normalised(subject.pixels(rows[i : i + batch])) for i in range(0, len(rows), batch)]
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    answers: dict[str, Tensor] = {}
    shown = torch.empty(0)
    for turn in range(repeats + 1):
        for name in WAYS:
            model.select.drop = blocks[name]
            start = time.perf_counter()
            outputs = [model(part) for part in parts]
            answers[name] = torch.cat([out.logits for out in outputs]).argmax(1).cpu()
            if turn:  # the first warms up
                seconds[name].append(time.perf_counter() - start)
            shown = torch.cat([out.selection() for out in outputs]).cpu()
        if turn:
            report(", ".join(f"{name} {len(rows) / seconds[name][-1]:.1f} images/s" for name in WAYS))
    label = torch.from_numpy(subject.fold.truth[rows])
    return {
        "run": subject.run,
        "unseen": subject.fold.unseen,
        "backbone": model.backbone.resolved,
        "image_size": subject.predictor.config.image_size,
        "after": blocks["dropped"],
        "images": len(rows),
        "batch": batch,
        "kept": _kept(shown, batch),
        "speed": ratio_of(seconds["whole"], seconds["dropped"]),
        "accuracy": {name: float((answers[name] == label).float().mean()) for name in WAYS},
        "same_class": float((answers["whole"] == answers["dropped"]).float().mean()),
        "seconds": seconds,
        "machine": {"device": str(subject.predictor.device), "threads": torch.get_num_threads()},
    }


def _kept(shown: Tensor, batch: int) -> dict[str, float]:
    """Share of selected patches (N, P), and share that batches keep for their image with the most selected ones."""
    share = (shown >= SELECTED).float().mean(1)  # (N,)
    return {
        "selected": float(share.mean()),
        "batches": float(torch.stack([p.max() for p in share.split(batch)]).mean()),
    }
