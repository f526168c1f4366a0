"""A stream: every row is in one stage, held out or unused, from whichever layout it comes."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from patchgen.ccd.data import Stream, make_stream, read_stream
from patchgen.ccd.settings import StreamConfig
from patchgen.ccd.stages import Schedule

CLASSES = ("ant", "bee", "cat", "dog", "eel")
THREE = Schedule((0.6, 0.2, 0.2), ((0.8, 0.5, 1.0), (0.7, 1.0), (1.0,)))


def fill(root: Path, images: int = 20, domains: tuple[str, ...] = ("",)) -> Path:
    """Empty `<domain>/<class>/<n>.jpg`: no pixel is read here."""
    for domain in domains:
        for name in CLASSES:
            (root / domain / name).mkdir(parents=True)
            for i in range(images):
                (root / domain / name / f"{i:03d}.jpg").touch()
    return root


def check(stream: Stream) -> None:
    """What holds for every stream."""
    parts = [*stream.train, stream.held_out]
    together = np.concatenate(parts)
    assert len(together) == len(set(together.tolist()))
    assert (stream.stages.stage[stream.held_out] == -1).all()
    for number, rows in enumerate(stream.train):
        assert (stream.stages.stage[rows] == number).all() and len(rows)
        assert set(stream.label[rows]) <= set(stream.stages.entered(number))
    assert stream.known.tolist() == sorted(set(stream.label[stream.train[0]]))


def test_class_folders(tmp_path: Path) -> None:
    stream = read_stream(fill(tmp_path / "animals"), THREE)
    check(stream)
    assert stream.table.classes == CLASSES and stream.table.domains == ("animals",)
    assert stream.table.paths[20] == "bee/000.jpg" and stream.table.file(20).is_file()
    assert np.bincount(stream.label[stream.held_out]).tolist() == [2] * 5  # 10 % of 20
    # 18 left: 14 + 2 + 2; 12 + 6; 18
    assert stream.stages.counts.tolist() == [[14, 2, 2]] * 3 + [[0, 12, 6], [0, 0, 18]]
    assert stream.known.tolist() == [0, 1, 2] and stream.stages.entry.tolist() == [0, 0, 0, 1, 2]
    assert stream.notes == ()


def test_holdout_and_seed(tmp_path: Path) -> None:
    root = fill(tmp_path)
    assert len(read_stream(root, THREE, holdout=0).held_out) == 0
    fifth = read_stream(root, THREE, holdout=0.2)
    check(fifth)
    assert np.bincount(fifth.label[fifth.held_out]).tolist() == [4] * 5
    one, again, other = (read_stream(root, replace(THREE, seed=seed)) for seed in (1, 1, 2))
    assert one.held_out.tolist() == again.held_out.tolist() != other.held_out.tolist()
    assert one.stages.stage.tolist() == again.stages.stage.tolist() != other.stages.stage.tolist()
    assert (one.schedule.seed, other.schedule.seed) == (1, 2)


def test_domains_are_ignored(tmp_path: Path) -> None:
    stream = read_stream(fill(tmp_path, 10, ("clinic", "field")), THREE)
    check(stream)
    assert stream.stages.counts.tolist() == [[14, 2, 2]] * 3 + [[0, 12, 6], [0, 0, 18]]
    stream.table.to_csv(tmp_path / "m.csv")
    again = read_stream(tmp_path / "m.csv", THREE)
    assert again.stages.stage.tolist() == stream.stages.stage.tolist()
    replace(stream.table, weight=np.ones(100)).to_csv(tmp_path / "weighted.csv")
    with pytest.raises(ValueError, match="sample_weight; leave that column out"):
        make_stream(StreamConfig(data=str(tmp_path / "weighted.csv")))


@pytest.mark.parametrize("other", ["test", "val"])
def test_folders_called_train_and_test_are_parts(tmp_path: Path, other: str) -> None:
    stream = read_stream(fill(tmp_path, 10, ("train", other)), THREE)
    check(stream)
    assert {stream.table.paths[i].split("/")[0] for i in stream.held_out} == {other}
    assert len(stream.held_out) == 50 and stream.stages.counts.sum() == 50


def write_cub(root: Path, images: list[tuple[int, bool]]) -> Path:
    """One image for each (class, is train)."""
    paths = [f"{c + 1:03d}.Bird/{i}.jpg" for i, (c, _) in enumerate(images)]
    for path in paths:
        (root / "images" / path).parent.mkdir(parents=True, exist_ok=True)
        (root / "images" / path).touch()
    lists = {
        "images.txt": paths,
        "image_class_labels.txt": [c + 1 for c, _ in images],
        "train_test_split.txt": [int(train) for _, train in images],
        "classes.txt": [f"{c + 1:03d}.Bird" for c in range(max(c for c, _ in images) + 1)],
    }
    for name, values in lists.items():
        (root / name).write_text("".join(f"{i} {value}\n" for i, value in enumerate(values, 1)))
    return root


def test_cub_holds_out_the_official_test_part(tmp_path: Path) -> None:
    images = [(c, i % 2 == 0) for c in range(10) for i in range(58 + 2 * (c > 0))]  # the first class has 29 + 29
    stream = read_stream(write_cub(tmp_path / "CUB_200_2011", images))
    check(stream)
    assert stream.held_out.tolist() == [i for i, (_, train) in enumerate(images) if not train]
    counts = [[25, 2, 1, 1]] + [[26, 2, 1, 1]] * 6 + [[0, 21, 6, 3], [0, 0, 27, 3], [0, 0, 0, 30]]
    assert stream.stages.counts.tolist() == counts
    assert stream.notes == ("CUB: a subset, 299 of 5,994 train images and 299 of 5,794 test images",)
    with pytest.raises(ValueError, match="contains a data set; pass '.*CUB_200_2011' itself"):
        read_stream(tmp_path)


def test_notes_on_tiny_and_unused_classes(tmp_path: Path) -> None:
    for name, images in {"ant": 20, "bee": 2, "cat": 20, "dog": 20}.items():
        (tmp_path / name).mkdir()
        for i in range(images):
            (tmp_path / name / f"{i}.jpg").touch()
    schedule = Schedule((("ant", "bee"), ("dog",)), ((0.8, 1.0), (1.0,)))
    stream = read_stream(tmp_path, schedule)
    check(stream)
    assert stream.notes == (
        "1 of 4 classes in no stage: cat",
        "1 of 4 classes too small for all stages: bee (not in 1)",
    )
    assert stream.stages.entry.tolist() == [0, 0, -1, 1]
    assert set(stream.label[stream.held_out]) == {0, 1, 3}  # a class in no stage is not scored


def test_rows_without_a_label_are_not_used(tmp_path: Path) -> None:
    root = fill(tmp_path, 10, ("clinic", "field"))
    rows = [(p.relative_to(root).as_posix(), p.parts[-3], p.parts[-2]) for p in sorted(root.rglob("*.jpg"))]
    lines = [f"{path},{site},{'' if i % 10 == 0 else label}" for i, (path, site, label) in enumerate(rows)]
    (root / "m.csv").write_text("\n".join(["path,domain,label", *lines]) + "\n")
    stream = read_stream(root / "m.csv", THREE)
    check(stream)
    bare = np.flatnonzero(stream.label < 0)
    assert len(bare) == 10 and (stream.stages.stage[bare] == -1).all() and not set(bare) & set(stream.held_out)
    assert stream.notes == ("10 images have no label and are not used",)
