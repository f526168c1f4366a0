"""The command table: every command is there, mistakes are one sentence, and help costs no heavy import."""

import subprocess
import sys

import pytest

from patchgen import __version__, cli
from patchgen.cli import COMMANDS, main


def exit_code(argv: list[str]) -> int | str | None:
    """What the shell would see: help leaves by SystemExit in some commands and by return in others."""
    try:
        return main(argv)
    except SystemExit as stop:
        return stop.code


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_module_that_answers_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code([name, "--help"]) == 0
    assert f"patchgen {name}" in capsys.readouterr().out


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"]])
def test_overview_lists_every_command(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    text = capsys.readouterr().out
    for name, line in COMMANDS.items():
        assert f"  {name} " in text and line in text


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"patchgen {__version__}\n"


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("trian", "; did you mean 'train'?"),
        ("xyzzy", ""),
        ("benchmark", "; it is now `patchgen compare`"),
        ("splits", "; it is now `patchgen doctor DATA --splits FILE.csv`"),
    ],
)
def test_unknown_command_names_the_nearest(word: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word]) == 2
    assert capsys.readouterr().err == f"patchgen: unknown command {word!r}{hint} (--help lists all)\n"


@pytest.mark.parametrize("error", [ValueError("the rule, the value, the fix"), FileNotFoundError("no such folder")])
def test_a_users_mistake_is_one_sentence(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(name: str, argv: list[str]) -> int:
        raise error

    monkeypatch.setattr("patchgen.commands.run", fail)
    assert main(["train", "x"]) == 2
    assert capsys.readouterr().err == f"patchgen train: {error}\n"


def test_a_defect_of_ours_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str, argv: list[str]) -> int:
        raise TypeError("a bug")

    monkeypatch.setattr("patchgen.commands.run", fail)
    with pytest.raises(TypeError, match="a bug"):
        main(["train"])


def test_interrupt_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def stop(name: str, argv: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("patchgen.commands.run", stop)
    assert main(["train"]) == 130
    assert "the same command continues" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [
        ["train", "nowhere", "--unseen", "a"],
        ["compare", "nowhere"],
        ["predict", "run", "nowhere"],
        ["explain", "run", "nowhere", "--out", "o"],
    ],
)
@pytest.mark.parametrize("terminal", [True, False])
def test_a_person_is_told_at_once_that_it_has_begun(
    command: list[str], terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    assert main(command) == 2
    assert capsys.readouterr().err.startswith("loading ...\n") == terminal
    if command[0] in ("train", "compare"):
        assert main([*command, "--quiet"]) == 2
        assert "loading" not in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["--help"], ["train", "--help"]])
def test_help_imports_neither_torch_nor_transformers(argv: list[str]) -> None:
    code = (
        "import sys\nfrom patchgen.cli import main\n"
        f"try:\n    main({argv!r})\nexcept SystemExit:\n    pass\n"
        "print('HEAVY', sorted({'torch', 'transformers', 'pandas', 'sklearn', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "HEAVY []"


@pytest.mark.parametrize(
    "error",
    [MemoryError(), RuntimeError("[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory: ...")],
)
def test_a_lack_of_memory_is_one_sentence(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(name: str, argv: list[str]) -> int:
        raise error

    monkeypatch.setattr("patchgen.commands.run", fail)
    assert cli.main(["train"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("patchgen train: there is not enough memory") and said.count("\n") == 1


@pytest.mark.parametrize(
    "name", ["predict", "evaluate", "embed", "explain", "slide", "serve", "discover", "diagnose", "train"]
)
def test_commands_that_run_a_model_take_a_device_and_a_precision(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code([name, "--help"]) == 0
    shown = capsys.readouterr().out
    assert "--accelerator" in shown and "--precision {32-true,bf16-mixed,auto}" in shown
