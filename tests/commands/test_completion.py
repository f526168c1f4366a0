"""Completion scripts: a shell that has read one offers the words that the commands take."""

import shutil
import subprocess
import sys

import pytest

from patchgen.cli import COMMANDS

CASES = {
    "patchgen ": set(COMMANDS),
    "patchgen tr": {"train"},
    "patchgen train --pa": {"--patience"},
    "patchgen train photos --preset ": {"small", "paper", "quick"},
    "patchgen runs ": {"list", "diff", "clean", "collect", "table"},
    "patchgen slide tiles slides --anno": {"--annotations"},
    "patchgen slide embed MODEL slides --form": {"--format"},
    "patchgen sweep m": {"mdg", "mdg-small", "mdg-gmdg"},
    "patchgen sweep mdg --dry": {"--dry-run"},
    "patchgen sweep --retr": {"--retries", "--retry-failed"},
    "patchgen runs clean --fa": {"--failed"},
    "patchgen explain MODEL --co": {"--colormap"},
    "patchgen fit photos --track ": {"tensorboard", "wandb", "mlflow"},
}


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash on this machine")
def test_bash_offers() -> None:
    """The script of a fresh process, which needs no torch."""
    asks = []
    for line in CASES:
        words = line.split(" ")
        quoted = " ".join(f"'{word}'" for word in words)
        asks.append(f'COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _tyro_patchgen; echo "${{COMPREPLY[*]}}"')
    code = (
        "import sys\nfrom patchgen.cli import main\ntry: main(['completion', 'bash'])\n"
        "finally: assert 'torch' not in sys.modules"
    )
    script = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    done = subprocess.run(["bash"], input="\n".join([script, *asks]), capture_output=True, text=True, check=True)
    offers = [set(line.split()) for line in done.stdout.splitlines()]
    for (line, wanted), offered in zip(CASES.items(), offers, strict=True):
        assert wanted <= offered, (line, offered, done.stderr)
        assert all(word.startswith(line.split(" ")[-1]) for word in offered), line
