"""Checks of the content of image files: readability, duplicates, near-duplicates, sizes and bit depths.

facts = list(inspect_files(table.files, decode=True, progress=None))
list(check_files(table, facts, decode=True))
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
from PIL import Image

from patchgen.common.child_process import safe_children
from patchgen.common.files import regular
from patchgen.common.machine import available_cores
from patchgen.data.images import UnreadableImage, gray_bits
from patchgen.data.images import decode as decode_image
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


def finding(name: str, problem: object, fix: str, otherwise: str = "none", status: Status = "warn") -> Check:
    """The problem, in words, with its fix; without one the check passes."""
    return Check(name, status, str(problem), fix) if problem else Check(name, "pass", otherwise)


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
    look: np.ndarray | None = None  # (2,) uint64: `dhash`, None without decoding or structure
    error: str = ""


def inspect_files(
    files: Sequence[Path], decode: bool, progress: Callable[[int, int], None] | None
) -> Iterator[FileFacts]:
    """Facts of every file, in order; many files are decoded in as many processes as there are cores.

    A large set is read in chunks, so that it does not make a large queue.
    """
    inspect = partial(_inspect, decode=decode)
    with ExitStack() as stack:
        if len(files) < FEW or not decode or available_cores() == 1:  # starting processes would take longer
            pool: Executor = stack.enter_context(ThreadPoolExecutor(min(4, available_cores())))
        else:
            stack.enter_context(safe_children())
            pool = stack.enter_context(ProcessPoolExecutor(available_cores(), mp_context=get_context("spawn")))
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


def check_files(table: Table, facts: Sequence[FileFacts], decode: bool) -> Iterator[Check]:
    """All checks of this module; those of pixels find nothing without decoding."""
    bad = [f"{table.paths[i]} ({fact.error})" for i, fact in enumerate(facts) if fact.error]
    yield finding(
        "readable images",
        bad and f"{len(bad):,} of {len(facts):,}: {some(bad)}",
        "Replace these files or remove them (from the manifest as well).",
        f"all {len(facts):,} {'decoded' if decode else 'read, none decoded'}",
        "fail",
    )
    yield from _check_duplicates(table, facts)
    yield from _check_sizes(table, facts)
    yield from _check_bits(facts)
    yield from _check_near_duplicates(table, facts)


def _check_duplicates(table: Table, facts: Sequence[FileFacts]) -> Iterator[Check]:
    """Files with the same content: with two labels, one is wrong; within or across domains, the test is not
    independent."""
    rows: dict[bytes, list[int]] = defaultdict(list)
    for i, fact in enumerate(facts):
        if fact.digest:
            rows[fact.digest].append(i)
    labels, across, within = list[str](), list[str](), list[str]()
    for same in (same for same in rows.values() if len(same) > 1):
        text, domains = " = ".join(table.paths[i] for i in same[:SHOWN]), table.domain[same].tolist()
        labels += [text] * (len({table.label_name(i) for i in same} - {""}) > 1)
        across += [text] * (len(set(domains)) > 1)
        within += [text] * (len(set(domains)) < len(domains))
    for kind, texts, fix in (
        ("different labels", labels, "The same picture cannot have two labels: remove the wrong one."),
        ("across domains", across, "Remove them from one domain; otherwise images of the unseen domain are seen in "
         "training."),
        ("within a domain", within, "Remove the copies, or give them one group and train with --split group."),
    ):  # fmt: skip
        text = texts and f"{len(texts):,} pictures: {some(texts)}"
        yield finding(f"duplicates, {kind}", text, fix, status="fail" if texts is labels else "warn")


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
    sizes = [(i, fact.size) for i, fact in enumerate(facts) if fact.size]
    if tiny := [f"{table.paths[i]} ({w}x{h})" for i, (w, h) in sizes if min(w, h) < TINY_SIDE]:
        fix = "Replace or remove them: enlarged to the working size they are only blur."
        detail = f"{len(tiny):,} with a side below {TINY_SIDE} pixels: {some(tiny)}"
        yield Check("tiny images", "warn", detail, fix)


def _check_bits(facts: Sequence[FileFacts]) -> Iterator[Check]:
    """16-bit grays are scaled per image, so brightness differs between bit depths; no check if there are none."""
    if depths := Counter(fact.bits for fact in facts if fact.bits):
        text = ", ".join(f"{n:,} use {bits} bits" for bits, n in sorted(depths.items()))
        fix = "Each is scaled by the bits it uses: to keep brightness comparable, save all with 8 bits on one scale."
        yield finding("16-bit grays", len(depths) > 1 and text, fix, text)


def _check_near_duplicates(table: Table, facts: Sequence[FileFacts]) -> Iterator[Check]:
    """Near-duplicates in two domains that are not the same file; no check without decoding."""
    rows = np.array([i for i, fact in enumerate(facts) if fact.look is not None], dtype=np.int64)
    if not len(rows):
        return
    pairs = similar_pairs(np.stack([facts[i].look for i in rows]), table.domain[rows])  # type: ignore[misc]
    alike = [(rows[i], rows[j]) for i, j in pairs if facts[rows[i]].digest != facts[rows[j]].digest]
    texts = [f"{table.paths[i]} ~ {table.paths[j]}" for i, j in alike]
    fix = (
        "Look at them: if they show the same object, scene or patient, the unseen domain is not unseen, and its score "
        "is too optimistic. Keep them in one domain, or merge the two domains."
    )
    yield finding("near-duplicates across domains", texts and f"{len(texts):,} pairs look alike: {some(texts)}", fix)


# Near-duplicates in linear time. The hash compares each pixel of a 9 x 9 thumbnail with its right and lower neighbours:
# scaling, compression and brightness hardly change it. Two hashes at most seven bits apart agree in at least one of
# eight bands of 16 bits, so only rows that share a band are compared, each with the `NEIGHBOURS` next ones.

BANDS = 8  # of 16 bits each
DISTANCE = BANDS - 1  # bits: pairs within it share at least one band
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
    """Pairs of rows of different domains whose hashes are at most `DISTANCE` bits apart, each once.

    Args:
        hashes: (N, 2) uint64.
        domain: (N,) whole numbers.
    """
    _, rows = np.unique(np.column_stack([hashes, domain.astype(np.uint64)]), axis=0, return_index=True)
    found: set[tuple[int, int]] = set()
    bands = np.ascontiguousarray(hashes[rows]).view(np.uint16)  # (M, 8)
    for band in bands.T:
        order = np.lexsort((hashes[rows, 1], hashes[rows, 0], band))
        for step in range(1, min(NEIGHBOURS, len(rows) - 1) + 1):
            a, b = order[:-step], order[step:]
            near = (band[a] == band[b]) & (domain[rows[a]] != domain[rows[b]])
            a, b = rows[a[near]], rows[b[near]]
            close = np.bitwise_count(hashes[a] ^ hashes[b]).sum(1) <= DISTANCE
            found.update((min(i, j), max(i, j)) for i, j in zip(a[close].tolist(), b[close].tolist(), strict=True))
    return sorted(found)
