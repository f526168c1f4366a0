"""`patchgen slide tiles`: every tile, label and row against what was drawn; and what happens to bad input."""

import json
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from patchgen.cli import main
from patchgen.data.table import read_table

pytest.importorskip("openslide")
pytest.importorskip("shapely")

from patchgen.slides.cut import AMBIGUOUS, OUTSIDE, choose_label  # noqa: E402
from patchgen.slides.heatmap import write_pyramid  # noqa: E402
from patchgen.slides.slide import TileGrid  # noqa: E402
from patchgen.slides.tissue import find_windows  # noqa: E402

from .cohort import COLUMNS, MPP, ROWS, SLIDES, TILE, annotation, draw, expected, feature, files_below, ring, rows_of  # noqa: E402


def run(*words: Any) -> int:
    return main(["slide", "tiles", *map(str, words)])


# The rules


@pytest.mark.parametrize(("shares", "covered", "label"), [
    ({"a": 1.0}, 1.0, "a"),
    ({"a": 0.75}, 0.75, "a"),
    ({"a": 0.74}, 0.74, AMBIGUOUS),
    ({"a": 0.25}, 0.25, OUTSIDE),
    ({"a": 0.26}, 0.26, AMBIGUOUS),
    ({}, 0.0, OUTSIDE),
    ({"a": 0.8, "b": 0.2}, 1.0, "a"),
    ({"a": 0.8, "b": 0.2}, 0.8, AMBIGUOUS),  # b within a, and a fifth is outside
    ({"a": 1.0, "b": 1.0}, 1.0, AMBIGUOUS),  # drawn over each other
    ({"a": 0.9, "b": 0.3}, 0.9, AMBIGUOUS),
])  # fmt: skip
def test_a_tile_has_a_label_only_where_there_is_no_doubt(shares: dict[str, float], covered: float, label: str) -> None:
    assert choose_label(shares, covered, 0.75) == label


@pytest.mark.parametrize("overlap", [0.0, 0.5, 0.25])
def test_windows_are_all_those_with_enough_tissue(overlap: float) -> None:
    grid = TileGrid((32.0, 32.0), 6, 4, (180, 120), 16)
    mask = np.random.default_rng(2).random((4 * 16, 6 * 16)) < np.linspace(0.1, 0.9, 96)
    found = {window.corner: window.tissue for window in find_windows(mask, grid, 0.5, overlap)}
    stride, slow = round(16 * (1 - overlap)), {}
    wide = np.pad(mask, ((0, 16), (0, 16)))
    for y in range(0, 60, stride):  # 120 level-0 pixels are 60 of the mask
        for x in range(0, 90, stride):
            share = wide[y : y + 16, x : x + 16].mean()
            if share >= 0.5:
                slow[2.0 * x, 2.0 * y] = share
    assert found == pytest.approx(slow) and len(found) > 4


# The whole command


