"""What a fit is going to do: its trainings, which of them are finished, and the checks before the first one."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from patchgen.common.files import cache_dir, expanded
from patchgen.common.progress import Progress
from patchgen.config import Config
from patchgen.data.benchmarks import visible_folders
from patchgen.data.content import shared_store
from patchgen.data.doctor import TINY_CLASS
from patchgen.data.images import BILINEAR
from patchgen.data.listing import list_files, skipped_line
from patchgen.data.table import Table, fingerprint, is_result
from patchgen.methods import make_method
from patchgen.methods.build import build_model
from patchgen.runs.folder import RunFolder, run_name
from patchgen.tasks import Fold

LISTED = 50  # unreadable files that are named
NAMED = 5  # classes with few images that are named


@dataclass(eq=False)
class Plan:
    """All trainings of a fit."""

    candidates: dict[str, Config]  # label -> settings of the training on all sites, simplest first
    table: Table
    runs: Path
    final: Fold
    sites: dict[str, Fold]  # the folds that leave each out, in table order; empty without an estimate for a new site
    say: Callable[[str], None]
    quiet: bool
    track: str | bool = False
    interpolation: str = BILINEAR  # expected by the backbone; set by `check_models`

    @cached_property
    def _fingerprint(self) -> str:
        return fingerprint(self.table)

    def is_finished(self, config: Config) -> bool:
        return RunFolder(self.runs / run_name(config, self._fingerprint)).done

    @property
    def first(self) -> Config:
        return next(iter(self.candidates.values()))

    @property
    def left_out(self) -> list[tuple[str, Config, Fold]]:
        """The trainings that leave a site out, each with the label of its candidate."""
        pairs = itertools.product(self.candidates.items(), self.sites.items())
        return [(label, replace(config, unseen=site), fold) for (label, config), (site, fold) in pairs]

    @property
    def all_finished(self) -> bool:
        """Whether only the last training remains, or exists for one of the methods."""
        return all(self.is_finished(config) for _, config, _ in self.left_out) and any(
            self.is_finished(config) for config in self.candidates.values()
        )

    def changed(self, **settings: Any) -> Plan:
        """The plan with other settings of all its trainings."""
        return replace(self, candidates={name: replace(c, **settings) for name, c in self.candidates.items()})

    def announce(self) -> None:
        """Print the number of trainings, how many are already finished, and where."""
        total, names = len(self.left_out) + 1, list(self.candidates)
        each = f" with each of {len(names)} methods ({', '.join(names)})" if len(names) > 1 else ""
        first = f"{len(self.sites)} sites left out in turn{each}, then " if self.sites else ""
        last = f"without {self.final.unseen}" if self.final.test else "on all sites"
        text = f"{first}{'the better one' if each else names[0]} {last}"
        done = sum(self.is_finished(config) for _, config, _ in self.left_out)
        done += any(self.is_finished(config) for config in self.candidates.values())
        where = self.runs.absolute()
        self.say(f"{total} training{'s' * (total > 1)}: {text}; {done or 'none'} finished in {where}")
        if expanded(self.first.data).is_dir():  # of which all files are used; a manifest lists its files
            if skipped := list_files(self.table.root).skipped:
                self.say(f"data: {skipped_line(skipped)}")
            if results := [folder.name for folder in visible_folders(self.table.root) if is_result(folder)]:
                self.say(f"data: ignored {', '.join(results)}: runs and models, not images of a site")
        for warning in warnings_of(self.table):
            self.say(f"data: {warning}")


def warnings_of(table: Table) -> list[str]:
    """What makes an estimate uncertain: sites with a handful of images of a class, classes missing at a site."""
    counts = table.counts()
    missing = [f"{site} lacks {', '.join(names)}" for site, names in table.missing().items()]
    tiny = [f"{site}/{name} ({n})" for site, row in counts.items() for name, n in row.items() if 0 < n < TINY_CLASS]
    warnings = []
    if missing:
        warnings.append(f"{'; '.join(missing)}: a class that only one site has cannot be learned without it")
    if tiny:
        few = ", ".join(tiny[:NAMED]) + (", ..." if len(tiny) > NAMED else "")
        warnings.append(f"fewer than {TINY_CLASS} images: {few}; their scores will say little")
    return warnings


def label_of(config: Config) -> str:
    """`lp-ln`, or `lp-ln@mean` if pool or tuning mode were set."""
    return "@".join(str(part) for part in (config.method, config.pool, config.tune) if part)


def check_models(plan: Plan) -> None:
    """Build each method's network once, to reject methods that do not fit the backbone or image size."""
    for config in plan.candidates.values():
        method = make_method(config)
        method.class_names = plan.final.classes
        method.use_sample_weights(plan.final.sample_weights())
        model = build_model(config, method, len(plan.final.classes), plan.say)
        plan.interpolation = model.backbone.interpolation


def check_readable(plan: Plan) -> None:
    """Decode every labelled image before the first training; with the cache on, this is not done again later.

    Raises:
        ValueError: lists all unreadable images.
    """
    rows = np.flatnonzero(plan.table.label >= 0)
    cache = cache_dir() if plan.first.cache else None
    store = shared_store(plan.table, plan.first.image_size, cache, plan.interpolation)
    with Progress("reading images", len(rows), quiet=plan.quiet) as bar:
        bad = store.unreadable(rows, bar.tick)
    if bad:
        count = "1 image" if len(bad) == 1 else f"{len(bad):,} images"
        advice = "repair, replace or remove (also from a manifest), then repeat:"
        lines = [f"{count} of {len(rows):,} cannot be read; {advice}"]
        lines += [f"  {plan.table.paths[row]}: {error.reason}" for row, error in bad[:LISTED]]
        lines += [f"  and {len(bad) - LISTED:,} more"] if len(bad) > LISTED else []
        raise ValueError("\n".join(lines))
