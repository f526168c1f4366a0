"""python -m benchmarks NAME [OPTIONS]: one benchmark, or `all` of the table of docs/develop/benchmarks.md.

python -m benchmarks all --out table.md       # some minutes on an idle machine
python -m benchmarks fit --into docs/develop/benchmarks.md      # renew its rows, unless the machine was busy
python -m benchmarks all --small              # tiny sizes: tries every benchmark, says nothing of the machine
python -m benchmarks rate --help              # the options of one
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import tyro

from benchmarks.common import Others, report
from benchmarks.table import SUBJECTS, TABLE, Row, markdown, put_into, table
from patchgen.commands import print_table
from patchgen.common.files import write_text


def main(argv: list[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Measure the package.", add_help=not words or words[0].startswith("-")
    )
    parser.add_argument("name", choices=["all", *SUBJECTS], help="`all`: the table of docs/develop/benchmarks.md")
    parser.add_argument("--small", action="store_true", help="tiny sizes: only tries the benchmark")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--out", metavar="FILE", help="write the table as Markdown here as well")
    parser.add_argument("--into", metavar="PAGE", help="renew these rows in the table of docs/develop/benchmarks.md")
    arguments, options = parser.parse_known_args(words)
    others = Others()
    try:
        result = _measure(arguments.name, arguments.small, options)
    except (ValueError, OSError) as error:
        print(f"python -m benchmarks {arguments.name}: {error}", file=sys.stderr)
        return 2
    rows, busy = table(result), others.verdict()
    if arguments.out is not None:
        write_text(arguments.out, markdown(rows) + (f"\n**{busy[0].upper()}{busy[1:]}.**\n" if busy else ""))
    if arguments.json:
        about = {"others": others.share(), "inconclusive": bool(busy)}
        listed = [{**row._asdict(), "verdict": row.verdict} for row in rows]
        print(json.dumps({"found": result, "table": listed, "machine": about}))
    else:
        print_table(("subject", "measured", "value", "target", ""), [(*row[:4], row.verdict) for row in rows])
        if busy:
            print(busy)
    if arguments.into is not None and rows:
        return _renew(arguments.into, rows, busy or "--small says nothing of the machine" * arguments.small)
    return 0


def _renew(page: str, rows: list[Row], reason: str) -> int:
    """Write the rows into a page, unless there is a reason not to."""
    if reason:
        print(f"{page} is left as it is: {reason}", file=sys.stderr)
        return 1
    try:
        write_text(page, put_into(Path(page).read_text(encoding="utf-8"), rows))
    except (OSError, ValueError) as error:
        print(f"python -m benchmarks: {page}: {error}", file=sys.stderr)
        return 2
    return 0


def _measure(name: str, small: bool, options: list[str]) -> dict[str, dict[str, Any]]:
    """What each benchmark finds with its default arguments, or the small ones, by name; or one with options."""
    if name != "all" and not small:
        return {name: tyro.cli(SUBJECTS[name].measure, prog=f"python -m benchmarks {name}", args=options)}
    if options:
        raise ValueError(f"{'--small' if small else 'all'} takes no further options, got {' '.join(options)}")
    result = {}
    for subject in TABLE if name == "all" else (name,):
        report(f"-- {subject}")
        result[subject] = SUBJECTS[subject].measure(**SUBJECTS[subject].SMALL if small else {})
    return result


if __name__ == "__main__":
    sys.exit(main())
