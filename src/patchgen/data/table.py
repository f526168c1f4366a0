"""A folder or a CSV manifest as a table with one checked row per image; only names are read, never pixels.

Rows of a folder are in DomainBed's order: domain, sorted class folder, sorted file name.
"""

import hashlib
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlencode

import numpy as np

from patchgen.common.files import read_csv, write_csv
from patchgen.common.text import did_you_mean, printable
from patchgen.data.benchmarks import Benchmark, get_benchmark, match_benchmark
from patchgen.data.image_files import IMAGE_EXTENSIONS, MOST_SIDE, finder, is_image, list_images, visible_folders

MOST_DOMAINS, MOST_CELLS = 1000, 5_000_000  # far beyond any data set; checks compare all pairs
Row = tuple[str, str, str]  # path, domain, class (empty: no label)
LAYOUT = "Expected <data>/<domain>/<class>/<image>, or a CSV manifest with the columns path, domain, label"


class TileScale(NamedTuple):
    mpp: float  # microns per pixel
    side: int  # pixels

    def __str__(self) -> str:
        return f"{self.side} pixels at {self.mpp:g} microns per pixel"


def is_weight(value: Any) -> bool:
    try:
        return 0 <= float(value) < math.inf
    except (TypeError, ValueError):
        return False


def tile_scale(mpp: Any, side: Any) -> TileScale | None:
    """The scale that a manifest or a model states; None if it states none, or no positive numbers."""
    try:
        scale = TileScale(float(mpp), int(side))
    except (TypeError, ValueError, OverflowError):
        return None
    return scale if 0 < scale.mpp < math.inf and 0 < scale.side < MOST_SIDE else None


@dataclass(frozen=True, eq=False)
class Table:
    """One checked row per image; `label` is -1 if the manifest gives none."""

    root: Path
    paths: tuple[str, ...]  # posix, relative to root; absolute where the manifest says so
    domains: tuple[str, ...]
    classes: tuple[str, ...]  # ONE list for all domains: a class missing in a domain never shifts ids
    domain: np.ndarray  # (N,) int64 into domains
    label: np.ndarray  # (N,) int64 into classes, or -1
    group: tuple[str, ...] | None = None  # patient or slide of each row
    benchmark: str | None = None
    options: dict[str, str] = field(default_factory=dict)  # reading options in force
    tiles: TileScale | None = None  # of images that are tiles of slides, all of one scale
    weight: np.ndarray | None = None  # (N,) float64, of each image in the training loss

    def __len__(self) -> int:
        return len(self.paths)

    def file(self, i: int) -> Path:
        """The path of image i."""
        return self.root / self.paths[i]

    @property
    def files(self) -> list[Path]:
        """The paths of all images."""
        return [self.root / path for path in self.paths]

    def rows_of(self, domain_name: str) -> np.ndarray:
        """Row indices of a domain, in table order."""
        if domain_name not in self.domains:
            hint = did_you_mean(domain_name, self.domains)
            raise ValueError(f"Unknown domain '{domain_name}'{hint} (known: {', '.join(self.domains)})")
        return np.flatnonzero(self.domain == self.domains.index(domain_name))

    def label_name(self, i: int) -> str:
        """The class of row i, empty when it has no label."""
        return self.classes[self.label[i]] if self.label[i] >= 0 else ""

    def counts(self) -> dict[str, dict[str, int]]:
        """Labelled images as {domain: {class: n}}, zeros included."""
        n = np.zeros((len(self.domains), len(self.classes)), dtype=np.int64)
        known = self.label >= 0
        np.add.at(n, (self.domain[known], self.label[known]), 1)
        return {d: dict(zip(self.classes, row.tolist(), strict=True)) for d, row in zip(self.domains, n, strict=True)}

    def to_csv(self, path: str | Path) -> None:
        """Write the manifest that `read_table` reads back to this table; outside of its root, paths are absolute."""
        relative = os.path.dirname(os.path.abspath(path)) == os.path.abspath(self.root)
        columns: dict[str, Sequence[str]] = {
            "path": self.paths if relative else [Path(os.path.abspath(file)).as_posix() for file in self.files],
            "domain": [self.domains[d] for d in self.domain],
            "label": [self.label_name(i) for i in range(len(self))],
        }
        if self.group is not None:
            columns["group"] = self.group
        if self.weight is not None:
            columns["sample_weight"] = list(map(repr, self.weight.tolist()))
        if self.benchmark is not None:  # with its options it fixes the order of domains and classes
            columns["benchmark"] = [f"{self.benchmark}?{urlencode(self.options)}".rstrip("?")] * len(self)
        if self.tiles is not None:
            columns |= {"mpp": [f"{self.tiles.mpp:g}"] * len(self), "tile": [str(self.tiles.side)] * len(self)}
        write_csv(path, list(columns), zip(*columns.values(), strict=True))


