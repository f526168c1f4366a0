"""The small version of `python tests/chaos/run.py`, in a process of its own: it forks, so it must have no threads."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it forks, and looks at /proc")
SMALL = ["--seed", "1", "--kills", "3", "--faults", "3", "--inputs", "40", "--small"]
LEAST = {"kills": 3, "faults": 7, "inputs": 30}


@pytest.mark.slow
def test_nothing_is_lost_and_no_traceback_is_seen(tmp_path: Path) -> None:
    command = [sys.executable, str(Path(__file__).with_name("run.py")), *SMALL, "--json", str(tmp_path / "found.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert (tmp_path / "found.json").exists(), done.stderr[-2000:]
    lines = json.loads((tmp_path / "found.json").read_text())["lines"]
    assert [text for line in lines for text in line["wrong"]] == []
    for room, least in LEAST.items():  # kills that met a process, faults that were noticed
        of_room = [line for line in lines if line["room"] == room]
        assert sum(line["tried"] for line in of_room) >= least
        assert sum(line["hit"] for line in of_room) >= 0.3 * least


def test_tasks_are_all_that_is_asked_for_and_are_each_done_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    from chaos.inputs import KINDS
    from chaos.work import all_tasks

    tasks = all_tasks(300, 120, 5000)
    assert sum(task.do.args[1] for task in tasks if task.room == "kills") == 300
    parts = [task.do.args[2:] for task in tasks if task.name == "images to predict"]
    assert [row for count, part in parts for row in range(count)[part]] == list(range(1000))
    assert {task.name for task in all_tasks(0, 0, 100)} > set(KINDS)
    assert [task.name for task in all_tasks(9, 9, 100, only="recipes")] == ["recipes"]
