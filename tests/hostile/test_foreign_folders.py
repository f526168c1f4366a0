"""Run and model folders of others: no link is followed, and files may change under a model that is in use."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from patchgen.cli import main
from patchgen.config import Config
from patchgen.predict.model_folder import read_model
from patchgen.predict.predictor import load_predictor
from patchgen.runs.folder import RunFolder
from patchgen.train.lifecycle import train


@pytest.mark.parametrize(
    "name", [".lock", "records.jsonl", "config.yaml", "checkpoints", "checkpoints/state.safetensors"]
)
def test_links_in_a_run_folder_are_refused(
    name: str, tiny_run: Any, tiny_settings: dict[str, Any], tmp_path: Path
) -> None:
    run, outside = tiny_run("lp"), tmp_path / "outside"
    copy = tmp_path / "runs" / run.path.name
    shutil.copytree(run.path, copy)
    (copy / "done").unlink()
    if (copy / name).is_dir():
        (copy / name).rename(outside)
    else:
        outside.write_text((copy / name).read_text(errors="replace") if (copy / name).exists() else "precious")
        (copy / name).unlink(missing_ok=True)
    before = outside.read_bytes() if outside.is_file() else sorted(os.listdir(outside))
    (copy / name).symlink_to(outside)
    if name == "records.jsonl":  # it became a link after the folder was opened
        with pytest.raises(OSError):
            RunFolder(copy).append({"kind": "x"})
    with pytest.raises(ValueError, match=f"holds a link, '{Path(name).name}'"):
        train(Config(**{**tiny_settings, "method": "lp"}), tmp_path / "runs", quiet=True)
    with pytest.raises(ValueError, match="holds a link"):
        RunFolder.open(copy)
    assert (outside.read_bytes() if outside.is_file() else sorted(os.listdir(outside))) == before


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "README.md"])
def test_links_in_a_model_folder_are_refused(name: str, model_folder: Path, tmp_path: Path) -> None:
    (model_folder / name).rename(tmp_path / name)
    (model_folder / name).symlink_to(tmp_path / name)
    with pytest.raises(ValueError, match=f"holds a link, '{name}'"):
        read_model(model_folder)


def test_the_hubs_cache_may_link_to_its_own_blobs(model_folder: Path, tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "123", tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for name in os.listdir(model_folder):
        shutil.copy(model_folder / name, blobs / name)
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    assert read_model(snapshot).predictor.classes


@pytest.mark.parametrize("change", ["truncate", "write"])
def test_a_model_in_use_does_not_notice_its_file(
    change: str, model_folder: Path, tiny_run: Any, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(tiny_run("patchgen").path, run)
    models = [read_model(model_folder).predictor.model, load_predictor(run).model]
    expected = [{name: tensor.clone() for name, tensor in model.state_dict().items()} for model in models]
    for file in (model_folder / "model.safetensors", *(run / "checkpoints").glob("*.safetensors")):
        size = file.stat().st_size
        if change == "truncate":
            os.truncate(file, 100)  # a mapped page beyond the end kills its reader
        else:
            with file.open("rb+") as handle:
                handle.write(b"\xff" * size)
    for model, tensors in zip(models, expected, strict=True):
        assert all(torch.equal(tensor, tensors[name]) for name, tensor in model.state_dict().items())


# Folders that a command continues in


@pytest.mark.parametrize("kind", ["folder", "part"])
def test_parts_of_predictions_that_are_links_are_refused(
    kind: str, image_folder: Path, tiny_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from patchgen.commands import predict

    (tmp_path / "elsewhere").mkdir()
    work = tmp_path / ".a.csv.0123456789ab.parts"
    if kind == "part":
        work.mkdir()
    (work if kind == "folder" else work / "000000.json").symlink_to(tmp_path / "elsewhere")
    monkeypatch.setattr(predict, "_digest", lambda *_: "0123456789ab")
    words = [str(tiny_run("lp").path), str(image_folder / "studio/cross"), "--csv", str(tmp_path / "a.csv")]
    assert main(["predict", *words]) == 2
    assert not list((tmp_path / "elsewhere").iterdir()) and not (tmp_path / "a.csv").exists()


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_the_log_of_a_sweep_is_a_plain_file(kind: str, tmp_path: Path) -> None:
    from patchgen.sweep.local import LocalLauncher

    log = tmp_path / "sweep.log"
    {"link": lambda: log.symlink_to(tmp_path / "precious"), "pipe": lambda: os.mkfifo(log), "folder": log.mkdir}[kind]()
    with pytest.raises(ValueError, match="sweep.log is a link, a pipe or a folder, .* remove it"):
        LocalLauncher(tmp_path, workers=1, threads=1)
    assert not (tmp_path / "precious").exists()


@pytest.mark.parametrize("content", ["[" * 100_000, "[1]", '{"tile": 5}', "link"])
def test_a_begun_slide_of_others_is_refused_in_a_sentence(content: str, tmp_path: Path) -> None:
    from patchgen.slides.cut import DESCRIPTION, TILES, check_settings

    (tmp_path / DESCRIPTION).write_text("{}" if content == "link" else content)
    if content == "link":
        (tmp_path / TILES).symlink_to(tmp_path.parent / "precious")
    with pytest.raises(ValueError, match="damaged|other settings|holds a link"):
        check_settings(tmp_path / DESCRIPTION, {} if content == "link" else {"tile": 512})


def test_a_forged_list_of_contents_is_damage(tmp_path: Path) -> None:
    """Its header asks for more memory than there is."""
    import numpy as np

    from patchgen.runs.folder import CONTENT

    np.save(tmp_path / "a.npy", np.zeros(9, np.uint64))
    data = (tmp_path / "a.npy").read_bytes().replace(b"(9,), }              ", b"(99999999999999,), } ")
    (tmp_path / CONTENT).write_bytes(data)
    with pytest.raises(ValueError, match="is damaged"):
        RunFolder(tmp_path).check_content(np.zeros(9, np.uint64), ["x"] * 9)


def test_json_files_are_read_within_limits() -> None:
    """Everything else reads what this process, or its own child, has written."""
    import re

    import patchgen

    source = Path(str(patchgen.__file__)).parent
    files = {file.relative_to(source).as_posix(): file.read_text(encoding="utf-8") for file in source.rglob("*.py")}
    direct = {
        name for name, text in files.items() if re.search(r"\bloads?\([^\n]*\.(read_text|read_bytes|open)\(", text)
    }
    assert direct == {"slides/annotations.py", "model/weights.py"}
