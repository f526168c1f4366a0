"""Semi-supervised k-means against scikit-learn, a slow version written out point by point, and analytic cases."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from patchgen.discovery import Estimate, SemiSupervisedKMeans, clustering_accuracy, estimate_num_classes, kmeans
from patchgen.discovery.kmeans import search


def blobs(
    classes: int, each: int, dim: int = 6, spread: float = 0.3, seed: int = 0, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """Points (classes * each, dim) around centres 4 apart on the axes and their negatives, and their classes."""
    generator = torch.Generator().manual_seed(seed)
    axes = 4 * torch.cat((torch.eye(dim), -torch.eye(dim)))[:classes]
    label = torch.arange(classes).repeat_interleave(each)
    return (axes[label] + spread * torch.randn(len(label), dim, generator=generator)).to(dtype), label


def fit_from(start: Any, clusters: SemiSupervisedKMeans, x: Any, *labelled: Any) -> SemiSupervisedKMeans:
    """A fit from given centres (K - K_l, D) of the clusters without a labelled class, instead of drawn ones."""
    points = torch.as_tensor(x)
    first = torch.as_tensor(start).double() - points.mean(0, dtype=torch.float64).to(points.dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clusters, "_draw", lambda *_: first)
        return clusters.fit(x, *labelled)


def slow_pinned(
    x: np.ndarray, labelled: np.ndarray, labels: np.ndarray, others: np.ndarray, tolerance: float
) -> tuple[np.ndarray, list[int], float]:
    """Lloyd's steps as they are defined, labelled points among the others in every sum."""
    classes = sorted(set(labels.tolist()))
    centres = np.array([labelled[labels == c].mean(0) for c in classes] + list(others))
    for _ in range(200):
        member = [int(np.argmin([np.sum((p - c) ** 2) for c in centres])) for p in x]
        new = []
        for k in range(len(centres)):
            mine = [p for p, m in zip(x, member, strict=True) if m == k]
            mine += [p for p, y in zip(labelled, labels, strict=True) if classes.index(y) == k]
            new.append(np.mean(mine, axis=0))
        change = sum(np.linalg.norm(a - b) for a, b in zip(new, centres, strict=True)) ** 2
        centres = np.array(new)
        if change <= tolerance:
            break
    member = [int(np.argmin([np.sum((p - c) ** 2) for c in centres])) for p in x]
    inertia = sum(np.sum((p - centres[m]) ** 2) for p, m in zip(x, member, strict=True))
    inertia += sum(np.sum((p - centres[classes.index(y)]) ** 2) for p, y in zip(labelled, labels, strict=True))
    return centres, member, inertia


