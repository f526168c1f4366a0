"""Folders and manifests become the same checked rows, and every mistake of a user has its own sentence."""

import os
from pathlib import Path

import numpy as np
import pytest

from patchgen.config import Config
from patchgen.data.image_files import list_images
from patchgen.data.table import Table, check_shared, read_table
from patchgen.tasks.mdg import make_fold


def fill(root: Path, *files: str) -> Path:
    """Empty files: the table looks at names only."""
    for file in files:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).touch()
    return root


def two_sites(root: Path) -> Path:
    return fill(root, "b/cat/2.jpg", "b/cat/10.JPG", "b/dog/1.png", "a/dog/1.webp", "a/dog/0.tiff")


def manifest(root: Path, text: str) -> Path:
    two_sites(root)
    (root / "m.csv").write_text(text, encoding="utf-8")
    return root / "m.csv"


def assert_same(one: Table, two: Table) -> None:
    assert (one.root, one.paths, one.domains, one.classes) == (two.root, two.paths, two.domains, two.classes)
    assert one.domain.tolist() == two.domain.tolist() and one.label.tolist() == two.label.tolist()
    assert (one.group, one.benchmark, one.options) == (two.group, two.benchmark, two.options)


def test_folder_rows_ids_and_counts(tmp_path: Path) -> None:
    fill(tmp_path, "ImageInfo.csv", "cover.jpg", ".git/x/1.jpg", "__MACOSX/cat/1.jpg", "a/.cache/1.jpg", "a/list.txt")
    table = read_table(two_sites(tmp_path))  # loose files and hidden folders are ignored
    assert table.paths == ("a/dog/0.tiff", "a/dog/1.webp", "b/cat/10.JPG", "b/cat/2.jpg", "b/dog/1.png")
    assert table.domains == ("a", "b") and table.classes == ("cat", "dog")
    # site a has no cat; its dogs keep id 1 all the same
    assert table.domain.tolist() == [0, 0, 1, 1, 1] and table.label.tolist() == [1, 1, 0, 0, 1]
    assert table.domain.dtype == np.int64 and table.label.dtype == np.int64
    assert table.counts() == {"a": {"cat": 0, "dog": 2}, "b": {"cat": 2, "dog": 1}}
    assert table.rows_of("b").tolist() == [2, 3, 4]
    assert table.file(2) == tmp_path / "b/cat/10.JPG" and table.file(2).is_file()
    assert (table.group, table.benchmark, table.options) == (None, None, {})


def test_weights_of_a_manifest(tmp_path: Path) -> None:
    lines = "path,domain,label,sample_weight\na/dog/0.tiff,a,dog,0.1\nb/cat/2.jpg,b,cat,2\n"
    table = read_table(manifest(tmp_path, lines))
    assert table.weight is not None and table.weight.tolist() == [0.1, 2.0]
    table.to_csv(tmp_path / "again.csv")
    again = read_table(tmp_path / "again.csv")
    assert again.weight is not None and again.weight.tolist() == [0.1, 2.0]
    with pytest.raises(ValueError, match="line 3: sample_weight must be a number of at least 0, not '-2'"):
        read_table(manifest(tmp_path, lines.replace(",2\n", ",-2\n")))


def test_order_is_that_of_a_sorted_walk(tmp_path: Path) -> None:
    files = ["z.jpg", "a/x.jpg", "a-b/x.jpg", "a/b/x.jpg", "B.jpg", "a/10.jpg", "a/9.jpg"]
    fill(tmp_path, *files, ".hidden/x.jpg", "__MACOSX/x.jpg", "._z.jpg", "notes.txt")
    # DomainBed's order: folders of os.walk sorted by full name, then sorted file names
    slow = [
        os.path.relpath(os.path.join(where, name), tmp_path)
        for where, _, names in sorted(os.walk(tmp_path))
        for name in sorted(names)
        if ".hidden" not in where and "__MACOSX" not in where and name[0] != "." and name != "notes.txt"
    ]
    assert list_images(tmp_path) == slow and sorted(slow) == sorted(files)


