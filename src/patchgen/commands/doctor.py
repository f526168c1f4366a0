"""patchgen doctor [DATA]: what is wrong with this machine and the data, and the fix; exit code 1 if a check failed.

`patchgen doctor DATA --splits FILE.csv` writes the train/validation splits instead.
"""

import os
from contextlib import ExitStack
from dataclasses import asdict
from functools import cache
from typing import Annotated, Any

import tyro

from patchgen.commands import print_table
from patchgen.common.files import expanded
from patchgen.common.text import json_text
from patchgen.config import SplitRule

STYLES = {"pass": "", "warn": "yellow", "fail": "red"}


def doctor(
    data: Annotated[str | None, tyro.conf.Positional] = None,
    benchmark: str | None = None,
    options: dict[str, str] | None = None,
    decode: bool = True,
    splits: str | None = None,
    split: SplitRule = "domainbed",
    seed: int = 1,
    holdout: float = 0.2,
    json: bool = False,
) -> int:
    """Check this machine and, when given, a data set; every finding names its fix.

    Args:
        data: Folder `domain/class/*.jpg` or CSV manifest; by default only the machine is checked.
        benchmark: Read DATA as this registered benchmark; by default recognised by the folder name.
        options: Reading options of a benchmark, such as `crctp_fold Fold1`.
        decode: Decode every image; otherwise files are only read, and damage is not detected.
        splits: Instead of checking DATA, write its train/validation splits to this .csv file.
        split: Of --splits: DomainBed's rule, or `group` (within a domain, no patient appears on both sides).
        seed: Of --splits: seed of the split.
        holdout: Of --splits: share of each domain to hold out.
        json: Print JSON instead of a table.
    """
    from patchgen.common.progress import Progress
    from patchgen.data.benchmarks import get_benchmark
    from patchgen.data.doctor import examine, examine_machine, worst

    if benchmark is not None:
        get_benchmark(benchmark)  # a misspelt option is not a problem of the data
    if data is None and (benchmark or options or splits):
        raise ValueError("--benchmark, --options and --splits are about DATA: give the folder too")
    reading: dict[str, Any] = {"benchmark": benchmark, "options": options}
    if splits and data:
        _write_splits(splits, data, reading, {"rule": split, "seed": seed, "holdout": holdout}, json)
        return 0
    checks = examine_machine()
    if data is not None:
        with ExitStack() as stack:
            bar = cache(lambda total: stack.enter_context(Progress("reading images", total)))  # from the first file on
            checks += examine(data, decode=decode, progress=lambda done, total: bar(total).tick(), **reading)
    verdict = worst(checks)
    if json:
        print(json_text({"worst": verdict, "checks": [asdict(check) for check in checks]}))
    else:
        rows = [(check.status.upper(), check.name, check.detail, check.fix) for check in checks]
        print_table(("status", "check", "detail", "fix"), rows, [STYLES[check.status] for check in checks])
    return int(verdict == "fail")


def _write_splits(name: str, data: str, reading: dict[str, Any], how: dict[str, Any], json: bool) -> None:
    """Write the file and print the images of both parts of each domain, then the file's name."""
    from patchgen.data.splits import make_splits, write_splits
    from patchgen.data.table import check_shared, read_table

    target = expanded(name)
    if target.suffix.lower() != ".csv" or target.is_dir():
        raise ValueError(f"--splits must be a file that ends in .csv, not {name!r}")
    if os.path.realpath(target) == os.path.realpath(expanded(data)):
        raise ValueError(f"--splits {name!r} is the manifest itself; choose another name, such as 'splits.csv'")
    table = check_shared(read_table(data, **reading))
    splits = make_splits(table, **how)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_splits(target, table, splits)
    held = {domain: int(splits.part[table.rows_of(domain)].sum()) for domain in table.domains}
    counts = {domain: {"in": len(table.rows_of(domain)) - n, "out": n} for domain, n in held.items()}
    if json:
        print(json_text({**how, "counts": counts, "file": str(target)}))
    else:
        rows = [(domain, f"{n['in']:,}", f"{n['out']:,}") for domain, n in counts.items()]
        print_table(("domain", "in", "out"), rows)
        print(target)


COMMAND = doctor
