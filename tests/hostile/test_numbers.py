"""Numbers in model folders and slides that would make nonsense, or end the process."""

from __future__ import annotations

import json
import struct
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from patchgen.common.children import child_environment, python
from patchgen.predict.model_folder import read_model

NUMBERS: dict[str, Any] = {
    "temperature": [0, -1.0, float("nan"), float("inf"), 1e-30, None, "1", True, [1]],
    "unlike_threshold": [float("nan"), float("inf"), "x", [1]],
    "std": [[0, 1, 1], [1, -1, 1], [1, 1, float("nan")], [1, 1], 1, None, [1e-30, 1, 1]],
    "mean": [[float("inf"), 0, 0], ["a", 0, 0], [], None],
    "classes": [[], ["a"], ["a", "a", "b"], ["a", "", "b"], [1, 2, 3], "abc", None],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in NUMBERS.items() for value in values])
def test_numbers_that_make_nonsense_are_refused(name: str, value: Any, model_folder: Path) -> None:
    facts = json.loads((model_folder / "config.json").read_text())
    (facts["backbone"] if name in ("mean", "std") else facts)[name] = value
    (model_folder / "config.json").write_text(json.dumps(facts))
    with pytest.raises(ValueError, match=rf"config.json: (backbone\.)?{name} must be"):
        read_model(model_folder)


def forge(path: Path, side: int) -> None:
    """Claim a tile size in every directory of a TIFF."""
    data = bytearray(path.read_bytes())
    offset = struct.unpack_from("<I", data, 4)[0]
    while offset:
        count = struct.unpack_from("<H", data, offset)[0]
        for entry in range(offset + 2, offset + 2 + 12 * count, 12):
            if struct.unpack_from("<H", data, entry)[0] in (322, 323):  # TileWidth, TileLength
                struct.pack_into("<I", data, entry + 8, side)
        offset = struct.unpack_from("<I", data, offset + 2 + 12 * count)[0]
    path.write_bytes(data)


@pytest.mark.parametrize("side", [1 << 15, 1 << 20, 1 << 24])
def test_a_forged_slide_does_not_lose_the_good_one_after_it(side: int, fitted_model: Path, tmp_path: Path) -> None:
    pytest.importorskip("openslide")
    from patchgen.slides.pyramid import write_pyramid

    pixels = np.full((600, 600, 3), 244, np.uint8)
    pixels[100:500, 100:500] = np.random.default_rng(0).integers(90, 190, (400, 400, 3))
    for name in ("forged", "good"):
        write_pyramid(tmp_path / f"{name}.tif", pixels, (0.5, 0.5))
    forge(tmp_path / "forged.tif", side)
    words = ["slide", str(fitted_model), str(tmp_path / "forged.tif"), str(tmp_path / "good.tif"), "--tile", "64",
             "--out", str(tmp_path / "out")]  # fmt: skip
    done = subprocess.run(python("-m", "patchgen", *words), env=child_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "forged.tif: openslide.level[0].tile-" in done.stderr and "damaged or forged" in done.stderr
    assert (tmp_path / "out" / "good" / "tiles.csv").is_file() and "Traceback" not in done.stderr
