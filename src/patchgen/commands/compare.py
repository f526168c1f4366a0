"""patchgen compare DATA --methods ... --seeds ...: every leave-one-domain-out fold, one table."""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from patchgen.commands import announce, chosen, merged, parse, require_data, settings_of
from patchgen.common.kept import keeping
from patchgen.common.progress import saying_once
from patchgen.config import PRESETS, Config, Pool, Tune
from patchgen.sweep.recipe import Planned

if TYPE_CHECKING:
    from patchgen.sweep.jobs import Job


@dataclass(frozen=True)
class CompareArguments(Config):
    """Leave every domain out in turn, with several methods and seeds, on the same data, splits and steps.

    Each method uses the preset's learning rate for it, unless --lr sets one for all.

    Resumable with the same command: finished runs are skipped, interrupted ones are resumed.
    """

    data: Annotated[str, tyro.conf.Positional]
    """Folder `domain/class/*.jpg` or CSV manifest (path, domain, label, optional group)."""
    unseen: tyro.conf.Suppress[str] = ""
    method: tyro.conf.Suppress[str] = "patchgen"
    pool: tyro.conf.Suppress[Pool | None] = None
    tune: tyro.conf.Suppress[Tune | None] = None
    seed: tyro.conf.Suppress[int] = 1
    lr: float = 0.0
    """Learning rate for every method; 0 uses the preset's value for each."""
    swad: bool = True
    """Also report weight averaging (SWAD)."""
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

    def check(self) -> None:
        """No check here: the settings are checked when they are built, with errors that name the option."""


START: dict[str, Any] = {"data": tyro.MISSING, **PRESETS["small"], "lr": 0.0}  # defaults shown by help


def planned_runs(arguments: CompareArguments, argv: list[str], domains: tuple[str, ...]) -> Iterator[Planned]:
    """The planned runs, ordered by fold, so that an interrupted comparison has complete folds."""
    from patchgen.methods.presets import method_settings, own_hparams, preset_for

    words = chosen(arguments, argv)
    for unseen in dict.fromkeys(arguments.folds or domains):
        for seed in dict.fromkeys(arguments.seeds):
            for label in dict.fromkeys(arguments.methods):
                own: dict[str, Any] = {"unseen": unseen, "seed": seed, "swad": arguments.swad, **method_settings(label)}
                given = {**words, **own, "data": arguments.data}
                given["hparams"] = own_hparams(arguments.hparams, own["method"])
                preset = preset_for(dataclasses.replace(arguments, method=own["method"]))
                for lr in arguments.lr_grid or (None,):
                    rate = {} if lr is None else {"lr": lr}
                    config = settings_of(Config, merged(preset, {**given, **rate}))
                    yield Planned(label, f"{label}, unseen {unseen}, seed {seed}, lr {config.lr:g}", config)


def main(argv: list[str]) -> int:
    arguments = parse(CompareArguments, "compare", argv, default=CompareArguments(**START))
    _check(arguments)
    announce(arguments.quiet)
    from patchgen.methods import compared_methods
    from patchgen.sweep.plan import DataSets, plan_runs
    from patchgen.tasks.mdg import check_domain

    arguments = dataclasses.replace(arguments, methods=compared_methods(arguments.methods))
    data = DataSets()
    domains = tuple(data.domains(vars(arguments)))
    for name in arguments.folds:
        check_domain(name, domains)
    planned = list(planned_runs(arguments, argv, domains))
    odd = [name for name in arguments.hparams if not any(name in vars(run.config)["hparams"] for run in planned)]
    if odd:
        raise ValueError(f"--hparams {odd[0]}: none of the methods has it (`patchgen methods` lists them)")
    jobs = plan_runs(planned, arguments.out, data)
    with saying_once(), keeping():
        failed = 0 if arguments.table_only else _train_all(jobs, arguments)
    _print(jobs, arguments, domains, argv)
    return 1 if failed else 0


def _check(arguments: CompareArguments) -> None:
    """Check the options before the data is read."""
    require_data(arguments.data)
    if not arguments.methods:
        raise ValueError("--methods needs at least one name, such as lp-ln (`patchgen methods` lists them)")
    if not arguments.seeds:
        raise ValueError("--seeds needs at least one whole number, such as 1")
    settings_of(Config, vars(arguments) | {"lr": arguments.lr or Config.lr})


def _train_all(jobs: list[Job], arguments: CompareArguments) -> int:
    """Train sequentially in this process; `patchgen sweep` runs several in parallel."""
    from patchgen.runs.find import failure_of
    from patchgen.sweep.jobs import perform

    failed = 0
    for number, job in enumerate(jobs, 1):
        if not arguments.quiet:
            print(f"run {number} of {len(jobs)}: {job}", file=sys.stderr, flush=True)
        if perform(dataclasses.replace(job, quiet=arguments.quiet)) in ("failed", "busy"):
            failed += 1
            failure = failure_of(job.folder)
            why = failure.error if failure else f"{job.folder.path} is being trained by another process"
            print(f"run {number} failed: {why}", file=sys.stderr)
    return failed


def _print(jobs: list[Job], arguments: CompareArguments, domains: tuple[str, ...], argv: list[str]) -> None:
    from patchgen.report.compare import cells, comparison, read_scores

    missing = [job for job in jobs if not job.folder.done]
    scores = read_scores((job.folder, row) for job in jobs if job.folder.done for row in job.rows)
    if arguments.json:
        print(json.dumps(list(cells(scores)), indent=2))
    else:
        shown = tuple(dict.fromkeys(arguments.folds)) or domains
        seeds, swad = len(set(arguments.seeds)), arguments.swad
        print("\n" + comparison(scores, arguments.methods, shown, seeds, swad=swad, details=arguments.details))
        if not arguments.details:
            also = "SWAD, " * swad
            print(f"\n{also}80 % of each unseen domain, source validation and masks: the same command with --details")
    if missing:
        stream = sys.stderr if arguments.json else sys.stdout
        print(f"\n{len(missing)} of {len(jobs)} runs are missing:", *missing, sep="\n  ", file=stream)
        words = [word for word in argv if word not in ("--table-only", "--table_only")]
        print(f"this fills them:\n  patchgen compare {shlex.join(words)}", file=stream)
