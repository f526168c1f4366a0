"""Checks of a data set and of the machine, with fixes. A bad data set never raises here: it is a failed check."""

import hashlib
import importlib
import importlib.metadata
import importlib.util
import os
import shutil
import sys
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import pandas as pd
from PIL import Image

from patchgen.common.child_process import safe_children
from patchgen.common.files import cache_dir
from patchgen.common.machine import available_cores
from patchgen.data.benchmarks import BENCHMARKS
from patchgen.data.image_files import check_file, list_files, open_image, skipped_line
from patchgen.data.images import UnreadableImage, gray_bits
from patchgen.data.images import decode as decode_image
from patchgen.data.splits import make_splits
from patchgen.data.table import Table, check_shared, read_table

Status = Literal["pass", "warn", "fail"]
SHOWN, NAMES = 3, 8  # examples in a detail; names of domains or classes in the layout row
TINY_CLASS = 5  # with fewer images, a 20 % hold-out has none on average
TINY_SIDE = 8  # smallest shorter side in pixels
OTHER_PICTURES = (".jp2", ".jxl", ".svg", ".psd", ".dcm", ".svs", ".ndpi", ".dng", ".cr2", ".nef", ".arw", ".eps")
CACHED_BYTES = 224 * 224 * 3  # of one decoded image at the usual size
MANY = 2000  # files: with fewer, starting processes takes longer
CHUNK = 512  # files that wait at a time: a large set makes no large queue
LOOK_SIDE = 72  # pixels that are compared for near-duplicates: large JPEG files are decoded at a fraction of their size
EXTRAS = (  # one package per extra, checked by tests/data/test_doctor.py
    *("timm", "umap", "ray", "submitit", "fastapi", "openslide", "shapely", "torchstain", "onnx", "onnxruntime"),
    *("openvino", "pillow_heif", "tensorboard", "wandb", "mlflow", "peft", "pyarrow"),
)


@dataclass(frozen=True)
class Check:
    """One finding; `fix` is empty when nothing has to be done."""

    name: str
    status: Status
    detail: str
    fix: str = ""


def finding(name: str, problem: object, fix: str, otherwise: str = "none", status: Status = "warn") -> Check:
    """The problem, in words, with its fix; without one the check passes."""
    return Check(name, status, str(problem), fix) if problem else Check(name, "pass", otherwise)


def worst(checks: Iterable[Check]) -> Status:
    """The most severe status of the checks; "pass" for none."""
    return max((check.status for check in checks), key=get_args(Status).index, default="pass")


def _first(texts: Sequence[str]) -> str:
    more = f", and {len(texts) - SHOWN:,} more" if len(texts) > SHOWN else ""
    return ", ".join(texts[:SHOWN]) + more


