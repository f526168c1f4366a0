"""patchgen sweep RECIPE.yaml: all the runs of a recipe, on an engine; resumable with the same command."""

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from patchgen.commands import print_table
from patchgen.common.text import json_text
from patchgen.train.track import Tracking

if TYPE_CHECKING:
    from patchgen.sweep.jobs import Job
    from patchgen.sweep.launch import LauncherOptions
    from patchgen.sweep.recipe import Recipe


@dataclass(frozen=True)
class SweepArguments:
    """Run all trainings of one or more recipes (docs/study/sweep.md). Resumable: finished runs are skipped."""

    recipes: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RECIPE")]
    """YAML files (shared settings, a `grid` of lists, `rows` of named settings), or names of --list."""
    list: bool = False
    """List the recipes included in the package, and exit."""
    engine: Literal["local", "ray", "slurm"] = "local"
    """Where to run: local processes, Ray tasks, or Slurm tasks."""
    dry_run: bool = False
    """Dry run: list the runs, their state, their budget by data set, and the cost of the missing ones."""
    out: str = "runs"
    """Parent of the run folders."""
    workers: int | None = None
    """Parallel runs. Local: one per CUDA device, or per --threads cores. Ray and Slurm: no limit."""
    threads: int | None = None
    """CPU threads of each run; by default the recipe's, else 1 without CUDA and an equal share with it."""
    retries: int = 2
    """Retries of a failed run; wrong settings and divergence are not retried."""
    collected: tuple[str, ...] = ()
    """CSV files of `patchgen runs collect`: the runs listed there are skipped, even if their folders are gone."""
    retry_failed: bool = False
    """Forget the failures of earlier launches and try those runs again."""
    address: str | None = None
    """ray: a cluster's address, such as `auto` or HOST:6379; by default Ray is started on this machine."""
    partition: str | None = None
    """slurm: the partition."""
    minutes: int = 240
    """slurm: time limit of a task; a run that reaches it is queued again and resumes."""
    rate: float | None = None
    """For the forecast: training images per second of one worker, until a finished run shows it."""
    parameters: str | None = None
    """Write all effective parameters, the splits' digests and the environment to this Markdown file."""
    track: Tracking | None = None
    """Log each evaluation to TensorBoard, W&B or MLflow (extras `track`, `wandb`, `mlflow`)."""
    quiet: bool = False
    """No progress."""
    json: bool = False
    """Print every run and its state as JSON instead of tables."""


def sweep(arguments: SweepArguments) -> int:
    from patchgen.sweep.recipe import find_recipe, read_recipe, recipes

    if arguments.list:
        print_table(("recipe", "what"), recipes().items())
        return 0
    if not arguments.recipes:
        raise ValueError("give a recipe, such as ablation-small: `--list` shows those of the package")
    selected = [read_recipe(find_recipe(word)) for word in arguments.recipes]
    from patchgen.report.results import read_rows
    from patchgen.runs.find import FAILED
    from patchgen.sweep.jobs import can_retry
    from patchgen.sweep.launch import LauncherOptions, Watch, launch, make_launcher

    names = ("workers", "threads", "retries", "address", "partition", "minutes")
    options = LauncherOptions(Path(arguments.out), **{name: getattr(arguments, name) for name in names})
    jobs = _plan(selected, arguments, options)
    if arguments.collected:
        known, planned = {row["run"] for file in arguments.collected for row in read_rows(Path(file))}, jobs
        jobs = [job for job in planned if job.run not in known]
        if not arguments.quiet:
            count = f"{len(planned) - len(jobs)} of {len(planned)}"
            print(f"{count} runs are in {', '.join(arguments.collected)}", file=sys.stderr)
    if arguments.retry_failed and not arguments.dry_run:
        for job in jobs:
            if job.state == "failed":
                (job.folder.path / FAILED).unlink(missing_ok=True)
    _print_forecast(jobs, arguments, options)
    todo = [job for job in jobs if not job.folder.done and can_retry(job, arguments.retries)]
    if todo and not arguments.dry_run:
        engine = make_launcher(arguments.engine, options, todo)
        launch(jobs, engine, retries=arguments.retries, watch=Watch(jobs, arguments.quiet))
    if arguments.parameters:
        from patchgen.sweep.parameters import write_parameters

        write_parameters(arguments.parameters, selected, [_plan([recipe], arguments, options) for recipe in selected])
        if not arguments.quiet:
            print(f"wrote {arguments.parameters}", file=sys.stderr)
    return _conclude(jobs, arguments)


