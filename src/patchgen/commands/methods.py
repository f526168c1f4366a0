"""patchgen methods: what can be trained."""

from __future__ import annotations

import json as to_json
from typing import Any

from patchgen.commands import parse


def list_methods(json: bool = False) -> None:
    """List the methods: what the head reads, what of the backbone is tuned, own hyper-parameters with their defaults.

    Args:
        json: Print JSON instead of a table.
    """
    from patchgen.methods import METHODS
    from patchgen.methods.stream import STREAM_METHODS

    rows: list[dict[str, Any]] = [
        {"name": name, "pool": method.pool, "tune": method.tune, "summary": method.summary,
         "hparams": method.all_defaults(), "reference": method.reference, "addable": method.addable}
        for name, method in METHODS.items()
    ]  # fmt: skip
    if json:
        print(to_json.dumps(rows, indent=2))
        return
    for row in rows:
        own = ", ".join(f"{name} {value:g}" for name, value in row["hparams"].items())
        print(f"{row['name']:<20} pool {row['pool']:<9} tune {row['tune']:<10} {row['summary']}")
        if own or row["reference"]:
            print(" " * 21 + "; ".join(filter(None, [row["reference"], f"--hparams {own}" if own else ""])))
    print("\nFor --task ccd: " + ", ".join(STREAM_METHODS) + " (docs/ccd.md)")
    print(f"\nBehind a '+' (as in patchgen+miro): {', '.join(row['name'] for row in rows if row['addable'])}")


def main(argv: list[str]) -> int:
    parse(list_methods, "methods", argv)
    return 0