def examine(
    data: str | Path, *, benchmark: str | None = None, options: Mapping[str, str] | None = None, decode: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> list[Check]:  # fmt: skip
    """Check a data set: names first, then every file, which without `decode` is only read and hashed."""
    try:
        table = check_shared(read_table(data, benchmark=benchmark, options=options))
    except (ValueError, OSError) as error:
        return [Check("layout", "fail", str(error), "Mend what the text names, then run the doctor again.")]
    names = {"domains": table.domains, "classes": table.classes}  # show whether a folder above or below was meant
    lists = (f"{len(n)} {what} ({', '.join(n[:NAMES])}{', ...' * (len(n) > NAMES)})" for what, n in names.items())
    checks = [Check("layout", "pass", ", ".join((f"{len(table):,} images", *lists)))]
    checks += [*_check_counts(table), *check_classes(table), *_check_labels(table), *_check_groups(table)]
    # a manifest lists its files itself
    if os.path.isdir(os.path.expanduser(data)) and (skipped := list_files(table.root).skipped):
        pictures = any(name.lower().endswith(OTHER_PICTURES) for name in skipped)
        fix, text = "Convert the pictures among them to .png or .jpg if they belong to the data.", skipped_line(skipped)
        checks.append(finding("files not read", pictures and text, fix, text))
    facts = list(inspect_files(table.files, decode, progress))
    cache = cache_dir()
    place = next(p for p in (cache.absolute(), *cache.absolute().parents) if p.exists())
    free, needed = shutil.disk_usage(place).free, len(table) * CACHED_BYTES
    text = f"{free / 1e9:.1f} GB free in '{cache}'; {needed / 1e9:.1f} GB hold all images at 224 px"
    fix = "Free some space, point $PATCHGEN_CACHE elsewhere, or train without the cache."
    return [*checks, *_check_files(table, facts, decode), finding("cache space", free <= needed and text, fix, text)]


def _check_counts(table: Table) -> Iterator[Check]:
    if table.benchmark is None:
        return
    entry = BENCHMARKS[table.benchmark]
    images = {domain: len(table.rows_of(domain)) for domain in table.domains}
    if absent := [domain for domain in entry.domains if domain not in images]:
        yield Check("domains", "warn", f"{entry.name} without {', '.join(absent)}", f"Source: {entry.source}.")
    if len(table.classes) != entry.num_classes:
        detail = f"{len(table.classes)} class names where {entry.name} has {entry.num_classes}"
        yield Check("class names", "warn", detail, "Look for renamed or lost class folders.")
    differences = [
        ({domain: n - known[domain] for domain, n in images.items() if domain in known}, version)
        for version, known in entry.counts.items()
    ]
    if differences := [(off, version) for off, version in differences if off]:
        off, version = min(differences, key=lambda difference: sum(map(abs, difference[0].values())))
        text = ", ".join(f"{domain} {images[domain]:,} ({n:+,})" for domain, n in off.items() if n)
        problem = text and f"no registered version of {entry.name}; against version {version}: {text}"
        fix = "Unpack the data again, or report the counts with the results."
        yield finding("counts", problem, fix, f"{entry.name}, version {version} ({', '.join(off)} as registered)")


def check_classes(table: Table) -> Iterator[Check]:
    """Classes that a domain lacks, and those with a handful of images there."""
    counts = table.counts()
    absent = {domain: [name for name, n in row.items() if not n] for domain, row in counts.items()}
    text = "; ".join(f"{domain} lacks {', '.join(names)}" for domain, names in absent.items() if names)
    fix = "Allowed, but a class that no source has cannot be learned: read its accuracy separately."
    yield finding("missing classes", text, fix, "every domain has every class")
    tiny = [f"{d}/{c} ({n})" for d, row in counts.items() for c, n in row.items() if 0 < n < TINY_CLASS]
    fix = "Add images, or expect a validation without these classes."
    yield finding("tiny classes", _first(tiny), fix, f"every class of a domain has {TINY_CLASS} images or more")


def _check_labels(table: Table) -> Iterator[Check]:
    """Class names that differ only in case or Unicode form, and rows without a label; no check if there are none."""
    spellings: dict[str, list[str]] = defaultdict(list)
    for name in table.classes:
        spellings[unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())].append(name)
    if alike := [" and ".join(names) for names in spellings.values() if len(names) > 1]:
        fix = "If they mean the same class, give its folders (or labels) one spelling: now each is a separate class."
        yield Check("class spelling", "warn", f"differ only in case or Unicode form: {_first(alike)}", fix)
    if empty := {name: n for name in table.domains if (n := int((table.label[table.rows_of(name)] < 0).sum()))}:
        text = ", ".join(f"{name} {n:,}" for name, n in empty.items())
        fix = "Fill in the labels, or leave them empty: such rows are neither trained on nor scored."
        yield Check("empty labels", "warn", f"{sum(empty.values()):,} of {len(table):,} rows: {text}", fix)


