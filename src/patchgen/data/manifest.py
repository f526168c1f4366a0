"""Read and check the lines of a CSV manifest: its columns and cells, and that each file exists and appears once.

    for number, cells in read_lines(Path("tiles.csv")): cells["path"], cells["domain"], cells["label"]

`patchgen.data.table` turns them into a table.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from patchgen.common.files import read_csv
from patchgen.common.text import did_you_mean
from patchgen.data.listing import IMAGE_EXTENSIONS, finder, is_image

Line = tuple[int, dict[str, str]]  # its number in the file, and its cells by column


def read_lines(path: Path) -> list[Line]:
    """The lines (at least one), with whitespace around cells removed.

    Raises:
        ValueError: names the invalid line.
    """
    header, raw = read_csv(path)
    _check_columns(path, header)
    one = {} if "domain" in header else {"domain": path.stem}  # without the column, all rows are of one site
    lines = [(line, one | {name: cell.strip() for name, cell in cells.items()}) for line, cells in raw]
    tags = {cells.get("benchmark", "") for _, cells in lines}
    if len(tags) != 1:
        raise ValueError(f"'{path}' has no rows, or several values in the column benchmark: {sorted(tags)[:3]}.")
    _check_cells(path, lines)
    return lines


def _check_columns(path: Path, header: Sequence[str]) -> None:
    near = [name for name in header if name.lower() in ("site", "domains", "domian", "center", "centre", "hospital")]
    for column in ("path", *(["domain"] if near else []), "label"):
        if column not in header:
            separator = next((s for s in (";", "\t", "|") if s in "".join(header)), None)
            hint = f"; separate cells with commas, not {separator!r}" if separator else did_you_mean(column, header)
            raise ValueError(f"'{path}' has no column '{column}' (found: {', '.join(header) or 'nothing'}){hint}")
    if len(set(header)) < len(header):
        raise ValueError(f"'{path}' has a column twice: {', '.join(header)}.")


def _check_cells(path: Path, lines: Sequence[Line]) -> None:
    """Files must exist, cells must be filled (a label may be empty), and a file must appear once."""
    needed = ["path", "domain", *(["group"] if any(cells.get("group") for _, cells in lines) else [])]
    seen: dict[str, tuple[int, str, str]] = {}
    lost: list[str] = []
    find = finder(path.parent)
    for line, cells in lines:
        empty = [column for column in needed if not cells[column]]
        if empty:
            raise ValueError(f"'{path}', line {line}: the cell '{empty[0]}' is empty. Only a label may be left empty.")
        name = os.path.normpath(cells["path"])
        file, exists = find(cells["path"])
        meaning = ", ".join(f"{column} '{cells[column]}'" for column in ("domain", "label", *needed[2:]))
        first = seen.setdefault(file, (line, meaning, name))
        if first[0] != line:  # the same file would appear on both sides of a split, or in two domains
            raise ValueError(f"'{path}': {_twice((line, meaning, name), first)}")
        if not is_image(os.path.basename(name)):
            raise ValueError(f"'{path}', line {line}: '{name}' is no image ({' '.join(IMAGE_EXTENSIONS)}).")
        if not exists:
            lost.append(f"line {line}: {name}")
    if lost:
        examples = "; ".join(lost[:3] + ["..."] * (len(lost) > 3))
        raise ValueError(
            f"'{path}': {len(lost)} of {len(lines)} files do not exist ({examples}). "
            f"Paths are relative to the manifest's folder '{path.parent}', or absolute."
        )


def _twice(row: tuple[int, str, str], first: tuple[int, str, str]) -> str:
    """The message for a file named by two lines: (line, meaning, name) of both."""
    (line, meaning, name), (before, other, spelt) = row, first
    again = "" if spelt == name else f", the file that line {before} calls '{spelt}',"
    if other != meaning:
        return f"'{name}'{again} is {other} in line {before}, but {meaning} in line {line}."
    return f"'{name}'{again} appears in line {before} and again in line {line}; remove one."
