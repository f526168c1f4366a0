"""CIFAR-100's pickles become files in the official order, and a pickle that wants to run code gets nothing."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from patchgen.ccd.cifar import cifar_table, is_cifar, load_pickle
from patchgen.ccd.plain_pickle import RefusedPickle
from patchgen.data.images import ImageStore

NAMES = ("apple", "bear", "aquarium_fish")  # not sorted: the order of `meta` holds


@pytest.fixture(autouse=True)
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATCHGEN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def part(label: list[int], seed: int = 0) -> dict[bytes, Any]:
    data = np.random.default_rng(seed).integers(0, 256, (len(label), 3072), dtype=np.uint8)
    names = [f"{i}.png".encode() for i in range(len(label))]
    more = {b"batch_label": b"training batch 1 of 1", b"filenames": names, b"coarse_labels": [0] * len(label)}
    return {b"data": data, b"fine_labels": label, **more}


def write(root: Path, protocol: int = 2, **changes: Any) -> Path:
    """The three official files; `train={b"data": ...}` changes entries, bytes replace a file, None leaves it out."""
    files: dict[str, Any] = {"train": part([2, 0, 1, 1, 2]), "test": part([1, 0], seed=1)}
    files["meta"] = {b"fine_label_names": [n.encode() for n in NAMES], b"coarse_label_names": [b"things"]}
    root.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        change = changes.get(name, {})
        if change is None:
            continue
        new = pickle.dumps({**content, **change}, protocol) if isinstance(change, dict) else change
        (root / name).write_bytes(new)
    return root


def pixels_of(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        assert image.mode == "RGB"
        return np.asarray(image)


@pytest.mark.parametrize("protocol", [2, 4])
def test_rows_are_the_official_ones(tmp_path: Path, fresh_cache: Path, protocol: int) -> None:
    root = write(tmp_path / "cifar-100-python", protocol)
    seen: list[int] = []
    table = cifar_table(root, "train", progress=seen.append)
    assert seen == [1] * 5 and table.classes == NAMES
    assert table.label.tolist() == [2, 0, 1, 1, 2] and table.label.dtype == np.int64
    assert table.paths[:2] == ("train/aquarium_fish/00000.png", "train/apple/00001.png")
    assert table.root.parent == fresh_cache / "cifar-100" and not list(table.root.glob(".*"))
    data = part([0] * 5)[b"data"]
    for i in range(5):
        image = pixels_of(table.file(i))
        for y, x, channel in ((0, 0, 0), (3, 7, 1), (31, 30, 2)):
            assert image[y, x, channel] == data[i, channel * 1024 + y * 32 + x]
    test = cifar_table(root, "test")
    assert test.label.tolist() == [1, 0] and test.root == table.root and test.paths[0] == "test/bear/00000.png"
    store = ImageStore([table.file(i) for i in range(5)], 32, None)
    assert store.load([4]).numpy().tobytes() == data[4].tobytes()


def test_pickles_of_python_2(tmp_path: Path) -> None:
    # what Python 2 wrote: text as plain strings, numpy by its old module name
    array = np.arange(3072, dtype=np.uint8)[None]
    raw = array.tobytes()
    old = b"\x80\x02}(U\x04datacnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
    old += b"(K\x01K\x01M\x00\x0c\x86cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNN"
    old += (
        b"J\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T"
        + len(raw).to_bytes(4, "little")
        + raw
        + b"tbU\x0bfine_labels]K\x01au."
    )
    root = write(tmp_path / "c", train=old)
    table = cifar_table(root)
    assert table.label.tolist() == [1]
    assert pixels_of(table.file(0))[2, 5].tolist() == [array[0, k * 1024 + 2 * 32 + 5] for k in range(3)]


def test_images_are_written_once_and_other_pickles_get_another_folder(tmp_path: Path) -> None:
    root = write(tmp_path / "c")
    first = cifar_table(root)
    stamp = first.file(0).stat().st_mtime_ns
    seen: list[int] = []
    assert cifar_table(root, progress=seen.append).paths == first.paths
    assert seen == [] and first.file(0).stat().st_mtime_ns == stamp
    write(root, train=part([2, 0, 1, 1, 2], seed=5))
    assert cifar_table(root).root != first.root


def test_an_interrupted_write_leaves_nothing(tmp_path: Path, fresh_cache: Path) -> None:
    root = write(tmp_path / "c")

    def stop(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cifar_table(root, progress=stop)
    assert not list(fresh_cache.rglob("*.png"))
    assert all(cifar_table(root).file(i).is_file() for i in range(5))


def test_losing_a_race_is_no_error(tmp_path: Path) -> None:
    root, calls = write(tmp_path / "c"), []

    def other_process(_: int) -> None:
        if not calls:
            calls.append(1)
            cifar_table(root)

    table = cifar_table(root, progress=other_process)
    assert calls and table.file(4).is_file() and not list(table.root.glob(".*"))


def test_lost_images_are_named(tmp_path: Path) -> None:
    root = write(tmp_path / "c")
    table = cifar_table(root)
    table.file(1).unlink()
    with pytest.raises(ValueError, match="has lost 1 of 5 images, first 'train/apple/00001.png'; remove that folder"):
        cifar_table(root)


class _Evil:
    def __init__(self, call: Any, *arguments: Any) -> None:
        self.reduced = call, arguments

    def __reduce__(self) -> Any:
        return self.reduced


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("place", ["train", "meta"])
def test_a_malicious_pickle_is_refused_and_does_nothing(tmp_path: Path, place: str, protocol: int) -> None:
    proof = tmp_path / "proof"
    evil = pickle.dumps({"data": _Evil(os.system, f"touch '{proof}'")}, protocol)
    root = write(tmp_path / "c", **{place: evil})
    with pytest.raises(
        RefusedPickle, match=rf"{place}': (this pickle asks for (posix|nt|os)\.system|it uses the).*refused"
    ):
        cifar_table(root)
    assert not proof.exists()
    pickle.loads(evil)  # the trap works where nobody refuses
    assert proof.exists()


@pytest.mark.parametrize("call", [eval, getattr, np.load, np.save, os.remove, pickle.loads])
def test_other_functions_are_refused(tmp_path: Path, call: Any) -> None:
    (tmp_path / "p").write_bytes(pickle.dumps(_Evil(call, "x")))
    with pytest.raises(RefusedPickle, match="this pickle asks for .*refused"):
        load_pickle(tmp_path / "p")


def test_attributes_of_allowed_names_and_other_codecs_are_refused(tmp_path: Path) -> None:
    (tmp_path / "p").write_bytes(b"\x80\x04\x8c\x05numpy\x8c\x0endarray.tofile\x93.")
    with pytest.raises(RefusedPickle, match="numpy.ndarray.tofile"):
        load_pickle(tmp_path / "p")
    (tmp_path / "p").write_bytes(b"c_codecs\nencode\n(X\x01\x00\x00\x00aX\x05\x00\x00\x00rot13tR.")
    with pytest.raises(RefusedPickle, match="codec 'rot13'"):
        load_pickle(tmp_path / "p")


def test_class_names_cannot_lead_out_of_the_cache(tmp_path: Path, fresh_cache: Path) -> None:
    for name in (b"../../x", b"/etc", b"..", b"", b"a\\b", b"bear"):
        root = write(tmp_path / "c", 4, meta={b"fine_label_names": [name, b"apple", b"bear"]})
        with pytest.raises(ValueError, match="two or more different plain names"):
            cifar_table(root)
    assert not fresh_cache.exists()


BYTES = pickle.dumps(part([2, 0, 1, 1, 2]), 2)
ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "no meta": ({"meta": None}, "lacks meta of the official files train, test, meta"),
    "no train and test": ({"train": None, "test": None}, "lacks train, test of"),
    "cut short": ({"train": BYTES[:-2000]}, "cannot be read .*damaged or cut short"),
    "empty": ({"train": b""}, "cannot be read .EOFError"),
    "text": ({"train": b"<html>not found</html>"}, "it uses the pickle instruction b'<'"),
    "a list": ({"train": pickle.dumps([1, 2])}, "holds a list, not the dict"),
    "CIFAR-10": ({"train": pickle.dumps({b"data": 1, b"labels": [1]})}, "no 'fine_labels' .found: data, labels"),
    "no names": ({"meta": pickle.dumps({b"label_names": []})}, "meta' has no 'fine_label_names'"),
    "width": ({"train": {b"data": np.zeros((5, 3000), np.uint8)}}, r"shape \(images, 3072\), got uint8 \(5, 3000\)"),
    "floats": ({"train": {b"data": np.zeros((5, 3072))}}, "an array of 'f8', and images are bytes"),
    "no array": ({"train": {b"data": [1, 2]}}, "got list"),
    "counts": ({"train": {b"fine_labels": [0, 1, 2]}}, "there are 5 images, 3 labels"),
    "no labels": ({"train": {b"fine_labels": 3}}, "there are 5 images, no list of labels"),
    "no images": ({"train": pickle.dumps(part([]), 4)}, "there are 0 images, 0 labels"),
    "label range": ({"train": {b"fine_labels": [0, 1, 2, 3, 0]}}, "whole numbers from 0 to 2, got 3"),
    "label kind": ({"train": {b"fine_labels": [0, 1, 2, "1", 0]}}, "got '1'"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(tmp_path: Path, fresh_cache: Path, case: str) -> None:
    changes, message = ERRORS[case]
    with pytest.raises(ValueError, match=message):
        cifar_table(write(tmp_path / "c", **changes))
    assert not fresh_cache.exists()


def test_parts_and_recognition(tmp_path: Path) -> None:
    root = write(tmp_path / "c", test=None)
    assert is_cifar(root) and not is_cifar(tmp_path)
    with pytest.raises(ValueError, match="the parts train, test, not 'val'"):
        cifar_table(root, "val")  # type: ignore[arg-type]