def test_manifest_with_groups_spaces_and_missing_labels(tmp_path: Path) -> None:
    rows = "b/dog/1.png, b,dog ,p1,X\na/dog/0.tiff,a,,p2,Y\n./b/cat/2.jpg,b,cat,p1,\n\n"
    table = read_table(manifest(tmp_path, "\ufeffPath, Domain ,label,group,scanner\n" + rows))
    assert table.paths == ("b/dog/1.png", "a/dog/0.tiff", "b/cat/2.jpg")  # the manifest's order
    assert table.domain.tolist() == [1, 0, 1] and table.label.tolist() == [1, -1, 0]
    assert table.group == ("p1", "p2", "p1")
    assert table.counts() == {"a": {"cat": 0, "dog": 0}, "b": {"cat": 1, "dog": 1}}
    table.to_csv(tmp_path / "again.csv")
    assert_same(read_table(tmp_path / "again.csv"), table)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_manifest_round_trip(tmp_path: Path, elsewhere: bool) -> None:
    table = read_table(fill(tmp_path / "set", "a/c,1/x 1.jpg", "a/c2/y.jpg", 'b/c"2/z.jpg', "b/é/ü.jpg"))
    (tmp_path / "other").mkdir()
    target = tmp_path / ("other" if elsewhere else "set") / "m.csv"
    table.to_csv(target)
    back = read_table(target)
    assert os.listdir(target.parent).count("m.csv") == 1 and not list(target.parent.glob(".*.tmp"))
    assert [back.file(i) for i in range(len(back))] == [table.file(i) for i in range(len(table))]
    assert back.classes == table.classes and back.label.tolist() == table.label.tolist()
    if not elsewhere:
        assert_same(back, table)


FOLDER_ERRORS = {
    "no images": ((), "No images"),
    "only text": (("a/cat/readme.txt", "b/cat/1.jpg"), "class folder 'a/cat'.*holds no image.*remove it"),
    "one class": (("a/cat/1.jpg", "b/cat/1.jpg"), "fewer than two classes \\(cat\\)"),
    "flat domain": (("a/cat/1.jpg", "b/dog/1.jpg", "c/1.jpg"), "'c'.*holds no class folder"),
    "empty domain": (("a/cat/1.jpg", "b/dog/1.jpg", "c/x/1.txt"), "c/x'.*holds no image"),
    "images at the root": (("1.jpg",), "No images in the folders"),
}


@pytest.mark.parametrize("case", FOLDER_ERRORS)
def test_folder_errors(tmp_path: Path, case: str) -> None:
    files, message = FOLDER_ERRORS[case]
    with pytest.raises(ValueError, match=message):
        read_table(fill(tmp_path, *files))


def test_missing_path_suggests_a_neighbour(tmp_path: Path) -> None:
    two_sites(tmp_path / "hospital_sites")
    with pytest.raises(ValueError, match="did you mean 'hospital_sites'"):
        read_table(tmp_path / "hospital_site" / "deeper")
    with pytest.raises(ValueError, match="neither a folder nor a .csv file.*unpacked"):
        read_table(fill(tmp_path, "data.tar") / "data.tar")


def test_unknown_domain_is_suggested(tmp_path: Path) -> None:
    table = read_table(fill(tmp_path, "site_a/x/1.jpg", "site_b/y/1.jpg"))
    with pytest.raises(ValueError, match="Unknown domain 'site-c'.*did you mean 'site_[ab]'"):
        table.rows_of("site-c")


