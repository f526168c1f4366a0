"""patchgen methods: what can be trained."""

from __future__ import annotations

import json as to_json

from patchgen.commands import parse


def list_methods(json: bool = False) -> None:
    """List the methods: what the head reads, what of the backbone is tuned.

    Args:
        json: Print JSON instead of a table.
    """
    from patchgen.methods import METHODS

    rows = [{"name": n, "pool": m.pool, "tune": m.tune, "summary": m.summary} for n, m in METHODS.items()]
    if json:
        print(to_json.dumps(rows, indent=2))
        return
    for row in rows:
        print(f"{row['name']:<20} pool {row['pool']:<9} tune {row['tune']:<10} {row['summary']}")


def main(argv: list[str]) -> int:
    parse(list_methods, "methods", argv)
    return 0
