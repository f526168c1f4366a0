"""patchgen methods: list the available methods."""

import csv
from importlib import resources
from typing import Any

from patchgen.common.text import json_text


def list_methods(needs: str | None = None, json: bool = False) -> None:
    """List the methods: what the head reads, what is tuned, what a step costs, what it needs, where it comes from.

    Args:
        needs: Only methods that need this: text (a text tower), source-free (no images) or transductive.
        json: Print JSON instead of a table.
    """
    from patchgen.ccd.methods import STREAM_METHODS
    from patchgen.common import plugins
    from patchgen.common.text import did_you_mean
    from patchgen.methods import ALIASES, METHODS
    from patchgen.methods.method import NEEDS

    plugins.load_all()
    if needs is not None and needs not in NEEDS:
        raise ValueError(f"--needs must be one of {', '.join(NEEDS)}, not {needs!r}{did_you_mean(needs, NEEDS)}")
    costs = step_costs()
    rows: list[dict[str, Any]] = [
        {"name": name, "pool": method.pool, "tune": method.tune, "cost": costs.get(name), "summary": method.summary,
         "hparams": method.all_defaults(), "reference": method.reference, "addable": method.addable,
         "needs": list(method.needs)}
        for name, method in METHODS.items()
        if needs is None or needs in method.needs
    ]  # fmt: skip
    if json:
        print(json_text(rows))
        return
    for row in rows:
        wanted = f"needs {', '.join(row['needs'])}" if row["needs"] else ""
        own = ", ".join(f"{name} {value:g}" for name, value in row["hparams"].items())
        cost = f"{row['cost']:.2f} x" if row["cost"] else ""
        print(f"{row['name']:<21} pool {row['pool']:<9} tune {row['tune']:<10} {cost:<7} {row['summary']}")
        if more := "; ".join(filter(None, [row["reference"], wanted, f"--hparams {own}" if own else ""])):
            print(" " * 22 + more)
    print("\n" + "\n".join(f"needs {word}: {meaning}" for word, meaning in NEEDS.items()))
    if needs is not None:
        return
    print("\nFor --task ccd: " + ", ".join(STREAM_METHODS) + " (docs/study/ccd.md)")
    print(
        "\nx: a training step as a multiple of lp-ln's, ViT-S/14 at 112 px (`python -m benchmarks methods` measures "
        "it); for methods that need text, with a text tower of CLIP ViT-B/16's size"
    )
    print("\nOther names: " + ", ".join(f"{other} for {name}" for other, name in ALIASES.items()))
    print(f"\nAfter a '+' (as in patchgen+miro): {', '.join(row['name'] for row in rows if row['addable'])}")


def step_costs() -> dict[str, float]:
    """Measured costs, stored with the methods; methods added since then have none."""
    text = resources.files("patchgen.methods").joinpath("cost.csv").read_text(encoding="utf-8")
    return {row["method"]: float(row["ratio"]) for row in csv.DictReader(text.splitlines())}


COMMAND = list_methods
