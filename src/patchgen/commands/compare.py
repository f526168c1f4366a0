"""patchgen compare DATA --methods ... --seeds ...: every leave-one-domain-out fold, one table."""

import dataclasses
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import tyro

from patchgen.commands.settings import (
    Layers,
    SettingsOptions,
    configs_of,
    parse_settings,
    preset_layers,
    settings_of,
    settings_schema,
)
from patchgen.common.progress import print_once
from patchgen.common.text import json_text
from patchgen.config import Config
from patchgen.sweep.recipe import PlannedRun

if TYPE_CHECKING:
    from patchgen.sweep.jobs import Job


USUAL: Layers = [("compare", {"swad": True})]


@dataclass(frozen=True, kw_only=True)
class CompareOptions(SettingsOptions):
    """Leave every domain out in turn, with several methods and seeds, on the same data, splits and steps.

    Each method uses the preset's learning rate for it, unless --lr sets one for all.

    Resumable with the same command: finished runs are skipped, interrupted ones are resumed.
    """

    command: ClassVar = "compare"
    hidden: ClassVar = ("unseen", "method", "pool", "tune", "seed")  # set by the methods, folds and seeds
    texts: ClassVar = {
        "lr": "Learning rate for every method; by default the preset's for each.",
        "swad": "Also report SWAD.",
    }

    methods: tuple[str, ...] = ("lp", "lp-ln", "lp-ln@mean", "patchgen")
    """Methods, or `all`; `@` changes the pool or the tuned part: lp-ln@mean, patchgen@full."""
    seeds: tuple[int, ...] = (1,)
    """Seeds; with several the table has standard errors."""
    folds: Annotated[tuple[str, ...], tyro.conf.arg(aliases=["--unseen"])] = ()
    """Only these unseen domains."""
    lr_grid: tuple[float, ...] = ()
    """Try these learning rates for every method and keep, per fold, the best on source validation."""
    preset: Literal["small", "paper"] = "small"
    """`small`: minutes per run on two cores. `paper`: the usual protocol, 5001 steps (DomainNet 15001) at 224 px."""
    out: str = "runs"
    """Parent of the run folders."""
    details: bool = False
    """Also show SWAD, 80 % of each unseen domain, and source validation with the masks."""
    table_only: bool = False
    """Train nothing; show finished runs and the command for the missing ones."""
    quiet: bool = False
    """No progress."""
    json: bool = False
    """Print every cell as JSON instead of tables."""

    def layers(self, given: Mapping[str, Any]) -> Layers:
        return [*preset_layers(self.preset, given), *USUAL]


COMMAND = settings_schema(CompareOptions)


def planned_runs(options: CompareOptions, given: Mapping[str, Any], domains: tuple[str, ...]) -> Iterator[PlannedRun]:
    """The planned runs, ordered by fold, so that an interrupted comparison has complete folds."""
    methods = tuple(dict.fromkeys(options.methods))
    for unseen in dict.fromkeys(options.folds or domains):
        for seed in dict.fromkeys(options.seeds):
            configs = configs_of(methods, {**given, "unseen": unseen, "seed": seed}, options.layers)
            for label, config in zip(methods, configs, strict=True):
                for lr in options.lr_grid or (config.lr,):
                    name = f"{label}, unseen {unseen}, seed {seed}, lr {lr:g}"
                    yield PlannedRun(label, name, dataclasses.replace(config, lr=lr))


def main(argv: list[str]) -> int:
    options, given = parse_settings(CompareOptions, argv)
    settings_of(Config, USUAL, {"unseen": "", **given})  # a wrong setting ends here, before the data is read
    if not options.methods:
        raise ValueError("--methods needs at least one name, such as lp-ln (`patchgen methods` lists them)")
    if not options.seeds:
        raise ValueError("--seeds needs at least one whole number, such as 1")
    from patchgen.methods import compared_methods
    from patchgen.runs.find import failure_of
    from patchgen.sweep.jobs import perform
    from patchgen.sweep.plan import DataSets, plan_runs
    from patchgen.tasks.mdg import check_domain

    options = dataclasses.replace(options, methods=compared_methods(options.methods))
    data, failed = DataSets(), 0
    domains = tuple(data.domains(given))
    for name in options.folds:
        check_domain(name, domains)
    jobs = plan_runs(list(planned_runs(options, given, domains)), options.out, data)
    with print_once():
        for number, job in enumerate([] if options.table_only else jobs, 1):
            if not options.quiet:
                print(f"run {number} of {len(jobs)}: {job}", file=sys.stderr, flush=True)
            if perform(dataclasses.replace(job, quiet=options.quiet)) in ("failed", "busy"):
                failure = failure_of(job.folder)
                why = failure.error if failure else f"{job.folder.path} is being trained by another process"
                print(f"run {number} failed: {why}", file=sys.stderr)
                failed += 1
    _print(jobs, options, given, domains, argv)
    return 1 if failed else 0


def _print(
    jobs: "list[Job]", options: CompareOptions, given: Mapping[str, Any], domains: tuple[str, ...], argv: list[str]
) -> None:
    from patchgen.report.compare import cells, comparison, read_scores

    missing = [job for job in jobs if not job.folder.done]
    scores = read_scores((job.folder, row) for job in jobs if job.folder.done for row in job.rows)
    if options.json:
        print(json_text(list(cells(scores))))
    else:
        shown = tuple(dict.fromkeys(options.folds)) or domains
        seeds, swad = len(set(options.seeds)), given.get("swad", True)
        print("\n" + comparison(scores, options.methods, shown, seeds, swad=swad, details=options.details))
        if not options.details:
            also = "SWAD, " * swad
            print(f"\n{also}80 % of each unseen domain, source validation and masks: the same command with --details")
    if missing:
        stream = sys.stderr if options.json else sys.stdout
        print(f"\n{len(missing)} of {len(jobs)} runs are missing:", *missing, sep="\n  ", file=stream)
        words = [word for word in argv if word not in ("--table-only", "--table_only")]
        print(f"this fills them:\n  patchgen compare {shlex.join(words)}", file=stream)
