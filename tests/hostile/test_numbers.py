"""Numbers in model folders and slides that would make nonsense, or end the process."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from forged import forge, write_empty_slide, write_slide

from patchgen.predict.model_folder import read_model

NUMBERS: dict[str, Any] = {
    "temperature": [0, float("nan"), float("inf"), 1e-30, None, "1", True],
    "unlike_threshold": [float("nan"), "x"],
    "std": [[0, 1, 1], [1, 1, float("nan")], [1, 1], 1, [1e-30, 1, 1]],
    "mean": [[float("inf"), 0, 0], ["a", 0, 0], None],
    "classes": [["a"], ["a", "a", "b"], ["a", "", "b"], [1, 2, 3], "abc"],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in NUMBERS.items() for value in values])
def test_numbers_that_make_nonsense_are_refused(name: str, value: Any, model_folder: Path) -> None:
    facts = json.loads((model_folder / "config.json").read_text())
    (facts["backbone"] if name in ("mean", "std") else facts)[name] = value
    (model_folder / "config.json").write_text(json.dumps(facts))
    with pytest.raises(ValueError, match=rf"config.json: (backbone: )?{name} must be"):
        read_model(model_folder)


def wide(path: Path, side: int) -> Path:
    """A slide that claims a tile size in every directory."""
    return forge(write_slide(path), (322, 323), lambda: side)


@pytest.fixture
def slides(tmp_path: Path) -> list[str]:
    pytest.importorskip("openslide")
    return [str(write_slide(tmp_path / f"{name}.tif")) for name in ("forged", "good")]


@pytest.mark.slow
def test_forged_slides_cost_a_sentence_each(
    fitted_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("openslide")
    from patchgen.cli import main
    from patchgen.slides import slide

    monkeypatch.setattr(slide, "SLIDE_SECONDS", 2.0)
    forged = [write_empty_slide(tmp_path / "endless.tif", 1_000_000), write_empty_slide(tmp_path / "slow.tif", 60_000),
              wide(tmp_path / "wide.tif", 1 << 20)]  # fmt: skip
    good = [write_slide(tmp_path / f"good-{i}.tif") for i in range(17)]
    assert forged[0].stat().st_size < 125_000
    words = [*map(str, [*forged, *good]), "--tile", "64", "--mpp", "0.5"]
    assert main(["slide", str(fitted_model), *words, "--out", f"{tmp_path}/out"]) == 0
    said = capsys.readouterr().err
    assert "3 of 20 slides could not be read" in said and "Traceback" not in said
    assert "endless.tif: it claims 1,000,000 x 1,000,000 pixels, 244,140,625 tiles, at most 1,000,000" in said
    assert "slow.tif: the area at x" in said and "more than 2 s in all" in said
    assert "wide.tif: openslide.level[0].tile-" in said
    assert all((tmp_path / "out" / path.stem / "tiles.csv").is_file() for path in good)


def test_a_crash_inside_openslide_costs_one_slide(
    slides: list[str], fitted_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    """Without the check of tile sizes OpenSlide aborts its process: that of the first slide alone."""
    from patchgen.cli import main
    from patchgen.slides import slide

    monkeypatch.setattr(slide, "MOST_TILE", 1 << 30)
    wide(Path(slides[0]), 1 << 20)
    words = [*slides, "--tile", "64", "--mpp", "0.5", "--out", str(tmp_path / "out")]
    assert main(["slide", str(fitted_model), *words]) == 0
    errors = capfd.readouterr().err
    assert "1 of 2 slides" in errors and "crash with exit code -6" in errors and "Traceback" not in errors
    assert (tmp_path / "out" / "good" / "tiles.csv").is_file()


@pytest.mark.slow
def test_a_reader_that_hangs_or_dies_is_one_unreadable_slide(slides: list[str]) -> None:
    from patchgen.slides.slide import UnreadableSlide, open_slide

    for number, reason in ((signal.SIGSTOP, "no answer within 1 s"), (signal.SIGSEGV, "a crash with exit code -11")):
        with open_slide(slides[1]) as slide:
            slide.child.seconds = 1
            assert slide.read((0, 0), (64, 64), (64, 64)).shape == (64, 64, 3)
            slide.child.process.send_signal(number)
            reason = rf"good.tif: the area at x 0, y 0 cannot be read: .*{reason}"
            for _ in range(2):
                with pytest.raises(UnreadableSlide, match=reason):
                    slide.read((0, 0), (64, 64), (64, 64))


def test_a_child_reads_the_same_pixels(slides: list[str]) -> None:
    import openslide

    from patchgen.slides.slide import open_slide

    with open_slide(slides[1]) as child, openslide.OpenSlide(slides[1]) as plain:
        assert (child.size, child.downsamples) == (plain.dimensions, plain.level_downsamples)
        assert child.properties == dict(plain.properties)
        for scale in (0.1, 0.99, 1.0, 1.5, 2.0, 2.02, 3.9, 4.0, 99.0):
            level = plain.get_best_level_for_downsample(scale)
            assert child.best_level(scale) == level
            for corner, size in (((90, 95), (70, 50)), ((-20, 550), (130, 130))):
                one, other = (slide.read_region(corner, level, size) for slide in (child, plain))
                assert one.mode == other.mode and one.tobytes() == other.tobytes()
