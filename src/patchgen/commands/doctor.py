"""patchgen doctor [DATA]: what is wrong with this machine and the data, and the fix; exit code 1 if a check failed."""

from __future__ import annotations

import json as to_json
from contextlib import ExitStack
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import tyro

from patchgen.commands import parse, print_table, require_data

if TYPE_CHECKING:
    from patchgen.data.doctor_files import Check

STYLES = {"pass": "", "warn": "yellow", "fail": "red"}
LINE_EVERY = 2000  # files between two progress lines without a terminal


def examine(
    data: Annotated[str | None, tyro.conf.Positional] = None,
    benchmark: str | None = None,
    options: dict[str, str] | None = None,
    decode: bool = True,
    json: bool = False,
) -> int:
    """Check this machine and, when given, a data set; every finding names its fix.

    Args:
        data: Folder `domain/class/*.jpg` or CSV manifest; by default only the machine is checked.
        benchmark: Read DATA as this registered benchmark; by default recognised by the folder name.
        options: Reading options of a benchmark, such as `crctp_fold Fold1`.
        decode: Decode every image; otherwise files are only read, and damage is not detected.
        json: Print JSON instead of a table.
    """
    from patchgen.data.benchmarks import get_benchmark
    from patchgen.data.doctor import examine_machine
    from patchgen.data.doctor_files import worst

    if data is not None:
        require_data(data)
    if benchmark is not None:
        get_benchmark(benchmark)  # a misspelt option is not a problem of the data
    for name, value in {"--benchmark": benchmark, "--options": options}.items():
        if value is not None and data is None:
            raise ValueError(f"{name} says how DATA is read: give the folder too, as in `patchgen doctor FOLDER`")
    checks = examine_machine() + (_examine_data(data, benchmark, options, decode) if data is not None else [])
    verdict = worst(checks)
    if json:
        print(to_json.dumps({"worst": verdict, "checks": [asdict(check) for check in checks]}, indent=2))
    else:
        rows = [(check.status.upper(), check.name, check.detail, check.fix) for check in checks]
        print_table(("status", "check", "detail", "fix"), rows, [STYLES[check.status] for check in checks])
    return int(verdict == "fail")


def _examine_data(data: str, benchmark: str | None, options: dict[str, str] | None, decode: bool) -> list[Check]:
    from patchgen.common.progress import Progress
    from patchgen.data.doctor import examine

    bars: list[Progress] = []  # created at the first file, when their number is known
    with ExitStack() as stack:

        def progress(done: int, total: int) -> None:
            if not bars:
                bars.append(stack.enter_context(Progress("reading images", total)))
            bars[0].advance()
            if done % LINE_EVERY == 0 and not bars[0].live:
                bars[0].say("")

        return examine(data, benchmark=benchmark, options=options, decode=decode, progress=progress)


def main(argv: list[str]) -> int:
    return parse(examine, "doctor", argv)
