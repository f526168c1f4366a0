"""`patchgen train` as a user calls it: what is printed where, and what a second call says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from patchgen.cli import main
from patchgen.commands.train import parsed
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
    found = [parsed(sum(options[i:] + options[:i], []))[1] for i in range(len(options))]
    released = {"miro": 0.01, "shift": 0.01, "domain": 0.01, "lr_mult": 25.0}
    assert vars(found[0])["hparams"] == released and all(each == found[0] for each in found)
    changed = parsed([*sum(options, []), "--hparams", "shift", "0.5"])[1]
    assert vars(changed)["hparams"] == {**released, "shift": 0.5}
    assert vars(parsed(["runs", *sum(options[:-1], [])])[1])["hparams"] == {}


def test_the_last_of_two_methods_has_its_own_rates() -> None:
    twice = parsed(["photos", "--unseen", "a", "--method", "lp", "--method", "patchgen"])[1]
    assert twice == parsed(["photos", "--unseen", "a", "--method", "patchgen"])[1] and twice.lr_module == 1e-3


def test_help_shows_words_that_a_person_would_give(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    shown = capsys.readouterr().out
    assert " DATA " in shown.splitlines()[0] + " " and "STR" not in shown.splitlines()[0].split("DATA")[0]
    assert "None" not in shown and "--steps INT" in shown


@pytest.mark.parametrize(
    ("option", "value", "rule"), [("--steps", "many", "a whole number"), ("--lr", "fast", "a number")]
)
def test_a_word_that_is_no_number_is_named(
    words: list[str], option: str, value: str, rule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for given in ([option, value], [f"{option}={value}"]):
        assert main([*words, *given]) == 2
        assert f"{option} must be {rule}, got {value!r}" in capsys.readouterr().err
