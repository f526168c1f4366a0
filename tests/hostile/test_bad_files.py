"""YAML, JSON and folders of others: bounded in size, depth and message, and one bad folder hides no other."""

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forged import LAUGHS

from patchgen.ccd.stages import get_schedule
from patchgen.cli import main
from patchgen.common.files import read_csv
from patchgen.common.untrusted import read_json, read_tensors, read_yaml, shortly
from patchgen.config import load_settings
from patchgen.model.weights import folder_tensors
from patchgen.report.results import read_rows
from patchgen.runs.find import describe, find_runs
from patchgen.runs.folder import is_model_folder

CHAIN = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 200))


@pytest.mark.parametrize(("text", "message"), [
    (LAUGHS, "aliases written out"),
    (CHAIN, "nested deeper"),
    (f"a: &a {'x' * 100_000}\nb: [{', '.join(['*a'] * 100)}]\n", "aliases written out"),
    ("a: &a [*a]\n", "inside what it names"),
    ("[" * 5000, "nested deeper|not readable"),
    ("{a: " * 60 + "1" + "}" * 60, "nested deeper"),
    ("x" * (1 << 23), "longer than 4,194,304 bytes"),
    ("a: !!python/object/apply:os.system ['true']\n", "not readable YAML"),
])  # fmt: skip
def test_yaml_is_bounded(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(text)
    start = time.process_time()
    for read in (read_yaml, load_settings, get_schedule):
        with pytest.raises(ValueError, match=message) as caught:
            read(tmp_path / "a.yaml")
        assert len(str(caught.value)) < 1000
    assert time.process_time() - start < 30


def read_annotation(path: Path) -> object:
    pytest.importorskip("shapely")
    from patchgen.slides.annotations import summarise

    return summarise(path)


@pytest.mark.parametrize(
    "read", [read_yaml, read_json, read_tensors, read_csv, read_rows, folder_tensors, read_annotation]
)
def test_pipes_are_no_files(read: Callable[[Path], object], tmp_path: Path) -> None:
    """Without the check each of these waits for a writer."""
    file = tmp_path / "pytorch_model.bin"
    for make in (lambda: os.mkfifo(file), lambda: file.symlink_to("/dev/zero")):
        file.unlink(missing_ok=True)
        make()
        with pytest.raises(ValueError, match="pytorch_model.bin is a pipe or device, and must be a file"):
            read(tmp_path if read is folder_tensors else file)


def test_plain_aliases_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("a: &a {x: 1, y: [2, 3]}\nb: {<<: *a, x: 4}\nc: *a\n")
    first = {"x": 1, "y": [2, 3]}
    assert read_yaml(tmp_path / "a.yaml") == {"a": first, "b": first | {"x": 4}, "c": first}


@pytest.mark.slow
def test_messages_are_bounded(tmp_path: Path) -> None:
    assert len(shortly({str(i): list(range(1000)) for i in range(1000)})) < 1000 and len(shortly("x" * 10**6)) < 200
    long = "x" * 100_000
    for line in (f"tune: [{'x, ' * 100_000}]", f"lr: {long}", f"{long[:1000]}: 1", f"hparams: [{'1, ' * 10_000}]"):
        (tmp_path / "a.yaml").write_text(f"data: x\nmethod: lp\ntask: mdg\nunseen: a\n{line}\n")
        with pytest.raises(ValueError) as caught:
            load_settings(tmp_path / "a.yaml")
        assert len(str(caught.value)) < 1500


@pytest.mark.parametrize("text", [
    b"[" * 200_000, b'{"a":' * 200 + b"1" + b"}" * 200, b'{"a":' * 1000 + b"1" + b"}" * 1000, b"[]", b"\xed\xa0\x80",
    b'{"a": ' + b"1" * 5000,
])  # fmt: skip
def test_json_is_bounded(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(ValueError, match="config.json (is not readable JSON|must hold|is nested)"):
        read_json(tmp_path / "config.json")
    assert not is_model_folder(tmp_path)


def damaged(run: Path, home: Path) -> Path:
    """Run folders that are broken, each in another way, and one that is whole."""
    texts: dict[str, dict[str, str]] = {
        "laughs": {"config.yaml": LAUGHS}, "deep": {"config.yaml": "[" * 5000}, "list": {"config.yaml": "- 1\n"},
        "records": {"records.jsonl": "[" * 100_000 + "\n"}, "kinds": {"records.jsonl": '{"kind": 5}\n'},
        "numbers": {"records.jsonl": '{"kind": "test", "checkpoint": "selected", "all": []}\n'},
        "failed": {"failed.json": '{"attempts": [], "error": 5, "time": {}, "final": 1}'},
        "failure": {"failed.json": "[" * 100_000}, "words": {"failed.json": '{"error": 1}'},
        "env": {"env.json": "[" * 100_000}, "whole": {},
    }  # fmt: skip
    for name, changes in texts.items():
        shutil.copytree(run, home / name)
        for file, text in changes.items():
            (home / name / file).write_text(text)
        if changes:
            (home / name / "done").unlink()
    shutil.copytree(run, home / "pipe")
    (home / "pipe" / "records.jsonl").unlink()
    os.mkfifo(home / "pipe" / "records.jsonl")
    shutil.copytree(run, home / "linked")
    (home / "linked" / ".lock").unlink(missing_ok=True)
    (home / "linked" / ".lock").symlink_to("/dev/null")
    return home


def test_bad_runs_are_told_each_on_its_line(tiny_run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = damaged(tiny_run("lp").path, tmp_path / "runs")
    found = {Path(line.run).name: line for line in map(describe, find_runs([home]))}
    assert len(found) == 13 and found["whole"].error is None and found["whole"].accuracy is not None
    for name in ("laughs", "deep", "list", "records", "failed", "failure", "words", "pipe", "linked"):
        assert found[name].error and len(found[name].error) < 1000, name
    assert main(["runs", str(home)]) == 0
    assert "whole" in capsys.readouterr().out
    assert main(["report", str(home), "--out", str(tmp_path / "report")]) == 0
    text = (tmp_path / "report" / "report.md").read_text()
    assert "1 finished runs; 12 folders left out" in text


def test_bad_models_do_not_hide_the_others(model_folder: Path, tiny_run: Any, tmp_path: Path) -> None:
    pytest.importorskip("fastapi", reason="the viewer needs patchgen[viewer]")
    from fastapi.testclient import TestClient

    from patchgen.viewer.app import create_app
    from patchgen.viewer.library import Library, find_items

    home = damaged(tiny_run("lp").path, tmp_path / "all")
    facts = json.loads((model_folder / "config.json").read_text())
    for name, change in {"good": {}, "settings": {"settings": [1]}, "none": {"settings": None, "data": [1]}}.items():
        shutil.copytree(model_folder, home / f"model-{name}")
        (home / f"model-{name}" / "config.json").write_text(json.dumps({**facts, **change}))
    shutil.copytree(model_folder, home / "model-deep")
    (home / "model-deep" / "config.json").write_text('{"format": "patchgen-model", "a":' + "[" * 100_000)
    shutil.copytree(model_folder, home / "model-readme")
    (home / "model-readme" / "README.md").unlink()
    (home / "model-readme" / "README.md").symlink_to("/etc/passwd")
    client = TestClient(create_app(Library(find_items([home]))), base_url="http://127.0.0.1")
    rows = {row["name"]: row for row in client.get("/api/models").json()["models"]}
    assert "error" not in rows["whole"] and "error" not in rows["model-good"]
    for name in ("laughs", "list", "records", "pipe", "linked", "model-settings", "model-none", "model-readme"):
        assert rows[name]["error"].startswith("cannot be read") and str(tmp_path) not in rows[name]["error"], name
    for name, row in rows.items():
        answer = client.get(f"/api/runs/{row['id']}")
        assert answer.status_code == 200 and "root:" not in answer.text and str(tmp_path) not in answer.text, name
        answer = client.get(f"/api/models/{row['id']}")
        assert answer.status_code in (200, 422) and str(tmp_path) not in answer.text, (name, answer.text)
