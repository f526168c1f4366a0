"""What used to be a traceback is a sentence; what is written for people runs nothing where they open it."""

import csv
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from patchgen.cli import main
from patchgen.common.child_process import child_environment, python
from patchgen.common.files import cache_dir, expanded, write_csv
from patchgen.common.text import csv_cell, printable
from patchgen.common.untrusted import read_tensors
from patchgen.data.table import read_table

CLOSED = ("--help", "<&- >&-"), ("runs nowhere", "2>&-")
EVIL = "\x1b]0;title\x07\x1b[2Jred\n\x9b31m"


def test_a_home_that_is_none(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for words in ("predict ~nosuchuser/model a.png", "serve ~nosuchuser/runs", "methods --plugin ~nosuchuser/p.py"):
        assert main(words.split()) == 2
        error = capsys.readouterr().err
        assert error.startswith("patchgen ") and "Traceback" not in error
    with pytest.raises(ValueError, match="~nosuchuser/x begins with ~, and there is no such home folder"):
        expanded("~nosuchuser/x")
    for name in ("HOME", "XDG_CACHE_HOME", "PATCHGEN_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # a system that knows no home for this user
    with pytest.raises(ValueError, match="no such home folder"):
        cache_dir()


@pytest.mark.parametrize(
    ("words", "closed"),
    [("--version", ">&- 2>&-"), *(pytest.param(*case, marks=pytest.mark.slow) for case in CLOSED)],
)
def test_closed_streams(closed: str, words: str, tmp_path: Path) -> None:
    command = f"exec {python()[0]} -P -m patchgen {words} {closed}"
    done = subprocess.run(["sh", "-c", command], env=child_environment(), capture_output=True, text=True, cwd=tmp_path)
    assert "Traceback" not in done.stderr + done.stdout and done.returncode == (2 if "runs" in words else 0)


@pytest.mark.slow
def test_a_stale_slurm_variable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_settings: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    from patchgen.config import Config
    from patchgen.train.lifecycle import train

    monkeypatch.setenv("SLURM_NTASKS", "4")
    settings = {**tiny_settings, "method": "lp", "image_size": 28, "steps": 1, "swad": False}
    assert train(Config(**settings), tmp_path, quiet=True).done
    assert "SLURM_NTASKS is set, but this is not a Slurm task" in capsys.readouterr().err


def safetensors(header: bytes, data: bytes = b"") -> bytes:
    return len(header).to_bytes(8, "little") + header + data


@pytest.mark.parametrize("content", [
    b"", b"\xff" * 8, b"\xff" * 100, safetensors(b"[]"), safetensors(b"{"), safetensors(b"\xff\xfe"),
    safetensors(b"[" * 9999),
    safetensors(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}', b"1234"),
    safetensors(b'{"a":{"dtype":"F99","shape":[1],"data_offsets":[0,4]}}', b"1234"),
    safetensors(b'{"a":{"dtype":"F4","shape":[8],"data_offsets":[0,4]}}', b"1234"),
    safetensors(b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}', b"1234"),
    safetensors(b'{"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,4]}}', b"1234"),
    safetensors(b'{"__metadata__":5}'), safetensors(b'{"__metadata__":{"a":[]}}'),
])  # fmt: skip
def test_malformed_safetensors(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(content)
    try:
        tensors, _ = read_tensors(tmp_path / "a.safetensors")
    except ValueError as error:
        assert "a.safetensors is not a readable .safetensors file" in str(error) and len(str(error)) < 500
    else:
        assert all(isinstance(tensor, torch.Tensor) for tensor in tensors.values())


def test_names_that_are_not_utf8(image_folder: Path, tmp_path: Path, tiny_run: Any, capsysbinary: Any) -> None:
    name = os.fsdecode(b"caf\xe9.png")
    for domain in ("a", "b"):
        for kind in ("x", "y"):
            (tmp_path / domain / kind).mkdir(parents=True)
            Image.new("RGB", (40, 40)).save(tmp_path / domain / kind / "0.png")
    Image.new("RGB", (40, 40)).save(tmp_path / "a" / "x" / name)
    with pytest.raises(ValueError, match=r"the name 'a/x/caf\\udce9.png' is not UTF-8; rename it"):
        read_table(tmp_path)
    run = str(tiny_run("lp").path)
    assert main(["predict", run, str(tmp_path / "a" / "x")]) == 0
    assert b"caf\\udce9.png" in capsysbinary.readouterr().out
    assert main(["doctor", str(tmp_path)]) == 1


# What people open


def test_control_characters_are_escaped(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert printable(EVIL) == "\\x1b]0;title\\x07\\x1b[2Jred\\n\\x9b31m" and printable("é 日本 ½") == "é 日本 ½"
    assert main(["predict", f"no{EVIL}model", "a.png"]) == 2
    assert main(["runs", f"no{EVIL}folder"]) == 2
    assert not set("\x1b\x07\x9b") & set(capsys.readouterr().err)


def test_formulas_are_text_in_a_csv_file(tmp_path: Path) -> None:
    assert [csv_cell(cell) for cell in ("=1+1", "+a", "-2+3", "@x", "\tx", "-1.5", "+3", "-1e-3", "a=1", "")] == [
        "'=1+1", "'+a", "'-2+3", "'@x", "'\tx", "-1.5", "+3", "-1e-3", "a=1", ""]  # fmt: skip
    write_csv(tmp_path / "a.csv", ["=head"], [["=cmd|' /C calc'!A0"], ["-1"]], people=True)
    with (tmp_path / "a.csv").open(newline="") as stream:
        assert [row[0] for row in csv.reader(stream)] == ["'=head", "'=cmd|' /C calc'!A0", "-1"]


def test_every_table_of_text_goes_through_one_writer() -> None:
    """CSV is written by `write_csv`, and line by line where a stopped command resumes."""
    import patchgen

    source = Path(str(patchgen.__file__)).parent
    writers = {file.relative_to(source).as_posix() for file in source.rglob("*.py") if "csv.writer" in file.read_text()}
    assert writers == {"common/files.py", "commands/predict.py", "slides/heatmap.py"}


def test_a_report_holds_no_html_of_a_name(tmp_path: Path, tiny_run: Any) -> None:
    home = tmp_path / "runs"
    shutil.copytree(tiny_run("lp").path, home / "good")
    shutil.copytree(tiny_run("lp").path, home / "<img src=x>")
    (home / "<img src=x>" / "config.yaml").write_text("'<script>alert(1)</script>': 1\n")
    assert main(["report", str(home), "--out", str(tmp_path / "out")]) == 0
    for name in ("report.md", "report.html"):
        text = (tmp_path / "out" / name).read_text()
        assert "<img src=x>" not in text and "<script>alert" not in text and "&lt;script&gt;" in text


@pytest.mark.slow
def test_a_column_of_names_is_no_column_of_domains(tmp_path: Path) -> None:
    from patchgen.data.table import _build

    rows = [(f"{i}.png", f"d{i % 900}", f"c{i % 50_000}") for i in range(100_000)]
    start = time.process_time()
    with pytest.raises(ValueError, match="a domain is a site or style of many images"):
        _build(tmp_path, rows, None, None, {})
    assert time.process_time() - start < 30