HEAD, ROW = "path,domain,label\n", "a/dog/0.tiff,a,dog\n"
MANIFEST_ERRORS = {
    "column": ("path,site,label\n" + ROW, "no column 'domain' \\(found: path, site, label\\)"),
    "column suggested": ("paths,domain,label\n" + ROW, "no column 'path'.*did you mean 'paths'"),
    "separator": ("path;domain;label\n", "commas, not ';'"),
    "empty file": ("", "no column 'path' \\(found: nothing\\)"),
    "no rows": ("path,domain,label\n", "has no rows"),
    "column twice": ("path,domain,label,label\n", "column twice"),
    "lost files": (
        HEAD + ROW + "".join(f"x{i}.jpg,b,cat\n" for i in range(5)),
        r"5 of 6 files do not exist \(line 3: x0.jpg; line 4: x1.jpg; line 5: x2.jpg; \.\.\.\)",
    ),
    "empty cell": (HEAD + ROW + "b/cat/2.jpg,,cat\n", "line 3: the cell 'domain' is empty"),
    "empty group": ("path,domain,label,group\na/dog/0.tiff,a,dog,p\nb/cat/2.jpg,b,cat,\n", "line 3: the cell 'group'"),
    "two labels": (HEAD + ROW + "./a/dog/0.tiff,a,cat\n", "line 2 .*'dog'.* and line 3 .*'cat'.* one file"),
    "two domains": (HEAD + ROW + "a/dog/0.tiff,b,dog\n", "line 2 .*domain 'a'.* and line 3 .*domain 'b'"),
    "too many cells": (HEAD + ROW + "a,b,c,d\n", "line 3: 4 cells where the header has 3"),
    "no image": (HEAD + "m.csv,a,dog\n", "line 2: 'm.csv' is no image"),
    "no labels": (HEAD + "a/dog/0.tiff,a,\nb/cat/2.jpg,b,\n", "m.csv' has fewer than two classes \\(no labels\\)"),
    "bad quotes": ('path,domain,label\n"a"b,c,d\n', "cannot be read as CSV"),
    "benchmark": ("path,domain,label,benchmark\na/dog/0.tiff,a,dog,pasc\n", "Unknown benchmark 'pasc'.*'pacs'"),
    "two benchmarks": ("path,domain,label,benchmark\na/dog/0.tiff,a,dog,x\nb/cat/2.jpg,b,cat,y\n", "several values"),
}


@pytest.mark.parametrize("case", MANIFEST_ERRORS)
def test_manifest_errors(tmp_path: Path, case: str) -> None:
    text, message = MANIFEST_ERRORS[case]
    with pytest.raises(ValueError, match=message):
        read_table(manifest(tmp_path, text))


@pytest.mark.parametrize("spelling", ["absolute", "file link", "folder link", "twice linked"])
@pytest.mark.parametrize("row", ["b,cat", "a,dog"])
def test_a_file_that_stands_twice_is_found_under_any_spelling(tmp_path: Path, spelling: str, row: str) -> None:
    root = two_sites(tmp_path)
    (root / "link.tiff").symlink_to(root / "a/dog/0.tiff")
    (root / "linked").symlink_to(root / "a", target_is_directory=True)
    (root / "again.tiff").symlink_to(root / "linked/dog/0.tiff")
    names = {"absolute": f"{root}/a/dog/0.tiff", "file link": "link.tiff", "folder link": "linked/dog/0.tiff",
             "twice linked": "again.tiff"}  # fmt: skip
    (root / "m.csv").write_text(f"path,domain,label\n{ROW}b/cat/2.jpg,b,cat\n{names[spelling]},{row}\n")
    with pytest.raises(ValueError, match="line 2 .'a/dog/0.tiff', .* and line 4 .* are one file; remove one"):
        read_table(root / "m.csv")


def test_links_to_several_files_are_several_images(tmp_path: Path) -> None:
    root = two_sites(tmp_path)
    for name in ("a/dog/0.tiff", "b/cat/2.jpg"):
        (root / name.replace("/", "-")).symlink_to(root / name)
    (root / "m.csv").write_text("path,domain,label\na-dog-0.tiff,a,dog\nb-cat-2.jpg,b,cat\n")
    assert read_table(root / "m.csv").paths == ("a-dog-0.tiff", "b-cat-2.jpg")  # as they are written
    (root / "b/cat/2.jpg").unlink()
    with pytest.raises(ValueError, match=r"1 of 2 files do not exist \(line 3: b-cat-2.jpg\)"):
        read_table(root / "m.csv")