def _plan(recipes: "Sequence[Recipe]", arguments: SweepArguments, options: "LauncherOptions") -> "list[Job]":
    """The jobs, each with a fixed thread count, because results depend on it."""
    from patchgen.sweep.launch import share_of
    from patchgen.sweep.plan import plan
    from patchgen.train.track import make_tracker

    if arguments.track:
        make_tracker(arguments.track)  # raises now if the extra is missing
    jobs = plan(recipes, arguments.out, threads=arguments.threads)
    threads = share_of(options, jobs).threads if arguments.engine == "local" else arguments.threads or 1
    configs = [replace(job.config, threads=job.config.threads or threads) for job in jobs]
    track = arguments.track or False
    return [replace(job, config=config, track=track) for job, config in zip(jobs, configs, strict=True)]


def _print_forecast(jobs: "Sequence[Job]", arguments: SweepArguments, options: "LauncherOptions") -> None:
    """Print the number of runs, their states and the expected cost of the rest, before anything starts."""
    from patchgen.sweep.launch import share_of
    from patchgen.sweep.plan import PROTOCOL, predict_cost, protocols

    if arguments.json or (arguments.quiet and not arguments.dry_run):
        return
    if arguments.dry_run and jobs:
        print_table(("run", "state", "what"), [(job.run, job.state, str(job)) for job in jobs])
        print_table(PROTOCOL, protocols(jobs))
    workers = arguments.workers or (share_of(options, jobs).workers if arguments.engine == "local" else 1)
    forecast = predict_cost(jobs, arguments.out, arguments.rate)
    stream = sys.stdout if arguments.dry_run else sys.stderr
    lines = [f"{len(jobs)} runs in {arguments.out}: {_states(jobs)}", *forecast.lines(workers)]
    print(*lines, *(_largest_step(jobs) if arguments.dry_run else ()), sep="\n", file=stream)


def _largest_step(jobs: "Sequence[Job]") -> list[str]:
    """Memory and arithmetic of the largest step of runs that leave a domain out."""
    from patchgen.config import Config
    from patchgen.diagnose.cost import largest_step
    from patchgen.sweep.plan import DataSets
    from patchgen.tasks.mdg import leaves_out

    steps, data = [], DataSets()
    for job in jobs:
        if isinstance(config := job.config, Config):
            domains = data.table(config.data, config.benchmark, config.options)[0].domains
            sources = len(domains) - leaves_out(config, domains)
            steps.append((str(job), config, config.batch_per_domain * sources))
    return largest_step(steps)


def _states(jobs: "Sequence[Job]") -> str:
    return ", ".join(f"{count} {state}" for state, count in Counter(job.state for job in jobs).items())


def _conclude(jobs: "Sequence[Job]", arguments: SweepArguments) -> int:
    """Report failures and their reasons; exit code 1 if requested runs are missing."""
    from patchgen.runs.find import FAILED, failure_of

    failures = {job.run: failure_of(job.folder) for job in jobs}
    if arguments.json:
        about = [
            {"run": str(job.folder.path), "labels": job.labels, "rows": job.rows, "state": job.state,
             "attempts_failed": failure.attempts if (failure := failures[job.run]) else 0,
             "error": failure.error if failure else None}
            for job in jobs
        ]  # fmt: skip
        print(json_text(about))
    failed = [(job, failure) for job in jobs if job.state == "failed" and (failure := failures[job.run])]
    for job, failure in failed:
        times = f"{failure.attempts} attempt{'s' * (failure.attempts > 1)}"
        print(f"failed after {times}: {job}\n  {failure.line}\n  {job.folder.path / FAILED}", file=sys.stderr)
    if arguments.dry_run:
        return 0
    if not arguments.json:
        print(f"{len(jobs)} runs in {arguments.out}: {_states(jobs)}")
    if failed and not arguments.quiet:
        print("fix these errors, then run the same command with --retry-failed", file=sys.stderr)
    return 0 if all(job.folder.done for job in jobs) else 1


COMMAND = sweep