def read_table(
    data: str | Path, *, benchmark: str | None = None, options: Mapping[str, str] | None = None,
    for_scoring: bool = False,
) -> Table:  # fmt: skip
    """Read a folder `domain/class/image` or `class/image`, a manifest, or an oracle set, which is made on first use.

    Without `benchmark`, a folder with the name of one is read as that one; with it, `data` may also be the folder's
    parent. `options` choose its parts, e.g. `{"crctp_fold": "Fold1"}`; `for_scoring`, one class suffices.
    """
    least = 1 if for_scoring else 2
    where = Path(os.path.abspath(os.path.expanduser(data)))
    entry = get_benchmark(benchmark) if benchmark else None
    if not os.path.exists(where) and str(data).startswith("oracle-"):
        from patchgen.data.oracle import suite_folder

        where = suite_folder(str(data))
    if not os.path.exists(where):
        parent = next(p for p in where.parents if os.path.exists(p))
        lost, there = where.relative_to(parent).parts[0], os.listdir(parent) if parent.is_dir() else []
        raise ValueError(f"No such data: '{where}' ('{lost}' is not in '{parent}'){did_you_mean(lost, there)}")
    if where.is_dir():
        return _read_folder(where, entry, options, least)
    if where.suffix.lower() != ".csv":
        raise ValueError(f"'{where}' is neither a folder nor a .csv file. {LAYOUT}; archives must be unpacked first.")
    return _read_manifest(where, entry, options, least)


def _read_folder(root: Path, entry: Benchmark | None, options: Mapping[str, str] | None, least: int) -> Table:
    root, entry = (entry.find_root(root), entry) if entry else (root, match_benchmark(root))
    used: dict[str, str] = {}
    if entry:
        parents, used = entry.class_folders(root, options or {})
    elif options:
        raise ValueError(f"Reading options {sorted(options)} belong to a benchmark, and '{root}' is read as none.")
    else:
        if (root / "oracle.json").is_file() and (root / "images").is_dir():
            raise ValueError(f"'{root}' is a generated data set with its masks; give its images, '{root / 'images'}'")
        folders = [folder for folder in visible_folders(root) if not is_result(folder)]
        images = any(is_image(path.name) for folder in folders for path in folder.iterdir())
        flat = images and not any(map(visible_folders, folders))
        parents = {root.name: [root]} if flat else {folder.name: [folder] for folder in folders}
    rows = [row for d, places in parents.items() for place in places for row in _class_rows(root, d, place, entry)]
    if not rows:
        raise ValueError(f"No images in the folders of '{root}'. {LAYOUT}.")
    if empty := parents.keys() - {domain for _, domain, _ in rows}:
        raise ValueError(f"The domain folder '{min(empty)}' in '{root}' holds no class folder with images. {LAYOUT}.")
    names: dict[str, str] = {}  # real path -> name
    find = finder(root)
    for path, *_ in rows:  # through links an image could appear in two domains or classes
        if (other := names.setdefault(find(path)[0], path)) != path:
            raise ValueError(f"'{other}' and '{path}' in '{root}' are one file, reached through a link; remove one")
    return _build(root, rows, None, entry, used, least)


def is_result(folder: Path) -> bool:
    """Whether a folder holds runs, or a model, rather than the images of a site."""
    runs = any((inner / "config.yaml").is_file() and (inner / "checkpoints").is_dir() for inner in folder.iterdir())
    return runs or (folder / "model.safetensors").is_file()


def check_shared(table: Table) -> Table:
    """The table, if its domains share a class or it is a benchmark; otherwise ValueError: several data sets?"""
    cells = np.unique(np.stack([table.label, table.domain])[:, table.label >= 0], axis=1)
    if table.benchmark or len(table.domains) == 1 or len(np.unique(cells[0])) < cells.shape[1]:
        return table
    rows = {domain: [c for c, n in row.items() if n][:3] for domain, row in list(table.counts().items())[:2]}
    examples = "; ".join(f"'{domain}' has {', '.join(names) or 'none'}" for domain, names in rows.items())
    raise ValueError(
        f"The domains of '{table.root}' share no class ({examples}), so nothing learned on one transfers to another. "
        f"{LAYOUT}, with the same class names in every domain{_deeper(table.root)}"
    )


