"""Checks of a data set and of the machine; each reports a finding and, if something is wrong, the fix.

    checks = examine("PACS") + examine_machine()
    worst(checks)                                    # "pass", "warn" or "fail"

A bad data set never raises here: it is a failed check.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import shutil
import sys
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from patchgen.common.files import cache_dir
from patchgen.data.benchmarks import BENCHMARKS
from patchgen.data.doctor_files import Check, check_files, finding, inspect_files, some
from patchgen.data.listing import list_files, skipped_line
from patchgen.data.splits import make_splits
from patchgen.data.table import Table, check_shared, read_table

TINY_CLASS = 5  # with fewer images, a 20 % hold-out has none on average
OTHER_PICTURES = (".jp2", ".jxl", ".svg", ".psd", ".dcm", ".svs", ".ndpi", ".dng", ".cr2", ".nef", ".arw", ".eps")
NAMES = 8  # of domains or classes in the layout row
CACHED_BYTES = 224 * 224 * 3  # of one decoded image at the usual size
EXTRAS = (  # one package per extra, checked by tests/data/test_doctor.py
    *("timm", "umap", "ray", "submitit", "fastapi", "openslide", "shapely", "torchstain", "onnx", "onnxruntime"),
    *("openvino", "pillow_heif", "tensorboard", "wandb", "mlflow", "peft", "pyarrow"),
)


def examine(
    data: str | Path,
    *,
    benchmark: str | None = None,
    options: Mapping[str, str] | None = None,
    decode: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> list[Check]:
    """Check a data set: names first, then the content of every file.

    Args:
        data: what `read_table` takes, with the same `benchmark` and `options`.
        decode: decode every image; otherwise files are only read and hashed (no pixel sizes, no check for damage).
        progress: called as progress(files done, files in all).
    """
    try:
        table = check_shared(read_table(data, benchmark=benchmark, options=options))
    except (ValueError, OSError) as error:
        return [Check("layout", "fail", str(error), "Mend what the text names, then run the doctor again.")]
    checks = [Check("layout", "pass", _layout(table))]
    checks += [*_check_counts(table), *_check_classes(table), *_check_labels(table), *_check_groups(table)]
    if os.path.isdir(os.path.expanduser(data)):  # a manifest lists its files itself
        checks += _check_other_files(table)
    facts = list(inspect_files(table.files, decode, progress))
    return [*checks, *check_files(table, facts, decode), _check_disk(len(table))]


def examine_machine() -> list[Check]:
    """Check Python, torch, transformers, a broken torchvision, and the optional packages."""
    version = ".".join(map(str, sys.version_info[:3]))
    return [
        Check("python", "pass", version),
        _check_torch(),
        *_check_torchvision(),
        _check_import("transformers"),
        _check_extras(),
    ]


def _layout(table: Table) -> str:
    """Counts and names, which show whether a folder above or below the data was given by mistake."""

    def named(names: Sequence[str], what: str) -> str:
        more = ", ..." if len(names) > NAMES else ""
        return f"{len(names)} {what} ({', '.join(names[:NAMES])}{more})"

    return f"{len(table):,} images, {named(table.domains, 'domains')}, {named(table.classes, 'classes')}"


def _check_counts(table: Table) -> Iterator[Check]:
    """Images per domain against the registered versions of the benchmark."""
    if table.benchmark is None:
        return
    entry = BENCHMARKS[table.benchmark]
    images = {domain: len(table.rows_of(domain)) for domain in table.domains}
    absent = [domain for domain in entry.domains if domain not in images]
    if absent:
        yield Check("domains", "warn", f"{entry.name} without {', '.join(absent)}", f"Source: {entry.source}.")
    if len(table.classes) != entry.num_classes:
        detail = f"{len(table.classes)} class names where {entry.name} has {entry.num_classes}"
        yield Check("class names", "warn", detail, "Look for renamed or lost class folders.")
    version = entry.version_of(images)
    if version is not None:
        known = [domain for domain in images if domain in entry.counts[version]]
        yield Check("counts", "pass", f"{entry.name}, version {version} ({', '.join(known)} as registered)")
        return
    versions = {
        name: {domain: n - known[domain] for domain, n in images.items() if domain in known}
        for name, known in entry.counts.items()
    }
    apart = [(sum(map(abs, off.values())), name) for name, off in versions.items() if off]
    nearest = min(apart)[1] if apart else ""
    text = ", ".join(f"{domain} {images[domain]:,} ({n:+,})" for domain, n in versions.get(nearest, {}).items() if n)
    yield finding(
        "counts",
        apart and f"no registered version of {entry.name}; against version {nearest}: {text}",
        "Unpack the data again, or report the counts with the results.",
        f"no count of {', '.join(images)} is registered: nothing to compare",
    )


def _check_classes(table: Table) -> Iterator[Check]:
    """Classes with no or very few images in a domain."""
    text = "; ".join(f"{domain} lacks {', '.join(names)}" for domain, names in table.missing().items())
    fix = "Allowed, but a class that no source has cannot be learned: read its accuracy separately."
    yield finding("missing classes", text, fix, "every domain has every class")
    tiny = [f"{d}/{c} ({n})" for d, row in table.counts().items() for c, n in row.items() if 0 < n < TINY_CLASS]
    fix = "Add images, or expect a validation without these classes."
    yield finding("tiny classes", some(tiny), fix, f"every class of a domain has {TINY_CLASS} images or more")


def _check_labels(table: Table) -> Iterator[Check]:
    """Class names that differ only in case or Unicode form, and rows without a label; no check if there are none."""
    spelled: dict[str, list[str]] = defaultdict(list)
    for name in table.classes:
        spelled[unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())].append(name)
    alike = [" and ".join(names) for names in spelled.values() if len(names) > 1]
    if alike:
        fix = "If they mean the same class, give its folders (or labels) one spelling: now each is a separate class."
        same = all(len({name.casefold() for name in names}) == 1 for names in spelled.values())
        how = "case" if same else "case, or in how Unicode writes a letter"
        yield Check("class spelling", "warn", f"differ only in {how}: {some(alike)}", fix)
    empty = {name: n for name in table.domains if (n := int((table.label[table.rows_of(name)] < 0).sum()))}
    if empty:
        text = ", ".join(f"{name} {n:,}" for name, n in empty.items())
        fix = "Fill in the labels, or leave them empty: such rows are neither trained on nor scored."
        yield Check("empty labels", "warn", f"{sum(empty.values()):,} of {len(table):,} rows: {text}", fix)


def _check_other_files(table: Table) -> Iterator[Check]:
    """Files in the data folder that are not read; no check if there are none."""
    if skipped := list_files(table.root).skipped:
        pictures = any(name.lower().endswith(OTHER_PICTURES) for name in skipped)
        fix, text = "Convert the pictures among them to .png or .jpg if they belong to the data.", skipped_line(skipped)
        yield finding("files not read", pictures and text, fix, text)


def _check_groups(table: Table) -> Iterator[Check]:
    """The number of groups (patients) that a random split would put on both sides."""
    if table.group is None:
        if table.benchmark and BENCHMARKS[table.benchmark].group_pattern:
            fix = "Restore the original file names, or pass a manifest with a group column."
            yield Check("groups", "warn", "the file names hold no patient, so a split by patient is impossible", fix)
        return
    try:
        held_out = make_splits(table).part
    except ValueError as error:
        yield Check("groups", "fail", str(error), "Give every domain at least two images.")
        return
    sides: dict[tuple[int, str], set[bool]] = defaultdict(set)
    for domain, group, out in zip(table.domain.tolist(), table.group, held_out.tolist(), strict=True):
        sides[domain, group].add(out)
    torn = sum(len(side) == 2 for side in sides.values())
    detail = f"a random split puts {torn:,} of {len(sides):,} groups on both sides"
    yield finding("groups", torn and detail, "Train with --split group.", detail)
    places: dict[str, list[str]] = defaultdict(list)
    for domain, group in sides:
        places[group].append(table.domains[domain])
    shared = [f"{group} ({', '.join(names)})" for group, names in places.items() if len(names) > 1]
    if shared:  # each domain is split separately, so no rule keeps these on one side
        detail = f"{len(shared):,} of {len(places):,} groups are in several domains, such as {shared[0]}"
        fix = (
            "Patients of an unseen domain are then seen in training, even with --split group: merge these sites into "
            "one domain, or keep each patient in only one of them. If they are different patients with the same "
            "number, prefix the group with the site's name."
        )
        yield Check("groups across domains", "warn", detail, fix)


def _check_disk(images: int) -> Check:
    """Free space where decoded images are cached."""
    cache = cache_dir()
    place = next(p for p in (cache.absolute(), *cache.absolute().parents) if p.exists())
    free, needed = shutil.disk_usage(place).free, images * CACHED_BYTES
    detail = f"{free / 1e9:.1f} GB free in '{cache}'; {needed / 1e9:.1f} GB hold all images at 224 px"
    fix = "Free some space, point $PATCHGEN_CACHE elsewhere, or train without the cache."
    return finding("cache space", free <= needed and detail, fix, detail)


def _check_import(name: str, fix: str = "") -> Check:
    try:
        importlib.import_module(name)
        return Check(name, "pass", importlib.metadata.version(name))
    except Exception as error:  # a half-installed package can raise anything on import
        return Check(
            name, "fail", f"{type(error).__name__}: {error}", f"pip {fix or f'install --force-reinstall {name}'}"
        )


def _check_torch() -> Check:
    check = _check_import("torch")
    if check.status == "fail":
        return check
    import torch

    device = "cpu"
    if torch.cuda.is_available():
        device = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    elif torch.backends.mps.is_available():
        device = "mps"
    return Check("torch", "pass", f"{check.detail}, {torch.get_num_threads()} threads, device {device}")


def _check_torchvision() -> Iterator[Check]:
    """torchvision is not needed, but one built for another torch breaks transformers: only that is reported."""
    if importlib.util.find_spec("torchvision") is not None:
        yield _check_import("torchvision", "uninstall torchvision (not needed, and a broken one breaks transformers)")


def _check_extras() -> Check:
    found = [name for name in EXTRAS if importlib.util.find_spec(name) is not None]
    absent = [name for name in EXTRAS if name not in found]
    return Check("extras", "pass", f"found: {', '.join(found) or 'none'}; not installed: {', '.join(absent) or 'none'}")