def test_options_need_a_benchmark(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="belong to a benchmark"):
        read_table(two_sites(tmp_path), options={"crctp_fold": "Fold1"})
    with pytest.raises(ValueError, match="a manifest already names its files"):
        read_table(manifest(tmp_path, "path,domain,label\n"), options={"crctp_fold": "Fold1"})


# A folder one level too high


def make_set(root: Path, sites: tuple[str, ...], classes: tuple[str, ...]) -> Path:
    return fill(root, *(f"{site}/{name}/{i}.jpg" for site in sites for name in classes for i in range(3)))


def test_the_parent_of_data_sets_is_told_which_was_meant(tmp_path: Path) -> None:
    office = make_set(tmp_path / "office", ("amazon", "webcam"), ("bike", "mug"))
    with pytest.raises(ValueError, match=f"only one domain, 'office'.*did you mean '{office}'"):
        read_table(tmp_path)
    make_set(tmp_path / "pets", ("indoor", "outdoor"), ("cat", "dog"))
    both = f"did you mean '{office}' or '{tmp_path / 'pets'}'"
    with pytest.raises(ValueError, match=f"share no class .'office' has amazon, webcam; 'pets' has indoor.*{both}"):
        check_shared(read_table(tmp_path))
    assert check_shared(read_table(office)).domains == ("amazon", "webcam")


def test_one_domain(tmp_path: Path) -> None:
    make_set(tmp_path / "all", ("amazon",), ("bike", "mug"))
    nested, flat = read_table(tmp_path / "all"), read_table(tmp_path / "all/amazon")
    assert nested.domains == flat.domains == ("amazon",) and nested.classes == flat.classes == ("bike", "mug")
    rows = "".join(f"all/{path},{nested.label_name(i)}\n" for i, path in enumerate(nested.paths))
    (tmp_path / "clinic.csv").write_text("path,label\n" + rows)
    assert read_table(tmp_path / "clinic.csv").domains == ("clinic",)
    with pytest.raises(ValueError, match="one domain, clinic, .*--unseen none"):
        make_fold(Config(str(tmp_path / "clinic.csv"), "clinic"))


def test_folders_of_runs_and_models_are_not_domains(tmp_path: Path) -> None:
    make_set(tmp_path, ("amazon", "webcam"), ("bike", "mug"))
    (tmp_path / "runs/4f2a/checkpoints").mkdir(parents=True)
    (tmp_path / "runs/4f2a/config.yaml").touch()
    (tmp_path / "model").mkdir()
    (tmp_path / "model/model.safetensors").touch()
    assert read_table(tmp_path).domains == ("amazon", "webcam")


def test_the_folder_of_a_generated_set_is_not_read_as_the_sites_images_and_masks(tmp_path: Path) -> None:
    for part in ("images", "masks"):
        make_set(tmp_path / part, ("amber", "mist"), ("bars", "rings"))
    (tmp_path / "oracle.json").write_text("{}")
    for scoring in (False, True):
        with pytest.raises(ValueError, match=f"give its images, '{tmp_path / 'images'}'"):
            read_table(tmp_path, for_scoring=scoring)
    assert read_table(tmp_path / "images").domains == ("amber", "mist")


def test_a_manifest_whose_sites_share_no_class_cannot_be_trained_with(tmp_path: Path) -> None:
    root = make_set(tmp_path / "office", ("amazon", "webcam"), ("bike", "mug"))
    rows = [f"amazon/bike/{i}.jpg,a,bike\nwebcam/mug/{i}.jpg,b,mug" for i in range(3)]
    (root / "m.csv").write_text("\n".join(["path,domain,label", *rows]))
    with pytest.raises(ValueError, match="share no class"):
        make_fold(Config(str(root / "m.csv"), "a"))
