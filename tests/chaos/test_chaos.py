"""The small version of `python tests/chaos/run.py`, in a process of its own: it forks, so it must have no threads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it forks, and looks at /proc")
SMALL = ["--seed", "1", "--kills", "3", "--faults", "3", "--inputs", "40", "--small", "--quiet"]
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
    assert sum(task.count for task in tasks if task.room == "kills") == 300 and len(tasks) <= 256
    tried: dict[str, list[int]] = {}
    for task in tasks:
        if task.room == "inputs":
            tried.setdefault(task.name, []).extend(range(task.start, task.stop))
    assert sum(map(len, tried.values())) == 5000 and tried["images to predict"] == list(range(1000))
    assert {task.name for task in all_tasks(0, 0, 100)} > set(KINDS)
    assert [task.name for task in all_tasks(9, 9, 100, only="recipes")] == ["recipes"]


def test_the_page_sums_what_several_processes_tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    from chaos.ledger import Ledger, joined, page

    for number, wrong in enumerate(([], ["x"])):
        ledger = Ledger(tmp_path / f"{number}.json", quiet=True)
        line = ledger.line("inputs", "bombs")
        line.tried, line.hit, line.wrong, line.slowest, line.peak = 600 + number, 5, wrong, 1.0 + number, 2 << 30
        ledger.tell(line, 1)
    lines = joined([tmp_path / "0.json", tmp_path / "1.json", tmp_path / "none.json"], [("inputs", "bombs")])
    text = page({"command": "run", "seconds": 120.0, "lines": [vars(line) for line in lines]})
    assert "| inputs: bombs | 1,201 | 10 | 1 |" in text and "| **inputs** | 1,201 | 10 | 1 |" in text
    assert text.endswith("`run`: 2 minutes, the slowest input 2.0 s, the most memory of a process 2.00 GB.")
