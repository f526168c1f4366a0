"""What a map says of itself."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from patchgen.cli import main
from patchgen.draw.overlay import Explanation, mask_reading


@pytest.mark.parametrize(
    ("mask", "text"),
    [
        (np.full((6, 6), 0.98), "36 of 36 patches selected: no selection to read (spread 0.000)"),
        (np.zeros((2, 2)), "0 of 4 patches selected: no selection to read (spread 0.000)"),
        (np.array([[0.5, 0.1], [0.9, 0.1]]), "2 of 4 patches selected, spread 0.332"),
    ],
)
def test_a_map_without_a_selection_says_so(mask: np.ndarray, text: str) -> None:
    assert mask_reading(mask) == text
    explanation = Explanation(None, np.zeros((56, 56, 3), np.uint8), mask.astype(np.float32), (("cat", 0.9),))
    assert explanation.reading == text


def test_explain_counts_such_maps(
    tiny_run: object,
    image_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from patchgen.predict.predictor import Predictor

    def flat(self: Predictor, image: Path, *_: object) -> Explanation:
        return Explanation(image, np.zeros((56, 56, 3), np.uint8), np.ones((4, 4), np.float32), (("cat", 0.9),))

    monkeypatch.setattr(Predictor, "explain", flat)
    run = str(tiny_run().path)  # type: ignore[operator]
    image = str(image_folder / "field/cross/00.png")
    assert main(["explain", run, image, "--out", str(tmp_path / "maps")]) == 0
    assert "1 of 1 maps select every patch, or none: no selection to read in them" in capsys.readouterr().err
    [entry] = json.loads((tmp_path / "maps/index.json").read_text())["images"]
    assert entry["reading"] == "16 of 16 patches selected: no selection to read (spread 0.000)"
    assert "16 of 16 patches selected" in (tmp_path / "maps/index.html").read_text()
