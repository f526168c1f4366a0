"""The subjects of `patchgen bench` that end in rows of one table: each alone, or `all` in order."""

from __future__ import annotations

import json as to_json
import sys
from collections.abc import Sequence

from patchgen.commands import announce, print_table
from patchgen.common.files import write_text


def bench_all(small: bool = False, json: bool = False, out: str | None = None) -> None:
    """All subjects that have a row in the table of docs/benchmarks.md, in order; some minutes on an idle machine.

    Args:
        small: Tiny sizes: tries the command, says nothing of the machine.
        json: Print JSON instead of a table.
        out: Write the table as Markdown here as well.
    """
    _bench(None, small, json, out)


def bench_rate(json: bool = False) -> None:
    """Steps of LP, LP+LN, full and PatchGen, ViT-S/14 and B/14, as a share of the machine's matrix-multiply rate."""
    _bench(["rate"], False, json)


def bench_modes(json: bool = False) -> None:
    """What `--precision bf16-mixed` and `--compile` make of a step of ViT-S/14 on this machine."""
    _bench(["modes"], False, json)


def bench_input(json: bool = False) -> None:
    """Images a second of the input pipeline, cold and cached, against a plain one of Pillow."""
    _bench(["input"], False, json)


def bench_fold(json: bool = False) -> None:
    """A whole fold against a plain loop that evaluates as the host projects do."""
    _bench(["fold"], False, json)


def bench_probe(json: bool = False) -> None:
    """A linear probe without augmentation, with kept features and without."""
    _bench(["probe"], False, json)


def bench_grouping(json: bool = False) -> None:
    """K-means, the mixture and the Hungarian match, each against a plain version."""
    _bench(["grouping"], False, json)


def bench_growth(json: bool = False) -> None:
    """How each cost grows with images, patches, classes and domains."""
    _bench(["growth"], False, json)


def bench_start(json: bool = False) -> None:
    """Seconds of `import patchgen` and `patchgen --help`."""
    _bench(["start"], False, json)


def _bench(names: Sequence[str] | None, small: bool, json: bool, out: str | None = None) -> None:
    announce()
    from patchgen.diagnose import cost_table

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    found = cost_table.measure_all(names or tuple(cost_table.SUBJECTS), small=small, report=say)
    rows = cost_table.table(found)
    if out is not None:
        write_text(out, cost_table.markdown(rows))
    if json:
        print(to_json.dumps({"found": found, "table": [{**row._asdict(), "verdict": row.verdict} for row in rows]}))
    else:
        print_table(("subject", "measured", "value", "target", ""), [(*row[:4], row.verdict) for row in rows])