def test_tiles_are_those_that_were_drawn(tiles: Path, cohort: Path) -> None:
    names = {c: n for c, n in Counter(expected().values()).items()}
    assert names == {"tumour": 20, "stroma": 12, "half": 4, "none": 12}
    for site, slides in SLIDES.items():
        for name in slides:
            pixels, folder = draw(site, int(name[1])), tiles / "images" / site / name
            rows = rows_of(folder / "tiles.csv")
            places = {(int(row["x"]) // TILE, int(row["y"]) // TILE): row for row in rows}
            truth = {place: label for place, label in expected().items() if label in ("tumour", "stroma")}
            assert {place: row["label"] for place, row in places.items()} == truth
            for (column, row), cells in places.items():
                area = pixels[row * TILE : (row + 1) * TILE, column * TILE : (column + 1) * TILE]
                np.testing.assert_array_equal(np.asarray(Image.open(folder / cells["file"])), area)
            assert json.loads((folder / "slide.json").read_text())["counts"] == {
                "stroma": 12, "tumour": 20, AMBIGUOUS: 4, OUTSIDE: 12
            }  # fmt: skip


def test_the_manifest_is_ready_for_fit(tiles: Path) -> None:
    table = read_table(tiles / "manifest.csv")
    assert table.domains == ("site_a", "site_b") and table.classes == ("stroma", "tumour")
    assert table.counts() == {site: {"stroma": 24, "tumour": 40} for site in SLIDES}
    assert table.group is not None and set(table.group) == {"a1", "a2", "b1", "b2"}
    assert {(group, table.domains[d]) for group, d in zip(table.group, table.domain, strict=True)} == {
        (name, site) for site, names in SLIDES.items() for name in names
    }
    [first, *_] = rows_of(tiles / "slides.csv")
    assert {k: first[k] for k in ("domain", "group", "stroma", "tumour", "ambiguous", "outside", "error")} == {
        "domain": "site_a", "group": "a1", "stroma": "12", "tumour": "20", "ambiguous": "4", "outside": "12",
        "error": "",
    }  # fmt: skip
    assert sorted(p.name for p in tiles.iterdir()) == ["images", "manifest.csv", "slides.csv"]


def test_the_same_command_cuts_only_what_is_missing(tiles: Path, cohort: Path, tmp_path: Path) -> None:
    out = shutil.copytree(tiles, tmp_path / "tiles")
    before = files_below(out)
    shutil.rmtree(out / "images" / "site_b" / "b1")  # never begun, or killed: there is no half of a slide
    (out / "manifest.csv").unlink()
    times = {p: p.stat().st_mtime_ns for p in (out / "images" / "site_a").rglob("*.png")}
    assert run(cohort / "slides", "--annotations", cohort / "annotations", "--out", out, "--tile", TILE) == 0
    assert files_below(out) == before
    assert all(p.stat().st_mtime_ns == then for p, then in times.items())


def test_other_settings_are_not_mixed_in(tiles: Path, cohort: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (cohort / "slides", "--annotations", cohort / "annotations", "--out", tiles, "--tile", TILE)
    before = files_below(tiles)
    assert run(*words, "--min-label", 0.9) == 2
    assert (
        "started with other settings (min_label 0.75, now 0.9)" in capsys.readouterr().err
        and files_below(tiles) == before
    )


def test_outside_overlap_and_ignored_classes(cohort: Path, tmp_path: Path) -> None:
    slide, drawn = cohort / "slides" / "site_a" / "a1.tif", cohort / "annotations" / "a1.geojson"
    words = (slide, "--annotations", drawn, "--tile", TILE)
    assert run(*words, "--out", tmp_path / "o", "--outside", "normal", "--ignore", "stroma") == 0
    [row] = rows_of(tmp_path / "o" / "slides.csv")
    assert (row["normal"], row["tumour"], row["ambiguous"]) == ("28", "20", "0")  # all stroma is outside now
    assert run(*words, "--out", tmp_path / "h", "--overlap", 0.5) == 0
    half = rows_of(tmp_path / "h" / "images" / "site_a" / "a1" / "tiles.csv")
    assert {int(r["x"]) % TILE for r in half} == {0, TILE // 2}
    upper = [r for r in half if r["label"] == "stroma" and int(r["y"]) <= 2 * TILE]
    # columns 1 to 4 by halves within the region (7), and one that reaches half beyond each side (tissue 0.5) is not
    assert len(upper) == 7 * 3


def test_labels_sites_and_patients_of_a_table(cohort: Path, tmp_path: Path) -> None:
    slides = cohort / "slides"
    (tmp_path / "t.csv").write_text(
        "Slide,Label,Domain,Patient\na1.tif,cancer,north,p1\na2,healthy,north,p2\nb1,cancer,south,p3\nzz,cancer,x,p9\n"
    )
    files = (slides / "site_a" / "a1.tif", slides / "site_a" / "a2.tif", slides / "site_b" / "b1.tif")
    assert run(*files, "--labels", tmp_path / "t.csv", "--out", tmp_path / "o", "--tile", TILE) == 0
    table = read_table(tmp_path / "o" / "manifest.csv")
    assert table.counts() == {"north": {"cancer": 48, "healthy": 48}, "south": {"cancer": 48, "healthy": 0}}
    assert table.group is not None and Counter(table.group) == {"p1": 48, "p2": 48, "p3": 48}
    more = ("--annotations", cohort / "annotations" / "b1.geojson", "--out", tmp_path / "both", "--tile", TILE)
    assert run(*files, "--labels", tmp_path / "t.csv", *more) == 0  # a slide's own annotation outweighs its label
    counts = read_table(tmp_path / "both" / "manifest.csv").counts()
    assert counts["south"] == {"cancer": 0, "healthy": 0, "stroma": 12, "tumour": 20}


def test_a_coarser_resolution_gives_smaller_tiles_of_the_same_tissue(cohort: Path, tiles: Path, tmp_path: Path) -> None:
    slide, drawn = cohort / "slides" / "site_a" / "a1.tif", cohort / "annotations" / "a1.geojson"
    assert run(slide, "--annotations", drawn, "--tile", TILE // 2, "--mpp", 2 * MPP, "--out", tmp_path) == 0
    coarse, fine = (rows_of(out / "images" / "site_a" / "a1" / "tiles.csv") for out in (tmp_path, tiles))
    assert coarse == fine
    assert Image.open(tmp_path / "images" / "site_a" / "a1" / coarse[0]["file"]).size == (TILE // 2, TILE // 2)


# What goes wrong


def test_a_bad_slide_costs_itself_alone(cohort: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slides, drawn = tmp_path / "slides", tmp_path / "annotations"
    slides.mkdir()
    drawn.mkdir()
    shutil.copy(cohort / "slides" / "site_a" / "a1.tif", slides / "good.tif")
    write_pyramid(slides / "bare.tif", draw("site_a", 1))  # without microns per pixel
    (slides / "broken.svs").write_text("no slide")
    write_pyramid(slides / "glass.tif", np.full((ROWS * TILE, COLUMNS * TILE, 3), 244, np.uint8), (MPP, MPP))
    shutil.copy(slides / "good.tif", slides / "unlabelled.tif")
    for name in ("good", "bare", "broken", "glass"):
        (drawn / f"{name}.geojson").write_text(json.dumps(annotation()))
    words = (slides, "--annotations", drawn, "--out", tmp_path / "o", "--tile", TILE)
    assert run(*words) == 0
    said = capsys.readouterr().err
    for part in (
        "4 of 5 slides",
        "bare.tif: the file does not say how many microns",
        "broken.svs: OpenSlide says",
        "glass.tif: no tile has 50% tissue",
        "unlabelled.tif: it has neither an annotation nor a label",
        "all tiles are of one site, 'slides'",
    ):
        assert part in said, part
    assert Counter(row["label"] for row in rows_of(tmp_path / "o" / "manifest.csv")) == {"stroma": 12, "tumour": 20}
    errors = {Path(row["slide"]).name: row["error"] for row in rows_of(tmp_path / "o" / "slides.csv")}
    assert "--mpp-slide" in errors["bare.tif"] and errors["good.tif"] == ""
    write_pyramid(slides / "bare.tif", draw("site_a", 1), (MPP, MPP))  # mended: the same command takes it in
    capsys.readouterr()
    assert run(*words) == 0 and "3 of 5 slides" in capsys.readouterr().err
    assert len(rows_of(tmp_path / "o" / "manifest.csv")) == 64


@pytest.mark.parametrize(("more", "message"), [
    ([], "give --annotations FILES, or --labels FILE.csv"),
    (["--annotations", "other.geojson"], "other.geojson is the annotation of no slide"),
    (["--annotations", "a1.geojson", "--classes", "tumor", "stroma"], "unknown class 'tumour' in"),
    (["--annotations", "none.geojson"], "does not exist"),
    (["--annotations", "away/a1.geojson"], "no tile has a label"),
    (["--labels", "wrong.csv"], "needs the column `slide`"),
    (["--labels", "twice.csv"], "line 3: the slide 'a1' is there twice"),
    (["--labels", "others.csv"], "no slide has an annotation or a label"),
    (["--labels", "good.csv", "--overlap", "1"], "--overlap must be below 1, not 1"),
    (["--labels", "good.csv", "--min-label", "0.5"], "--min-label must be above 0.5"),
    (["--labels", "good.csv", "--tile", "0"], "--tile must be at least 1"),
])  # fmt: skip
def test_mistakes_are_one_sentence_and_cost_nothing(
    cohort: Path, tmp_path: Path, more: Sequence[str], message: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "away").mkdir()
    away = [feature("x", "Polygon", [ring(100, 100, 101, 101)])]
    for name, content in (("a1", annotation()), ("other", annotation()), ("away/a1", away)):
        (tmp_path / f"{name}.geojson").write_text(json.dumps(content))
    tables = {"wrong": "file,label\na1,x", "twice": "slide,label\na1,x\na1,y", "others": "slide,label\nzz,x"}
    for name, text in {**tables, "good": "slide,label\na1,x"}.items():
        (tmp_path / f"{name}.csv").write_text(text + "\n")
    words = [cohort / "slides" / "site_a" / "a1.tif", "--out", "o", *([] if "--tile" in more else ["--tile", TILE])]
    assert run(*words, *more) == 2
    said = capsys.readouterr().err
    assert message in said and not (tmp_path / "o" / "manifest.csv").exists()
    assert "tumor" not in more or "did you mean 'tumor'" in said


def test_no_slide_and_two_of_one_name(cohort: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t.csv").write_text("slide,label\na1,x\n")
    slide, other = cohort / "slides" / "site_a" / "a1.tif", tmp_path / "more" / "site_a" / "a1.tif"
    (tmp_path / "empty").mkdir()
    other.parent.mkdir(parents=True)
    shutil.copy(slide, other)
    for slides, rule in (
        ([], "no slide given"),
        ([tmp_path / "empty"], "hold no slide"),
        ([slide, other], "both called 'a1' at site 'site_a'"),
    ):
        assert run(*slides, "--labels", tmp_path / "t.csv", "--out", tmp_path / "o") == 2
        assert rule in capsys.readouterr().err
