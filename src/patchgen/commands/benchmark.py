"""patchgen benchmark DATA --methods ... --seeds ...: every leave-one-domain-out fold, one table."""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from patchgen.commands import announce, before_preset, option, parse, require_data, settings_of
from patchgen.config import PRESETS, Config, Pool, Tune
from patchgen.methods.presets import method_settings
from patchgen.runs.folder import run_name

if TYPE_CHECKING:
    from patchgen.runs.scores import Cell


@dataclass(frozen=True)
class BenchmarkArguments(Config):
    """Leave every domain out in turn, with several methods and seeds, under identical settings.

    Finished runs are skipped and interrupted ones go on, so the same command may be given again at any time.
    """

    data: Annotated[str, tyro.conf.Positional]
    """Folder `domain/class/*.jpg` or CSV manifest (path, domain, label, optional group)."""
    unseen: tyro.conf.Suppress[str] = ""
    method: tyro.conf.Suppress[str] = "patchgen"
    pool: tyro.conf.Suppress[Pool | None] = None
    tune: tyro.conf.Suppress[Tune | None] = None
    seed: tyro.conf.Suppress[int] = 1
    lr: float = 0.0
    """Adam's learning rate for every method; 0 takes the preset's own for each."""
    swad: bool = True
    """Report weight averaging beside the selected checkpoint."""
    methods: tuple[str, ...] = ("lp", "lp-ln", "lp-ln@mean", "patchgen")
    """Methods, or `all`; `@` changes what is pooled or tuned: lp-ln@mean, patchgen@full."""
    seeds: tuple[int, ...] = (1,)
    """Seeds; with several the table has standard errors."""
    folds: Annotated[tuple[str, ...], tyro.conf.arg(aliases=["--unseen"])] = ()
    """Only these unseen domains."""
    lr_grid: tuple[float, ...] = ()
    """Try these learning rates for every method alike and keep, fold by fold, what source validation prefers."""
    preset: Literal["small", "paper"] = "small"
    """`small`: minutes a run on two cores. `paper`: the field's protocol, 5001 steps (DomainNet 15001) at 224 px."""
    out: str = "runs"
    """Parent of the run folders."""
    table_only: bool = False
    """Train nothing; show what is there and the command that fills the rest."""
    quiet: bool = False
    """No progress."""
    json: bool = False
    """Print every cell as JSON instead of tables."""

    def __post_init__(self) -> None:
        """Nothing is checked before the settings are made of these: there an error names its option."""


@dataclass(frozen=True)
class Job:
    label: str  # the method as the user wrote it
    config: Config

    def __str__(self) -> str:
        return f"{self.label}, unseen {self.config.unseen}, seed {self.config.seed}, lr {self.config.lr:g}"


def jobs_of(arguments: BenchmarkArguments, domains: tuple[str, ...]) -> Iterator[Job]:
    """Fold by fold, so that an interrupted benchmark has whole folds."""
    from patchgen.methods.presets import preset_settings

    for unseen in dict.fromkeys(arguments.folds or domains):
        for seed in dict.fromkeys(arguments.seeds):
            for label in dict.fromkeys(arguments.methods):
                chosen = {**_published(arguments, label.split("@")[0]), **method_settings(label)}
                given = known_hparams(arguments, chosen["method"])
                chosen["hparams"] = {**chosen.get("hparams", {}), **given}
                preset = preset_settings(arguments.preset, chosen["method"])
                if arguments.lr_module is None:
                    chosen["lr_module"] = preset.get("lr_module")
                own_rate = chosen.pop("lr", None) or preset.get("lr")
                for lr in arguments.lr_grid or (arguments.lr or own_rate or Config.lr,):
                    yield Job(label, settings_of(arguments, Config, unseen=unseen, seed=seed, lr=lr, **chosen))


def known_hparams(arguments: BenchmarkArguments, method: str) -> dict[str, float]:
    """Of the hyper-parameters given, those that this method has."""
    from patchgen.methods import method_class

    known = set(method_class(method).all_defaults())
    if any(name.endswith("lr_mult") for name in known):
        known.add("lr_mult")  # the common name of all of them
    return {name: value for name, value in arguments.hparams.items() if name in known}


def _published(arguments: BenchmarkArguments, method: str) -> dict[str, Any]:
    """With the preset `paper`: what the method's authors used on this benchmark, unless another value was given."""
    if arguments.preset != "paper":
        return {}
    from patchgen.methods.presets import published

    found = published(
        arguments.data, arguments.benchmark, method, arguments.backbone, task=arguments.task, swad=arguments.swad
    )
    usual = {"lr": 0.0, "hparams": arguments.hparams}
    return {k: v for k, v in found.items() if getattr(arguments, k) == usual.get(k, getattr(Config, k, None))}


