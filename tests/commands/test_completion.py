"""Completion scripts: a shell that has read one offers the words that the commands take."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from patchgen.cli import COMMANDS, main

CASES = {
    "patchgen ": set(COMMANDS),
    "patchgen tr": {"train"},
    "patchgen train --pa": {"--patience"},
    "patchgen train photos --preset ": {"small", "paper"},
    "patchgen runs ": {"list", "diff", "clean", "collect", "table"},
    "patchgen slide tiles slides --anno": {"--annotations"},
    "patchgen runs clean --fa": {"--failed"},
    "patchgen explain MODEL --co": {"--colormap"},
    "patchgen fit photos --track ": {"tensorboard", "wandb", "mlflow"},
}


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit):
        main(["completion", shell])
    return capsys.readouterr().out


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash on this machine")
def test_bash_offers(capsys: pytest.CaptureFixture[str]) -> None:
    asks = []
    for line in CASES:
        words = line.split(" ")
        quoted = " ".join(f"'{word}'" for word in words)
        asks.append(f'COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _tyro_patchgen; echo "${{COMPREPLY[*]}}"')
    whole = "\n".join([script("bash", capsys), *asks])
    done = subprocess.run(["bash"], input=whole, capture_output=True, text=True, check=True)
    offered = [set(line.split()) for line in done.stdout.splitlines()]
    for (line, wanted), found in zip(CASES.items(), offered, strict=True):
        assert wanted <= found, (line, found, done.stderr)
        assert {word for word in found if not word.startswith(line.split(" ")[-1])} == set(), line


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_have_a_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert all(word in script(shell, capsys) for word in ("patchgen", "--lr-module", "compare"))


def test_making_it_does_not_import_torch() -> None:
    code = "import sys; from patchgen.commands.completion import app; app(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
