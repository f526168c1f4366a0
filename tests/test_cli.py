"""The command table: every command is there, mistakes are one sentence, and help costs no heavy import."""

import subprocess
import sys
from collections.abc import Callable

import pytest

from patchgen import __version__
from patchgen.cli import COMMANDS, main

MODELS = {"predict", "evaluate", "embed", "explain", "slide", "serve", "discover", "diagnose", "train"}  # they run one


def exit_code(argv: list[str]) -> int | str | None:
    """What the shell would see: help leaves by SystemExit in some commands and by return in others."""
    try:
        return main(argv)
    except SystemExit as stop:
        return stop.code


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_module_that_answers_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code([name, "--help"]) == 0
    shown = capsys.readouterr().out
    assert f"patchgen {name}" in shown
    if name in MODELS:
        assert "--accelerator" in shown and "--precision {32-true,bf16-mixed,auto}" in shown


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"]])
def test_overview_lists_every_command(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    text = capsys.readouterr().out
    for name, line in COMMANDS.items():
        assert f"  {name} " in text and line in text


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"patchgen {__version__}\n"


@pytest.mark.parametrize(("word", "hint"), [
    ("trian", "; did you mean 'train'?"),
    ("xyzzy", ""),
    ("benchmark", "; it is now `patchgen compare`"),
    ("splits", "; it is now `patchgen doctor DATA --splits FILE.csv`"),
])  # fmt: skip
def test_unknown_command_names_the_nearest(word: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word]) == 2
    assert capsys.readouterr().err == f"patchgen: unknown command {word!r}{hint} (--help lists all)\n"


@pytest.fixture
def fails(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], None]:
    """`fails(error)`: every command raises it."""

    def plant(error: BaseException) -> None:
        def fail(name: str, argv: list[str]) -> int:
            raise error

        monkeypatch.setattr("patchgen.commands.run", fail)

    return plant


@pytest.mark.parametrize(("error", "code", "said"), [
    (ValueError("the rule, the value, the fix"), 2, "patchgen train: the rule, the value, the fix\n"),
    (FileNotFoundError("no such folder"), 2, "patchgen train: no such folder\n"),
    (MemoryError(), 2, "patchgen train: there is not enough memory "),
    (RuntimeError("can't allocate memory: ..."), 2, "patchgen train: there is not enough memory "),
    (KeyboardInterrupt(), 130, "patchgen: stopped; the same command continues"),
])  # fmt: skip
def test_a_users_mistake_is_one_sentence(
    error: BaseException, code: int, said: str, fails: Callable[[BaseException], None],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    fails(error)
    assert main(["train", "x"]) == code
    message = capsys.readouterr().err
    assert message.startswith(said) and message.count("\n") == 1


def test_a_defect_of_ours_is_not_hidden(fails: Callable[[BaseException], None]) -> None:
    fails(TypeError("a bug"))
    with pytest.raises(TypeError, match="a bug"):
        main(["train"])


@pytest.mark.parametrize(
    "line", ["train nowhere --unseen a", "compare nowhere", "predict run nowhere", "explain run nowhere --out o"]
)
@pytest.mark.parametrize("terminal", [True, False])
def test_a_person_is_told_at_once_that_it_has_begun(
    line: str, terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    assert main(line.split()) == 2
    assert capsys.readouterr().err.startswith("loading ...\n") == terminal
    if line.startswith(("train", "compare")):
        assert main([*line.split(), "--quiet"]) == 2
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