def _check_groups(table: Table) -> Iterator[Check]:
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
    rows = pd.DataFrame({"domain": table.domain, "group": table.group, "out": held_out})
    sides = rows.groupby(["domain", "group"])["out"].nunique()
    torn = int((sides == 2).sum())
    detail = f"a random split puts {torn:,} of {len(sides):,} groups on both sides"
    yield finding("groups", torn and detail, "Train with --split group.", detail)
    places = rows.groupby("group", sort=False)["domain"].unique()
    if shared := [(group, domains) for group, domains in places.items() if len(domains) > 1]:
        first = f"{shared[0][0]} ({', '.join(table.domains[d] for d in shared[0][1])})"
        detail = f"{len(shared):,} of {len(places):,} groups are in several domains, such as {first}"
        fix = (  # each domain is split separately, so no rule keeps these on one side
            "Patients of an unseen domain are then seen in training, even with --split group: merge these sites into "
            "one domain, or keep each patient in only one of them. If they are different patients with the same "
            "number, prefix the group with the site's name."
        )
        yield Check("groups across domains", "warn", detail, fix)


@dataclass(frozen=True)
class FileFacts:
    """Facts about one image file; `size` is (width, height), None without decoding; `bits` of 16-bit grays."""

    digest: bytes = b""
    size: tuple[int, int] | None = None
    bits: int | None = None
    look: np.ndarray | None = None  # (2,) uint64: `dhash`, None without decoding or structure
    error: str = ""


def inspect_files(
    files: Sequence[Path], decode: bool, progress: Callable[[int, int], None] | None
) -> Iterator[FileFacts]:
    """Facts of every file, in order; many are decoded in processes, because threads wait for one another."""
    with ExitStack() as stack:
        if decode and len(files) >= MANY and available_cores() > 1:
            stack.enter_context(safe_children())
            pool: Executor = stack.enter_context(ProcessPoolExecutor(available_cores(), get_context("spawn")))
        else:
            pool = stack.enter_context(ThreadPoolExecutor(available_cores()))
        for start in range(0, len(files), CHUNK):
            part = pool.map(partial(_inspect, decode=decode), files[start : start + CHUNK], chunksize=16)
            for done, facts in enumerate(part, start + 1):
                yield facts
                if progress is not None:
                    progress(done, len(files))


def _inspect(file: Path, decode: bool) -> FileFacts:
    try:
        check_file(file)
        content = file.read_bytes()
        if not content:
            return FileFacts(error="empty file")
        digest = hashlib.blake2b(content, digest_size=16).digest()
        if not decode:
            return FileFacts(digest)
        look = dhash(decode_image(file, LOOK_SIDE))  # all of the file is read: damage shows as it does in training
        with open_image(file) as image:
            gray = image.mode.startswith("I")  # 16 bits
            bits = gray_bits(np.asarray(image), image.format) if gray else None
            return FileFacts(digest, image.size, bits, look)
    except UnreadableImage as error:
        return FileFacts(error=error.reason)
    except (OSError, ValueError) as error:
        return FileFacts(error=str(error))


def _check_files(table: Table, facts: Sequence[FileFacts], decode: bool) -> Iterator[Check]:
    """Checks of the files' content; those of pixels find nothing without decoding."""
    bad = [f"{table.paths[i]} ({fact.error})" for i, fact in enumerate(facts) if fact.error]
    yield finding(
        "readable images",
        bad and f"{len(bad):,} of {len(facts):,}: {_first(bad)}",
        "Replace these files or remove them (from the manifest as well).",
        f"all {len(facts):,} {'decoded' if decode else 'read, none decoded'}",
        "fail",
    )
    yield from _check_duplicates(table, facts)
    yield from _check_sizes(table, facts)
    if depths := Counter(fact.bits for fact in facts if fact.bits):  # scaled per image
        text = ", ".join(f"{n:,} use {bits} bits" for bits, n in sorted(depths.items()))
        fix = "Each is scaled by the bits it uses: to keep brightness comparable, save all with 8 bits on one scale."
        yield finding("16-bit grays", len(depths) > 1 and text, fix, text)
    if any(fact.look is not None for fact in facts):
        yield _check_near_duplicates(table, facts)


