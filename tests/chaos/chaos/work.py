"""The work, in tasks that need nothing of one another, and the processes that share it.

Each process prepares a folder of its own and takes the next task until none is left. The seed alone decides what is
tried, however many processes there are.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from chaos.faults import FAULTS, do_fault
from chaos.hostile import HOSTILE
from chaos.inputs import KINDS, some_inputs
from chaos.kills import kill_some, shares
from chaos.ledger import Ledger, joined

AT_MOST = 250  # inputs of a task
Prepare = Callable[[Path], None]


class Task(NamedTuple):
    room: str
    name: str
    count: int  # kills, damaged files, or inputs of this kind in all
    start: int = 0  # of the inputs of this kind, those from here ...
    stop: int = 0  # ... to here

    def do(self, ground: Path, seed: int, ledger: Ledger) -> None:
        if self.room == "kills":
            kill_some(ground, self.name, self.count, seed, ledger)
        elif self.room == "faults":
            do_fault(ground, self.name, self.count, seed, ledger)
        else:
            some_inputs(ground, (KINDS | HOSTILE)[self.name], self, seed, ledger)


def all_tasks(kills: int, faults: int, inputs: int, only: str = "", small: bool = False) -> list[Task]:
    """Those that take long come first: at the end no process should have much left while the others wait."""
    tasks = [Task("kills", name, count) for name, count in shares(kills, small).items() if count]
    tasks += [Task("faults", name, faults) for name in FAULTS if faults]
    for name, (_, _, share) in (HOSTILE | KINDS).items():
        part = inputs * share // 100
        tasks += [Task("inputs", name, part, at, min(at + AT_MOST, part)) for at in range(0, part, AT_MOST)]
    return [task for task in tasks if only in ("", task.name)]


def shared_work(arguments: argparse.Namespace, folder: Path, prepare: Prepare) -> dict[str, Any]:
    """Do all tasks in `--jobs` processes; what was tried, by room."""
    a, began = arguments, time.monotonic()
    tasks = all_tasks(a.kills, a.faults, a.inputs, a.only, a.small)
    queue, end = os.pipe()  # a byte for each task: who reads it has the task
    os.write(end, bytes(range(len(tasks))))
    os.close(end)
    workers = {_worker(tasks, queue, folder / str(number), arguments, prepare): number for number in range(a.jobs)}
    stopped = []
    while workers:
        try:
            pid, status = os.wait()
        except KeyboardInterrupt:  # the workers have it too
            stopped.append("stopped by the user; the table has what was tried until then")
            continue
        if (code := os.waitstatus_to_exitcode(status)) and not stopped:
            stopped.append(f"process {workers[pid]} ended with {code}; the table lacks what it had not done")
        del workers[pid]
    order = [("kills", name) for name in shares(100)] + [("faults", name) for name in FAULTS]
    order += [("inputs", name) for name in KINDS | HOSTILE]
    lines = joined([folder / f"{number}.json" for number in range(a.jobs)], order)
    words = f"--seed {a.seed} --kills {a.kills} --faults {a.faults} --inputs {a.inputs} --jobs {a.jobs}"
    return {"command": f"python tests/chaos/run.py {words}", "seconds": round(time.monotonic() - began, 1),
            "stopped": stopped, "lines": [asdict(line) for line in lines]}  # fmt: skip


def _worker(tasks: list[Task], queue: int, ground: Path, arguments: argparse.Namespace, prepare: Prepare) -> int:
    """Start a process that takes tasks; its id."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        ground.mkdir(mode=0o755)
        prepare(ground)
        ledger = Ledger(ground.with_suffix(".json"), arguments.quiet)
        while number := os.read(queue, 1):
            tasks[number[0]].do(ground, arguments.seed, ledger)
        code = 0
    except KeyboardInterrupt:
        code = 130
    except BaseException:  # noqa: BLE001  the parent says that this process failed
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os.chdir("/")
        os._exit(code)
