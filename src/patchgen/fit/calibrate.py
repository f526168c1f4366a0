"""Calibrate confidence for the training sites, on their held-out images.

Probabilities are softmax(logits / T). An image is unlike training if its features are farther from all class centres
than 99 % of source validation. At a new site both are extrapolations: probabilities tend to be overconfident there.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from patchgen.data.images import ImageStore
from patchgen.predict.predictor import Confidence, Familiar, Predictor
from patchgen.tasks import Fold
from patchgen.tasks.mdg import at_most
from patchgen.tasks.metrics import calibration_error

IMAGES = 2000  # maximum number of training and of validation images
COLDEST, HOTTEST = 0.05, 20.0
QUANTILE = 0.99


def calibrate(
    predictor: Predictor, fold: Fold, store: ImageStore, tick: Callable[[int], None] | None = None,
    tokens: np.ndarray | None = None,
) -> tuple[Confidence, dict[str, Any]]:  # fmt: skip
    """Temperature and familiarity, fitted on a fold's source images or their stored tokens, and their effect there."""
    seed = predictor.config.seed
    train = spread(list(fold.train.values()), IMAGES, seed)
    held_out = spread(list(fold.validation.values()), IMAGES, seed)
    _, features, _ = predictor.read(store, train, tick, tokens)
    logits, others, _ = predictor.read(store, held_out, tick, tokens)
    label = torch.from_numpy(fold.target[held_out])
    temperature = fit_temperature(logits, label)
    effect: dict[str, Any] = {"images": len(label), "accuracy": float((logits.argmax(1) == label).double().mean())}
    for name, divisor in (("before", 1.0), ("after", temperature)):
        probabilities = (logits / divisor).softmax(1).numpy()
        effect[f"ece_{name}"] = calibration_error(probabilities, label.numpy())
        effect[f"nll_{name}"] = negative_log_likelihood(logits, label, divisor)
    familiar = fit_familiar(features, torch.from_numpy(fold.target[train]), others)
    return Confidence(temperature, familiar), {**effect, "quantile": QUANTILE}


def calibration_images(fold: Fold) -> int:
    """The number of images that `calibrate` will read."""
    return sum(min(IMAGES // len(p), len(r)) for p in (fold.train, fold.validation) for r in p.values())


def spread(parts: list[np.ndarray], limit: int, seed: int) -> np.ndarray:
    """At most `limit` rows in total, with the same maximum for each part."""
    return np.concatenate([at_most(rows, limit // len(parts), [seed, 21, i]) for i, rows in enumerate(parts)])


def negative_log_likelihood(logits: Tensor, label: Tensor, temperature: float) -> float:
    """Mean of -log p(label) at a temperature."""
    return float(torch.nn.functional.cross_entropy(logits.double() / temperature, label))


def fit_temperature(logits: Tensor, label: Tensor) -> float:
    """The T of the highest likelihood of labels (N,) under softmax(logits / T); 1 where the optimum would be 0."""
    if bool((logits.argmax(1) == label).all()):
        return 1.0
    from scipy.optimize import minimize_scalar

    best = minimize_scalar(
        lambda log: negative_log_likelihood(logits, label, float(np.exp(log))),
        bounds=(np.log(COLDEST), np.log(HOTTEST)),  # convex in 1/T, so the minimum is unique
        method="bounded",
        options={"xatol": 1e-6},
    )
    return float(np.exp(best.x))


def fit_familiar(features: Tensor, label: Tensor, held_out: Tensor) -> Familiar:
    """Class centres of features (N, D) with labels (N,), a shrunk covariance, and the threshold on `held_out`."""
    from sklearn.covariance import LedoitWolf

    kinds = label.unique()
    centres = torch.stack([features[label == kind].mean(0) for kind in kinds]).double()  # (K, D)
    within = features.double() - centres[torch.searchsorted(kinds, label)]
    covariance = torch.from_numpy(LedoitWolf(assume_centered=True).fit(within.numpy()).covariance_)
    values, vectors = torch.linalg.eigh(covariance)
    floor = max(1e-6 * float(values.max()), 1e-12)  # a direction without spread must not dominate
    whitening = (vectors * values.clamp(min=floor).rsqrt()).float()  # (D, D)
    familiar = Familiar((centres.float() @ whitening), whitening, 0.0)
    distance = familiar.distance(held_out).double().numpy()
    return replace(familiar, threshold=float(np.quantile(distance, QUANTILE, method="higher")))