@pytest.mark.parametrize(("seed", "tolerance"), [(0, 0.0), (1, 0.0), (2, 0.1)])
def test_equals_the_slow_version_with_pinned_labels(seed: int, tolerance: float) -> None:
    rng = np.random.default_rng(seed)
    x, labelled = rng.normal(size=(60, 3)), rng.normal(size=(25, 3)) + 0.5
    labels = rng.permutation(np.array([4, 9, 2] * 8 + [2]))  # classes that overlap: pinning decides
    others = x[rng.choice(60, 2, replace=False)]
    centres, member, inertia = slow_pinned(x, labelled, labels, others, tolerance)
    found = fit_from(others, SemiSupervisedKMeans(5, tolerance=tolerance), x, labelled, labels)
    assert found.labelled_classes == [2, 4, 9]
    np.testing.assert_allclose(found.centres.numpy(), centres, atol=1e-9)
    assert found.assignment.tolist() == member and found.inertia == pytest.approx(inertia, rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_equals_scikit_learn_from_the_same_start(dtype: torch.dtype) -> None:
    from sklearn.cluster import KMeans

    x = torch.randn(400, 5, generator=torch.Generator().manual_seed(2), dtype=dtype)
    start = x[:7]
    ours = fit_from(start, SemiSupervisedKMeans(7, tolerance=0), x)
    theirs = KMeans(7, init=start.numpy(), n_init=1, tol=0, max_iter=200, algorithm="lloyd").fit(x.numpy())
    assert (ours.assignment.numpy() == theirs.labels_).all()
    np.testing.assert_allclose(ours.centres.numpy(), theirs.cluster_centers_, atol=1e-5)
    assert ours.inertia == pytest.approx(theirs.inertia_, rel=1e-5)


def test_far_from_the_origin_float32_still_tells_points_apart() -> None:
    x, label = blobs(4, 20, dtype=torch.float32)
    near, far = SemiSupervisedKMeans(4).fit(x), SemiSupervisedKMeans(4).fit(x + 3000)
    assert clustering_accuracy(label, far.assignment, []).all == 1
    assert far.inertia == pytest.approx(near.inertia, rel=1e-2)  # x + 3000 itself is rounded
    torch.testing.assert_close(
        far.distances(x + 3000).min(1).values, near.distances(x).min(1).values, atol=5e-3, rtol=0
    )


def test_predict_and_distances() -> None:
    x, _ = blobs(4, 10)
    found = SemiSupervisedKMeans(4).fit(x)
    torch.testing.assert_close(found.distances(x), torch.cdist(x, found.centres))
    assert torch.equal(found.predict(x), found.assignment) and torch.equal(
        found.distances(x).argmin(1), found.assignment
    )
    assert float(found.distances(x).min(1).values.square().sum()) == pytest.approx(found.inertia)
    assert found.predict(x[:1].float()).tolist() == found.assignment[:1].tolist()


@pytest.mark.parametrize("block", [1, 7])
def test_blocks_do_not_change_the_answer(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, label = blobs(5, 12)
    whole = SemiSupervisedKMeans(5, inits=2).fit(x[20:], x[:20], label[:20])
    monkeypatch.setattr(kmeans, "BLOCK", block)
    parts = SemiSupervisedKMeans(5, inits=2).fit(x[20:], x[:20], label[:20])
    assert torch.equal(whole.assignment, parts.assignment)
    torch.testing.assert_close(whole.centres, parts.centres)
    assert whole.inertia == pytest.approx(parts.inertia)


# Draws


def test_the_same_seed_gives_the_same_clusters_and_another_seed_other_draws() -> None:
    x = torch.randn(200, 4, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(5)
    one = SemiSupervisedKMeans(12, inits=2, seed=3).fit(x)
    torch.manual_seed(6)  # the global generator plays no part
    np.random.seed(6)
    again, other = SemiSupervisedKMeans(12, inits=2, seed=3).fit(x), SemiSupervisedKMeans(12, inits=2, seed=4).fit(x)
    assert torch.equal(one.centres, again.centres) and torch.equal(one.assignment, again.assignment)
    assert one.inertia == again.inertia != other.inertia


def test_draws_are_proportional_to_the_squared_distance() -> None:
    """One labelled class at 0; points at 1, 2 and 3 are drawn with probability 1/14, 4/14 and 9/14."""
    x, origin, draw = torch.tensor([[1.0], [2.0], [3.0]]), torch.zeros(1, 1), SemiSupervisedKMeans(2)._draw
    drawn = np.array([draw(x, origin, 1, run).item() for run in range(3000)])
    shares = [(drawn == value).mean() for value in (1, 2, 3)]
    np.testing.assert_allclose(shares, np.array([1, 4, 9]) / 14, atol=0.03)


def test_draws_never_repeat_a_point_where_distances_are_mere_rounding() -> None:
    x = 1000 + 0.01 * torch.randn(20, 300, generator=torch.Generator().manual_seed(0))  # |x|^2 = 3e8, distances 0.06
    drawn = SemiSupervisedKMeans(20)._draw(x, x[:0], 20, 0)
    assert len(drawn.unique(dim=0)) == 20


# Empty clusters


def test_an_empty_cluster_restarts_at_the_farthest_point() -> None:
    """Two centres far away lose everything; the farthest points, 9 and then 6, take them over."""
    x = torch.tensor([[0.0], [1.0], [6.0], [9.0]], dtype=torch.float64)
    start = torch.tensor([[0.0], [500.0], [600.0]], dtype=torch.float64)
    found = fit_from(start, SemiSupervisedKMeans(3, tolerance=0), x)
    torch.testing.assert_close(found.centres.flatten(), torch.tensor([0.5, 9.0, 6.0], dtype=torch.float64))
    assert found.assignment.tolist() == [0, 0, 2, 1]


def test_a_restart_empties_no_other_cluster() -> None:
    """The point 100 is farthest from its centre but alone with it: the next one moves."""
    x = torch.tensor([[0.0], [2.0], [100.0]], dtype=torch.float64)
    start = torch.tensor([[0.5], [150.0], [900.0]], dtype=torch.float64)
    found = fit_from(start, SemiSupervisedKMeans(3, tolerance=0), x)
    assert sorted(found.assignment.tolist()) == [0, 1, 2] and found.centres[1].item() == 100


def test_equal_points_give_finite_centres() -> None:
    found = SemiSupervisedKMeans(3).fit(torch.ones(5, 2), torch.ones(2, 2), [0, 0])
    assert torch.isfinite(found.centres).all() and found.inertia == pytest.approx(0, abs=1e-9)


# Errors


X = torch.randn(6, 2, generator=torch.Generator().manual_seed(0))
BROKEN = X.clone()
BROKEN[4, 1] = float("nan")


@pytest.mark.parametrize(("clusters", "data", "text"), [
    (2, (X, X[:3], [0, 1, 2]), "must be from 3, the number of labelled classes, to 9, .* not 2"),
    (8, (X, X[:1], [0]), "from 1, .* to 7, .* not 8"),
    (0, (X,), "from 1, .* not 0"),
    (2, (BROKEN,), "unlabelled must be finite, but 1 of 6 rows .* row 4"),
    (2, (X, BROKEN, [0] * 6), "labelled must be finite"),
    (2, (X, torch.zeros(1, 3), [0]), "labelled has 3 features a point, the others 2"),
    (2, (X, X[:2], [0]), "one id a labelled point, 2, not 1"),
    (2, (X, X[:2], [0, -1]), "-1, which means 'no label'"),
    (2, (X, X[:2]), "both or neither"),
    (2, (X[0],), r"shape \(N, D\) .* not \(2,\)"),
    (2, (X[:0],), r"not \(0, 2\)"),
])  # fmt: skip
def test_wrong_data(clusters: int, data: tuple[Any, ...], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        SemiSupervisedKMeans(clusters).fit(*data)


# The number of classes: right on separated blobs, and the search against looking everywhere


@pytest.mark.parametrize(("classes", "known", "each"), [(9, 6, 60), (20, 10, 30)])
def test_finds_the_number_of_separated_blobs(classes: int, known: int, each: int) -> None:
    x, label = blobs(classes, each, dim=classes, spread=0.2)
    has_label = (label < known) & (torch.arange(len(x)) % 2 == 0)
    names = [f"class {int(i)}" for i in label[has_label]]
    found = estimate_num_classes(x[~has_label], x[has_label], names, at_most=5 * classes)
    k, curve = found  # a pair, too
    assert isinstance(found, Estimate) and k == classes == found.num_classes
    assert curve[k] == 1 and all(score < 1 for tried, score in curve.items() if tried > k)
    assert list(curve) == sorted(curve) and known <= min(curve) and max(curve) <= 5 * classes


@pytest.mark.parametrize(("low", "high"), [(1, 1), (3, 5), (5, 40), (70, 1000)])
def test_search_finds_every_single_top(low: int, high: int) -> None:
    for top in {low, high, (low + high) // 2, low + (high - low) // 7, high - (high - low) // 9}:
        found = search(lambda k, top=top: -abs(k - top), low, high)  # type: ignore[misc]
        assert found.num_classes == top and len(found.curve) <= 40
        # perfect below the top, as a score is that does not see merged unlabelled classes
        assert search(lambda k, top=top: 1 - max(0, k - top), low, high).num_classes == top  # type: ignore[misc]


@pytest.mark.parametrize(("change", "text"), [
    ({"at_most": 2}, "3 to 10, not 2"),
    ({"at_most": 11}, "3 to 10, not 11"),
    ({"labels": [0, 1]}, "one length"),
])  # fmt: skip
def test_wrong_arguments(change: dict[str, Any], text: str) -> None:
    good = {"unlabelled": torch.rand(6, 2), "labelled": torch.rand(4, 2), "labels": [0, 1, 2, 2], "at_most": 5}
    with pytest.raises(ValueError, match=text):
        estimate_num_classes(**{**good, **change})


def test_of_equal_scores_that_are_not_perfect_the_smallest_number_wins() -> None:
    assert search(lambda k: 0.5, 3, 9).num_classes == 3 and search(lambda k: 1.0, 3, 9).num_classes == 9
