"""Unseen domain and unknown classes combined: some classes have no labels in training, and the test domain is unseen.

Labels are hidden here, before training and selection: ``Fold.target`` is -1. The unlabelled pool contains only unknown
classes, as in the paper, or (``mixed``) also a share of the known ones. Checkpoints are selected on images of known
classes. The outputs after the known ones get new classes by one Hungarian match over all scored images.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from patchgen.common.text import did_you_mean
from patchgen.config import Config
from patchgen.data.table import Table
from patchgen.discovery.assignment import accuracy_of_counts, match
from patchgen.methods import method_class
from patchgen.tasks import mdg
from patchgen.tasks.mdg import Fold


@dataclass(frozen=True)
class DiscoveryFold(Fold):
    known: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()  # true names, for the scorer only

    @property
    def notes(self) -> tuple[str, ...]:
        seen = " - BUT THIS METHOD IS GIVEN THEM: an upper bound" if (self.target == self.truth).all() else ""
        return (
            *super().notes,
            f"known classes: {', '.join(self.known)}",
            f"unknown classes, whose labels training does not see{seen}: {', '.join(self.unknown)}",
            "accuracy is that of all classes under one match of outputs to classes",
        )

    @property
    def num_known(self) -> int:
        return len(self.known)

    def scores(self, confusion: np.ndarray) -> dict[str, Any]:
        """All / Known / Unknown after one joint match, as usual; ``accuracy`` is All.

        It may assign a known output to an unknown class if more images are then correct; ``by_name`` does not.
        """
        names = (*self.known, *self.unknown)
        counts = confusion[: len(names), : len(self.classes)]
        is_known = np.arange(len(names)) < len(self.known)
        found = accuracy_of_counts(counts, is_known)
        true_of = {output: true for output, true in enumerate(match(counts).tolist()) if true >= 0}
        hits = {names[true]: int(counts[true, output]) for output, true in true_of.items()}
        total = counts.sum(1)
        return {
            "accuracy": found.all,
            "known": found.known,
            "unknown": found.unknown,
            "images": int(total.sum()),
            "known_images": int(total[is_known].sum()),
            "by_name": _by_name(counts, len(self.known)),
            "taken_for_known": _share(counts[~is_known, : len(self.known)].sum(), total[~is_known].sum()),
            "per_class": {name: hits.get(name, 0) / int(total[i]) for i, name in enumerate(names) if total[i]},
            "outputs": {self.classes[output]: names[true] for output, true in true_of.items()},
        }


def make_fold(config: Config, table: Table | None = None) -> DiscoveryFold:
    """The leave-one-domain-out fold without the labels of unknown classes."""
    whole = mdg.make_fold(replace(config, task="mdg", val_images=None), table)
    if not whole.test:
        raise ValueError("task mdg_gcd discovers classes in an unseen domain: --unseen must name one, not none")
    known, unknown = known_classes(config.known, whole.table.classes)
    order = [whole.table.classes.index(name) for name in (*known, *unknown)]
    rank = np.argsort(order)  # table's class id -> known classes first
    truth = np.where(whole.table.label >= 0, rank[whole.table.label], -1)
    hidden = _hidden(config, whole, truth, len(known))
    revealed = method_class(config.method).labels == "all"
    parts = vars(whole) | {
        "validation": _validation(config, whole, truth, len(known)),
        "target": truth if revealed else np.where(hidden, -1, truth),
        "truth": truth,
        "classes": output_names(known, unknown, config.num_classes),
        "metric": "accuracy",  # of known classes: the validation rows contain no others
        "positive": None,
    }
    return DiscoveryFold(**parts, known=known, unknown=unknown)


def known_classes(rule: str, classes: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Known and unknown classes: ``lreg`` (L-Reg's half plus one), ``half``, or comma-separated names."""
    if rule in ("lreg", "half"):
        known = classes[: len(classes) // 2 + (rule == "lreg")]  # L-Reg: class ids up to and including int(C / 2)
    else:
        known = tuple(dict.fromkeys(name.strip() for name in rule.split(",") if name.strip()))
        for name in known:
            if name not in classes:
                hint = did_you_mean(name, classes)
                raise ValueError(f"--known {name!r} is not a class of this data{hint} (classes: {', '.join(classes)})")
    unknown = tuple(name for name in classes if name not in known)
    if len(known) < 2 or not unknown:
        raise ValueError(
            f"--known {rule} is {len(known)} of {len(classes)} classes: name at least two, and leave some to discover"
        )
    return known, unknown


def output_names(known: tuple[str, ...], unknown: tuple[str, ...], num_classes: int | None) -> tuple[str, ...]:
    """Known classes by name; the outputs after them have generic names."""
    total = num_classes or len(known) + len(unknown)
    if total < len(known):
        raise ValueError(
            f"--num-classes {total} is less than the {len(known)} known classes; give known and new ones together"
        )
    return (*known, *(f"new-{i + 1}" for i in range(total - len(known))))


def _hidden(config: Config, whole: Fold, truth: np.ndarray, num_known: int) -> np.ndarray:
    """(N,) rows whose labels are hidden from training: all unknown classes and, with ``mixed``, some of the known."""
    hidden = truth >= num_known
    if config.unlabelled == "mixed":
        for domain, rows in whole.train.items():
            of_known = rows[truth[rows] < num_known]
            count = round(len(of_known) * (1 - config.labelled_share))
            drawn = np.random.default_rng([config.seed, domain, 77]).choice(of_known, count, replace=False)
            hidden[drawn] = True
    source = np.concatenate(list(whole.train.values()))
    if not hidden[source].any():
        raise ValueError(
            "the unlabelled pool is empty: no training image of the source domains is of an unknown class; "
            "choose --known so that the sources hold images of other classes"
        )
    for domain, rows in whole.train.items():
        if hidden[rows].all():
            name = whole.table.domains[domain]
            raise ValueError(f"source domain {name!r} has no labelled image of a known class; leave it out of the data")
    return hidden


def _validation(config: Config, whole: Fold, truth: np.ndarray, num_known: int) -> dict[str, np.ndarray]:
    """Held-out rows of known classes only: checkpoints cannot be selected without labels."""
    chosen = {}
    for name, rows in whole.validation.items():
        kept = rows[truth[rows] < num_known]
        if not len(kept):
            raise ValueError(f"source domain {name!r} has no held-out image of a known class to choose a checkpoint by")
        chosen[name] = mdg.at_most(kept, config.val_images, [config.seed, whole.table.domains.index(name)])
    return chosen


def _by_name(counts: np.ndarray, num_known: int) -> dict[str, float]:
    """All / Known / Unknown accuracy if known classes must use their own output, and new ones a new output."""
    known, new = np.diag(counts)[:num_known].sum(), counts[num_known:, num_known:]
    found = sum(new[true, output] for output, true in enumerate(match(new)) if true >= 0) if new.size else 0
    total, of_known = counts.sum(), counts[:num_known].sum()
    return {
        "all": _share(known + found, total),
        "known": _share(known, of_known),
        "unknown": _share(found, total - of_known),
    }


def _share(part: Any, whole: Any) -> float:
    return float(part / whole) if whole else float("nan")
