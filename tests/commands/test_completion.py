"""Completion scripts: a shell that has read one offers the words that the commands take."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

import pytest

from patchgen.cli import COMMANDS
from patchgen.commands.completion import script


@pytest.fixture(scope="module")
def bash() -> str:
    return script("bash")


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash on this machine")
@pytest.mark.parametrize(
    ("line", "offered", "not_offered"),
    [
        ("patchgen ", {"train", "embed", "completion"}, "--help"),
        ("patchgen tr", {"train"}, "fit"),
        ("patchgen train --pa", {"--patience"}, "--track"),
        ("patchgen train photos --track ", {"tensorboard", "wandb", "mlflow"}, "None"),
        ("patchgen runs ", {"diff", "clean"}, "train"),
        ("patchgen slide ", {"tiles"}, "slide_tiles"),
        ("patchgen slide tiles slides --anno", {"--annotations"}, "--runtime"),
        ("patchgen runs clean --fa", {"--failed"}, "--unfinished"),
        ("patchgen slide ", {"tiles"}, "slide_tiles"),
        ("patchgen slide --ru", {"--runtime"}, "--overlap"),
        ("patchgen slide tiles --ov", {"--overlap"}, "--runtime"),
        ("patchgen fit photos --track ", {"tensorboard", "wandb", "mlflow"}, "None"),
        ("patchgen sweep sel", {"selection"}, "mdg"),
        ("patchgen explain MODEL --co", {"--colormap"}, "--alpha"),
        ("patchgen explain MODEL photos/", set(), "train"),
    ],
)
def test_bash_offers(bash: str, line: str, offered: set[str], not_offered: str) -> None:
    words = line.split(" ")
    quoted = " ".join(f"'{word}'" for word in words)
    ask = f"{bash}\nCOMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _patchgen; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    done = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, check=True)
    found = set(done.stdout.split())
    assert offered <= found and not_offered not in found and (offered or not found), done.stderr


def test_every_command_has_its_options(bash: str) -> None:
    offered = re.search(r'^    words="(.*)"$', bash, re.MULTILINE)
    assert offered and sorted(offered[1].split()) == sorted(COMMANDS)
    for name in COMMANDS:
        assert f'"{name}") words="-h --help' in bash or f'"{name} {name}") words=' in bash, name


def test_making_it_does_not_import_torch() -> None:
    code = (
        "import sys; from patchgen.commands.completion import script; script('zsh'); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_zsh_reads_it_as_bash_does(bash: str) -> None:
    zsh = script("zsh")
    assert "bashcompinit" in zsh and zsh.splitlines()[2:] == bash.splitlines()[1:]
