"""Mistakes in the words of every command: exit code 2, a message with the rule or the fix, and nothing is written."""

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from patchgen.cli import main
from patchgen.data.table import read_table
from patchgen.runs.folder import RunFolder

TRAIN = "train nowhere --unseen a"
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
    "train photos --gpus 1": "did you mean '--devices'?",
    "train photos --output x": "did you mean '--out'?",
    "train photos --stepz 1": "did you mean '--steps'?",
    "train photos --task ccd --steps 3": "no option --steps",
    f"{TRAIN} --val-images x": "patchgen train: --val-images must be a whole number, got 'x'",
    f"{TRAIN} --val_images=x": "patchgen train: --val-images must be a whole number, got 'x'",
    f"{TRAIN} --steps 2.5": "--steps must be a whole number, got '2.5'",
    f"{TRAIN} --lr fast": "--lr must be a number, got 'fast'",
    f"{TRAIN} --val-images 0": "--val-images must be at least 1, not 0",
    f"{TRAIN} --batch-per-domain 12 --devices 5": "--batch-per-domain 12 must be divisible by devices = 5",
    f"{TRAIN} --config a.yaml --preset paper": "--config and --preset exclude each other",
    # right numbers pass
    f"{TRAIN} --val-images None --steps=3 --lr 1e-3 --options a b --holdout 0.3": "patchgen train: No such data",
    "train {images} --unseen studio --out {here} --backbone vit_base_patch16_224": "did you mean 'timm:vit_base",
    "train {images} --unseen none --task mdg_gcd --backbone tiny --image-size 56": "--unseen must name one",
    # data
    "doctor ''": "patchgen doctor: DATA is empty",
    "doctor ' '": "DATA is empty",
    "doctor '' --splits s.csv": "DATA is empty",
    "train '' --unseen a": "DATA is empty",
    "compare ''": "DATA is empty",
    "evaluate {run} ''": "DATA is empty",
    "oracle compose '' --out {out}": "DATA is empty",
    "doctor {images} --benchmark pasc": "did you mean 'pacs'?",
    "doctor --benchmark pacs": "--benchmark says how DATA is read",
    "doctor --options crctp_fold Fold1": "--options says how DATA is read",
    "doctor {manifest} --splits {manifest}": "is the manifest itself",
    "doctor {images} --splits {here}": "must be a file that ends in .csv",
    "doctor {images} --splits {out}.csv --split group": "needs groups",
    "doctor {here}/nowhere --splits {out}.csv": "No such data",
    "doctor {images} --splits {out}.csv --holdout 2": "between 0 and 1",
    "doctor {images} --splits {out}.csv --benchmark vlsc": "did you mean 'vlcs'",
    "weights fetch registri": "did you mean 'registry'?",
    "datasets domainet": "did you mean 'domainnet'?",
    "oracle write oracle-tny --out {out}": "did you mean 'oracle-tiny'",
    f"{COMPOSE} --correlation high,1,1": "--correlation must be numbers separated by commas, got 'high,1,1'",
    f"{COMPOSE} --correlation 2,1,1": "--correlation must be three shares in [0,1]",
    f"{COMPOSE} --object 20": "--object must be 32..84, got 20",
    f"{COMPOSE} --per-class 3": "use --per-class 2",
    COMPOSE.replace("{out}", "{images}/composed") + " --per-class 1": "would be read as photographs next time",
    # trainings
    "compare {images} --methods": "--methods needs at least one name",
    "compare {images} --seeds": "--seeds needs at least one whole number",
    "compare {images} --lr-grid 1e-3 x": "--lr-grid must be a number, got 'x'",
    "compare {images} --unseen studoi": "did you mean 'studio'",
    "compare {images} --folds none": "'none' is not a domain",
    "doctor {images} --splits {out}.csv --options crctp_fol Fold1": "belong to a benchmark",
    "compare {images} --methods lp lp-ln@maen": "'maen' is neither a pool nor a tuning mode (cls, mean,",
    "compare {images} --methods lp patchgne": "unknown method 'patchgne'; did you mean 'patchgen'?",
    "compare {images} --methods lp patchgen@cls": "pool 'cls' does not fit method 'patchgen'",
    f"{FIT} {{out}} --unseen studo": "did you mean 'studio'",
    f"{FIT} {{images}}": "not empty and not a model folder",
    f"{FIT} ' '": "--out is empty",
    f"{FIT} /proc/model": "--out /proc/model cannot be written: in /proc nothing can be made",
    f"{FIT} {{out}} --steps 0": "--steps must be at least 1",
    f"{FIT} {{out}} --minutes 0": "--minutes must be above 0",
    f"{FIT} {{out}} --select oracle": "leaves none out",
    f"{FIT} {{out}} --method lp-nl": "did you mean 'lp-ln'",
    f"{FIT} {{out}} --methods lp lp-nl": "did you mean 'lp-ln'",
    f"{FIT} {{out}} --methods lp --method lp": "--method and --methods exclude each other",
    f"{FIT} {{out}} --methods lp lp-ln --no-expect": "name one method, such as --method lp-ln",
    f"{FIT} {{out}} --hparams shrae 0.2": "none of the methods has it",
    f"{FIT} {{out}} --image-size 100": "patch size 14 of 'tiny', got 100x100; nearest valid: 98 or 112",
    f"{FIT} {{out}} --quick --preset paper": "--quick excludes --preset",
    "sweep": "give a recipe",
    "sweep engine-small --dry-run": "did you mean 'engines-small'?",
    "sweep engines-small --workers 0": "patchgen sweep: --workers must be at least 1, not 0",
    "sweep engines-small --retries -1": "--retries must be at least 0, not -1",
    # models and images
    "predict {run}": "no image given",
    "predict {run} {photo} nowhere/x.png": "no image found: nowhere/x.png does not exist",
    "predict {run} {photo} *.png": "pattern *.png",
    "predict {run} {photo} {empty}": "no image found: the folder",
    "predict {run} {photo} ' '": "a word is empty",
    "predict {images} {photo}": "not a run folder",
    "predict {run} {photo} --csv {here}": "--csv must be a file, not the folder",
    "predict {run} {photo} --csv {here}/no/file.csv": "does not exist; make it first",
    "predict {run} {photo} --csv /proc/x.csv": "--csv /proc/x.csv cannot be written: in /proc nothing can be made",
    "predict {run} {photo} --csv - --json": "exclude each other",
    "predict {run} {photo} --batch 0": "--batch must be at least 1, not 0",
    "predict {run} {photo} --workers 2": "add --csv FILE",
    "explain {images} {photo} --out {out}": "not a run folder",
    "explain {run} {photo} --out {file}": "--out must be a folder",
    "explain {run} {photo} --out /proc/maps": "--out /proc/maps cannot be written",
    "explain {run} {photo} --out {out} --colormap virdis": "did you mean 'viridis'",
    "explain {run} {photo} --out {out} --alpha 2": "from 0 to 1, not 2",
    "embed {run} {photo} --out /proc/x.npz": "--out /proc/x.npz cannot be written",
    "embed {run} {photo} --out {out}.csv": "ends in .parquet or .npz",
    "embed {here}/typo {photo} --out {out}.npz": "there is no model, run or encoder",
    "export {run} --out {here}": "ends in .onnx",
    "export {run} --out /proc/x.onnx": "--out /proc/x.onnx cannot be written",
    "export {run} --out {out}.onnx --count 0": "--count must be at least 1",
    "export {run} --out {out}.onnx --images nowhere.png": "no image found",
    "serve ''": "patchgen serve: '' is no run folder",
    "serve {empty}": "is no run folder",
    f"{LABELS} --positive crss": "--positive 'crss' is not a class of the model; did you mean 'cross'?",
    f"{LABELS} --sites stdio": "Unknown domain 'stdio'; did you mean 'studio'?",
    f"{LABELS} --resamples 5": "--resamples must be 0 (no intervals) or at least 100, not 5",
    "evaluate {run} {images} --out /proc/scores": "--out /proc/scores cannot be written",
    f"{LABELS} --wrong -1": "--wrong must be at least 0, not -1",
    "evaluate {run} {images} --out {file}": "--out must be a folder",
    "evaluate {run} {strange} --out {out}": "knows none of the data's classes (fox)",
    "evaluate {run} {broken} --out {out}": "none of the 1 labelled images can be read",
    "evaluate {run} {unlabelled} --out {out}": "has no labelled image",
    f"{GROUP} --new-classes 0": "--new-classes must be at least 1, not 0",
    f"{GROUP} --new-classes 12": "--new-classes 12 needs as many images, but 10 were found",
    f"{GROUP} --at-most 0": "--at-most must be at least 1",
    f"{GROUP} --at-most 3 --new-classes 2": "choose one",
    f"{GROUP} --data ''": "DATA is empty",
    f"{GROUP} --data nowhere": "give it with `--data`",
    "discover {run} {photos} --out {file}": "--out must be a folder",
    "discover {run} {broken} --out {out}": "none of the 1 images could be read",
    "diagnose {run} --rankings masc": "no ranking is called 'masc'; did you mean 'mask'?",
    "diagnose {run} --operators blurr": "--operators has no 'blurr'",
    "diagnose {run} --images 1": "--images must be at least 2",
    "diagnose {run} --steps 99": "--steps must be at most the 16 patches",
    "diagnose {run} --against nowhere": "nowhere is not a run folder",
    "diagnose {run} --against {run}": "named twice",
    "diagnose {run} --data nowhere": "No such data",
    "theory --sizes 40": "1..36 patches, got 40",
    "theory --images 3": "at least 32",
    "theory --run nowhere": "is not a run folder",
    "theory --out {file}": "--out must be a folder",
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
