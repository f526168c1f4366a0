"""The small version of `python tests/chaos/run.py`, in a process of its own: it forks, so it must have no threads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it forks, and looks at /proc")
SMALL = ["--seed", "1", "--kills", "8", "--faults", "12", "--inputs", "150", "--small", "--quiet"]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    target = tmp_path_factory.mktemp("chaos") / "found.json"
    command = [sys.executable, str(Path(__file__).with_name("run.py")), *SMALL, "--json", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert target.exists(), done.stderr[-2000:]
    return dict(json.loads(target.read_text())["rooms"])


@pytest.mark.parametrize("room", ["kills", "faults", "inputs"])
def test_nothing_is_lost_and_no_traceback_is_seen(found: dict[str, Any], room: str) -> None:
    assert [text for line in found[room] for text in line["wrong"]] == []


@pytest.mark.parametrize(("room", "least"), [("kills", 8), ("faults", 20), ("inputs", 140)])
def test_the_faults_were_real(found: dict[str, Any], room: str, least: int) -> None:
    lines = found[room]
    assert sum(line["tried"] for line in lines) >= least
    assert sum(line["hit"] for line in lines) >= 0.3 * least  # kills that met a process, faults that were noticed
