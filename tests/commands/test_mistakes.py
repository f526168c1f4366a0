"""Mistakes in the words of every command: exit code 2, a message with the rule or the fix, and nothing is written."""

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from patchgen.cli import main
from patchgen.data.table import read_table
from patchgen.runs.folder import RunFolder

TRAIN = "train nowhere --unseen a"
STREAM = "train {images}/studio --task ccd --backbone tiny --image-size 28"
FIT = "fit {images} --runs {runs} --backbone tiny --image-size 56 --steps 3 --out"
COMPOSE = "oracle compose {images} --domain field --num-classes 3 --out {out}"
LABELS = "evaluate {run} {images} --resamples 100 --out {out}"
GROUP = "discover {run} {photos} --out {out}"
CASES = {
    # words, and what the parser says
    "doctr": "did you mean 'doctor'?",
    "weights fetsh": "did you mean 'fetch'?",
    "train": "DATA is missing",
    "train photos": "--unseen is missing",
    "train photos studio": "unexpected word 'studio'",
    "train photos --epochs 3": "no option --epochs; did you mean '--steps'?",
    "train photos --batch-size 3": "did you mean '--batch-per-domain'?",
    "train photos --stepz 1": "did you mean '--steps'?",
    "train photos --task ccd --steps 3": "no option --steps",
    f"{STREAM} --method promtccd": "did you mean 'promptccd'",
    f"{STREAM} --schedule papr": "did you mean 'paper'",
    f"{STREAM} --epochs 2 --warm-up 2": "--warm-up must be below",
    f"{TRAIN} --config a.yaml --preset paper": "--config and --preset exclude each other",
    # right numbers pass
    f"{TRAIN} --val-images None --steps=3 --lr 1e-3 --options a b --holdout 0.3": "patchgen train: No such data",
    "train {images} --unseen studio --out {here} --backbone vit_base_patch16_224": "did you mean 'timm:vit_base",
    "train {images} --unseen none --task mdg_gcd --backbone tiny --image-size 56": "--unseen must name one",
    # data
    "doctor ''": "patchgen doctor: a word of the command is empty",
    "train photos --unseen=": "a word of the command is empty",
    "doctor {images} --benchmark pasc": "did you mean 'pacs'?",
    "doctor --benchmark pacs": "are about DATA: give the folder too",
    "doctor --options crctp_fold Fold1": "are about DATA: give the folder too",
    "doctor {manifest} --splits {manifest}": "is the manifest itself",
    "doctor {images} --splits {here}": "must be a file that ends in .csv",
    "methods --needs texts": "--needs must be one of text, source-free, transductive, not 'texts'",
    "datasets domainet": "did you mean 'domainnet'?",
    "oracle write oracle-tny --out {out}": "did you mean 'oracle-tiny'",
    f"{COMPOSE} --correlation high,1,1": "--correlation must be numbers separated by commas, got 'high,1,1'",
    f"{COMPOSE} --per-class 3": "use --per-class 2",
    COMPOSE.replace("{out}", "{images}/composed") + " --per-class 1": "would be read as photographs next time",
    # trainings
    "compare {images} --seeds": "--seeds needs at least one whole number",
    "compare {images} --unseen studoi": "did you mean 'studio'",
    "compare {images} --methods lp patchgne": "unknown method 'patchgne'; did you mean 'patchgen'?",
    "compare {images} --methods lp patchgen@cls": "pool 'cls' does not fit method 'patchgen'",
    f"{FIT} {{out}} --unseen studo": "did you mean 'studio'",
    f"{FIT} {{images}}": "not empty and not a model folder",
    f"{FIT} /proc/model": "--out /proc/model cannot be written: in /proc nothing can be made",
    f"{FIT} {{out}} --minutes 0": "--minutes must be above 0",
    f"{FIT} {{out}} --select oracle": "leaves none out",
    f"{FIT} {{out}} --methods lp --method lp": "--method and --methods exclude each other",
    f"{FIT} {{out}} --methods lp lp-ln --no-expect": "name one, such as --method lp-ln",
    f"{FIT} {{out}} --hparams shrae 0.2": "none of the methods has it",
    f"{FIT} {{out}} --quick --preset paper": "--quick excludes --preset",
    "sweep": "give a recipe",
    "sweep engines-small --workers 0": "patchgen sweep: --workers must be at least 1, not 0",
    # models and images
    "predict {run}": "no image given",
    "predict {run} {photo} nowhere/x.png": "no image found: nowhere/x.png is no file",
    "predict {run} {photo} *.png": "no image found: *.png",
    "predict {run} {photo} {empty}": "no image found",
    "predict {images} {photo}": "not a run folder",
    "predict {run} {photo} --csv {here}": "--csv must be a file, not the folder",
    "predict {run} {photo} --csv {here}/no/file.csv": "does not exist; make it first",
    "predict {run} {photo} --csv /proc/x.csv": "--csv /proc/x.csv cannot be written: in /proc nothing can be made",
    "predict {run} {photo} --csv - --json": "exclude each other",
    "predict {run} {photo} --workers 2": "add --csv FILE",
    "explain {run} {photo} --out {file}": "--out must be a folder",
    "explain {run} {photo} --out {out} --colormap virdis": "did you mean 'viridis'",
    "explain {run} {photo} --out {out} --alpha 2": "from 0 to 1, not 2",
    "embed {run} {photo} --out {out}.csv": "ends in .parquet or .npz",
    "embed {here}/typo {photo} --out {out}.npz": "there is no model, run or encoder",
    "export {run} --out {here}": "ends in .onnx",
    "serve {empty}": "is no run folder",
    "serve {run} --port 70000": "--port must be at most 65535, not 70000",
    f"{LABELS} --positive crss": "--positive 'crss' is not a class of the model; did you mean 'cross'?",
    f"{LABELS} --sites stdio": "Unknown domain 'stdio'; did you mean 'studio'?",
    f"{LABELS} --resamples 5": "--resamples must be 0 (no intervals) or at least 100, not 5",
    "evaluate {run} {strange} --out {out}": "knows none of the data's classes (fox)",
    "evaluate {run} {broken} --out {out}": "none of the 1 labelled images can be read",
    "evaluate {run} {unlabelled} --out {out}": "has no labelled image",
    f"{GROUP} --new-classes 0": "--new-classes must be at least 1, not 0",
    f"{GROUP} --new-classes 12": "--new-classes 12 needs as many images, but 10 were found",
    f"{GROUP} --at-most 3 --new-classes 2": "choose one",
    f"{GROUP} --data nowhere": "give it with `--data`",
    "discover {run} {broken} --out {out}": "none of the 1 images could be read",
    "diagnose {run} --rankings masc": "no ranking is called 'masc'; did you mean 'mask'?",
    "diagnose {run} --images 1": "--images must be at least 2",
    "diagnose {run} --against {run}": "named twice",
    "theory --sizes 40": "1..36 patches, got 40",
}


