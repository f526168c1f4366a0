"""`patchgen predict` and `patchgen explain` as a user calls them."""

import csv
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from patchgen.cli import main
from patchgen.commands import predict
from patchgen.commands.options import find_images
from patchgen.predict.predictor import Predictor, load_run
from patchgen.report.explained import output_names
from patchgen.runs.folder import RunFolder, WorkFolder

MakeRun = Callable[..., RunFolder]
Captured = pytest.CaptureFixture[str]


@pytest.fixture
def photos(image_folder: Path, tmp_path: Path) -> Path:
    """Two readable images (one in a sub-folder), a broken one, and a text file."""
    folder = tmp_path / "photos"
    (folder / "more").mkdir(parents=True)
    (folder / "a.png").write_bytes((image_folder / "studio/cross/00.png").read_bytes())
    (folder / "more" / "a.png").write_bytes((image_folder / "studio/square/00.png").read_bytes())
    (folder / "broken.JPG").write_bytes(b"not an image")
    (folder / "readme.txt").write_text("hello")
    return folder


@pytest.fixture(scope="module")
def run(tiny_run: MakeRun) -> str:
    return str(tiny_run().path)


def test_words_become_files(photos: Path) -> None:
    everything = [photos / "a.png", photos / "broken.JPG", photos / "more/a.png"]
    assert find_images([str(photos)]) == everything
    assert find_images([f"{photos}/**/*"]) == everything
    assert find_images([f"{photos}/**/a.png", str(photos)]) == [everything[0], everything[2], everything[1]]
    assert find_images([str(photos / "readme.txt")]) == [photos / "readme.txt"]  # named by the user: tried as it is
    odd = photos / "b[1].png"
    odd.write_bytes(b"")
    assert find_images([str(odd)]) == [odd]


def test_skipped_files_are_counted_and_named(run: str, photos: Path, tmp_path: Path, capsys: Captured) -> None:
    Image.open(photos / "a.png").save(photos / "moving.gif")
    (photos / "more" / "scan.dcm").write_text("hello")
    line = "2 files skipped, no image by the ending: 1 .dcm, 1 .txt (such as "
    assert main(["predict", run, str(photos), "--csv", "-"]) == 0
    out, err = capsys.readouterr()
    assert f"{photos}: {line}" in err and "moving.gif" in out  # a GIF is an image, in a folder as by its name
    assert main(["explain", run, f"{photos}/**/*", "--out", str(tmp_path / "maps")]) == 0
    assert line in capsys.readouterr().err
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "x.psd").touch()
    assert main(["predict", run, str(tmp_path / "other")]) == 2
    assert (
        "no image found" in (err := capsys.readouterr().err) and "1 file skipped, no image by the ending: 1 .psd" in err
    )


