"""patchgen oracle list | write NAME --out DIR: the generated data sets whose predictive patches are known."""

from __future__ import annotations

import json as to_json
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, Any

import tyro

from patchgen.commands import choose, parse, print_table


def list_sets(json: bool = False) -> None:
    """List the suite: classes, size of C*, distractors, and how far each domain's background follows the class.

    Args:
        json: Print every parameter as JSON instead of a table.
    """
    from patchgen.data.oracle import SUITE

    if json:
        print(to_json.dumps({name: asdict(spec) for name, spec in SUITE.items()}, indent=2))
        return
    rows = [summary(name) for name in SUITE]
    print_table(list(rows[0]), [list(map(str, row.values())) for row in rows])


def write_set(name: Annotated[str, tyro.conf.Positional], out: str, quiet: bool = False) -> None:
    """Write images, masks and oracle.json into a folder; the last line printed is the images folder.

    Args:
        name: A name of `patchgen oracle list`.
        out: The folder to create; one that already holds this set is left as it is.
        quiet: No progress bar.
    """
    from patchgen.data.oracle import Oracle, suite_spec
    from patchgen.train.progress import Progress

    oracle = Oracle(suite_spec(name))
    with Progress(f"writing {name}", len(oracle), quiet=quiet) as bar:
        folder = oracle.write(out, bar.advance)
    print(folder / "images")


def summary(name: str) -> dict[str, Any]:
    """One line of the list; a correlation is the share of images whose background is the class's own."""
    from patchgen.data.oracle import Oracle, suite_spec

    spec = suite_spec(name)
    laws = [f"{d.name} {d.correlation:g}{' (turned)' if d.turned else ''}" for d in spec.domains]
    return {
        "name": name,
        "classes": spec.classes,
        "held out": spec.held_out,
        "C*": f"{spec.predictive} of {spec.grid**2}",
        "objects": spec.objects,
        "distractors": spec.distractors,
        "correlation": ", ".join(laws),
        "unseen": spec.unseen,
        "local": "yes" if spec.local else "no",
        "images": len(Oracle(spec)),
    }


ACTIONS: dict[str, Callable[..., None]] = {"list": list_sets, "write": write_set}


def main(argv: list[str]) -> int:
    action, rest = choose(ACTIONS, "oracle", argv)
    if action is not None:
        parse(action, f"oracle {argv[0]}", rest)
    return 0
