"""Checks of the content of image files: readability, duplicates, near-duplicates, sizes and bit depths.

facts = list(inspect_files(table.files, decode=True, progress=None))
[check_readable(table, facts, decode=True), *check_duplicates(table, facts)]
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Literal

import numpy as np

from patchgen.common.child_process import safe_children
from patchgen.common.files import regular
from patchgen.data.images import UnreadableImage, cores, gray_bits
from patchgen.data.images import decode as decode_image
from patchgen.data.near_duplicates import dhash, similar_pairs
from patchgen.data.safe_open import check_length, open_image
from patchgen.data.table import Table

Status = Literal["pass", "warn", "fail"]
SEVERITY: tuple[Status, ...] = ("pass", "warn", "fail")
SHOWN = 3  # examples in a detail
TINY_SIDE = 8  # smallest shorter side in pixels
FEW, CHUNK = 2000, 512  # files that one process decodes; files that wait at a time
LOOK_SIDE = 72  # pixels that are compared for near-duplicates: large JPEG files are decoded at a fraction of their size


@dataclass(frozen=True)
class Check:
    """One finding; `fix` is empty when nothing has to be done."""

    name: str
    status: Status
    detail: str
    fix: str = ""


def worst(checks: Iterable[Check]) -> Status:
    """The most severe status of the checks; "pass" for none."""
    return max((check.status for check in checks), key=SEVERITY.index, default="pass")


def some(texts: Sequence[str]) -> str:
    """The first few of the texts, and how many more there are."""
    more = f", and {len(texts) - SHOWN:,} more" if len(texts) > SHOWN else ""
    return ", ".join(texts[:SHOWN]) + more


@dataclass(frozen=True)
class FileFacts:
    """Facts about one image file; `size` is (width, height), None without decoding; `bits` of 16-bit grays."""

    digest: bytes = b""
    size: tuple[int, int] | None = None
    bits: int | None = None
    look: np.ndarray | None = None  # (2,) uint64: `data.near_duplicates.dhash`, None without decoding or structure
    error: str = ""


def inspect_files(
    files: Sequence[Path], decode: bool, progress: Callable[[int, int], None] | None
) -> Iterator[FileFacts]:
    """Facts of every file, in order; many files are decoded in as many processes as there are cores.

    A large set is read in chunks, so that it does not make a large queue.
    """
    inspect = partial(_inspect, decode=decode)
    with ExitStack() as stack:
        if len(files) < FEW or not decode or cores() == 1:  # starting processes would take longer
            pool: Executor = stack.enter_context(ThreadPoolExecutor(min(4, cores())))
        else:
            stack.enter_context(safe_children())
            pool = stack.enter_context(ProcessPoolExecutor(cores(), mp_context=get_context("spawn")))
        for start in range(0, len(files), CHUNK):
            part = files[start : start + CHUNK]
            for done, facts in enumerate(pool.map(inspect, part, chunksize=16), start + 1):
                yield facts
                if progress is not None:
                    progress(done, len(files))


def _inspect(file: Path, decode: bool) -> FileFacts:
    try:
        if file.exists() and not regular(file):
            return FileFacts(error="a pipe or device, and an image is a file")
        check_length(file.stat().st_size)
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


def check_readable(table: Table, facts: Sequence[FileFacts], decode: bool) -> Check:
    bad = [f"{table.paths[i]} ({fact.error})" for i, fact in enumerate(facts) if fact.error]
    if bad:
        fix = "Replace these files or remove them (from the manifest as well)."
        return Check("readable images", "fail", f"{len(bad):,} of {len(facts):,}: {some(bad)}", fix)
    return Check("readable images", "pass", f"all {len(facts):,} {'decoded' if decode else 'read, none decoded'}")


def check_duplicates(table: Table, facts: Sequence[FileFacts]) -> Iterator[Check]:
    """Files with the same content: with two labels, one is wrong; within or across domains, the test is not
    independent."""
    rows: dict[bytes, list[int]] = defaultdict(list)
    for i, fact in enumerate(facts):
        if fact.digest:
            rows[fact.digest].append(i)
    found: dict[str, list[str]] = {"different labels": [], "across domains": [], "within a domain": []}
    for same in (same for same in rows.values() if len(same) > 1):
        labels, domains = {table.label_name(i) for i in same} - {""}, table.domain[same]
        text = " = ".join(table.paths[i] for i in same[:SHOWN])
        kinds = (len(labels) > 1, len(set(domains)) > 1, len(set(domains)) < len(domains))
        for kind, applies in zip(found, kinds, strict=True):
            found[kind] += [text] * applies
    fixes = (
        "The same picture cannot have two labels: remove the wrong one.",
        "Remove them from one domain; otherwise images of the unseen domain are seen in training.",
        "Remove the copies, or give them one group and train with --split group.",
    )
    for (kind, texts), fix in zip(found.items(), fixes, strict=True):
        status: Status = "pass" if not texts else "fail" if kind == "different labels" else "warn"
        detail = f"{len(texts):,} pictures: {some(texts)}" if texts else "none"
        yield Check(f"duplicates, {kind}", status, detail, fix if texts else "")


def check_near_duplicates(table: Table, facts: Sequence[FileFacts]) -> Iterator[Check]:
    """Near-duplicates in two domains that are not the same file; no check without decoding."""
    rows = np.array([i for i, fact in enumerate(facts) if fact.look is not None], dtype=np.int64)
    if not len(rows):
        return
    pairs = similar_pairs(np.stack([facts[i].look for i in rows]), table.domain[rows])  # type: ignore[misc]
    found = [(rows[i], rows[j]) for i, j in pairs if facts[rows[i]].digest != facts[rows[j]].digest]
    if not found:
        yield Check("near-duplicates across domains", "pass", "none")
        return
    texts = [f"{table.paths[i]} ~ {table.paths[j]}" for i, j in found]
    fix = (
        "Look at them: if they show the same object, scene or patient, the unseen domain is not unseen, and its score "
        "is too optimistic. Keep them in one domain, or merge the two domains."
    )
    yield Check("near-duplicates across domains", "warn", f"{len(texts):,} pairs look alike: {some(texts)}", fix)


def check_sizes(table: Table, facts: Sequence[FileFacts]) -> Iterator[Check]:
    """Pixel sizes; a domain with a different resolution can be recognised by its blur alone."""
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
    uneven = max(short.values()) >= 2 * min(short.values())
    fix = "Resample the domains to one resolution, or expect sharpness to act as a shortcut." if uneven else ""
    yield Check("image sizes", "warn" if uneven else "pass", f"median (least-most): {', '.join(texts)}", fix)


def check_tiny(table: Table, facts: Sequence[FileFacts]) -> Iterator[Check]:
    """Placeholders such as 1 x 1 pixels; no check if there are none."""
    sizes = {table.paths[i]: fact.size for i, fact in enumerate(facts) if fact.size}
    tiny = [f"{path} ({w}x{h})" for path, (w, h) in sizes.items() if min(w, h) < TINY_SIDE]
    if tiny:
        fix = "Replace or remove them: enlarged to the working size they are only blur."
        detail = f"{len(tiny):,} with a side below {TINY_SIDE} pixels: {some(tiny)}"
        yield Check("tiny images", "warn", detail, fix)


def check_bits(facts: Sequence[FileFacts]) -> Iterator[Check]:
    """16-bit grays are scaled per image, so brightness differs between bit depths; no check if there are none."""
    depths = Counter(fact.bits for fact in facts if fact.bits)
    if depths:
        text = ", ".join(f"{n:,} use {bits} bits" for bits, n in sorted(depths.items()))
        fix = "Each is scaled by the bits it uses: to keep brightness comparable, save all with 8 bits on one scale."
        uneven = len(depths) > 1
        yield Check("16-bit grays", "warn" if uneven else "pass", text, fix if uneven else "")