@pytest.mark.parametrize("terminal", [False, True])
def test_table_goes_to_stdout(
    run: str, photos: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")  # a live bar on stderr must not swallow the rows
    assert main(["predict", run, str(photos)]) == 0
    out, err = capsys.readouterr()
    lines = [line.split() for line in out.splitlines()]
    assert lines[0] == ["path", "label", "confidence"]
    expected = {str(p.path): p for p in load_run(run).predict([photos / "a.png", photos / "more/a.png"])}
    assert [line[0] for line in lines[1:]] == list(expected)
    for path, label, confidence in lines[1:]:
        assert label == expected[path].label
        assert float(confidence) == pytest.approx(expected[path].confidence, abs=1e-3)
    assert "1 of 3 images could not be read" in err and "broken.JPG" in err


def test_csv_file_is_whole_or_not_there(run: str, photos: Path, tmp_path: Path, capsys: Captured) -> None:
    target = tmp_path / "found.csv"
    assert main(["predict", run, str(photos), "--csv", str(target), "--batch", "1", "--checkpoint", "swad"]) == 0
    assert capsys.readouterr().out == f"{target}\n"
    rows = list(csv.DictReader(target.open()))
    assert list(rows[0]) == ["path", "label", "confidence", "p_circle", "p_cross", "p_square"]
    for row, found in zip(rows, load_run(run, "swad").predict([photos / "a.png", photos / "more/a.png"]), strict=True):
        numbers = {name[2:]: float(row[name]) for name in row if name.startswith("p_")}
        assert sum(numbers.values()) == pytest.approx(1, abs=1e-5)
        assert row["label"] == max(numbers, key=numbers.__getitem__) == found.label
        assert float(row["confidence"]) == max(numbers.values())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["found.csv", "photos"]


def test_json_lines_agree_with_json(run: str, photos: Path, tmp_path: Path, capsys: Captured) -> None:
    target = tmp_path / "found.jsonl"
    assert main(["predict", run, str(photos), "--json"]) == 0
    expected = json.loads(capsys.readouterr().out)
    assert main(["predict", run, str(photos), "--jsonl", str(target)]) == 0
    assert capsys.readouterr().out == f"{target}\n"
    assert [json.loads(line) for line in target.read_text().splitlines()] == expected
    assert main(["predict", run, str(photos), "--jsonl", "-"]) == 0
    assert capsys.readouterr().out == target.read_text()


@pytest.fixture
def stop_after(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[int]]:
    """`stop_after(24)`: predictions stop as at Ctrl-C after so many images; returns the sizes of scored batches."""
    whole = Predictor.computed

    def plant(images: int) -> list[int]:
        scored: list[int] = []

        def answer(self: Predictor, pixels: Sequence[np.ndarray]) -> object:
            if sum(scored) >= images:
                raise KeyboardInterrupt
            scored.append(len(pixels))
            return whole(self, pixels)

        monkeypatch.setattr(Predictor, "computed", answer)
        return scored

    return plant


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_a_killed_command_resumes(
    kind: str, run: str, image_folder: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch,
    stop_after: Callable[[int], list[int]],
) -> None:  # fmt: skip
    monkeypatch.setattr(predict, "PART", 16)
    words = ["predict", run, str(image_folder), "--batch", "8", f"--{kind}"]
    assert main([*words, str(tmp_path / "whole")]) == 0
    target = tmp_path / "predictions"
    stop_after(24)
    assert main([*words, str(target)]) == 130 and not target.exists()
    assert len(list(tmp_path.glob(".predictions.*.parts"))) == 1
    capsys.readouterr()
    scored = stop_after(1000)
    assert main([*words, str(target)]) == 0
    assert sum(scored) == 90 - 16 and "[16/90" in capsys.readouterr().err
    assert target.read_text() == (tmp_path / "whole").read_text()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["predictions", "whole"]


@pytest.mark.parametrize("change", ["folder", "fewer", "as typed", "contents", "model", "nothing"])
def test_parts_of_another_model_or_of_other_images_are_never_used(
    change: str, run: str, tiny_run: MakeRun, image_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    stop_after: Callable[[int], list[int]],
) -> None:  # fmt: skip
    monkeypatch.setattr(predict, "PART", 4)
    for place, kind in (("A", "circle"), ("B", "cross")):
        shutil.copytree(image_folder / "studio" / kind, tmp_path / place / "photos")
    monkeypatch.chdir(tmp_path / "A")
    target = tmp_path / "predictions.csv"
    words = ["--batch", "4", "--csv", str(target)]
    stop_after(4)
    assert main(["predict", run, "photos", *words]) == 130
    [parts] = tmp_path.glob(".*.parts")
    (tmp_path / ".other.csv.0123456789ab.parts").mkdir()  # of another target
    if change == "folder":
        monkeypatch.chdir(tmp_path / "B")
    if change == "contents":
        Image.new("RGB", (9, 9)).save("photos/00.png")
    images = {"fewer": "photos/0[1-9].png", "as typed": "../A/photos"}.get(change, "photos")
    model = str(tiny_run("lp-ln").path) if change == "model" else run
    scored = stop_after(1000)
    assert main(["predict", model, images, *words]) == 0
    assert sum(scored) == {"fewer": 9, "nothing": 6}.get(change, 10)
    assert not parts.exists() and (tmp_path / ".other.csv.0123456789ab.parts").exists()


def test_a_file_that_another_process_writes_is_left_to_it(
    run: str, image_folder: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predict, "_digest", lambda *_: "0123456789ab")
    work = tmp_path / ".a.csv.0123456789ab.parts"
    work.mkdir()
    with WorkFolder(work, tmp_path / "a.csv").locked():
        assert main(["predict", run, str(image_folder), "--csv", str(tmp_path / "a.csv")]) == 2
        assert "by another process" in capsys.readouterr().err


@pytest.mark.slow
def test_ten_thousand_images_need_no_more_memory_than_a_thousand(run: str, image_folder: Path, tmp_path: Path) -> None:
    code = (
        "import resource, sys; from patchgen.cli import main; code = main(sys.argv[1:]);"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss); sys.exit(code)"
    )
    sources = sorted(image_folder.rglob("*.png"))
    peak = []
    for count in (1000, 10_000):
        folder = tmp_path / str(count)
        folder.mkdir()
        for i in range(count):
            (folder / f"{i:05}.png").hardlink_to(sources[i % len(sources)])
        words = ["predict", run, str(folder), "--csv", str(tmp_path / f"{count}.csv")]
        done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
        peak.append(int(done.stdout.split()[-1]) / 1024)
        assert len((tmp_path / f"{count}.csv").read_text().splitlines()) == count + 1
    assert peak[1] - peak[0] < 40, peak  # MiB; the pixels alone would be 90 MiB more, their tokens several times that


