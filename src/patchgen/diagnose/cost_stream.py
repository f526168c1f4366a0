"""What discovery costs in a stream: choosing prompts against a training step, scoring a stage against plain k-means.

    cost = measure_discovery()
    cost["prompts"]["share_of_step"]          # choosing prompts / a whole step
    cost["evaluation"]["ratio"]               # our constrained k-means / scikit-learn's unconstrained one, same data

The evaluation has the size of the last stage of CIFAR-100: 42,950 labelled and 7,050 unlabelled images, 100 classes.
Ours pins the labelled images and draws only the missing centres; scikit-learn's clusters all images freely.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from patchgen.config.stream import StreamConfig
from patchgen.diagnose.cost import Report, _device, _now
from patchgen.diagnose.cost_discovery import random_features
from patchgen.discovery import SemiSupervisedKMeans
from patchgen.discovery.mixture import SphericalMixture
from patchgen.discovery.prompts import choose_prompts
from patchgen.methods.stream import Views, make_stream_method
from patchgen.methods.stream.model import StreamModel
from patchgen.model.backbone import BACKBONES, load_backbone, set_tuning
from patchgen.train.stream.optim import make_stream_optimizer

NEW_SHARE = 0.1  # classes of a stage that no labelled image has: CIFAR-100's last stage


def measure_discovery(
    backbone: str = "dinov2-small",
    *,
    image_size: int = 224,
    batch: int = 8,
    repeats: int = 3,
    labelled: int = 42_950,
    unlabelled: int = 7_050,
    dim: int = 768,
    classes: int = 100,
    inits: int = 10,
    report: Report = lambda _: None,
) -> dict[str, Any]:
    """Time both.

    Args:
        batch: images a step, each in two views.
        repeats: timed steps after one that warms up.
        inits: starts of each k-means.
        report: called with one line per timed piece, ``pieces(repeats)`` times.
    """
    counts = {"batch": batch, "repeats": repeats, "labelled": labelled, "unlabelled": unlabelled, "inits": inits}
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")
    return {
        "machine": {"device": str(_device()), "threads": torch.get_num_threads(), "torch": torch.__version__},
        "prompts": _prompts(backbone, image_size, batch, classes, repeats, report),
        "evaluation": _evaluation(labelled, unlabelled, dim, classes, inits, report),
    }


def pieces(repeats: int) -> int:
    """Lines that `measure_discovery` reports."""
    return repeats + 2


def _prompts(source: str, image_size: int, batch: int, classes: int, repeats: int, report: Report) -> dict[str, Any]:
    """Seconds of the parts of a PromptCCD step: query (a prompt-free pass), choice of the prompts, all of it."""
    config = StreamConfig("", image_size=image_size, method="promptccd")
    model = _model(source, config)
    method, optimizer = make_stream_method(config), make_stream_optimizer(model, config)
    features, _ = random_features(20 * classes, model.backbone.dim, classes)
    mixture = SphericalMixture.fit(features, classes, iterations=5)
    images = torch.randn(2 * batch, 3, image_size, image_size, device=_device())
    none = torch.full((2 * batch,), -1, device=images.device)
    parts: dict[str, list[float]] = {"query": [], "choice": [], "step": []}
    for turn in range(repeats + 1):
        clock = [_now(images.device)]
        with torch.no_grad():
            query = model.read(images).features
        clock.append(_now(images.device))
        prompts = choose_prompts(mixture, query, config.prompts)
        clock.append(_now(images.device))
        losses = method.losses(model, Views(model.read(images, prompts), none, none, None, classes, 0, labelled=False))
        optimizer.zero_grad()
        torch.stack(list(losses.values())).sum().backward()
        optimizer.step()
        clock.append(_now(images.device))
        if turn:  # the first one warms up
            for name, seconds in zip(
                parts, (clock[1] - clock[0], clock[2] - clock[1], clock[3] - clock[0]), strict=True
            ):
                parts[name].append(seconds)
            report(f"step {parts['step'][-1]:.3f} s, of which prompts {1000 * parts['choice'][-1]:.2f} ms")
    median = {name: statistics.median(seconds) for name, seconds in parts.items()}
    shares = {"share_of_step": median["choice"] / median["step"], "query_share": median["query"] / median["step"]}
    size = {"image_size": image_size, "batch": batch, "components": classes, "backbone": model.backbone.resolved}
    return {**size, "median_seconds": median, "seconds": parts, **shares}


def _model(source: str, config: StreamConfig) -> StreamModel:
    backbone = load_backbone(source, pretrained=source not in BACKBONES, image_size=config.image_size)
    set_tuning(backbone, config.tune)
    return StreamModel(backbone, config, "cls").to(_device())


def _evaluation(labelled: int, unlabelled: int, dim: int, classes: int, inits: int, report: Report) -> dict[str, Any]:
    """Seconds of the constrained k-means that scores a stage, and of scikit-learn's free one on all its images."""
    from sklearn.cluster import KMeans

    x, _ = random_features(labelled + unlabelled, dim, classes)  # row i is of class i modulo the classes
    member = np.arange(len(x)) % classes
    known = classes - max(1, round(NEW_SHARE * classes))
    chosen = np.flatnonzero(member < known)[:labelled]
    rest = np.setdiff1d(np.arange(len(x)), chosen)
    ours = SemiSupervisedKMeans(classes, inits=inits)
    seconds = {"ours": _timed(lambda: ours.fit(x[rest], x[chosen], member[chosen]), x)}
    report(f"constrained k-means, ours: {seconds['ours']:.1f} s")
    theirs = KMeans(classes, n_init=inits, max_iter=ours.iterations, random_state=1)
    seconds["sklearn"] = _timed(lambda: theirs.fit(x.cpu().numpy()), x)
    report(f"plain k-means, scikit-learn: {seconds['sklearn']:.1f} s")
    return {
        "labelled": len(chosen), "unlabelled": len(rest), "dim": dim, "classes": classes, "inits": inits,
        "seconds": seconds, "ratio": seconds["ours"] / seconds["sklearn"],
    }  # fmt: skip


def _timed(work: Callable[[], object], x: Tensor) -> float:
    start = _now(x.device)
    work()
    return _now(x.device) - start
