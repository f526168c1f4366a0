"""Many runs from Python: a recipe, its runs one after the other, and a table of what came out.

python examples/sweep_from_python.py $PATCHGEN_DATA/photos
"""

from pathlib import Path

import pandas as pd
import tyro
import yaml

from patchgen.runs.find import failure_of
from patchgen.sweep.jobs import perform
from patchgen.sweep.plan import plan
from patchgen.sweep.recipe import read_recipe


def main(
    data: tyro.conf.Positional[str],
    out: str = "sweep-runs",
    backbone: str = "auto",
    image_size: int = 112,
    steps: int = 151,
    seeds: tuple[int, ...] = (1, 2),
) -> None:
    """Every domain unseen in turn, two methods, some seeds; what is done already is not done again."""
    recipe = Path(out) / "recipe.yaml"
    recipe.parent.mkdir(parents=True, exist_ok=True)
    recipe.write_text(yaml.safe_dump({
        "preset": "small", "backbone": backbone, "image_size": image_size, "steps": steps, "data": data,
        "grid": {"unseen": "all", "seed": list(seeds)},
        "rows": [{"name": "baseline", "method": "lp-ln"}, {"name": "ours", "method": "patchgen"}],
    }))  # fmt: skip

    rows = []
    jobs = plan([read_recipe(recipe)], out)  # everything is checked before the first run
    for number, job in enumerate(jobs, 1):
        print(f"run {number} of {len(jobs)}: {job} ({job.state})", flush=True)
        if perform(job) == "failed":  # the error stays in the run folder; the others continue
            print("failed:", failure_of(job.folder))
            continue
        [test] = job.folder.records("test")
        rows.append({"method": job.config.method, "unseen": test["unseen"], "accuracy": test["all"]["accuracy"]})
    table = pd.DataFrame(rows).pivot_table(index="method", columns="unseen", values="accuracy")
    print(table.assign(mean=table.mean(axis=1)).round(3).to_string())


if __name__ == "__main__":
    tyro.cli(main)