def test_strict_fails_after_all_work(run: str, photos: Path, capsys: Captured) -> None:
    assert main(["predict", run, str(photos), "--strict", "--json"]) == 1
    assert len(json.loads(capsys.readouterr().out)) == 2
    assert main(["predict", run, str(photos / "a.png"), "--strict"]) == 0
    capsys.readouterr()
    assert main(["predict", run, str(photos / "broken.JPG"), "--json"]) == 1  # nothing could be read
    assert json.loads(capsys.readouterr().out) == []
    assert main(["explain", run, str(photos / "broken.JPG"), "--out", str(photos / "maps")]) == 1
    assert json.loads((photos / "maps/index.json").read_text())["images"] == []


# explain


def test_explain_writes_pictures_masks_and_index(run: str, photos: Path, tmp_path: Path, capsys: Captured) -> None:
    odd = photos / "<b>&#37; 'x'.png"
    odd.write_bytes((photos / "a.png").read_bytes())
    out = tmp_path / "deep" / "out"
    assert main(["explain", run, str(photos), "--out", str(out), "--relative"]) == 0
    printed, page = capsys.readouterr(), (out / "index.html").read_text()
    assert "Selection map, not an annotation" in page and "stretched" in page and "<b>" not in page
    assert printed.out.splitlines()[-1] == str(out)
    assert "1 of 4 images could not be read" in printed.err

    names = ["0001__b_37_x_", "0002_a", "0004_a"]  # the third image is the broken one
    files = [f"{name}.{end}" for name in names for end in ("npy", "png")]
    assert sorted(p.name for p in out.iterdir()) == sorted([*files, "index.html", "index.json"])
    index = json.loads((out / "index.json").read_text())
    predictor = load_run(run)
    assert [Path(e["path"]) for e in index["images"]] == [odd, photos / "a.png", photos / "more/a.png"]
    for entry in index["images"]:
        expected = predictor.explain(entry["path"])
        mask = np.load(out / entry["mask_file"], allow_pickle=False)
        assert mask.dtype == np.float32 and mask.shape == tuple(entry["mask"]["grid"]) == (4, 4)
        np.testing.assert_allclose(mask, expected.mask, atol=1e-6)
        assert entry["mask"]["mean"] == pytest.approx(mask.mean()) and entry["mask"]["max"] == pytest.approx(mask.max())
        assert [(t["class"], pytest.approx(t["probability"], abs=1e-5)) for t in entry["top"]] == list(expected.top)
        assert Image.open(out / entry["picture"]).width > 600
    assert [Path(u["path"]).name for u in index["unreadable"]] == ["broken.JPG"]


@pytest.mark.parametrize(("more", "kind"), [([], "Grad-CAM"), (["--map", "rollout"], "attention rollout")])
def test_explain_with_a_baseline_is_labelled(
    more: list[str], kind: str, tiny_run: MakeRun, photos: Path, tmp_path: Path, capsys: Captured
) -> None:
    words = ["explain", str(tiny_run("lp-ln").path), str(photos / "a.png"), "--out", str(tmp_path / "out")]
    assert main([*words, *more]) == 0
    [entry] = json.loads((tmp_path / "out" / "index.json").read_text())["images"]
    page = (tmp_path / "out" / "index.html").read_text()
    assert entry["map"] == kind and f"{kind} of the predicted class, computed afterwards" in page
    assert "Selection map" not in page
    assert main([*words, "--map", "mask"]) == 2 and "no ranking 'mask'" in capsys.readouterr().err


def test_names_never_meet() -> None:
    paths = [Path(p) for p in ("x/0.png", "y/0.jpg", "Straße 7.png", "a/<?>:*.png", f"{'ü' * 300}.png", "a.b.png")]
    names = output_names(paths)
    assert names[:4] == ["0001_0", "0002_0", "0003_Straße_7", "0004__"] and names[5] == "0006_a.b"
    assert len({name.casefold() for name in names}) == len(paths)
    assert all(len(f"{name}.png".encode()) <= 255 for name in names)
    assert output_names(paths * 2000)[-1] == "12000_a.b"
