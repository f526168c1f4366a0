"""What discovery costs in a stream: choosing prompts against a training step, scoring a stage against plain k-means.

    cost = measure()
    cost["prompts"]["share_of_step"]          # choosing prompts / a whole step
    cost["evaluation"]["ratio"]               # our constrained k-means / scikit-learn's unconstrained one, same data

The evaluation has the size of the last stage of CIFAR-100: 42,950 labelled and 7,050 unlabelled images, 100 classes.
Ours pins the labelled images and draws only the missing centres; scikit-learn's clusters all images freely.
"""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np
import torch
from sklearn.cluster import KMeans

from benchmarks.common import Line, at_least_one, clock_seconds, now, random_features, report
from patchgen.ccd.loop import make_stream_optimizer
from patchgen.ccd.methods import Views, make_stream_method
from patchgen.ccd.mixture import SphericalMixture
from patchgen.ccd.model import StreamModel
from patchgen.ccd.settings import StreamConfig
from patchgen.diagnose.cost import device
from patchgen.discovery import SemiSupervisedKMeans
from patchgen.model.backbone import load_architecture
from patchgen.model.tuning import set_tuning

SMALL = {
    "source": "tiny", "image_size": 28, "batch": 2, "repeats": 2, "labelled": 90, "unlabelled": 30, "dim": 16,
    "classes": 6, "inits": 2,
}  # fmt: skip
NEW_SHARE = 0.1  # classes of a stage that no labelled image has: CIFAR-100's last stage


def measure(
    source: str = "dinov2-small",
    *,
    image_size: int = 224,
    batch: int = 8,
    repeats: int = 3,
    labelled: int = 42_950,
    unlabelled: int = 7_050,
    dim: int = 768,
    classes: int = 100,
    inits: int = 10,
) -> dict[str, Any]:
    """Time both.

    Args:
        source: A backbone; a name gets random weights.
        image_size: Pixels of the square images.
        batch: Images per step, each in two views.
        repeats: Timed steps, after one that warms up.
        labelled: Images with a class or cluster.
        unlabelled: Images of the stage.
        dim: Features per image.
        classes: Clusters, and components of the mixture.
        inits: Starts of each k-means.
    """
    at_least_one(batch=batch, repeats=repeats, labelled=labelled, unlabelled=unlabelled, inits=inits)
    return {
        "machine": {"device": str(device()), "threads": torch.get_num_threads(), "torch": torch.__version__},
        "prompts": _prompts(source, image_size, batch, classes, repeats),
        "evaluation": _evaluation(labelled, unlabelled, dim, classes, inits),
    }


def lines(found: dict[str, Any]) -> list[Line]:
    prompts, evaluation = found["prompts"], found["evaluation"]
    median, seconds = prompts["median_seconds"], evaluation["seconds"]
    step = f"{prompts['image_size']} px, {prompts['batch']} images x 2 views, {prompts['components']} components"
    stage = (
        f"{evaluation['labelled']:,} labelled and {evaluation['unlabelled']:,} unlabelled images, "
        f"{evaluation['dim']} features, {evaluation['classes']} clusters, {evaluation['inits']} starts"
    )
    return [
        (f"{step}: whole training step", f"{1000 * median['step']:.2f} ms"),
        ("prompt-free pass / step", f"{prompts['query_share']:.2%}"),
        ("choice of the prompts / step", f"{prompts['share_of_step']:.3%}"),
        (f"{stage}: constrained k-means, ours", f"{seconds['ours']:.1f} s"),
        ("plain k-means, scikit-learn", f"{seconds['sklearn']:.1f} s"),
        ("ours / scikit-learn's", f"{evaluation['ratio']:.3f}"),
    ]


def _prompts(source: str, image_size: int, batch: int, classes: int, repeats: int) -> dict[str, Any]:
    """Seconds of the parts of a PromptCCD step: query (a prompt-free pass), choice of the prompts, all of it."""
    config = StreamConfig("", image_size=image_size, method="promptccd")
    model = _model(source, config)
    method, optimizer = make_stream_method(config), make_stream_optimizer(model, config)
    features, _ = random_features(20 * classes, model.backbone.dim, classes)
    mixture = SphericalMixture.fit(features, classes, iterations=5)
    images = torch.randn(2 * batch, 3, image_size, image_size, device=device())
    none = torch.full((2 * batch,), -1, device=images.device)
    parts: dict[str, list[float]] = {"query": [], "choice": [], "step": []}
    for turn in range(repeats + 1):
        clock = [now()]
        with torch.no_grad():
            query = model.read(images).features
        clock.append(now())
        prompts = mixture.prompts(query, config.prompts)
        clock.append(now())
        losses = method.losses(model, Views(model.read(images, prompts), none, none, None, classes, 0, labelled=False))
        optimizer.zero_grad()
        torch.stack(list(losses.values())).sum().backward()
        optimizer.step()
        clock.append(now())
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
    backbone = load_architecture(source, config.image_size)
    set_tuning(backbone, config.tune)
    return StreamModel(backbone, config, "cls").to(device())


def _evaluation(labelled: int, unlabelled: int, dim: int, classes: int, inits: int) -> dict[str, Any]:
    """Seconds of the constrained k-means that scores a stage, and of scikit-learn's free one on all its images."""
    x, _ = random_features(labelled + unlabelled, dim, classes)  # row i is of class i modulo the classes
    member = np.arange(len(x)) % classes
    known = classes - max(1, round(NEW_SHARE * classes))
    chosen = np.flatnonzero(member < known)[:labelled]
    rest = np.setdiff1d(np.arange(len(x)), chosen)
    ours = SemiSupervisedKMeans(classes, inits=inits)
    seconds = {"ours": clock_seconds(ours.fit, x[rest], x[chosen], member[chosen])}
    report(f"constrained k-means, ours: {seconds['ours']:.1f} s")
    theirs = KMeans(classes, n_init=inits, max_iter=ours.iterations, random_state=1)
    seconds["sklearn"] = clock_seconds(theirs.fit, x.cpu().numpy())
    report(f"plain k-means, scikit-learn: {seconds['sklearn']:.1f} s")
    return {
        "labelled": len(chosen), "unlabelled": len(rest), "dim": dim, "classes": classes, "inits": inits,
        "seconds": seconds, "ratio": seconds["ours"] / seconds["sklearn"],
    }  # fmt: skip
