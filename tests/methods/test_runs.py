"""Runs of methods with terms or a state of their own: interrupted and resumed, and with the terms that they log."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from patchgen.cli import main
from patchgen.config import Config
from patchgen.methods import METHODS, method_class
from patchgen.model.patchgen import PatchGen
from patchgen.predict.predictor import load_run
from patchgen.train.fold import FoldTrainer
from patchgen.train.lifecycle import train
from tests.conftest import interrupt

PENALTY, AVERAGE, ANNEAL = {"penalty": 0.1}, {"ema": 0.5}, {"anneal": 0.6}  # ANNEAL: changes at step 3, the resumed one
INTERRUPTED: list[tuple[str, dict[str, float]]] = [
    ("dann", PENALTY), ("patchgen+cdann", PENALTY), ("arm", {}), ("sma", {"sma_start": 0.3}), ("gestur", {}),
    ("gmdg", {}), ("irm", ANNEAL), ("vrex", ANNEAL), ("groupdro", {}), ("patchgen+mdsdi", {}), ("mixup", {}),
    ("mldg", {}), ("fish", {}), ("patchgen+mtl", AVERAGE), ("patchgen+selfreg", {}), ("sagnet", {}),
    ("patchgen+mixstyle", {}), ("lp-ln+balance", {}), ("patchgen-select", {}), ("patchgen-attend", {}),
    ("kadaptation", {}), ("kadaptation-moa", {}), ("clip", {}),
    ("coop", {}), ("coop+sma", {}),
    ("duprg", {"sentence_steps": 5}), ("dpl", {"context": 3, "width": 16}), ("clipood", {}),
]  # fmt: skip


@pytest.mark.parametrize(("method", "hparams"), INTERRUPTED)
def test_an_interrupted_run_gives_the_same_numbers(
    method: str, hparams: dict[str, float], tiny_settings: dict[str, Any], tiny_run: Callable[..., Any],
    tmp_path: Path, clip_folder: Path,
) -> None:  # fmt: skip
    """Stopped between two evaluations, after the state of step 2 and one more step, it goes on to the end."""
    settings: dict[str, Any] = {"method": method, "hparams": hparams}
    if "text" in method_class(method).needs:  # cached features, if it has any
        settings |= {"backbone": str(clip_folder), "augment": method in ("clip", "clipood")}
    config = Config(**{**tiny_settings, **settings})
    interrupt(FoldTrainer, "take_step", 5, lambda: train(config, tmp_path, quiet=True))
    run, whole = train(config, tmp_path, quiet=True), tiny_run(**settings)
    plain, wanted = ([record | {"seconds": 0} for record in one.records()] for one in (run, whole))
    assert plain == wanted
    for name in ("selected", "swad"):
        assert run.checkpoint(name).read_bytes() == whole.checkpoint(name).read_bytes()


SHORT: dict[str, dict[str, float]] = {  # the same methods in seconds, on a CLIP that is 48 wide
    "duprg": {"sentence_steps": 5}, "promptstyler": {"styles": 2, "style_steps": 2, "epochs": 2},
    "dpl": {"context": 3, "width": 16}, "kadaptation": {"rules": 16}, "kadaptation-moa": {"rules": 16},
}  # fmt: skip


@pytest.mark.parametrize("method", [*SHORT, "clipood", "clipceil", "bfmix-like"])
def test_methods_on_clip_train_and_predict_from_the_command_line(
    method: str, clip_folder: Path, image_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = shutil.copytree(clip_folder, tmp_path / "clip")
    settings = {
        "--unseen": "studio", "--method": method, "--backbone": place, "--out": tmp_path / "runs", "--image-size": 56,
        "--steps": 3, "--eval-every": 2, "--batch-per-domain": 4, "--val-images": 3,
    }  # fmt: skip
    words = [str(word) for item in settings.items() for word in item]
    if method in SHORT:
        words += ["--hparams", *(str(word) for item in SHORT[method].items() for word in item)]
    assert main(["train", str(image_folder), *words, "--quiet"]) == 0
    run = Path(capsys.readouterr().out.strip().splitlines()[-1])
    if getattr(METHODS[method], "self_contained", False):
        for file in place.glob("tokenizer*"):
            file.unlink()  # the text tower cannot be used any more, and need not
    found = list(load_run(run).predict(sorted(image_folder.rglob("studio/*/00.png"))))
    assert len({tuple(p.probabilities) for p in found}) == 3
    assert main(["predict", str(run), str(image_folder / "studio" / "cross"), "--csv", str(tmp_path / "p.csv")]) == 0
    assert len((tmp_path / "p.csv").read_text().splitlines()) == 11


@pytest.mark.parametrize(
    ("method", "part"),
    [*((f"ablation-{row}", "select") for row in ("static", "channel", "attention")), ("patchgen+mdsdi", "head")],
)
def test_a_model_with_parts_of_its_own_predicts_what_its_run_recorded(
    method: str, part: str, tiny_run: Callable[..., Any], image_folder: Path
) -> None:
    run = tiny_run(method, steps=3)
    predictor = load_run(run.path)
    assert type(getattr(predictor.model, part)) not in (nn.Linear, PatchGen)
    paths = sorted((image_folder / "studio").rglob("*.png"))
    right = [found.label == path.parent.name for found, path in zip(predictor.predict(paths), paths, strict=True)]
    test = next(record for record in run.records("test") if record["checkpoint"] == "selected")
    assert sum(right) / len(right) == pytest.approx(test["all"]["accuracy"])
    assert predictor.explain(paths[0]).mask.shape == (4, 4)


PATCHGEN = {"L_ms", "L_conf", "L_sim"}
GMDG = {"L_miro", "L_label", "L_shift", "L_domain"}
HIDDEN = {"task": "mdg_gcd"}
TRAINED: list[tuple[str, dict[str, Any], set[str]]] = [
    ("patchgen+gmdg", {"precision": "bf16-mixed"}, GMDG), ("gmdg", HIDDEN, GMDG),
    ("patchgen+pim", HIDDEN, {"L_pim", "L_marginal"}), ("patchgen+pim-lreg", HIDDEN, {"L_pseudo", "L_error"}),
    ("patchgen-select+entropy", HIDDEN, {"L_marginal", "expert", "contradiction"}),
    ("patchgen+rsc", {"dropout": 0.1}, PATCHGEN), ("patchgen+mixup", {}, PATCHGEN),
]  # fmt: skip


@pytest.mark.parametrize(("method", "settings", "terms"), TRAINED)
def test_a_run_logs_its_terms(
    method: str, settings: dict[str, Any], terms: set[str], tiny_run: Callable[..., Any]
) -> None:
    values = tiny_run(method, steps=3, **settings).records("evaluation")[-1]["train"]
    assert {"main"} | terms <= values.keys()
    assert all(values[term] != 0 for term in terms - {"L_ms"})  # L_ms is 0 where no entry of the mask is weak