def _deeper(root: Path) -> str:
    """\"; did you mean 'ROOT/SET'?\" for sub-folders that are laid out as data sets themselves."""
    sets = []
    for folder in visible_folders(root):
        classes = [{inner.name for inner in visible_folders(child)} for child in visible_folders(folder)]
        if len(set().union(*classes)) < sum(map(len, classes)):  # two sub-folders share a name, as domains do a class
            sets.append(repr(str(folder)))
    return f"; did you mean {' or '.join(sets[:3])}?" if sets else "."


def _class_rows(root: Path, domain: str, parent: Path, entry: Benchmark | None) -> list[Row]:
    """(path, domain, class) of every image in the class folders of one parent."""
    rows: list[Row] = []
    folder_of: dict[str, str] = {}
    for folder in visible_folders(parent):
        name = _class_name(folder.name, domain, entry)
        if (other := folder_of.setdefault(name, folder.name)) != folder.name:
            raise ValueError(f"'{parent}': the folders '{other}' and '{folder.name}' both mean class '{name}'.")
        prefix, images = folder.relative_to(root).as_posix(), list_images(folder)
        if not images:
            rule = f"({' '.join(IMAGE_EXTENSIONS)}). Fill it, or remove it: a domain may lack a class."
            raise ValueError(f"The class folder '{prefix}' in '{root}' holds no image {rule}")
        rows += [(f"{prefix}/{image}", domain, name) for image in images]
    return rows


def _class_name(name: str, domain: str, entry: Benchmark | None) -> str:
    if entry is None:
        return name
    if (known := entry.class_of(name)) is not None:
        return known
    classes = entry.classes or ()
    raise ValueError(
        f"'{name}' in domain '{domain}' is not a class of {entry.name}{did_you_mean(name, classes)} "
        f"({', '.join(classes)}). If the data is not {entry.name}, give its folder another name."
    )


def _read_manifest(path: Path, entry: Benchmark | None, options: Mapping[str, str] | None, least: int) -> Table:
    if options:
        raise ValueError(f"Reading options {sorted(options)} choose folders; a manifest already names its files.")
    header, raw = read_csv(path)
    _check_columns(path, header)
    site = {"domain": path.stem}  # of all rows, without the column
    lines = [(line, site | {name: cell.strip() for name, cell in cells.items()}) for line, cells in raw]
    tags = {cells.get("benchmark", "") for _, cells in lines}
    if len(tags) != 1:
        raise ValueError(f"'{path}' has no rows, or several values in the column benchmark: {sorted(tags)[:3]}.")
    _check_cells(path, lines)
    tag, _, query = tags.pop().partition("?")
    entry = entry or (get_benchmark(tag) if tag else None)
    rows: list[Row] = []
    for line, cells in lines:
        domain = cells["domain"]
        if entry and not (domain := entry.domain_of(domain) or ""):
            rule = f"is none of {', '.join(entry.domains)}{did_you_mean(cells['domain'], entry.domains)}"
            raise ValueError(f"'{path}', line {line}: '{cells['domain']}' {rule}")
        label = _class_name(cells["label"], domain, entry) if cells["label"] else ""
        rows.append((Path(cells["path"]).as_posix(), domain, label))
    group = tuple(cells["group"] for _, cells in lines) if lines[0][1].get("group") else None
    table = _build(path.parent, rows, group, entry, dict(parse_qsl(query)), least, path)
    scales = {(cells.get("mpp"), cells.get("tile")) for _, cells in lines}
    tiles = tile_scale(*scales.pop()) if len(scales) == 1 else None
    weighted = "sample_weight" in header
    weight = np.array([float(cells["sample_weight"]) for _, cells in lines]) if weighted else None
    return replace(table, tiles=tiles, weight=weight)


def _check_columns(path: Path, header: Sequence[str]) -> None:
    near = [name for name in header if name.lower() in ("site", "domains", "domian", "center", "centre", "hospital")]
    for column in ("path", *(["domain"] if near else []), "label"):
        if column not in header:
            separator = next((s for s in (";", "\t", "|") if s in "".join(header)), None)
            hint = f"; separate cells with commas, not {separator!r}" if separator else did_you_mean(column, header)
            raise ValueError(f"'{path}' has no column '{column}' (found: {', '.join(header) or 'nothing'}){hint}")
    if len(set(header)) < len(header):
        raise ValueError(f"'{path}' has a column twice: {', '.join(header)}.")


