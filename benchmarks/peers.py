"""Other software at equal work on the same files: how many times as long it takes.

    result = measure(images=64)
    result["ratios"]["predict"]["median"], result["ratios"]["predict"]["quartiles"]      # above 1: ours is faster

- `predict`: transformers' image-classification pipeline, the same architecture, files and batch, one process.
- `train`: a plain PyTorch script, the same images, steps and evaluations.
- `k-means`: scikit-learn's Lloyd iterations from the same centres.
- `mixture`: scikit-learn's spherical GaussianMixture from the same means, for as many steps.
- `match`: scipy's Hungarian solver on a table that a loop over the samples fills, as the host projects do.

Ours and the peer take turns in one process, after one turn that warms up. A ratio is of seconds on the clock, beside it
that of processor seconds, which other programs disturb less.
"""

import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from sklearn.cluster import KMeans
from sklearn.mixture import GaussianMixture
from torch import Tensor

from benchmarks.common import Line, at_least_one, now, random_features, report, write_images
from benchmarks.fold import PlainLoop, evaluations, image_cache, local_copy, write_domains
from benchmarks.predict import untrained_predictor
from patchgen.ccd.mixture import SphericalMixture
from patchgen.config import Config
from patchgen.discovery import clustering_accuracy
from patchgen.discovery.kmeans import nearest
from patchgen.tasks import make_fold
from patchgen.train.lifecycle import train

ITERATIONS = 3  # of k-means and of expectation-maximisation
SMALL = {"source": "tiny", "image_size": 28, "images": 6, "pixels": 32, "batch": 3, "steps": 2, "points": 300,
         "dim": 16, "classes": 5, "repeats": 1}  # fmt: skip
PEERS = {
    "predict": "`predict`: transformers' pipeline / ours",
    "train": "`train`: plain PyTorch script / ours",
    "k-means": "k-means: scikit-learn / ours",
    "mixture": "mixture: scikit-learn / ours",
    "match": "Hungarian match: sample by sample / ours",
}
TARGETS = {"predict": 1.0, "train": 1.0}
Pair = tuple[Callable[[], object], Callable[[], object]]  # ours, the peer


