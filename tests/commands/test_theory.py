"""patchgen theory: tables, JSON, files and mistakes."""

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from patchgen.cli import main


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("theory") / "new"
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(["theory", "--sizes", "12", "36", "--images", "32", "--json", "--out", str(out)]) == 0
    assert json.loads(printed.getvalue()) == json.loads((out / "theory.json").read_text())
    return out


def test_files_are_complete(measured: Path) -> None:
    assert sorted(p.name for p in measured.iterdir()) == ["theory.json", "theory.md", "theory.png", "theory.svg"]
    found: dict[str, Any] = json.loads((measured / "theory.json").read_text())
    assert found["settings"] == {"sizes": [12, 36], "images": 32, "seed": 1} and found["run"] is None
    page = (measured / "theory.md").read_text()
    assert "None bounds the learned selector" in page and "## One assumption broken in each row" in page
    assert page.count("\n| ") == len(found["rows"]) + len(found["broken"]) + 4  # two heads and two rules
    assert (measured / "theory.svg").read_text().lstrip().startswith("<?xml")
    with Image.open(measured / "theory.png") as picture:
        assert picture.width > 1000


def test_table_has_verdicts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["theory", "--sizes", "12", "--images", "32"]) == 0
    text = capsys.readouterr().out
    assert "holds" in text and "violated" in text and "Prop. 3.2" in text and "none says" in text
