"""Settings of a stream run: checked, hashed, written and read back."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from patchgen.ccd.settings import SMALL, StreamConfig, stream_preset
from patchgen.runs.folder import run_name


def test_the_hash_names_what_decides_the_numbers() -> None:
    config = StreamConfig("birds")
    for same in ({"data": "elsewhere"}, {"threads": 1}, {"cache": False}, {"schedule": "other.yaml"}):
        assert run_name(replace(config, **same), "rows") == run_name(config, "rows")
    for other in ({"seed": 2}, {"method": "gcd"}, {"components": "half"}, {"lr_module": 0.1}):
        assert run_name(replace(config, **other), "rows") != run_name(config, "rows")
    assert run_name(config, "rows") != run_name(config, "other rows")


@pytest.mark.parametrize(("settings", "text"), [
    ({"warm_up": 200}, "warm_up must be below epochs = 200"),
    ({"components": "halve"}, "did you mean 'half'"),
    ({"batch": 1}, "batch must be at least 2"),
    ({"holdout": 1.0}, "holdout must be below 1"),
    ({"task": "mdg"}, "task must be ccd"),
])  # fmt: skip
def test_bad_settings(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        StreamConfig("birds", **settings)


def test_presets_know_the_host_s_settings_for_cub(tmp_path: Path) -> None:
    cub = tmp_path / "CUB_200_2011"
    cub.mkdir()
    for name in ("images.txt", "image_class_labels.txt", "train_test_split.txt", "classes.txt"):
        (cub / name).touch()
    (cub / "images").mkdir()
    assert StreamConfig("x", **stream_preset("paper", "")).lr == 0.1
    found = StreamConfig("x", **stream_preset("paper", str(cub)))
    assert (found.lr, found.components, found.epochs, found.warm_up) == (0.05, "half", 200, 30)
    assert found.keep_aspect and found.inits == 100  # the host's pixels and its starts of k-means
    small = StreamConfig("x", **stream_preset("small", str(cub)))
    assert not small.keep_aspect and "keep_aspect" not in small.hashed()  # earlier runs keep their names
    assert small.components == "half" and small.warm_up < small.epochs and small.lr == SMALL["lr"]
