"""Numbers of the feature picture on clouds whose answer is known."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest

from patchgen.diagnose import geometry

RNG = np.random.default_rng(0)
LABEL = np.repeat(["a", "b", "c"], 40)
DOMAIN = np.tile(["north", "south"], 60)


def cloud(by_class: float, by_domain: float) -> np.ndarray:
    """Classes apart along three axes, domains along a fourth; unit noise."""
    points = RNG.normal(size=(120, 12))
    points[np.arange(120), np.unique(LABEL, return_inverse=True)[1]] += by_class
    points[:, 3] += by_domain * np.where(DOMAIN == "north", 1, -1)
    return points


def test_numbers_tell_tight_classes_from_domains_that_are_apart() -> None:
    classes, domains = (geometry.numbers(cloud(*apart), LABEL, DOMAIN, "south") for apart in ((40, 0), (0, 8)))
    assert classes["silhouette_by_class"] > 0.8 and abs(classes["silhouette_by_domain"]) < 0.05
    assert classes["domain_separability"]["chance"] == 0.5 and classes["domain_separability"]["accuracy"] < 0.65
    assert classes["knn_across_domains"]["unseen"] == 1 == classes["knn_across_domains"]["mean"]
    assert domains["silhouette_by_class"] < 0.05 < 0.3 < domains["silhouette_by_domain"]
    assert domains["domain_separability"]["accuracy"] > 0.98
    assert domains["knn_across_domains"]["unseen"] < 0.6  # a third by chance


def test_knn_learns_from_the_other_domains_only() -> None:
    """In the unseen domain the classes have changed places: its own images would say otherwise."""
    points = np.repeat(np.eye(2), 10, axis=0)[np.tile(np.arange(20), 2)]
    domain = np.repeat(["seen", "new"], 20)
    label = np.where(points[:, 0] == 1, "a", "b")
    label[20:] = np.where(label[20:] == "a", "b", "a")
    found = geometry.knn_across_domains(points, label, domain, "new")
    assert found is not None and found["unseen"] == 0


def test_too_few_images_or_groups_are_none() -> None:
    one = np.repeat("only", 120)
    found = geometry.numbers(cloud(1, 1), one, one, "only")
    assert found["silhouette_by_class"] is None and found["domain_separability"] is None
    assert found["knn_across_domains"] is None
    few = np.array(["x"] * 117 + ["y"] * 3)
    assert geometry.domain_separability(cloud(0, 0), few) is None


def test_umap_or_pca(monkeypatch: pytest.MonkeyPatch) -> None:
    points = cloud(5, 2)
    assert geometry.flat(points, "pca")[1] == "PCA"
    assert geometry.flat(points[:10], "auto")[1] == "PCA"
    monkeypatch.setattr(geometry, "find_spec", lambda name: None)
    assert geometry.flat(points, "auto")[1] == "PCA"
    with pytest.raises(ValueError, match=r"patchgen\[plots\]"):
        geometry.flat(points, "umap")
    monkeypatch.setattr(geometry, "find_spec", lambda name: object())
    fake = SimpleNamespace(UMAP=lambda **_: SimpleNamespace(fit_transform=lambda features: features[:, :2]))
    monkeypatch.setitem(sys.modules, "umap", fake)
    assert geometry.flat(points, "auto")[1] == "UMAP"
