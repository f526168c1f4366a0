"""The steps of a fit before its first training: announce the plan, read every image, give a quick estimate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from patchgen.common.files import cache_dir, expanded
from patchgen.common.progress import Progress
from patchgen.common.text import duration
from patchgen.config import Config
from patchgen.data.images import BILINEAR, ImageStore
from patchgen.data.listing import list_files, skipped_line
from patchgen.data.shared import shared_store
from patchgen.data.table import Table, fingerprint
from patchgen.fit.quick import quick_look
from patchgen.methods import make_method, method_class
from patchgen.methods.build import build_model
from patchgen.runs.folder import RunFolder, run_name
from patchgen.tasks import Fold

LISTED = 50  # unreadable files that are named


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
    interpolation: str = BILINEAR  # expected by the backbone; set by `check_models`

    @cached_property
    def store(self) -> ImageStore:
        config = self.first
        cache = cache_dir() if config.cache else None
        return shared_store(self.table, config.image_size, cache, self.interpolation)

    @cached_property
    def _fingerprint(self) -> str:
        return fingerprint(self.table)

    def is_finished(self, config: Config) -> bool:
        """Whether this training is already finished."""
        return RunFolder(self.runs / run_name(config, self._fingerprint)).done

    @property
    def is_folder(self) -> bool:
        """Whether the data is a folder, of which all files are used; a manifest lists its files."""
        return expanded(self.first.data).is_dir()

    @property
    def first(self) -> Config:
        return next(iter(self.candidates.values()))

    @property
    def left_out(self) -> list[tuple[Config, Fold]]:
        """The trainings that leave a site out."""
        return [(replace(config, unseen=site), fold) for config in self.candidates.values()
                for site, fold in self.sites.items()]  # fmt: skip

    @property
    def all_finished(self) -> bool:
        """Whether only the last training remains, or exists for one of the methods."""
        return all(self.is_finished(config) for config, _ in self.left_out) and any(
            self.is_finished(config) for config in self.candidates.values()
        )

    def title(self, config: Config, text: str) -> str:
        return f"{label_of(config)} {text}" if len(self.candidates) > 1 else text

    def announce(self) -> None:
        """Print the number of trainings, how many are already finished, and where."""
        total, names = len(self.left_out) + 1, list(self.candidates)
        parts = []
        if self.sites:
            each = f" with each of {len(names)} methods ({', '.join(names)})" if len(names) > 1 else ""
            parts.append(f"{len(self.sites)} sites left out in turn{each}")
        last = f"without {self.final.unseen}" if self.final.test else "on all sites"
        parts.append(f"the better one {last}" if len(names) > 1 else f"{names[0]} {last}")
        done = sum(self.is_finished(config) for config, _ in self.left_out)
        done += any(self.is_finished(config) for config in self.candidates.values())
        where = self.runs.absolute()
        self.say(f"{total} training{'s' * (total > 1)}: {', then '.join(parts)}; {done or 'none'} finished in {where}")
        if skipped := list_files(self.table.root).skipped if self.is_folder else []:
            self.say(f"data: {skipped_line(skipped)}")


def label_of(config: Config) -> str:
    """`lp-ln`, or `lp-ln@mean` if pool or tuning mode were set."""
    return "@".join(str(part) for part in (config.method, config.pool, config.tune) if part)


def check_models(plan: Plan) -> None:
    """Build each method's network once, to reject methods that do not fit the backbone or image size."""
    for config in plan.candidates.values():
        method = make_method(config)
        method.class_names = plan.final.classes
        model = build_model(config, method, len(plan.final.classes), plan.say)
        plan.interpolation = model.backbone.interpolation


def check_readable(plan: Plan) -> None:
    """Decode every labelled image before the first training; with the cache on, this is not done again later.

    Raises:
        ValueError: lists all unreadable images.
    """
    rows = np.flatnonzero(plan.table.label >= 0)
    with Progress("reading images", len(rows), quiet=plan.quiet) as bar:
        bad = plan.store.unreadable(rows, bar.tick)
    if bad:
        lines = [f"  {plan.table.paths[row]}: {error.reason}" for row, error in bad[:LISTED]]
        more = [f"  and {len(bad) - LISTED:,} more"] if len(bad) > LISTED else []
        count = "1 image" if len(bad) == 1 else f"{len(bad):,} images"
        head = (
            f"{count} of {len(rows):,} cannot be read; repair, replace or remove (also from a manifest), then repeat:"
        )
        raise ValueError("\n".join([head, *lines, *more]))


def first_look(plan: Plan) -> None:
    """Report the accuracy of a linear probe on frozen features at each left-out site, and the expected cost."""
    left_out = list(plan.sites) or [plan.final.unseen] * bool(plan.final.test)
    if plan.quiet or not left_out:
        return
    config = plan.first
    look = quick_look(config, plan.table, left_out, plan.store)
    plan.say(str(look))
    jobs = [*plan.left_out, (list(plan.candidates.values())[-1], plan.final)]
    seconds = sum(forecast(*job, look.per_image) for job in jobs if not plan.is_finished(job[0]))
    plan.say(f"the trainings will take about {duration(seconds)}, estimated from the quick look")


def forecast(config: Config, fold: Fold, per_image: float) -> float:
    """Seconds of a training: a step that tunes the backbone costs three forward passes, two of them for backward."""
    passes = 1 if (config.tune or method_class(config.method).tune) == "head" else 3
    steps = config.steps * config.batch_per_domain * len(fold.train) * passes
    evaluations = (config.steps // config.eval_every + 1) * sum(len(rows) for rows in fold.validation.values())
    return per_image * (steps + evaluations + sum(len(rows) for rows in fold.test.values()))
