"""Memory of a training step: counted, measured on the CPU, and what the paper's recipes need on a card of 24 GB.

python -m benchmarks.step_memory                            # prints both tables
python -m benchmarks.step_memory --into docs/use/gpu.md     # renews them there; a quarter of an hour, idle machine

Counted are the bytes per image that the operations of a step allocate (`patchgen.diagnose.cost`). Measured is the
growth of a process's largest resident memory from a step of 6 images to one of 18, divided by 12.
"""

import argparse
import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from patchgen.common.files import write_text
from patchgen.config import Config, read_settings
from patchgen.data.benchmarks import BENCHMARKS
from patchgen.diagnose.cost import COUNTED_BY, StepCost, make_step, random_batch, step_cost
from patchgen.sweep.recipe import expand, is_recipe, read_recipe

BACKBONES = ("dinov2-small", "dinov2-base", "dinov2-large")
METHODS = ("lp-ln", "patchgen", "patchgen-cls", "gmdg")
PRECISIONS = ("32-true", "bf16-mixed")
MEASURED, IMAGES = "dinov2-small", (6, 18)
ROOM = 23e9  # bytes of a 24 GB card beside what CUDA itself takes
RECIPES = Path(__file__).parents[1] / "configs" / "paper"
COSTS: dict[str, StepCost | None] = {}
MARKS = "<!-- python -m benchmarks.step_memory -->\n", "<!-- end -->\n"


def settings(backbone: str, method: str, precision: str, checkpointing: bool) -> Config:
    return Config(
        "random", "none", backbone=backbone, method=method, precision=precision, checkpoint_activations=checkpointing
    )  # type: ignore[arg-type]


def cost_of(config: Config) -> StepCost | None:
    """None if the method refuses these settings, or cannot be counted; once for settings that cost the same."""
    key = repr([getattr(config, name) for name in COUNTED_BY])
    if key not in COSTS:
        COSTS[key] = None
        with suppress(ValueError):
            COSTS[key] = step_cost(config)
    return COSTS[key]


def measured(backbone: str, method: str, precision: str, checkpointing: bool) -> float:
    """Bytes per image of a step on this machine's CPU, with one thread."""
    command = [sys.executable, "-m", "benchmarks.step_memory", *["--checkpoint-activations"] * checkpointing]
    command += ["--one", backbone, method, precision]
    # memory is given back at once: the peak is that of the step, not of what the allocator keeps
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    small, large = (
        int(subprocess.run([*command, str(size)], env=env, check=True, capture_output=True, text=True).stdout)
        for size in IMAGES
    )
    return (large - small) / (IMAGES[1] - IMAGES[0])


def peak_of(config: Config, images: int) -> int:
    """Largest resident memory of this process after a step."""
    step = make_step(config)
    batch = random_batch(images, config.image_size)
    with torch.autocast("cpu", torch.bfloat16, enabled=config.precision == "bf16-mixed"):
        step(batch)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def memory_table(measure: bool) -> Iterator[str]:
    kinds = [(precision, checkpointing) for precision in PRECISIONS for checkpointing in (False, True)]
    yield "| MB per image | " + " | ".join(p + ", checkpointing" * c for p, c in kinds) + " |"
    yield "|---" * (len(kinds) + 1) + "|"
    for backbone in BACKBONES:
        for method in METHODS:
            cells = []
            for kind in kinds:
                cost = cost_of(settings(backbone, method, *kind))
                cells.append("refused" if cost is None else f"{cost.per_image / 1e6:.1f}")
                if cost and measure and backbone == MEASURED:
                    cells[-1] += f" ({measured(backbone, method, *kind) / 1e6:.1f})"
            print(f"{backbone}, {method}: {', '.join(cells)}", file=sys.stderr, flush=True)
            yield f"| {backbone}, `{method}` | " + " | ".join(cells) + " |"


def recipe_table() -> Iterator[str]:
    yield "| recipe | largest step | GB | GB, bf16-mixed | on 24 GB |"
    yield "|---|---|---|---|---|"
    for path in sorted(path for path in RECIPES.glob("*.yaml") if is_recipe(read_settings(path))):
        steps = steps_of(path)
        costs = {key: cost for key, (config, _) in steps.items() if (cost := cost_of(config))}
        if costs:
            largest = max(costs, key=lambda key: costs[key].bytes(steps[key][1]))
            config, images = steps[largest]
            half = cost_of(replace(config, precision="bf16-mixed"))
            needs = dict.fromkeys(fix for key in costs if (fix := fix_for(*steps[key], costs[key])))
            print(f"{path.name}: {len(steps)} kinds of steps", file=sys.stderr, flush=True)
            yield (
                f"| `{path.stem}` | `{config.method}`, {config.backbone}, {images} images | "
                f"{costs[largest].bytes(images) / 1e9:.1f} | {half.bytes(images) / 1e9 if half else 0:.1f} | "
                f"{'; '.join(needs) or 'as it is'} |"
            )


def fix_for(config: Config, images: int, cost: StepCost) -> str:
    """What makes a step fit; empty if it does."""
    if cost.bytes(images) <= ROOM:
        return ""
    if cost.divisible:
        return "`--micro-batch auto`, the default"
    half = cost_of(replace(config, precision="bf16-mixed"))
    if half and half.bytes(images) <= ROOM:
        return f"`{config.method}`, {config.backbone}: `--precision bf16-mixed`"
    most = int((ROOM - half.bytes(0)) / half.per_image) if half else 0
    return f"`{config.method}`, {config.backbone}: `--precision bf16-mixed` and at most {most} images a step"


def steps_of(recipe: Path) -> dict[str, tuple[Config, int]]:
    """The distinct steps of a recipe, each with its largest number of images."""
    os.environ["PATCHGEN_DATA"] = "/data"
    result: dict[str, tuple[Config, int]] = {}
    for run in expand(read_recipe(recipe), lambda settings: domains(str(settings["data"]))):
        if isinstance(config := run.config, Config):
            images = config.batch_per_domain * (len(domains(config.data)) - 1)
            key = repr([getattr(config, name) for name in COUNTED_BY])
            if key not in result or images > result[key][1]:
                result[key] = replace(config, precision="32-true"), images
    return result


def domains(data: str) -> tuple[str, ...]:
    return next(entry.domains for entry in BENCHMARKS.values() if entry.folder == Path(data).name)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step_memory", description="Memory of a step.")
    parser.add_argument("--into", metavar="PAGE", help="renew the tables of this page")
    parser.add_argument("--no-measure", action="store_true", help="only count")
    parser.add_argument("--one", nargs=4, metavar=("BACKBONE", "METHOD", "PRECISION", "IMAGES"), help="used by itself")
    parser.add_argument("--checkpoint-activations", action="store_true", help="with --one")
    given = parser.parse_args()
    if given.one:
        print(peak_of(settings(*given.one[:3], given.checkpoint_activations), int(given.one[3])))
        return
    text = "\n".join([*memory_table(not given.no_measure), "", *recipe_table()]) + "\n"
    print(text)
    if given.into:
        page = Path(given.into).read_text(encoding="utf-8")
        pattern = re.escape(MARKS[0]) + ".*?" + re.escape(MARKS[1])
        if not re.search(pattern, page, re.DOTALL):
            raise SystemExit(f"{given.into} must contain the lines {MARKS[0].strip()} and {MARKS[1].strip()}")
        write_text(given.into, re.sub(pattern, lambda _: f"{MARKS[0]}\n{text}\n{MARKS[1]}", page, flags=re.DOTALL))


if __name__ == "__main__":
    main()
