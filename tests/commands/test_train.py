"""`patchgen train` as a user calls it: what is printed where, and what a second call says."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from benchmarks.common import trained_step
from patchgen.ccd.settings import StreamConfig
from patchgen.cli import main
from patchgen.commands import fit
from patchgen.commands.settings import GROUPS, field_help, parse_settings
from patchgen.commands.train import parsed
from patchgen.config import Config
from patchgen.diagnose.cost import cost_lines, random_batch, step_peak
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
    whole, seen = FoldTrainer.take_step, []

    def breaks(self: FoldTrainer, step: int) -> None:
        seen.append(step)
        if seen == [0, 1, 2]:
            raise KeyboardInterrupt
        whole(self, step)

    monkeypatch.setattr(FoldTrainer, "take_step", breaks)
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


def help_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit):
        main([*words, "--help"])
    return re.sub(r"[\s│]+", " ", capsys.readouterr().out)


@pytest.mark.parametrize(("method", "preset"), [("lp-ln", "small"), ("patchgen-cls", "quick"), ("miro", "paper")])
def test_help_shows_the_values_that_the_command_would_use(
    method: str, preset: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--method", method, "--preset", preset, "--tau", "0.5"]
    config = vars(parsed(["photos", "--unseen", "a", *words])[1])
    shown = help_of(capsys, "train", *words)
    for name in ("lr", "lr_module", "steps", "tau", "image_size", "normalization"):
        if config[name] is not None:
            option = shown.partition(f" --{name.replace('_', '-')} ")[2].partition(" --")[0]
            assert re.search(rf"\((default: )?{config[name]}[,)]", option), (name, option)
    assert "(0.5, given)" in shown and f"(0.003, preset {preset}" in shown or preset == "paper"


def test_every_setting_of_a_fold_has_a_group_and_a_text() -> None:
    assert {name for names in GROUPS.values() for name in names} >= {f.name for f in dataclasses.fields(Config)}
    for kind in (Config, StreamConfig):
        assert field_help(kind).keys() == {f.name for f in dataclasses.fields(kind)}


def test_fit_has_no_options_of_other_tasks_and_reads_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = help_of(capsys, "fit")
    assert "--known" not in shown and "--task" not in shown and "--config" in shown and "(0.003, preset small" in shown
    file = tmp_path / "c.yaml"
    file.write_text("data: there\nunseen: a\nsteps: 7\nlr: 0.5\nmethod: lp\n")
    words = ["photos", "--out", "m", "--config", str(file), "--method", "lp-ln", "--lr", "0.25"]
    [config] = fit._configs(*parse_settings(fit.FitOptions, words))
    assert (config.data, config.method, config.steps, config.lr) == ("photos", "lp-ln", 7, 0.25)


def test_a_dry_run_says_what_a_run_costs(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    costs = []
    for batch in (2, 4):
        assert main([*words, "--dry-run", "--json", "--tune", "layernorm", "--batch-per-domain", str(batch)]) == 0
        costs.append(json.loads(capsys.readouterr().out))
    small, large = costs
    assert (small["images_per_step"], large["images_per_step"]) == (4, 8) and small["steps"] == 3
    assert large["bytes"] - small["bytes"] == pytest.approx(4 * small["bytes_per_image"])
    step = trained_step("lp", "tiny", 28, tune="layernorm")
    step(random_batch(3, 28))
    counted = sum(p.numel() * 4 for p in step.model.parameters()) + step_peak(step, random_batch(8, 28))
    assert large["bytes"] == pytest.approx(counted, rel=0.05)
    assert small["gflops_per_image"] == large["gflops_per_image"] > 0 and small["seconds"] > 0
    assert main([*words, "--dry-run"]) == 0
    assert "memory: " in capsys.readouterr().out and list(tmp_path.iterdir()) == []


def test_a_step_larger_than_the_card_is_warned_of() -> None:
    cost = {"images_per_step": 96, "steps": 5001, "seconds": 60.0, "seconds_per_image": 0.1, "gflops_per_image": 300.0,
            "precision": "32-true", "bytes_per_image": 255e6, "bytes": 24.5e9}  # fmt: skip
    assert "WARNING: this card has 16.0 GB" in cost_lines({**cost, "card_bytes": 16_000_000_000})[-1]
    assert not any("WARNING" in line for line in cost_lines({**cost, "card_bytes": 40_000_000_000}))
