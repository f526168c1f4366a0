"""CSV files: written atomically, and read with line numbers.

write_csv("tiles.csv", ["path", "label"], [["a.png", "cat"]])
header, rows = read_csv(Path("tiles.csv"))               # [(2, {"path": "a.png", "label": "cat"})]
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path

from patchgen.common.files import refuse_pipe, replacing
from patchgen.common.text import csv_cell


def write_csv(path: str | Path, header: Sequence[str], rows: Iterable[Sequence[str]], people: bool = False) -> None:
    """Write a CSV file under a temporary name in the same folder, then rename it.

    Args:
        people: the file is meant for spreadsheets and not read back: no cell may be a formula.
    """
    if people:
        header, rows = [csv_cell(cell) for cell in header], ([csv_cell(str(cell)) for cell in row] for row in rows)
    with replacing(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)


def read_csv(path: Path) -> tuple[list[str], list[tuple[int, dict[str, str]]]]:
    """Header (stripped, lower case) and rows as (line number, cells) of a UTF-8 CSV file."""
    rows: list[tuple[int, dict[str, str]]] = []
    refuse_pipe(path)
    try:
        with path.open(newline="", encoding="utf-8-sig") as stream:
            reader = csv.reader(stream, strict=True)
            header = [name.strip().lower() for name in next(reader, [])]
            for cells in filter(None, reader):
                if len(cells) != len(header):
                    raise ValueError(
                        f"'{path}', line {reader.line_num}: {len(cells)} cells where the header has {len(header)}. "
                        "Put a cell that contains a comma between double quotes."
                    )
                rows.append((reader.line_num, dict(zip(header, cells, strict=True))))
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"'{path}' cannot be read as CSV ({error}). Save it as comma-separated UTF-8.") from error
    return header, rows
