"""Geometry of features, of unit length, by class and by domain: as a picture and as numbers."""

import warnings
from importlib.util import find_spec
from typing import Any, Literal

import numpy as np

Projection = Literal["auto", "umap", "pca"]
NEIGHBOURS = 5
FOLDS = 5


def numbers(features: np.ndarray, label: np.ndarray, domain: np.ndarray, unseen: str) -> dict[str, Any]:
    """Of features (N,D) with class and domain names (N,); None where there are too few images or groups."""
    unit = unit_length(features)
    return {
        "images": len(unit),
        "silhouette_by_class": silhouette(unit, label),
        "silhouette_by_domain": silhouette(unit, domain),
        "domain_separability": domain_separability(unit, domain),
        "knn_across_domains": knn_across_domains(unit, label, domain, unseen),
    }


def unit_length(features: np.ndarray) -> np.ndarray:
    return features / np.maximum(np.linalg.norm(features, axis=1, keepdims=True), 1e-12)


def silhouette(features: np.ndarray, group: np.ndarray) -> float | None:
    """Mean silhouette of the groups, -1 to 1."""
    from sklearn.metrics import silhouette_score

    return float(silhouette_score(features, group)) if 2 <= len(np.unique(group)) < len(features) else None


def domain_separability(features: np.ndarray, domain: np.ndarray) -> dict[str, float] | None:
    """Cross-validated balanced accuracy of a linear classifier of the domains, and chance level."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedKFold, cross_val_score
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    names, count = np.unique(domain, return_counts=True)
    if len(names) < 2 or count.min() < FOLDS:
        return None
    linear = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=500, class_weight="balanced"))
    folds = StratifiedKFold(FOLDS, shuffle=True, random_state=0)
    scores = cross_val_score(linear, features, domain, cv=folds, scoring="balanced_accuracy")
    return {"accuracy": float(scores.mean()), "chance": 1 / len(names)}


def knn_across_domains(
    features: np.ndarray, label: np.ndarray, domain: np.ndarray, unseen: str
) -> dict[str, Any] | None:
    """Accuracy of a kNN trained on the other domains: for each domain, and for the unseen one from the sources."""
    from sklearn.neighbors import KNeighborsClassifier

    names = np.unique(domain).tolist()
    if len(names) < 2:
        return None
    by_domain = {}
    for name in names:
        there = domain == name
        neighbours = KNeighborsClassifier(min(NEIGHBOURS, int((~there).sum()))).fit(features[~there], label[~there])
        by_domain[name] = float(neighbours.score(features[there], label[there]))
    return {"unseen": by_domain.get(unseen), "mean": float(np.mean(list(by_domain.values()))), "by_domain": by_domain}


def require_projection(how: Projection) -> None:
    """ValueError if UMAP was requested and is not installed."""
    if how == "umap" and find_spec("umap") is None:
        raise ValueError("UMAP is not installed: `pip install 'patchgen[plots]'`, or choose pca")


def flat(features: np.ndarray, how: Projection = "auto", seed: int = 0) -> tuple[np.ndarray, str]:
    """(N,2) for a picture, and the name of the method; PCA if there are too few images for UMAP."""
    require_projection(how)
    unit = unit_length(features)
    if how == "pca" or find_spec("umap") is None or len(unit) <= 30:
        return pca(unit), "PCA"
    from umap import UMAP

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a seed disables its parallelism
        return np.asarray(UMAP(n_neighbors=15, min_dist=0.2, random_state=seed).fit_transform(unit)), "UMAP"


def pca(features: np.ndarray) -> np.ndarray:
    """The first two principal components (N,2); their arbitrary sign makes the largest entry positive."""
    from sklearn.decomposition import PCA

    points = PCA(2, svd_solver="full").fit_transform(features.astype(np.float64))
    return points * np.where(points.max(0) < -points.min(0), -1, 1)