def _check_cells(path: Path, lines: Sequence[tuple[int, dict[str, str]]]) -> None:
    """Files must exist, cells must be filled (a label may be empty), and a file must appear once."""
    needed = ["path", "domain", *(["group"] if any(cells.get("group") for _, cells in lines) else [])]
    seen: dict[str, str] = {}  # real path -> its line
    lost: list[str] = []
    find = finder(path.parent)
    for line, cells in lines:
        if empty := [column for column in needed if not cells[column]]:
            raise ValueError(f"'{path}', line {line}: the cell '{empty[0]}' is empty. Only a label may be left empty.")
        if not is_weight(weight := cells.get("sample_weight", 1)):
            raise ValueError(f"'{path}', line {line}: sample_weight must be a number of at least 0, not '{weight}'")
        name = os.path.normpath(cells["path"])
        file, exists = find(cells["path"])
        meaning = ", ".join(f"{column} '{cells[column]}'" for column in ("domain", "label", *needed[2:]))
        here = f"line {line} ('{name}', {meaning})"
        if (other := seen.setdefault(file, here)) != here:  # on both sides of a split, or in two domains
            raise ValueError(f"'{path}': {other} and {here} are one file; remove one.")
        if not is_image(os.path.basename(name)):
            raise ValueError(f"'{path}', line {line}: '{name}' is no image ({' '.join(IMAGE_EXTENSIONS)}).")
        if not exists:
            lost.append(f"line {line}: {name}")
    if lost:
        examples = "; ".join(lost[:3] + ["..."] * (len(lost) > 3))
        rule = f"Paths are relative to the manifest's folder '{path.parent}', or absolute."
        raise ValueError(f"'{path}': {len(lost)} of {len(lines)} files do not exist ({examples}). {rule}")


def _build(
    root: Path, rows: Sequence[Row], group: tuple[str, ...] | None, entry: Benchmark | None, options: dict[str, str],
    least: int = 2, source: Path | None = None,
) -> Table:  # fmt: skip
    """Names to ids, with the checks common to folders and manifests (`source`); at least `least` classes."""
    paths, domain_names, labels = zip(*rows, strict=True)
    for names in (paths, set(domain_names), set(labels)):
        if odd := [name for name in names if not name.isascii() and name.encode(errors="ignore").decode() != name]:
            raise ValueError(f"'{source or root}': the name '{printable(odd[0])}' is not UTF-8; rename it")
    present, named = set(domain_names), set(labels) - {""}
    domains = tuple(d for d in entry.domains if d in present) if entry else tuple(sorted(present))
    classes = entry.classes if entry and entry.classes else tuple(sorted(named))
    if len(domains) > MOST_DOMAINS or len(domains) * len(classes) > MOST_CELLS:
        raise ValueError(
            f"'{source or root}' has {len(domains):,} domains and {len(classes):,} classes, at most {MOST_DOMAINS:,} "
            f"domains and {MOST_CELLS:,} pairs of both; a domain is a site or style of many images, not one image"
        )
    if len(domains) < least and source is None and (inner := _deeper(root)) != ".":
        raise ValueError(f"'{root}' holds only one domain, '{domains[0]}'. {LAYOUT}{inner}")
    if len(named) < least:
        few = "fewer than two classes" if least == 2 else "no labelled image"
        raise ValueError(f"'{source or root}' has {few} ({', '.join(named) or 'no labels'}). {LAYOUT}.")
    domain_id, class_id = {d: i for i, d in enumerate(domains)}, {c: i for i, c in enumerate(classes)}
    domain = np.array([domain_id[d] for d in domain_names], dtype=np.int64)
    label = np.array([class_id.get(c, -1) for c in labels], dtype=np.int64)
    group = group or (entry.groups_of(paths) if entry else None)
    return Table(root, paths, domains, classes, domain, label, group, entry.name if entry else None, options)


def fingerprint(table: Table) -> str:
    """Digest of the rows and their files' sizes (file names are often mere numbers), independent of the machine."""
    digest = hashlib.sha256()
    for part in (table.paths, table.domains, table.classes, table.group or (), (table.benchmark or "",)):
        digest.update("\n".join(part).encode() + b"\0")
    sizes = np.array([os.stat(os.path.join(table.root, path)).st_size for path in table.paths])
    for ids in (table.domain, table.label, sizes):
        digest.update(np.ascontiguousarray(ids, dtype="<i8").tobytes())
    if table.weight is not None:
        digest.update(np.ascontiguousarray(table.weight, dtype="<f8").tobytes())
    return digest.hexdigest()[:16]
