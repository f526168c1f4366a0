"""patchgen oracle: the list, writing a set, composing one of photographs, and mistakes."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from patchgen.commands import run
from patchgen.data.oracle import SUITE, Oracle
from patchgen.data.table import read_table

main = partial(run, "oracle")


def test_list_names_every_set(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in SUITE) and "36 of 36" in text and "mist 0.05 (turned)" in text


def test_list_as_json_is_the_whole_spec(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert list(facts) == list(SUITE)
    assert facts["oracle-tiny"]["predictive"] == 1 and facts["oracle-unknown"]["held_out"] == 3
    assert facts["oracle-shortcut"]["domains"][0] == {
        "name": "amber", "correlation": 0.99, "style": 0.6, "turned": False
    }  # fmt: skip


@pytest.mark.parametrize("seed", [None, 101])
def test_write_prints_the_images_folder(
    seed: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = replace(SUITE["oracle-tiny"], per_class=1)
    monkeypatch.setitem(SUITE, "oracle-tiny", spec)
    more = ["--seed", str(seed)] if seed else []  # other images of the same kind
    for _ in range(2):  # the second time it is there already
        assert main(["write", "oracle-tiny", "--out", str(tmp_path / "set"), "--quiet", *more]) == 0
        assert capsys.readouterr().out == f"{tmp_path / 'set' / 'images'}\n"
    drawn = Oracle(replace(spec, seed=seed or spec.seed))
    assert len(read_table(tmp_path / "set" / "images")) == len(drawn) == 16
    assert json.loads((tmp_path / "set" / "oracle.json").read_text())["digest"] == drawn.digest()


def test_compose_prints_the_images_folder(
    image_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--domain", "field", "--classes", "round=circle|cross, square", "--per-class", "2"]
    for _ in range(2):  # the second time it is there already
        more = ["--correlation", "1,1,0.5", "--object", "40", "--out", str(tmp_path / "set"), "--quiet"]
        assert main(["compose", str(image_folder), *words, *more]) == 0
        assert capsys.readouterr().out == f"{tmp_path / 'set' / 'images'}\n"
    table = read_table(tmp_path / "set" / "images")
    assert len(table) == 16 and table.classes == ("round", "square")
    spec = json.loads((tmp_path / "set" / "oracle.json").read_text())["spec"]
    assert spec["object_size"] == 40 and [d["correlation"] for d in spec["domains"]] == [1, 1, 0.5, 0.5]
