"""patchgen splits DATA --out FILE.csv: which images are held out, without training anything."""

from __future__ import annotations

import json as to_json
import os
from pathlib import Path
from typing import Annotated

import tyro

from patchgen.commands import parse, print_table, require_data
from patchgen.common.files import expanded
from patchgen.config import SplitRule


def write(
    data: Annotated[str, tyro.conf.Positional],
    out: str,
    rule: Annotated[SplitRule, tyro.conf.arg(aliases=["--split"])] = "domainbed",
    seed: int = 1,
    holdout: float = 0.2,
    benchmark: str | None = None,
    options: dict[str, str] | None = None,
    json: bool = False,
) -> None:
    """Write the splits of a data set; the last line printed is the file.

    Args:
        data: Folder `domain/class/*.jpg` or CSV manifest (path, domain, label, optional group).
        out: The .csv file to write.
        rule: DomainBed's rule, or `group` (within a domain, no patient appears on both sides).
        seed: Seed of the split.
        holdout: Share of each domain to hold out.
        benchmark: Read DATA as this registered benchmark; by default recognised by the folder name.
        options: Reading options of a benchmark, such as `crctp_fold Fold1`.
        json: Print the counts and the file as one JSON object instead.
    """
    from patchgen.data.splits import make_splits, write_splits
    from patchgen.data.table import read_table

    require_data(data)
    target = _checked(out, data)
    table = read_table(data, benchmark=benchmark, options=options)
    splits = make_splits(table, rule=rule, seed=seed, holdout=holdout)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_splits(target, table, splits)
    held = {domain: int(splits.part[table.rows_of(domain)].sum()) for domain in table.domains}
    counts = {domain: {"in": len(table.rows_of(domain)) - n, "out": n} for domain, n in held.items()}
    if json:
        how = {"rule": rule, "seed": seed, "holdout": holdout}
        print(to_json.dumps({**how, "counts": counts, "file": str(target)}, indent=2))
        return
    print_table(("domain", "in", "out"), [(domain, f"{n['in']:,}", f"{n['out']:,}") for domain, n in counts.items()])
    print(target)


def _checked(out: str, data: str) -> Path:
    """The file to write: a .csv that is not the data itself."""
    target = expanded(out)
    if target.suffix.lower() != ".csv" or target.is_dir():
        raise ValueError(f"--out must name a .csv file, got '{out}'; try '{target / 'splits.csv'}'")
    if os.path.realpath(target) == os.path.realpath(os.path.expanduser(data)):
        raise ValueError(f"--out '{out}' is the manifest itself; choose another name, such as 'splits.csv'")
    return target


def main(argv: list[str]) -> int:
    parse(write, "splits", argv)
    return 0
