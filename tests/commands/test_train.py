"""`patchgen train` as a user calls it: what is printed where, and what a second call says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from patchgen.cli import main
from patchgen.commands.train import defaults
from patchgen.runs.folder import RunFolder
from patchgen.train.fold import FoldTrainer

SMALL = "--unseen studio --method lp --backbone tiny --image-size 28 --steps 3 --eval-every 1 --batch-per-domain 2"


@pytest.fixture
def words(image_folder: Path, tmp_path: Path) -> list[str]:
    return ["train", str(image_folder), *SMALL.split(), "--val-images", "3", "--threads", "1", "--out", str(tmp_path)]


def test_json_is_the_whole_of_stdout(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    [folder] = tmp_path.iterdir()
    assert found == {"run": str(folder), "tests": RunFolder.open(folder).records("test")}
    assert [record["checkpoint"] for record in found["tests"]] == ["selected"]


def test_a_finished_run_is_not_trained_again_and_says_so(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 0
    first = capsys.readouterr()
    [folder] = tmp_path.iterdir()
    assert first.out == f"{folder}\n" and "finished earlier" not in first.err and "validation accuracy" in first.err
    assert main(words) == 0
    second = capsys.readouterr()
    assert second.out == first.out and "finished earlier: nothing to do\n" in second.err
    assert main([*words, "--quiet"]) == 0
    assert capsys.readouterr() == (first.out, "")


def test_an_interrupted_run_says_where_it_goes_on(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, seen = FoldTrainer._step, []

    def breaks(self: FoldTrainer, step: int) -> None:
        seen.append(step)
        if seen == [0, 1, 2]:
            raise KeyboardInterrupt
        whole(self, step)

    monkeypatch.setattr(FoldTrainer, "_step", breaks)
    assert main(words) == 130
    assert "resumed" not in capsys.readouterr().err
    assert main(words) == 0
    said = capsys.readouterr().err
    assert "resumed at step 2" in said and "finished earlier" not in said and seen == [0, 1, 2, 2]


def test_the_published_settings_do_not_depend_on_the_order_of_the_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that is the value of another option is not the data."""
    monkeypatch.chdir(tmp_path)
    for folder in ("runs", "PACS/photo/dog", "PACS/sketch/dog"):
        Path(folder).mkdir(parents=True)
    options = [["--out", "runs"], ["--unseen", "photo"], ["--method", "gmdg"], ["--backbone", "resnet50"],
               ["--preset", "paper"], ["--threads=1"], ["PACS"]]  # fmt: skip
    found = [defaults(sum(options[i:] + options[:i], [])) for i in range(len(options))]
    assert found[0]["hparams"] == {"miro": 0.01, "shift": 0.01, "domain": 0.01, "lr_mult": 25.0}  # the release's
    assert all(each == found[0] for each in found)
    assert "hparams" not in defaults(["runs", *sum(options[:-1], [])])
    assert "hparams" not in defaults(["--preset", "paper", "--help"])