def _check_duplicates(table: Table, facts: Sequence[FileFacts]) -> Iterator[Check]:
    """Files with the same content: with two labels, one is wrong; otherwise the test is not independent."""
    rows: dict[bytes, list[int]] = defaultdict(list)
    for i, fact in enumerate(facts):
        if fact.digest:
            rows[fact.digest].append(i)
    fixes = {
        "different labels": "The same picture cannot have two labels: remove the wrong one.",
        "across domains": "Remove them from one domain; otherwise images of the unseen domain are seen in training.",
        "within a domain": "Remove the copies, or give them one group and train with --split group.",
    }
    texts: dict[str, list[str]] = {kind: [] for kind in fixes}
    for same in (same for same in rows.values() if len(same) > 1):
        text, domains = " = ".join(table.paths[i] for i in same[:SHOWN]), table.domain[same].tolist()
        texts["different labels"] += [text] * (len({table.label_name(i) for i in same} - {""}) > 1)
        texts["across domains"] += [text] * (len(set(domains)) > 1)
        texts["within a domain"] += [text] * (len(set(domains)) < len(domains))
    for kind, fix in fixes.items():
        problem = texts[kind] and f"{len(texts[kind]):,} pictures: {_first(texts[kind])}"
        yield finding(f"duplicates, {kind}", problem, fix, status="fail" if kind == "different labels" else "warn")


def _check_sizes(table: Table, facts: Sequence[FileFacts]) -> Iterator[Check]:
    """Pixel sizes: a domain with another resolution can be recognised by its blur alone; placeholders of a pixel."""
    short: dict[str, float] = {}  # domain -> median of the shorter side
    texts = []
    for domain in table.domains:
        sizes = np.array([size for i in table.rows_of(domain) if (size := facts[i].size)]).reshape(-1, 2)
        if len(sizes):
            short[domain] = float(np.median(sizes.min(axis=1)))
            (w, h), (least, most) = np.median(sizes, axis=0), (sizes.min(), sizes.max())
            texts.append(f"{domain} {w:.0f}x{h:.0f} ({least}-{most})")
    if not short:
        return
    text, uneven = f"median (least-most): {', '.join(texts)}", max(short.values()) >= 2 * min(short.values())
    fix = "Resample the domains to one resolution, or expect sharpness to act as a shortcut."
    yield finding("image sizes", uneven and text, fix, text)
    sides = [(path, *fact.size) for path, fact in zip(table.paths, facts, strict=True) if fact.size]
    if tiny := [f"{path} ({w}x{h})" for path, w, h in sides if min(w, h) < TINY_SIDE]:
        detail = f"{len(tiny):,} with a side below {TINY_SIDE} pixels: {_first(tiny)}"
        fix = "Replace or remove them: enlarged to the working size they are only blur."
        yield Check("tiny images", "warn", detail, fix)


def _check_near_duplicates(table: Table, facts: Sequence[FileFacts]) -> Check:
    looks = {i: fact.look for i, fact in enumerate(facts) if fact.look is not None}
    rows = np.fromiter(looks, dtype=np.int64)
    hashes = np.array(list(looks.values()), dtype=np.uint64).reshape(-1, 2)
    pairs = ((rows[i], rows[j]) for i, j in similar_pairs(hashes, table.domain[rows]))
    texts = [f"{table.paths[i]} ~ {table.paths[j]}" for i, j in pairs if facts[i].digest != facts[j].digest]
    fix = (
        "Look at them: if they show the same object, scene or patient, the unseen domain is not unseen, and its score "
        "is too optimistic. Keep them in one domain, or merge the two domains."
    )
    text = texts and f"{len(texts):,} pairs look alike: {_first(texts)}"
    return finding("near-duplicates across domains", text, fix)


