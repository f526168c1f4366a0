"""Units of work: claimed, done once, taken over after a kill, tried again a bounded number of times."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from patchgen.common.files import write_text
from patchgen.sweep import jobs as jobs_module
from patchgen.sweep.jobs import Needs, Unit, perform
from patchgen.sweep.launch import LauncherOptions, run_units

Work = Callable[..., None]


def run_here(units: list[Unit]) -> dict[str, Any]:
    return run_units(units, None, LauncherOptions(units[0].claim.parent), quiet=True)


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Unit]:
    """`make(function, "a")`: a unit of this test's own function, as if it were one of the package."""

    def made(function: Work, name: str = "a", call: str = "patchgen.sweep.jobs:work_of_a_test") -> Unit:
        monkeypatch.setattr(jobs_module, "work_of_a_test", function, raising=False)
        arguments = {"result": str(tmp_path / name), "word": name}
        return Unit(call, arguments, tmp_path / ".work" / name, tmp_path / name, f"unit {name}", Needs(1, "cpu"))

    return made


def write(folder: Path, result: str, word: str) -> None:
    assert folder.is_dir()
    write_text(result, word)


def test_a_unit_is_done_once_and_leaves_its_result_alone(make: Callable[..., Unit], tmp_path: Path) -> None:
    calls: list[str] = []

    def work(folder: Path, result: str, word: str) -> None:
        calls.append(word)
        write(folder, result, word)

    unit = make(work)
    assert unit.progress == 0 and perform(unit) == "done" and unit.progress == 1
    assert perform(unit) == "found" and calls == ["a"] and (tmp_path / "a").read_text() == "a"
    assert not unit.claim.exists()


def test_a_killed_attempt_is_resumed(make: Callable[..., Unit]) -> None:
    def work(folder: Path, result: str, word: str) -> None:
        part = folder / "part"
        if not part.exists():
            part.write_text("half")
            raise KeyboardInterrupt  # as a kill: nothing is cleared away
        write_text(result, part.read_text() + " and whole")

    unit = make(work)
    with pytest.raises(KeyboardInterrupt):
        perform(unit)
    assert not unit.folder.done and not unit.folder.busy
    assert perform(unit) == "done" and unit.result.read_text() == "half and whole"


def test_failures_are_reported_and_reset_by_the_next_command(make: Callable[..., Unit], tmp_path: Path) -> None:
    mended: list[bool] = []

    def work(folder: Path, result: str, word: str) -> None:
        if word == "b" and not mended:
            raise ValueError("b is broken")
        write(folder, result, word)

    units = [make(work, name) for name in "abc"]
    failures = run_here(units)
    assert {label: (one.error, one.final) for label, one in failures.items()} == {"unit b": ("b is broken", True)}
    assert (tmp_path / "a").exists() and (tmp_path / "c").exists() and (tmp_path / ".work").is_dir()
    mended.append(True)
    assert run_here(units) == {} and (tmp_path / "b").read_text() == "b"
    assert not (tmp_path / ".work").exists()


@pytest.mark.parametrize("call", ["os:remove", "subprocess:run"])
def test_nothing_outside_the_package_is_called(make: Callable[..., Unit], call: str) -> None:
    unit = make(write, call=call)
    failures: dict[str, Any] = run_here([unit])
    assert "is no function of patchgen" in failures["unit a"].error
