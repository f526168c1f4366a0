"""CUB's lists are joined on the image's id, whatever their order, and a broken list is named."""

from pathlib import Path

import pytest

from patchgen.data.cub import is_cub, read_cub

IMAGES = {1: "001.Auk/a_1.jpg", 2: "001.Auk/a_2.jpg", 3: "002.Jay/j_1.jpg", 4: "002.Jay/j 2.jpg", 5: "003.Tern/t_1.jpg"}
LISTS = {
    "images.txt": [f"{i} {path}" for i, path in IMAGES.items()],
    "image_class_labels.txt": ["1 1", "2 1", "3 2", "4 2", "5 3"],
    "train_test_split.txt": ["1 1", "2 0", "3 0", "4 1", "5 1"],
    "classes.txt": ["1 001.Auk", "2 002.Jay", "3 003.Tern"],
}


def write(root: Path, images: dict[int, str] | None = None, **lists: list[str] | None) -> Path:
    """The official layout with five images; `images_txt=[...]` replaces a list, None leaves it out."""
    root.mkdir(parents=True, exist_ok=True)
    for name, lines in LISTS.items():
        chosen = lists.get(name.replace(".", "_"), lines)
        if chosen is not None:
            (root / name).write_text("\n".join(chosen) + "\n")
    for path in (IMAGES if images is None else images).values():
        (root / "images" / path).parent.mkdir(parents=True, exist_ok=True)
        (root / "images" / path).touch()
    return root


def test_rows_labels_and_parts(tmp_path: Path) -> None:
    table, test, notes = read_cub(write(tmp_path / "CUB_200_2011"))
    assert table.paths == tuple(f"images/{path}" for path in IMAGES.values())
    assert table.classes == ("001.Auk", "002.Jay", "003.Tern") and table.label.tolist() == [0, 0, 1, 1, 2]
    assert test.tolist() == [1, 2] and all(file.is_file() for file in table.files)
    assert notes == ("CUB: a subset, 3 of 5,994 train images and 2 of 5,794 test images",)
    assert is_cub(tmp_path / "CUB_200_2011") and not is_cub(tmp_path)


def test_the_join_is_by_id_not_by_line(tmp_path: Path) -> None:
    straight, test, _ = read_cub(write(tmp_path / "a"))
    turned = {name.replace(".", "_"): lines[k:] + lines[:k] for k, (name, lines) in enumerate(LISTS.items(), 1)}
    other, other_test, _ = read_cub(write(tmp_path / "b", **turned))
    assert other.paths == straight.paths and other.classes == straight.classes
    assert other.label.tolist() == straight.label.tolist() and other_test.tolist() == test.tolist()


def test_missing_images_are_said_and_left_out(tmp_path: Path) -> None:
    table, _, notes = read_cub(write(tmp_path, {1: IMAGES[1], 4: IMAGES[4]}))
    assert table.paths == ("images/001.Auk/a_1.jpg", "images/002.Jay/j 2.jpg")
    assert table.label.tolist() == [0, 1] and len(table.classes) == 3  # ids stay as they are
    assert notes[0] == "CUB: 3 of 5 listed images are not there, first '001.Auk/a_2.jpg'"


def test_lists_may_name_more_images(tmp_path: Path) -> None:
    table, test, notes = read_cub(write(tmp_path, images_txt=LISTS["images.txt"][:3]))
    assert len(table) == 3 and test.tolist() == [1, 2]
    assert notes == ("CUB: a subset, 1 of 5,994 train images and 2 of 5,794 test images",)


ERRORS: dict[str, tuple[dict[str, list[str] | None], str]] = {
    "lists": ({"classes_txt": None, "train_test_split_txt": None}, "lacks 2 of the official lists: train_test_split"),
    "no label": ({"image_class_labels_txt": ["1 1", "2 1", "3 2"]}, "labels.txt' gives 2 of the 5.*first image 4"),
    "class": ({"image_class_labels_txt": ["1 1", "2 9", "3 2", "4 2", "5 3"]}, "1 of the 5 .*image 2 .'9'"),
    "part": ({"train_test_split_txt": ["1 1", "2 0", "3 yes", "4 1", "5 1"]}, r"\['0', '1'\], first image 3 .'yes'"),
    "id twice": ({"images_txt": ["1 a.jpg", "1 b.jpg"]}, "images.txt', line 2: expected a new number"),
    "no id": ({"classes_txt": ["1 001.Auk", "Jay"]}, "classes.txt', line 2: expected a new number.*'Jay'"),
    "no value": ({"classes_txt": ["1"]}, "line 1: expected a new number, a space and a value"),
    "parent": ({"images_txt": ["1 ../outside.jpg"]}, "leads out of the folder"),
    "absolute": ({"images_txt": ["1 /etc/passwd"]}, "leads out of the folder"),
    "parents inside": ({"images_txt": ["1 001.Auk/../../../outside.jpg"]}, "leads out of the folder"),
    "empty": ({"images_txt": [""]}, "none of the 0 listed images"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(tmp_path: Path, case: str) -> None:
    lists, message = ERRORS[case]
    with pytest.raises(ValueError, match=message):
        read_cub(write(tmp_path, **lists))


def test_no_images_and_no_text(tmp_path: Path) -> None:
    root = write(tmp_path, images={})
    with pytest.raises(ValueError, match="none of the 5 listed images is in"):
        read_cub(root)
    (root / "classes.txt").write_bytes(b"\xff\xfe1")
    with pytest.raises(ValueError, match="classes.txt' is no text file"):
        read_cub(root)