# Near-duplicates in linear time. The hash compares each pixel of a 9 x 9 thumbnail with its right and lower neighbours:
# scaling, compression and brightness hardly change it. Two hashes at most seven bits apart agree in at least one of
# eight bands of 16 bits, so only rows that share a band are compared, each with the `NEIGHBOURS` next ones.

DISTANCE = 7  # bits
NEIGHBOURS = 8
FLAT = 12  # range of gray levels in a thumbnail below which an image has no structure to compare


def dhash(pixels: np.ndarray) -> np.ndarray | None:
    """Pixels (S, S, 3) uint8 -> (2,) uint64; None for an image without structure, such as a blank tile."""
    small = Image.fromarray(pixels).convert("L").resize((9, 9), Image.Resampling.BOX)
    gray = np.asarray(small, dtype=np.int16)
    if int(gray.max()) - int(gray.min()) < FLAT:
        return None
    bits = np.stack([gray[:8, 1:] > gray[:8, :8], gray[1:, :8] > gray[:8, :8]])  # (2, 8, 8): right, lower
    return np.packbits(bits.reshape(2, 64), axis=1).view(np.uint64)[:, 0]


def similar_pairs(hashes: np.ndarray, domain: np.ndarray) -> list[tuple[int, int]]:
    """Pairs of rows (N,2) uint64 of different domains (N,) that are at most `DISTANCE` bits apart, each once."""
    _, rows = np.unique(np.column_stack([hashes, domain.astype(np.uint64)]), axis=0, return_index=True)
    pairs: set[tuple[int, int]] = set()
    bands = np.ascontiguousarray(hashes[rows]).view(np.uint16)  # (M, 8)
    for band in bands.T:
        order = np.lexsort((hashes[rows, 1], hashes[rows, 0], band))
        for step in range(1, min(NEIGHBOURS, len(rows) - 1) + 1):
            a, b = order[:-step], order[step:]
            near = (band[a] == band[b]) & (domain[rows[a]] != domain[rows[b]])
            a, b = rows[a[near]], rows[b[near]]
            close = np.bitwise_count(hashes[a] ^ hashes[b]).sum(1) <= DISTANCE
            pairs.update((min(i, j), max(i, j)) for i, j in zip(a[close].tolist(), b[close].tolist(), strict=True))
    return sorted(pairs)


def examine_machine() -> list[Check]:
    """Check Python, torch, transformers, a broken torchvision, and the optional packages."""
    checks = [Check("python", "pass", ".".join(map(str, sys.version_info[:3]))), _check_import("torch")]
    if checks[-1].status == "pass":
        import torch

        device = "mps" if torch.backends.mps.is_available() else "cpu"
        if torch.cuda.is_available():
            device = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
        detail = f"{checks[-1].detail}, {torch.get_num_threads()} threads, device {device}"
        checks[-1] = Check("torch", "pass", detail)
    if importlib.util.find_spec("torchvision") is not None:
        check = _check_import("torchvision")
        broken = f"not built for this torch; only timm needs it ({check.detail})" if check.status == "fail" else ""
        checks.append(finding("torchvision", broken, "pip uninstall torchvision", check.detail))
    present = [name for name in EXTRAS if importlib.util.find_spec(name) is not None]
    absent = [name for name in EXTRAS if name not in present]
    extras = f"found: {', '.join(present) or 'none'}; not installed: {', '.join(absent) or 'none'}"
    return [*checks, _check_import("transformers"), Check("extras", "pass", extras)]


def _check_import(name: str) -> Check:
    try:
        importlib.import_module(name)
        return Check(name, "pass", importlib.metadata.version(name))
    except Exception as error:  # a half-installed package can raise anything on import
        return Check(name, "fail", f"{type(error).__name__}: {error}", f"pip install --force-reinstall {name}")
