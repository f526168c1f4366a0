"""`--parameters FILE.md`: all effective parameters, row by row, with the splits and the environment."""

import dataclasses
import hashlib
import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from patchgen.common.files import write_text
from patchgen.common.text import markdown
from patchgen.common.untrusted import read_json
from patchgen.runs.folder import environment
from patchgen.sweep.jobs import Job
from patchgen.sweep.recipe import Recipe
from patchgen.tasks import get_task


def write_parameters(path: str | Path, recipes: Sequence[Recipe], plans: Sequence[Sequence[Job]]) -> None:
    """Write the page; `plans` are the jobs of each recipe."""
    parts = ["# Parameters in force", "", "Written by `patchgen sweep ... --parameters`; not meant to be edited.", ""]
    for recipe, jobs in zip(recipes, plans, strict=True):
        parts += _recipe(recipe, jobs)
    parts += _environment([job for jobs in plans for job in jobs])
    write_text(Path(path), "\n".join(parts) + "\n")


def _recipe(recipe: Recipe, jobs: Sequence[Job]) -> list[str]:
    done = sum(job.folder.done for job in jobs)
    lines = recipe.path.read_text(encoding="utf-8").splitlines()
    header = itertools.takewhile(lambda line: line.startswith("#"), lines)
    parts = [f"## {recipe.path.name}", "", "```yaml", *header, "```", ""]
    parts += [f"{len(jobs)} runs, {done} of them done here. A setting with several values was run with each.", ""]
    by_row = {row: parameters_of([job for job in jobs if row in job.rows]) for row in recipe.rows}
    first, *others = by_row.values()
    common = {name: text for name, text in first.items() if all(row.get(name) == text for row in others)}
    parts += _table("### All runs", ("parameter", "value"), list(common.items()))
    for row, parameters in by_row.items():
        if special := [(name, text) for name, text in parameters.items() if name not in common]:
            parts += _table(f"### Row {row}", ("parameter", "value"), special)
    return parts + _splits(jobs)


def _table(heading: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [heading, "", markdown(head, rows), ""]


def parameters_of(jobs: Sequence[Job]) -> dict[str, str]:
    """Every setting with its values over some runs, and the effective hyper-parameters of the method."""
    texts: dict[str, dict[str, None]] = defaultdict(dict)
    for job in jobs:
        config: Any = job.config
        method = get_task(config.task).make_method(config)  # its defaults stand for settings that are left open
        settings = dataclasses.asdict(config)
        settings |= {"pool": config.pool or method.pool, "tune": config.tune or getattr(method, "tune", None)}
        settings |= {"hparams": method.hparams} if getattr(method, "hparams", None) is not None else {}
        for rate in ("lr_module", "lr_backbone"):
            settings[rate] = settings["lr"] if settings.get(rate) is None else settings[rate]
        settings["data"] = Path(config.data).name  # its path on this machine is irrelevant
        for name, value in settings.items():
            texts[name][_text(value)] = None
    return {name: ", ".join(each) for name, each in texts.items()}


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{name}={inner}" for name, inner in value.items()) or "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _splits(jobs: Sequence[Job]) -> list[str]:
    """Which images were in which part: runs with equal digests had equal splits."""
    same: Counter[tuple[str, ...]] = Counter()
    for job in jobs:
        for file in (job.folder.path / name for name in ("splits.csv", "stages.csv")):
            if file.exists():
                digest = hashlib.sha256(file.read_bytes()).hexdigest()[:16]
                same[Path(job.config.data).name, str(job.config.seed), file.name, digest] += 1
    if not same:
        return ["### Splits", "", "No run is here yet; each writes its split into its folder.", ""]
    rows = [(*key, str(count)) for key, count in sorted(same.items())]
    return _table("### Splits", ("data", "seed", "manifest", "sha256 (first 16)", "runs"), rows)


def _environment(jobs: Sequence[Job]) -> list[str]:
    """The environment of the runs, or without runs that of this machine."""
    import torch

    files = [file for job in jobs if (file := job.folder.path / "env.json").exists()]
    texts = Counter(json.dumps(_flat(read_json(file))) for file in files)
    parts = ["## Environment", ""]
    for text in texts or [json.dumps(_flat(environment(torch.get_num_threads())))]:
        words = f"Of {texts[text]} runs:" if texts else "Of this machine, where no run is yet:"
        parts += _table(words, ("what", "value"), list(json.loads(text).items()))
    return parts


def _flat(facts: Mapping[str, Any]) -> dict[str, str]:
    """Nested values with joined names, such as `packages torch`."""
    return {f"{key} {name}".strip(): _text(inner) for key, value in facts.items()
            for name, inner in (value.items() if isinstance(value, dict) else [("", value)])}  # fmt: skip
