"""CIFAR-100's binary records become files in the official order; its pickles are never opened."""

import os
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from patchgen.ccd.data import read_cifar, read_stream
from patchgen.data.images import ImageStore

NAMES = ("apple", "bear", "aquarium_fish")  # not sorted: the order of the file holds
TRAIN, TEST = [2, 0, 1, 1, 2], [1, 0]
GUIDE = Path(__file__).parents[2] / "docs" / "study" / "ccd.md"


@pytest.fixture(autouse=True)
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATCHGEN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def pixels(labels: list[int], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (len(labels), 3072), dtype=np.uint8)


def records(labels: list[int], seed: int = 0) -> bytes:
    coarse = bytes([7])
    return b"".join(coarse + bytes([c]) + p.tobytes() for c, p in zip(labels, pixels(labels, seed), strict=True))


def write(root: Path, **changes: bytes | None) -> Path:
    """The official files; `train_bin=b"..."` replaces one, None leaves it out."""
    files: dict[str, bytes | None] = {
        "train_bin": records(TRAIN), "test_bin": records(TEST, seed=1),
        "fine_label_names_txt": "\n".join(NAMES).encode() + b"\n", "coarse_label_names_txt": b"things\n",
    }  # fmt: skip
    root.mkdir(parents=True, exist_ok=True)
    for name, content in (files | changes).items():
        if content is not None:
            (root / ".".join(name.rsplit("_", 1))).write_bytes(content)
    return root


def test_rows_are_the_official_ones(tmp_path: Path, fresh_cache: Path) -> None:
    table, test, _ = read_cifar(write(tmp_path / "cifar-100-binary"))
    assert table.classes == NAMES and table.label.tolist() == TRAIN + TEST and test.tolist() == [5, 6]
    assert table.paths[:2] == ("train/aquarium_fish/00000.png", "train/apple/00001.png")
    assert table.paths[5] == "test/bear/00000.png"
    assert table.root.parent == fresh_cache / "cifar-100" and not list(table.root.glob(".*"))
    data = np.concatenate([pixels(TRAIN), pixels(TEST, seed=1)]).reshape(7, 3, 32, 32)
    assert np.array_equal(ImageStore(table.files, 32, None).load(range(7)).numpy(), data)


def test_images_are_written_once_or_again_if_lost_and_other_records_get_another_folder(tmp_path: Path) -> None:
    root = write(tmp_path / "c")
    first, *_ = read_cifar(root)
    stamp = first.file(0).stat().st_mtime_ns
    assert read_cifar(root)[0].paths == first.paths and first.file(0).stat().st_mtime_ns == stamp
    first.file(1).unlink()
    assert read_cifar(root)[0].file(1).is_file()
    write(root, train_bin=records(TRAIN, seed=5))
    assert read_cifar(root)[0].root != first.root


def test_a_stream_holds_out_the_official_test_part(tmp_path: Path) -> None:
    names = "".join(f"class{c:03d}\n" for c in range(10)).encode()
    root = write(tmp_path / "c", train_bin=records([*range(10)] * 30), test_bin=records([*range(10)] * 2),
                 fine_label_names_txt=names)  # fmt: skip
    stream = read_stream(root, holdout=0.5)
    assert stream.held_out.tolist() == list(range(300, 320))
    assert stream.table.paths[300].startswith("test/") and stream.table.file(319).is_file()
    assert stream.notes == ("CIFAR-100: a subset, 300 of 50,000 train images and 20 of 10,000 test images",)


ERRORS: dict[str, tuple[dict[str, bytes | None], str]] = {
    "no names": ({"fine_label_names_txt": None}, "lacks fine_label_names.txt"),
    "no records": ({"train_bin": None, "test_bin": None}, "lacks train.bin, test.bin"),
    "cut short": ({"train_bin": records(TRAIN)[:-2000]}, "has 13,370 bytes"),
    "empty": ({"train_bin": b""}, "has 0 bytes"),
    "CIFAR-10": ({"train_bin": b"\1" * 3073 * 3}, "records of 3,074 bytes"),
    "label": ({"train_bin": records([0, 1, 3])}, "from 0 to 2 .*but 3 occurs"),
    **{
        f"name {name!r}": ({"fine_label_names_txt": name + b"\napple\nbear\n"}, "two or more different classes")
        for name in (b"../../x", b"/etc", b"..", b"", b"a\\b", b"bear")
    },
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(tmp_path: Path, fresh_cache: Path, case: str) -> None:
    changes, message = ERRORS[case]
    with pytest.raises(ValueError, match=message):
        read_cifar(write(tmp_path / "c", **changes))
    assert not fresh_cache.exists()


class Trap:
    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> Any:
        return os.system, (f"touch '{self.proof}'",)


def write_python_version(root: Path, **more: Any) -> Path:
    root.mkdir()
    names = {"fine_label_names": list(NAMES), "coarse_label_names": ["things"]}
    parts = {"train": (TRAIN, 0), "test": (TEST, 1)}
    for name, (labels, seed) in parts.items():
        content = {b"data": pixels(labels, seed), b"fine_labels": labels, b"coarse_labels": [7] * len(labels)}
        (root / name).write_bytes(pickle.dumps({**content, **more}, 2))
    (root / "meta").write_bytes(pickle.dumps(names, 2))
    return root


def test_pickles_are_not_opened(tmp_path: Path) -> None:
    root = write_python_version(tmp_path / "cifar-100-python", trap=Trap(tmp_path / "proof"))
    for folder in (root, tmp_path):
        with pytest.raises(ValueError, match="the python version of CIFAR-100.* docs/study/ccd.md"):
            read_stream(folder)
    assert not (tmp_path / "proof").exists()
    pickle.loads((root / "train").read_bytes())  # the trap works where somebody opens it
    assert (tmp_path / "proof").exists()


def test_the_guide_converts_the_python_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_python_version(tmp_path / "cifar-100-python")
    snippet = re.search(r"```python\n(import pickle.*?)```", GUIDE.read_text(), re.DOTALL)
    assert snippet
    monkeypatch.chdir(tmp_path)
    exec(snippet[1], {})
    expected = write(tmp_path / "expected")
    converted = tmp_path / "cifar-100-binary"
    for file in expected.iterdir():
        assert (converted / file.name).read_bytes() == file.read_bytes()
