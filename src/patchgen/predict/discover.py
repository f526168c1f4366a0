"""Group images that fit no known class, by the features that a run's head reads.

Known classes are pinned: their labelled images stay in the cluster of their class (semi-supervised k-means). Images in
such a cluster fit the class; the other clusters are the groups new-1, new-2, ... by size. But a new site is not a new
class: a cluster whose images the classifier names alike and confidently gets that class (`Rule`).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import normalize

from patchgen.config import NO_DOMAIN
from patchgen.discovery import Estimate, SemiSupervisedKMeans, estimate_num_classes
from patchgen.predict.predictor import Checkpoint, Prediction, Predictor, Unreadable
from patchgen.runs.folder import RunFolder
from patchgen.runs.tensors import read_predictions

PER_CLASS = 60  # reference images of a known class
FEWEST = 5  # examples of a known class in an estimate
LOOK_AT_LEAST = 10  # new classes that an estimate considers, if there are enough images


class Features(NamedTuple):
    predictions: list[Prediction]
    vectors: np.ndarray  # (N, D) float32 of length 1: the head's input for each of them
    unreadable: list[Unreadable]


@dataclass(frozen=True)
class Rule:
    """When a group is a known class at a new site: its images get one label as surely as those of left-out sites."""

    agreement: float = 0.9  # least share of the images with the most frequent label
    confidence: float = 0.9  # least median probability of that label
    sites: tuple[str, ...] = ()  # that it was calibrated on
    images: int = 0

    def __str__(self) -> str:
        share = f"{self.agreement:.0%} of its images get one label, with a median probability of {self.confidence:.2f}"
        origin = "not calibrated: no predictions for a left-out site are there"
        if self.sites:
            origin = f"calibrated on {self.images:,} images of {', '.join(self.sites)}, left out of training"
        return f"a group is a known class if at least {share} ({origin})"


@dataclass(frozen=True, eq=False)
class Member:
    path: Path
    group: str  # a known class, or new-1, new-2, ...
    fits_known: bool  # by its features, or because the classifier names its whole group so
    distance: float  # to the centre of its group, between unit vectors: 0 to 2
    confidence: float  # margin 1 - d1 / d2 of the two nearest centres: 0 half-way, 1 at the centre; not a probability
    nearest_known: str
    distance_ratio: float  # own centre / nearest known centre: 1 if it fits, small if it is far from all known
    mask: np.ndarray | None = None  # (h, w)


@dataclass(frozen=True, eq=False)
class Groups:
    members: list[Member]  # in the order of the images
    new: list[str]  # groups that fit no known class, largest first
    known: list[str]
    estimate: Estimate | None  # of ALL classes, known and new; None if the number was given
    unreadable: list[Unreadable]
    rule: Rule
    renamed: dict[str, int]  # known class -> images of groups that got it from the classifier

    def of(self, group: str) -> list[Member]:
        """Images of a group or known class, the most central first."""
        return sorted((member for member in self.members if member.group == group), key=lambda member: member.distance)


def reference_images(run: RunFolder, data: str | None = None, per_class: int = PER_CLASS) -> dict[str, list[Path]]:
    """At most `per_class` training images of each known class, none of some; `data`: where the run's data are now."""
    from patchgen.data.splits import read_splits
    from patchgen.tasks import make_fold

    config = run.config if data is None else replace(run.config, data=data)
    try:
        fold = make_fold(config)
        read_splits(run.path / "splits.csv", fold.table)
    except (ValueError, OSError) as error:
        raise ValueError(f"the images that {run.path} was trained on are needed as examples of its known classes: "
                         f"{error}. If their path has changed, give it with `--data`") from error  # fmt: skip
    rows = np.concatenate(list(fold.train.values()))
    rng = np.random.default_rng(config.seed)
    known = fold.classes[: fold.num_known]  # the other outputs of mdg_gcd have no class yet
    drawn = {name: np.sort(rng.permutation(rows[fold.target[rows] == c])[:per_class]) for c, name in enumerate(known)}
    return {name: [fold.table.file(row) for row in rows] for name, rows in drawn.items()}


def read_features(
    predictor: Predictor, paths: Iterable[str | Path], batch: int = 64, tick: Callable[[int], None] | None = None
) -> Features:
    """Predictions and unit vectors of images; `tick` is called with the number of images after each batch."""
    answers = list(predictor.predict(paths, batch, tick))
    predictions = [answer for answer in answers if isinstance(answer, Prediction)]
    vectors = torch.tensor(np.array([prediction.features for prediction in predictions], np.float32))
    unreadable = [answer for answer in answers if isinstance(answer, Unreadable)]
    return Features(predictions, normalize(vectors, dim=-1).numpy(), unreadable)


