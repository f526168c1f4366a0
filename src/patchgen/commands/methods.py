"""patchgen methods: what can be trained."""

from __future__ import annotations

import csv
import json as to_json
from importlib import resources
from typing import Any

from patchgen.commands import parse


def list_methods(json: bool = False) -> None:
    """List the methods: what the head reads, what is tuned, what a step costs, own hyper-parameters and defaults.

    Args:
        json: Print JSON instead of a table.
    """
    from patchgen.common import plugins
    from patchgen.methods import ALIASES, METHODS
    from patchgen.methods.stream import STREAM_METHODS

    plugins.load_all()
    costs = step_costs()
    rows: list[dict[str, Any]] = [
        {"name": name, "pool": method.pool, "tune": method.tune, "cost": costs.get(name), "summary": method.summary,
         "hparams": method.all_defaults(), "reference": method.reference, "addable": method.addable}
        for name, method in METHODS.items()
    ]  # fmt: skip
    if json:
        print(to_json.dumps(rows, indent=2))
        return
    for row in rows:
        own = ", ".join(f"{name} {value:g}" for name, value in row["hparams"].items())
        cost = f"{row['cost']:.2f} x" if row["cost"] else ""
        print(f"{row['name']:<21} pool {row['pool']:<9} tune {row['tune']:<10} {cost:<7} {row['summary']}")
        if own or row["reference"]:
            print(" " * 22 + "; ".join(filter(None, [row["reference"], f"--hparams {own}" if own else ""])))
    print("\nFor --task ccd: " + ", ".join(STREAM_METHODS) + " (docs/ccd.md)")
    print(
        "\nx: a training step as a multiple of lp-ln's, ViT-S/14 at 112 px (`python -m benchmarks methods` measures it)"
    )
    print("\nOther names: " + ", ".join(f"{other} for {name}" for other, name in ALIASES.items()))
    print(f"\nBehind a '+' (as in patchgen+miro): {', '.join(row['name'] for row in rows if row['addable'])}")


def step_costs() -> dict[str, float]:
    """Measured once and kept beside the methods; one that was added since has none."""
    text = resources.files("patchgen.methods").joinpath("cost.csv").read_text(encoding="utf-8")
    return {row["method"]: float(row["ratio"]) for row in csv.DictReader(text.splitlines())}


def main(argv: list[str]) -> int:
    parse(list_methods, "methods", argv)
    return 0
