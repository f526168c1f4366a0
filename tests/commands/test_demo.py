"""The demo through its smoke mode: the whole path from drawing the images to the page."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from patchgen.cli import main
from patchgen.data.oracle import SUITE
from patchgen.runs.folder import RunFolder


@pytest.fixture(scope="module", autouse=True)
def small_suite() -> Iterator[None]:
    """Few images of each class, in a cache of their own name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SUITE, "oracle-shortcut", replace(SUITE["oracle-shortcut"], per_class=6))
        yield


@pytest.fixture(scope="module")
def shown(small_suite: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("demo")
    assert main(["demo", "--smoke", "--out", str(out)]) == 0
    return out


def test_the_page_is_whole_and_needs_nothing_from_outside(shown: Path) -> None:
    text = (shown / "index.html").read_text()
    images = re.findall("<img[^>]*>", text)
    assert len(images) == 9 and all(re.search('src="data:', tag) and re.search('alt="[^"]', tag) for tag in images)
    assert '<p class="warning"' in text and 'class="best"' not in text
    assert "SMOKE RUN" in text and "not annotations" in text
    for heading in ("Accuracy", "Does the mask matter?", "While training", "Next: your own images"):
        assert f"<h2>{heading}</h2>" in text


def test_the_numbers_are_those_of_the_runs(shown: Path) -> None:
    runs = [RunFolder.open(path) for path in (shown / "runs").iterdir()]
    assert {run.config.method for run in runs} == {"lp", "lp-ln", "patchgen", "patchgen-cls"}
    assert all(run.done for run in runs)
    text = (shown / "index.html").read_text()
    for run in runs:
        [test] = run.records("test")
        assert f">{100 * test['all']['accuracy']:.1f}</td>" in text
        if run.config.method.startswith("patchgen"):
            assert {"auroc", "iou", "error", "kept"} <= set(test["mask"])
            for name in ("auroc", "untrained_auroc", "iou", "untrained_iou"):
                assert f">{test['mask'][name]:.2f}</td>" in text
            for line in ("true_mask", "random_mask"):
                assert f"<td>{100 * test[line]['accuracy']:.1f}</td>" in text


def test_again_it_shows_the_same_at_once(shown: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (shown / "index.html").read_text()
    assert main(["demo", "--smoke", "--out", str(shown)]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == str(shown / "index.html")
    assert "| patchgen-cls " in out and "mean nothing" in out
    assert (shown / "index.html").read_text() == before


def test_the_true_mask_is_for_known_truth_and_still_images(image_folder: Path, tmp_path: Path) -> None:
    words = ["--method", "patchgen-true-mask", "--backbone", "tiny", "--image-size", "56", "--steps", "2", "--quiet"]
    common = ["--batch-per-domain", "2", "--val-images", "4", "--out", str(tmp_path)]
    assert main(["train", str(image_folder), "--unseen", "studio", *words, *common, "--no-augment"]) == 2
    assert main(["train", "oracle-shortcut", "--unseen", "mist", *words, *common]) == 2
    assert main(["train", "oracle-shortcut", "--unseen", "mist", *words, *common, "--no-augment"]) == 0
    [run] = [r for path in tmp_path.iterdir() if (r := RunFolder(path)).done]
    [test] = run.records("test")
    assert test["mask"]["auroc"] == 1 and test["mask"]["error"] == 0 and "true_mask" not in test
