"""The parser of CIFAR-100's files: Python's result on good files, and no harm from bad ones."""

from __future__ import annotations

import io
import pickle
import sys
import time
from typing import Any

import numpy as np
import pytest

from patchgen.ccd.plain_pickle import MOST_INSTRUCTIONS, read_plain

LABELS = [3, 99, 0, 300, 70_000]
CONTENT: dict[bytes, Any] = {
    b"filenames": [b"alp_s_000178.png", b"\xc3\xa9.png"], b"batch_label": b"testing batch 1 of 1",
    b"fine_labels": LABELS, b"coarse_labels": [-1, 2**40], b"rate": None,
    b"data": np.arange(5 * 3072, dtype=np.uint8).reshape(5, 3072),
}  # fmt: skip
SEEDS = [pickle.dumps(CONTENT, protocol) for protocol in (2, 3, 4, 5)]


@pytest.mark.parametrize("data", SEEDS[:3])
def test_good_files_are_read_as_python_reads_them(data: bytes) -> None:
    expected, found = pickle.loads(data, encoding="bytes"), read_plain(data)
    assert list(found) == list(expected)
    for key, value in expected.items():
        assert np.array_equal(found[key], value) if key == b"data" else found[key] == value
    assert found[b"data"].dtype == np.uint8 and not found[b"data"].flags.writeable


def forged_dtype() -> bytes:
    """An array of objects that says it holds none: numpy would take these bytes for pointers."""
    buffer = io.BytesIO()
    buffer.write(b"\x80\x02cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R")
    buffer.write(
        b"(K\x01K\x01\x85cnumpy\ndtype\nU\x02O8K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xff"
    )
    buffer.write(b"K\x00tb\x89U\x08\x41\x41\x41\x41\x41\x41\x41\x41tb.")
    return buffer.getvalue()


UINT8 = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R"
ATTACKS = {
    "objects without their flag": (forged_dtype(), "array of 'O8'"),
    "bytes with the state of objects": (
        UINT8 + b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK?tb.", "another state"),
    "a state of fields": (UINT8 + b"(K\x03U\x01|NU\x01x}K\x08K\x01K\x00tb.", "nests values"),
    "a call": (b"cnumpy\ndtype\n(U\x01Otb.", "sets the state"),
    "a name": (b"cnumpy.core.multiarray\nfromfile\n.", "asks for numpy.core.multiarray.fromfile"),
    "a tuple as a name": (
        b"(U\x07_codecsU\x06encodetX\x01\x00\x00\x00aX\x06\x00\x00\x00latin1\x86R.", "other arguments"),
    "a list in itself": (b"]q\x00h\x00a.", "names a container twice"),
    "lists in lists": (b"]" * 100_000 + b"a" * 99_999 + b".", "more than numbers and texts"),
    "dicts in dicts": (b"}" * 3 + b"K\x01K\x02s" + b".", "in the middle of a value"),
    "laughter": (b")" + b"q\x00\x85" * 5, "names a container twice|nests values"),
    "open containers": (b"(" * 100_000, "deeper than"),
    "instructions": (b"N0" * 3, "instruction b'0'"),
    "many instructions": (b"\x80\x02" * (MOST_INSTRUCTIONS + 1), "more than 4,000,000 instructions"),
    "growth": (
        b"X\x00\x04\x00\x00" + b"a" * 1024 + b"q\x00X\x06\x00\x00\x00latin1q\x01c_codecs\nencode\nq\x02("
        + b"h\x02h\x00h\x01\x86R" * 1000, "grows beyond its own length"),
    "another codec": (b"c_codecs\nencode\nX\x01\x00\x00\x00aX\x05\x00\x00\x00rot13\x86R.", "codec 'rot13'"),
    "an extension": (b"\x82\x01.", "instruction"),
    "a persistent id": (b"Pname\n.", "instruction"),
    "a buffer": (b"\x97.", "instruction"),
}  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS)
def test_attacks_are_refused(attack: str) -> None:
    data, message = ATTACKS[attack]
    start = time.process_time()
    with pytest.raises(ValueError, match=message):
        read_plain(data)
    assert time.process_time() - start < 20


def test_sizes_that_do_not_fit_are_refused() -> None:
    good = pickle.dumps({b"data": np.zeros((2, 3072), np.uint8)}, 4)
    assert good.count(b"M\x00\x0c") == 1
    with pytest.raises(ValueError, match="cannot have 6,144 bytes"):
        read_plain(good.replace(b"M\x00\x0c", b"M\xff\xff"))
    with pytest.raises(EOFError):
        read_plain(good[:-5])


def mutated(rng: np.random.Generator) -> bytes:
    """A good file with some bytes changed, cut, doubled, or exchanged with those of another."""
    data = bytearray(SEEDS[rng.integers(3)][:600] + SEEDS[rng.integers(3)][-600:]) if rng.random() < 0.3 else bytearray(
        SEEDS[rng.integers(4)])  # fmt: skip
    for _ in range(rng.integers(1, 8)):
        at, kind = int(rng.integers(len(data) + 1)) if rng.random() < 0.3 else int(rng.integers(300)), rng.integers(4)
        size = int(rng.integers(1, 9))
        if kind == 0 and at < len(data):
            data[at] = rng.integers(256)
        elif kind == 1:
            del data[at : at + size]
        elif kind == 2:
            data[at:at] = data[at : at + size] * int(rng.integers(1, 4))
        else:
            data[at:at] = rng.choice(list(b"()]}NKRb\x93ctaesuqhj\x94\x85\x86\x87."), size).astype(np.uint8).tobytes()
    return bytes(data)


def fuzz(count: int, seed: int) -> int:
    """How many of `count` mutated files were refused; no import, no other error, none longer than seconds."""
    rng, refused = np.random.default_rng(seed), 0
    modules = set(sys.modules)
    for _ in range(count):
        data, start = mutated(rng), time.process_time()
        try:
            repr(read_plain(data))
        except (EOFError, ValueError):
            refused += 1
        assert time.process_time() - start < 5
    assert set(sys.modules) == modules
    return refused


def test_mutated_files_do_no_harm() -> None:
    assert 2000 < fuzz(3000, seed=1) < 3000


@pytest.mark.slow
def test_many_mutated_files_do_no_harm() -> None:
    assert fuzz(10_000, seed=2) > 7000