def _protocol(argv: list[str]) -> dict[str, Any]:
    """What the preset sets for this data, before any method is asked for its own."""
    preset = option(argv, "--preset", "small")
    words = before_preset(BenchmarkArguments, "benchmark", argv) if preset == "paper" else None
    if words is None:
        return dict(PRESETS.get(preset, {}))
    from patchgen.methods.presets import preset_settings

    return preset_settings(preset, "", words.data, words.benchmark)


def main(argv: list[str]) -> int:
    start = {"data": tyro.MISSING, **_protocol(argv), "lr": 0.0}
    arguments = parse(BenchmarkArguments, "benchmark", argv, default=BenchmarkArguments(**start))
    _check(arguments)
    announce(arguments.quiet)
    from patchgen.data.table import fingerprint, read_table
    from patchgen.methods import compared_methods, make_method
    from patchgen.tasks.mdg import check_domain

    arguments = dataclasses.replace(arguments, methods=compared_methods(arguments.methods))
    table = read_table(arguments.data, benchmark=arguments.benchmark, options=arguments.options)
    for name in arguments.folds:
        check_domain(table, name)
    jobs = list(jobs_of(arguments, table.domains))
    for job in jobs:
        make_method(job.config)
    odd = [name for name in arguments.hparams if not any(name in job.config.hparams for job in jobs)]
    if odd:
        raise ValueError(f"--hparams {odd[0]}: none of the methods has it (`patchgen methods` lists them)")
    failed = 0 if arguments.table_only else _train_all(jobs, arguments)
    _print(jobs, arguments, table.domains, fingerprint(table), argv)
    return 1 if failed else 0


def _check(arguments: BenchmarkArguments) -> None:
    """Refuse before the data is read what no data can mend."""
    require_data(arguments.data)
    if not arguments.methods:
        raise ValueError("--methods needs at least one name, such as lp-ln (`patchgen methods` lists them)")
    if not arguments.seeds:
        raise ValueError("--seeds needs at least one whole number, such as 1")
    settings_of(arguments, Config)


def _train_all(jobs: list[Job], arguments: BenchmarkArguments) -> int:
    from patchgen.train.lifecycle import train

    failed = 0
    for number, job in enumerate(jobs, 1):
        if not arguments.quiet:
            print(f"run {number} of {len(jobs)}: {job}", file=sys.stderr, flush=True)
        try:
            train(job.config, arguments.out, quiet=arguments.quiet)
        except (ValueError, OSError) as error:
            failed += 1
            print(f"run {number} failed: {error}", file=sys.stderr)
    return failed


def _print(
    jobs: list[Job], arguments: BenchmarkArguments, domains: tuple[str, ...], data: str, argv: list[str]
) -> None:
    from pathlib import Path

    from patchgen.report.table import best_by_validation
    from patchgen.runs.folder import RunFolder
    from patchgen.runs.scores import cells_of

    folders = [(job, RunFolder(Path(arguments.out) / run_name(job.config, data))) for job in jobs]
    missing = [job for job, run in folders if not run.done]
    cells = best_by_validation(c for job, run in folders if run.done for c in cells_of(run, job.label))
    if arguments.json:
        print(json.dumps([dataclasses.asdict(cell) for cell in cells], indent=2))
    else:
        _print_tables(cells, arguments, tuple(dict.fromkeys(arguments.folds)) or domains)
    if missing:
        stream = sys.stderr if arguments.json else sys.stdout
        print(f"\n{len(missing)} of {len(jobs)} runs are not there yet:", *missing, sep="\n  ", file=stream)
        words = [word for word in argv if word not in ("--table-only", "--table_only")]
        print(f"this fills them:\n  patchgen benchmark {shlex.join(words)}", file=stream)


def _print_tables(cells: list[Cell], arguments: BenchmarkArguments, shown: tuple[str, ...]) -> None:
    from patchgen.report.table import CHECKPOINTS, accuracy_table, backbone_line, recovery_table, validation_table
    from patchgen.runs.scores import PARTS

    seeds = len(set(arguments.seeds))
    print(f"\n{backbone_line(cells)}")
    for checkpoint, what in CHECKPOINTS.items():
        for part, where in PARTS.items():
            if checkpoint == "selected" or arguments.swad:
                scores = "All / Known / Unknown accuracy" if arguments.task == "mdg_gcd" else "Accuracy"
                print(f"\n{scores}, {what}, on {where} (%)\n")
                print(accuracy_table(cells, arguments.methods, shown, checkpoint, part, seeds))
    print("\nSource validation accuracy (%): what checkpoints and learning rates are chosen by\n")
    print(validation_table(cells, arguments.methods, shown, seeds))
    if masks := recovery_table(cells, arguments.methods, seeds):
        print(f"\nMasks against the known predictive patches, on the unseen images\n\n{masks}")
