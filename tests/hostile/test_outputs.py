"""Outputs: devices, pipes and links stay what they are; folders are replaced in one step; leftovers of kills go."""

import multiprocessing
import os
import re
import signal
import stat
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from patchgen.common import files
from patchgen.common.child_process import child_environment, python
from patchgen.common.files import is_replaceable, replacing, replacing_folder, write_csv, write_text


@pytest.fixture(autouse=True)
def fresh_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process, which cleans each folder once."""
    monkeypatch.setattr(files, "_cleaned", set())


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[tuple[Path, list[bytes]]]:
    """A pipe and what is read from it; it must stay a pipe."""
    path, read = tmp_path / "pipe", list[bytes]()
    os.mkfifo(path)
    reader = threading.Thread(target=lambda: read.append(path.read_bytes()), daemon=True)
    reader.start()
    yield path, read
    reader.join(20)
    assert len(read) == 1 and stat.S_ISFIFO(os.lstat(path).st_mode)


def until_read(read: list[bytes]) -> bytes:
    while not read:
        time.sleep(0.01)
    return read[0]


def test_a_pipe_stays_a_pipe_and_gets_the_content(pipe: Any, tmp_path: Path) -> None:
    write_csv(pipe[0], ["a"], [["1"]])
    assert until_read(pipe[1]) == b"a\n1\n" and os.listdir(tmp_path) == ["pipe"]


def test_every_output_goes_through_the_same_helpers() -> None:
    """A file is written under a temporary name of theirs, or appended to and never through a link."""
    import patchgen

    source = Path(str(patchgen.__file__)).parent
    writes = re.compile(r"""\.write_(text|bytes)\(|(?<!fd)open\(.*["'][wax]\+?b?["']""")
    lines = [(file.relative_to(source).as_posix(), line.strip()) for file in source.rglob("*.py")
             for line in file.read_text(encoding="utf-8").splitlines() if writes.search(line)]  # fmt: skip
    direct = {name for name, line in lines if "temporary" not in line and "not_through_links" not in line}
    # the helpers; streams of a closed terminal; a device or pipe that a user named
    assert direct == {"common/files.py", "cli.py", "commands/predict.py"}


def test_a_device_stays_a_device() -> None:
    before = os.stat("/dev/null")
    write_text("/dev/null", "gone")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode) and os.stat("/dev/null").st_ino == before.st_ino
    assert not is_replaceable("/dev/null") and not is_replaceable("/dev/stdout")


def test_a_link_to_a_file_is_followed_and_stays(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "a.csv").write_text("old")
    (tmp_path / "link.csv").symlink_to("real/a.csv")
    (tmp_path / "new.csv").symlink_to("real/b.csv")
    write_text(tmp_path / "link.csv", "new")
    write_text(tmp_path / "new.csv", "made")
    assert (tmp_path / "link.csv").is_symlink() and (tmp_path / "real" / "a.csv").read_text() == "new"
    assert (tmp_path / "new.csv").is_symlink() and (tmp_path / "real" / "b.csv").read_text() == "made"
    assert sorted(os.listdir(tmp_path / "real")) == ["a.csv", "b.csv"]


def test_predict_writes_into_pipes_and_through_links(
    pipe: Any, tmp_path: Path, tiny_run: Any, image_folder: Path
) -> None:
    from patchgen.cli import main

    words = ["predict", str(tiny_run("lp").path), str(image_folder / "clinic" / "circle" / "00.png")]
    assert main([*words, "--csv", str(pipe[0])]) == 0
    (tmp_path / "target.csv").write_text("old")
    (tmp_path / "link.csv").symlink_to("target.csv")
    assert main([*words, "--csv", str(tmp_path / "link.csv")]) == 0
    content = until_read(pipe[1])
    assert content.startswith(b"path,label,confidence") and (tmp_path / "target.csv").read_bytes() == content
    assert (tmp_path / "link.csv").is_symlink()
    assert main([*words, "--jsonl", "/dev/null"]) == 0
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


# Folders


def write_folder(target: Path, text: str) -> None:
    with replacing_folder(target) as temporary:
        for name in ("a", "b"):
            (temporary / name).write_text(text)


@pytest.mark.parametrize("exchange", [True, False])
def test_a_folder_is_replaced_and_nothing_stays(
    tmp_path: Path, exchange: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchange:
        monkeypatch.setattr(files, "_exchange", lambda one, other: False)
    for text in ("one", "two", "three"):
        write_folder(tmp_path / "model", text)
        assert {name: (tmp_path / "model" / name).read_text() for name in "ab"} == {"a": text, "b": text}
        assert os.listdir(tmp_path) == ["model"]
    with pytest.raises(KeyError), replacing_folder(tmp_path / "model"):
        raise KeyError
    assert (tmp_path / "model" / "a").read_text() == "three" and os.listdir(tmp_path) == ["model"]


KILLED = """
import os, signal, sys
from pathlib import Path
from patchgen.common import files
count, exchange, target = int(sys.argv[1]), sys.argv[2] == "True", Path(sys.argv[3])
if not exchange:
    files._exchange = lambda one, other: False
calls = 0
def counted(real):
    def call(*words, **more):
        global calls
        calls += 1
        if calls == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*words, **more)
    return call
for name in ("replace", "mkdir", "fsync", "rmdir", "unlink"):
    setattr(os, name, counted(getattr(os, name)))
real, files._exchange = files._exchange, counted(files._exchange)
with files.replacing_folder(target) as temporary:
    for name in ("a", "b"):
        (temporary / name).write_text("new")
"""


@pytest.mark.parametrize("exchange", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_kill_at_any_operation_leaves_a_whole_folder_and_later_no_leftover(tmp_path: Path, exchange: bool) -> None:
    for count in range(1, 40):
        home = tmp_path / f"{exchange}-{count}"
        files._cleaned.clear()
        write_folder(home / "model", "old")
        command = python("-c", KILLED, str(count), str(exchange), str(home / "model"))
        code = subprocess.run(command, env=child_environment(), check=False).returncode
        files._cleaned.clear()
        files.clean(home)  # the next start
        found = {name: (home / "model" / name).read_text() for name in os.listdir(home / "model")}
        assert found in ({"a": "old", "b": "old"}, {"a": "new", "b": "new"}), count
        assert os.listdir(home) == ["model"], count
        if code == 0:
            assert count > 6 and found["a"] == "new"
            return
        assert code == -signal.SIGKILL
    raise AssertionError("the process never came to its end")


def hold(target: Path, begun: Any, end: Any) -> None:
    with replacing(target) as temporary:
        temporary.write_text("x")
        begun.set()
        end.wait(30)


def test_what_a_living_process_writes_is_left_alone(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    begun, end = context.Event(), context.Event()
    process = context.Process(target=hold, args=(tmp_path / "a", begun, end))
    process.start()
    assert begun.wait(30)
    (tmp_path / ".b.0123456789ab.tmp").write_text("left by a kill")
    (tmp_path / ".mine.tmp").write_text("of the user")
    files.clean(tmp_path)
    names = os.listdir(tmp_path)
    assert len(names) == 2 and ".mine.tmp" in names and ".b.0123456789ab.tmp" not in names
    end.set()
    process.join(30)
    assert (tmp_path / "a").read_text() == "x" and sorted(os.listdir(tmp_path)) == [".mine.tmp", "a"]
