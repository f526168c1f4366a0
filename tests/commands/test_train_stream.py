"""`patchgen train DATA --task ccd`: the whole way through the command, and a user's mistakes."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from patchgen.cli import main
from patchgen.commands.train import parsed

TINY = [
    "--backbone", "tiny", "--image-size", "28", "--epochs", "2", "--warm-up", "1", "--refit-every", "1", "--batch", "6",
    "--projection-hidden", "16", "--projection-bottleneck", "8", "--projection-out", "16", "--holdout", "0.3",
    "--inits", "2", "--accelerator", "cpu",
]  # fmt: skip


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four classes of one colour each, and a schedule of one unlabelled stage."""
    root = tmp_path_factory.mktemp("command")
    rng = np.random.default_rng(0)
    for c in range(4):
        (root / "photos" / f"class {c}").mkdir(parents=True)
        for i in range(12):
            pixels = rng.integers(0, 80, (30, 30, 3)) + np.array([0, 0, 0])
            pixels[..., c % 3] += 60 + 40 * (c // 3)
            Image.fromarray(pixels.astype(np.uint8)).save(root / "photos" / f"class {c}" / f"{i:02d}.png")
    (root / "stages.yaml").write_text("groups: [0.5, 0.5]\nratios: [[0.7, 1.0], [1.0]]\n")
    return root


def words(stream: Path, out: Path, *more: str) -> list[str]:
    data = [str(stream / "photos"), "--task", "ccd", "--schedule", str(stream / "stages.yaml"), "--out", str(out)]
    return ["train", *data, *TINY, *more]


def test_from_folder_to_summary(stream: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words(stream, tmp_path, "--json", "--quiet")) == 0
    found = json.loads(capsys.readouterr().out)
    assert [r["stage"] for r in found["stage"]] == [0, 0, 1, 1] and len(found["average"]) == 2
    run = Path(found["run"])
    assert (run / "stage-1" / "assignments.csv").is_file() and list((run / "stage-1").glob("new-*.png"))
    assert main(words(stream, tmp_path)) == 0  # finished: nothing is done again
    printed = capsys.readouterr()
    assert printed.out.strip() == str(run) and "finished earlier" in printed.err and "| stage |" in printed.err
    assert main(["train", str(stream / "photos"), "--config", str(run / "config.yaml"), "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() == str(run)


def test_help_has_the_stream_s_own_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["train", "--task", "ccd", "--help"])
    printed = capsys.readouterr().out
    assert stop.value.code == 0 and "--schedule" in printed and "--unseen" not in printed


def test_the_settings_for_cub_do_not_depend_on_the_order_of_the_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("runs", "CUB_200_2011"):
        Path(folder).mkdir()
    for name in ("images.txt", "image_class_labels.txt"):
        Path("CUB_200_2011", name).touch()
    for preset, lr in (("paper", 0.05), ("small", 0.02)):
        words = ["--task", "ccd", "--out", "runs", "--preset", preset]
        for order in ([*words, "CUB_200_2011"], ["CUB_200_2011", *words]):
            found = vars(parsed(order)[1])
            assert (found["components"], found["lr"]) == ("half", lr)
        assert vars(parsed(["runs", *words[:2], "--out", "CUB_200_2011"])[1])["components"] == "known"
