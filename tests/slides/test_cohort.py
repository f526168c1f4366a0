"""From slides to a classifier and back to maps; many slides at once, on several processes, to the same bytes."""

import html
import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pytest

from patchgen.cli import main
from patchgen.common.child_process import child_environment, python

pytest.importorskip("openslide")
pytest.importorskip("shapely")

from .cohort import TILE, expected, files_below, rows_of, undrawn  # noqa: E402


@pytest.fixture(scope="module")
def model(tiles: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fitted on the tiles of the annotated slides, with normalised stains."""
    pytest.importorskip("torchstain")
    out = tmp_path_factory.mktemp("model")
    words = ["fit", f"{tiles}/manifest.csv", "--out", f"{out}/model", "--runs", f"{out}/runs", "--no-expect"]
    tiny = ["--backbone", "tiny", "--image-size", str(TILE), "--steps", "40", "--eval-every", "20", "--lr", "3e-3"]
    assert main([*words, *tiny, "--stain", "macenko", "--augmentation", "histology", "--method", "lp-ln"]) == 0
    return out / "model"


@pytest.fixture(scope="module")
def mapped(cohort: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Maps of all slides, made by one process."""
    out = tmp_path_factory.mktemp("maps") / "one"
    words = [str(cohort / "slides"), "--out", str(out), "--tile", str(TILE), "--batch", "16", "--threads", "1"]
    with undrawn():
        assert main(["slide", str(model), *words]) == 0
    return out


def test_tiles_to_model_to_map(cohort: Path, mapped: Path, model: Path) -> None:
    assert json.loads((model / "config.json").read_text())["stain"]["kind"] == "macenko"
    truth = {place: "tumour" if place[0] >= 7 else "stroma" for place in expected()}  # also where nothing was drawn
    for name in ("a1", "a2", "b1", "b2"):
        rows = rows_of(mapped / name / "tiles.csv")
        found = {(int(row["column"]), int(row["row"])): row["label"] for row in rows}
        assert found.keys() == truth.keys()
        assert np.mean([found[place] == label for place, label in truth.items()]) > 0.9, name


def test_stains_are_normalised_on_the_way_to_the_map(tiles: Path, model: Path, mapped: Path) -> None:
    """The same model without its reference answers otherwise: so `slide` and `predict` have applied it."""
    from patchgen.predict.predictor import load_predictor

    files = sorted((tiles / "images" / "site_b" / "b1").glob("*.png"))
    predictor = load_predictor(model)
    with_stain = {one.path.stem: one for one in predictor.predict(files)}
    for row in rows_of(mapped / "b1" / "tiles.csv"):
        if (same := with_stain.get(f"x{row['x']}_y{row['y']}")) is not None:
            np.testing.assert_allclose(same.probabilities[1], float(row["p_tumour"]), atol=2e-5)  # type: ignore[union-attr]
    predictor.stain = None
    without = [one.probabilities[1] for one in predictor.predict(files)]  # type: ignore[union-attr]
    assert np.abs(without - np.array([with_stain[p.stem].probabilities[1] for p in files])).max() > 0.01  # type: ignore[union-attr]


def test_a_row_per_slide_and_a_page_with_their_pictures(mapped: Path) -> None:
    rows = rows_of(mapped / "cohort.csv")
    assert [row["slide"] for row in rows] == ["a1.tif", "a2.tif", "b1.tif", "b2.tif"]
    for row in rows:
        tiles = rows_of(mapped / row["folder"] / "tiles.csv")
        tumour = np.array([float(tile["p_tumour"]) for tile in tiles])
        assert int(row["tiles"]) == len(tiles) == 48
        assert float(row["mean_p_tumour"]) == pytest.approx(tumour.mean(), abs=1e-5)
        assert float(row["share_tumour"]) == pytest.approx(np.mean([tile["label"] == "tumour" for tile in tiles]))
        assert float(row["tissue_mm2"]) == pytest.approx(48 * (TILE * 0.0005) ** 2, rel=0.02)
        assert row["label"] == ("tumour" if tumour.mean() > 0.5 else "stroma") and row["error"] == ""
    page = (mapped / "index.html").read_text()
    pictures = [unquote(html.unescape(source)) for source in re.findall(r'<img src="([^"]+)"', page)]
    assert {"a1/thumbnail.png", "b2/map_01_p_tumour.png"} <= set(pictures)
    assert all((mapped / picture).is_file() for picture in pictures) and "<script" not in page
    assert not (mapped / ".work").exists()


def test_finished_slides_are_not_read_again_and_a_broken_one_is_listed(
    cohort: Path, model: Path, mapped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    from patchgen.slides.slide import Slide

    def never(*_: Any) -> None:
        raise AssertionError("a finished slide is read")

    monkeypatch.setattr(Slide, "read", never)
    out = shutil.copytree(mapped, tmp_path / "again")
    (tmp_path / "bad<b>.svs").write_text("no slide")
    words = [str(cohort / "slides"), str(tmp_path / "bad<b>.svs"), "--out", str(out), "--tile", str(TILE)]
    assert main(["slide", str(model), *words, "--batch", "16"]) == 0
    assert "OpenSlide says" in rows_of(out / "cohort.csv")[-1]["error"]
    page = (out / "index.html").read_text()
    assert "bad&lt;b&gt;.svs" in page and "<b>.svs" not in page
    assert files_below(out / "a1") == files_below(mapped / "a1")
    assert main(["slide", str(model), *words, "--batch", "16", "--strict"]) == 1
    assert main(["slide", str(model), *words, "--min-tissue", "0.9"]) == 2
    assert "started with other settings (min_tissue 0.5, now 0.9)" in capsys.readouterr().err


# Several processes


def test_parts_of_predict_give_the_file_of_one_process(
    image_folder: Path, tiny_run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """In this process, with the engine's place taken."""
    from patchgen.commands import predict
    from patchgen.commands.options import EngineOptions
    from patchgen.sweep.launch import LauncherOptions, run_units

    images, parts = shutil.copytree(image_folder, tmp_path / "images"), list[int]()
    (images / "field" / "cross" / "05.png").write_text("broken")
    monkeypatch.setattr(predict, "PART", 20)  # of 90 images, in parts of two batches

    def here(self: EngineOptions, units: Any, work: Path, what: str, quiet: bool = False) -> dict[str, str]:
        parts.append(len(units))
        run_units(units, None, LauncherOptions(work), quiet=True)
        return {}

    monkeypatch.setattr(EngineOptions, "do_units", here)
    words = ["predict", str(tiny_run("lp-ln").path), str(images), "--batch", "8"]
    for name, more in (("one.csv", []), ("two.csv", ["--workers", "2"])):
        assert main([*words, "--csv", str(tmp_path / name), *more]) == 0
        assert "1 of 90 images could not be read" in capsys.readouterr().err
    assert (tmp_path / "two.csv").read_bytes() == (tmp_path / "one.csv").read_bytes() and parts == [6]
    assert main([*words, "--workers", "2"]) == 2
    assert "add --csv FILE" in capsys.readouterr().err


def kill_the_worker_of(claim: Path, killed: list[int], stop: threading.Event) -> None:
    """SIGKILL the process that holds the lock of a slide, once some of its tiles are predicted."""
    file = claim / "part" / "tiles.csv"
    while not stop.is_set() and not killed:
        time.sleep(0.02)
        if file.exists() and file.read_bytes().count(b"\n") > 3:
            for link in Path("/proc").glob("[0-9]*/fd/*"):
                with suppress(OSError):
                    if not killed and os.readlink(link) == str((claim / ".lock").resolve()):
                        killed.append(int(link.parts[2]))
                        os.kill(killed[0], signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="finds the process to kill through /proc")
@pytest.mark.parametrize("engine", ["local", "ray"])
def test_two_workers_one_of_them_killed_give_the_bytes_of_one_process(
    engine: str, cohort: Path, model: Path, tmp_path: Path
) -> None:
    if engine == "ray":
        pytest.importorskip("ray")
    words = [str(cohort / "slides"), "--tile", str(TILE), "--batch", "1", "--threads", "1"]
    assert main(["slide", str(model), *words, "--out", str(tmp_path / "one")]) == 0
    killed, stop = list[int](), threading.Event()
    killer = threading.Thread(target=kill_the_worker_of, args=(tmp_path / "two" / ".work" / "a1", killed, stop))
    killer.start()
    try:
        command = python("-m", "patchgen", "slide", str(model), *words, "--out", str(tmp_path / "two"),
                         "--engine", engine, "--workers", "2")  # fmt: skip
        done = subprocess.run(command, env=child_environment(), capture_output=True, text=True, timeout=500)
    finally:
        stop.set()
        killer.join()
    assert done.returncode == 0, done.stderr
    assert killed and files_below(tmp_path / "two") == files_below(tmp_path / "one")