def measure(
    *, source: str = "dinov2-small", image_size: int = 112, images: int = 64, pixels: int = 512, batch: int = 16,
    steps: int = 7, points: int = 20_000, dim: int = 384, classes: int = 100, repeats: int = 5,
) -> dict[str, Any]:  # fmt: skip
    """Time ours and each peer in turn.

    Args:
        source: A backbone; a name gets random weights.
        image_size: Pixels of the square images that the networks read.
        images: Generated JPEG files to predict; a quarter of them for each of four sites to train on.
        pixels: Side of the files.
        batch: Images per forward pass of `predict`.
        steps: Of a training.
        points: Vectors to group, of `dim` numbers, in `classes` groups.
        repeats: Timed turns.
    """
    at_least_one(images=images, batch=batch, steps=steps, points=points, classes=classes, repeats=repeats)
    with tempfile.TemporaryDirectory() as name, image_cache(Path(name) / "cache"):
        folder = Path(name)
        pairs: dict[str, Pair] = {
            "predict": prediction(source, write_images(folder / "files", images, pixels), image_size, batch),
            "train": training(source, folder, max(4, images // 4), pixels, image_size, steps),
            **grouping(points, dim, classes),
        }
        ratios = {peer: _ratio(peer, pair, repeats) for peer, pair in pairs.items()}
    about = {"source": source, "image_size": image_size, "images": images, "steps": steps, "points": points}
    return {**about, "repeats": repeats, "machine": machine(), "ratios": ratios}


def lines(result: dict[str, Any]) -> list[Line]:
    rows: list[Line] = []
    about = f"{result['source']}, {result['image_size']} px, {result['images']} images, {result['machine']}"
    for peer, ratio in result["ratios"].items():
        low, high = ratio["quartiles"]
        value = f"{ratio['median']:.2f} ({low:.2f}-{high:.2f}), processor {ratio['processor']:.2f}"
        what = f"{PEERS[peer]} ({about})" if peer in TARGETS else PEERS[peer]
        target = TARGETS.get(peer)
        rows.append((what, value, f">= {target:g}", ratio["median"] >= target) if target else (what, value))
    return rows


def machine() -> str:
    """What decides which arithmetic is fast here."""
    words = set()
    if Path("/proc/cpuinfo").is_file():
        words = set(Path("/proc/cpuinfo").read_text().split())
    features = {"AVX-512": "avx512f", "bf16": "avx512_bf16", "VNNI": "avx512_vnni", "AMX": "amx_tile"}
    names = [name for name, flag in features.items() if flag in words]
    return f"{torch.get_num_threads()} threads, {', '.join(names) or 'no AVX-512'}"


def _ratio(peer: str, pair: Pair, repeats: int) -> dict[str, Any]:
    clock, processor = [], []
    for turn in range(repeats + 1):
        taken = []
        for work in pair:
            start, cpu = now(), time.process_time()
            work()
            taken.append((now() - start, time.process_time() - cpu))
        if turn:  # the first warms up
            (ours, our_cpu), (theirs, their_cpu) = taken
            clock.append(theirs / ours)
            processor.append(their_cpu / max(our_cpu, 1e-9))
            report(f"{peer}: ours {ours:.3f} s, peer {theirs:.3f} s")
    low, high = np.percentile(clock, (25, 75))
    return {
        "median": statistics.median(clock), "quartiles": [float(low), float(high)],
        "processor": statistics.median(processor),
    }  # fmt: skip


# Prediction


def prediction(source: str, files: list[Path], image_size: int, batch: int) -> Pair:
    from transformers import AutoConfig, AutoModelForImageClassification, ViTImageProcessorPil, pipeline

    predictor = untrained_predictor(source, "lp", image_size)
    facts = predictor.model.backbone.model.config.to_diff_dict()
    config = AutoConfig.for_model(**facts, num_labels=len(predictor.classes))
    size = {"height": image_size, "width": image_size}
    theirs = pipeline(
        "image-classification", AutoModelForImageClassification.from_config(config).eval(), device="cpu",
        image_processor=ViTImageProcessorPil(size=size),
    )  # fmt: skip
    names = [str(file) for file in files]
    return lambda: list(predictor.predict(files, batch)), lambda: list(theirs(names, batch_size=batch))


# Training


def training(source: str, folder: Path, images: int, pixels: int, image_size: int, steps: int) -> Pair:
    """LP+LN on three sites, evaluated at the first and the last step, and once on the fourth site."""
    config = Config(
        str(write_domains(folder / "sites", images, pixels)), "d0", method="lp-ln", backbone=local_copy(source, folder),
        image_size=image_size, steps=steps, eval_every=steps, batch_per_domain=4, cache=False,
    )  # fmt: skip
    turns = iter(range(1, 1000))  # each turn a run of its own

    def ours() -> None:
        train(replace(config, seed=next(turns)), folder / "runs", quiet=True)

    def plain() -> None:
        fold = make_fold(config)
        loop = PlainLoop(config, fold, splits={str(name): rows for name, rows in fold.validation.items()})
        loop.run()
        loop.score(np.concatenate(list(fold.test.values())))

    assert evaluations(config.steps, config.eval_every) <= 2
    return ours, plain


# Grouping


def grouping(points: int, dim: int, classes: int) -> dict[str, Pair]:
    x, centres = (each.cpu() for each in random_features(points, dim, classes))
    truth = np.arange(points) % classes
    groups = nearest(x, centres)[1].numpy()
    return {
        "k-means": (lambda: our_kmeans(x, centres), lambda: plain_kmeans(x, centres)),
        "mixture": (lambda: our_mixture(x, centres), lambda: plain_mixture(x, centres)),
        "match": (lambda: clustering_accuracy(truth, groups, range(classes)), lambda: plain_match(truth, groups)),
    }


def our_kmeans(x: Tensor, centres: Tensor) -> Tensor:
    """Centres (K, D) after some Lloyd iterations."""
    for _ in range(ITERATIONS):
        group = nearest(x, centres)[1]
        sums = torch.zeros_like(centres).index_add_(0, group, x)
        centres = sums / torch.bincount(group, minlength=len(centres))[:, None].clamp(min=1)
    return centres


def plain_kmeans(x: Tensor, centres: Tensor) -> np.ndarray:
    """scikit-learn's, from the same centres, for as many iterations."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is stopped before it converges
        model = KMeans(len(centres), init=centres.numpy(), n_init=1, max_iter=ITERATIONS, tol=0).fit(x.numpy())
    return np.asarray(model.cluster_centers_)


def our_mixture(x: Tensor, means: Tensor) -> SphericalMixture:
    return SphericalMixture.fit(x, len(means), start=means, iterations=ITERATIONS, tolerance=0)


def plain_mixture(x: Tensor, means: Tensor) -> Any:
    """scikit-learn's, from the same means, for as many steps."""
    size = dict(covariance_type="spherical", max_iter=ITERATIONS, tol=0.0, init_params="random_from_data")
    model = GaussianMixture(len(means), means_init=means.double().numpy(), random_state=0, **size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is stopped before it converges
        return model.fit(x.double().numpy())


def plain_match(truth: np.ndarray, groups: np.ndarray) -> float:
    """Accuracy as the host projects count it: one Python step a sample, then the Hungarian algorithm."""
    size = int(max(truth.max(), groups.max())) + 1
    counts = np.zeros((size, size), dtype=np.int64)
    for cluster, label in zip(groups, truth, strict=True):
        counts[cluster, label] += 1
    row, column = linear_sum_assignment(counts.max() - counts)
    return float(counts[row, column].sum() / len(truth))