def calibrated_rule(run: RunFolder, checkpoint: Checkpoint = "selected") -> Rule:
    """The rule for a run's model, from the predictions for left-out sites of it and of its sibling runs."""
    agreement, confidence, sites, images = [], [], [], 0
    for folder in sorted(run.path.resolve().parent.iterdir()):
        saved = None
        with suppress(ValueError, OSError):  # no run, or a damaged one
            other = RunFolder.open(folder)
            sibling = replace(other.config, unseen=run.config.unseen) == run.config
            if other.done and sibling and other.config.unseen != NO_DOMAIN:
                saved = read_predictions(folder, checkpoint)
        if saved is None:
            continue
        sites.append(str(other.config.unseen))
        images += len(saved.label)
        predicted, sure = saved.probabilities.argmax(1), saved.probabilities.max(1)
        for name in np.unique(saved.label):
            same = predicted[saved.label == name] == name
            if same.mean() > 0.5:  # the classifier names the class right
                agreement.append(float(same.mean()))
                confidence.append(float(np.median(sure[saved.label == name][same])))
    if not agreement:
        return Rule()
    return Rule(min(agreement), max(0.5, min(confidence)), tuple(dict.fromkeys(sites)), images)


def group_features(
    features: Features, known_features: np.ndarray, known_labels: Sequence[str], *, new_classes: int | None = None,
    at_most: int | None = None, seed: int = 1, rule: Rule = Rule(),  # noqa: B008  frozen
) -> Groups:  # fmt: skip
    """K-means, known classes pinned by unit vectors (M, D); new ones are estimated (up to `at_most`) or given."""
    known, images = len(set(known_labels)), len(features.predictions)
    if not images:
        first = "".join(f"; the first, {image.path}: {image.reason}" for image in features.unreadable[:1])
        raise ValueError(f"none of the {len(features.unreadable)} images could be read{first}")
    estimate = None
    if new_classes is None:
        import pandas as pd

        most = known + (at_most or min(images, max(LOOK_AT_LEAST, known)))
        # with more of each known class, the estimate would split these first
        shuffled = pd.Series(known_labels).iloc[np.random.default_rng(seed).permutation(len(known_labels))]
        few = np.sort(shuffled.groupby(shuffled).head(max(FEWEST, images // (2 * known))).index)
        labels = [known_labels[row] for row in few]
        estimate = estimate_num_classes(features.vectors, known_features[few], labels, most, seed=seed)
        new_classes = estimate.num_classes - known
    kmeans = SemiSupervisedKMeans(known + new_classes, seed=seed)
    kmeans.fit(features.vectors, known_features, known_labels)
    distances = kmeans.distances(features.vectors).numpy()  # (N, K)
    cluster = distances.argmin(1)
    classes = list(map(str, kmeans.labelled_classes))
    named = _named_by_classifier(features, cluster, classes, rule)
    sizes = Counter(c for c in sorted(cluster.tolist()) if c >= known and c not in named)
    free = (f"new-{i}" for i in count(1) if f"new-{i}" not in classes)  # a class of an earlier round may have this name
    new = {c: next(free) for c, _ in sizes.most_common()}
    members = _members(features, distances, dict(enumerate(classes)) | new | named, classes)
    renamed = Counter(named[c] for c in cluster.tolist() if c in named)
    return Groups(members, list(new.values()), classes, estimate, features.unreadable, rule, dict(renamed))


def _named_by_classifier(features: Features, cluster: np.ndarray, classes: Sequence[str], rule: Rule) -> dict[int, str]:
    """Cluster -> class, for clusters of no known class that the rule accepts."""
    labels = np.array([prediction.label for prediction in features.predictions], dtype=object)
    sure = np.array([prediction.confidence for prediction in features.predictions])
    named = {}
    for number in np.unique(cluster[cluster >= len(classes)]).tolist():
        inside = cluster == number
        [(label, count)] = Counter(labels[inside]).most_common(1)
        confident = np.median(sure[inside & (labels == label)]) >= rule.confidence
        if label in classes and count >= rule.agreement * inside.sum() and confident:
            named[number] = str(label)
    return named


def _members(
    features: Features, distances: np.ndarray, names: Mapping[int, str], classes: Sequence[str]
) -> list[Member]:
    to_known = distances[:, : len(classes)]
    alone = np.full((len(distances), 1), np.inf)  # the second nearest centre, if there is only one
    first, second = np.sort(np.hstack([distances, alone]), axis=1)[:, :2].T
    columns = distances.argmin(1), first, 1 - _ratio(first, second), to_known.argmin(1), _ratio(first, to_known.min(1))
    return [
        Member(image.path, names[c], names[c] in classes, distance, confidence, names[near], ratio, image.mask)
        for image, c, distance, confidence, near, ratio in zip(
            features.predictions, *(column.tolist() for column in columns), strict=True
        )
    ]


def _ratio(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """part / whole, for part <= whole; 1 if both are 0."""
    return np.divide(part, whole, out=np.ones_like(part), where=whole > 0)