@pytest.fixture(scope="module")
def shared(tiny_run: Callable[..., RunFolder], image_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict:
    here = tmp_path_factory.mktemp("mistakes")
    for folder in ("empty", "broken/cross", "strange/fox"):
        (here / folder).mkdir(parents=True)
    for name in ("file", "broken/cross/a.png", "strange/fox/a.png"):
        (here / name).write_bytes(b"nothing")
    (here / "unlabelled.csv").write_text("path,domain,label\nbroken/cross/a.png,x,\n")
    read_table(image_folder).to_csv(here / "manifest.csv")
    photos = image_folder / "studio" / "cross"
    places = {"run": tiny_run().path, "images": image_folder, "photos": photos, "photo": photos / "00.png"}
    return places | {path.stem: path for path in here.iterdir()}


@pytest.mark.parametrize("words", CASES)
def test_a_mistake_is_one_message(
    words: str, shared: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    places = {**shared, "here": tmp_path, "out": tmp_path / "out", "runs": tmp_path / "runs"}
    assert main(shlex.split(words.format(**places))) == 2
    printed = capsys.readouterr()
    assert CASES[words] in printed.err and "Traceback" not in printed.err and not printed.out
    assert list(tmp_path.iterdir()) == [] and shared["manifest"].stat().st_size > 1000


@pytest.mark.parametrize("words", ["train photos --steps x", "compare photos --lr-grid 1e-3 x"])
def test_the_parser_names_the_option(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(shlex.split(words))
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert words.split()[2] in error and "'x'" in error
