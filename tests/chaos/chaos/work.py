"""The work in tasks that need nothing of one another, the processes that share it, and the table of what came of it.

Each process prepares a folder of its own. The seed alone decides what is tried, however many processes there are.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from chaos.faults import FAULTS, do_fault
from chaos.ground import Line, prepare
from chaos.hostile import HOSTILE
from chaos.inputs import KINDS, some_inputs
from chaos.kills import kill_some, shares

AT_MOST = 250  # inputs of a task


class Task(NamedTuple):
    room: str
    name: str
    do: Callable[[Path, int], Line]  # in a prepared folder, with a seed


def all_tasks(kills: int, faults: int, inputs: int, only: str = "", small: bool = False) -> list[Task]:
    """Those that take long come first: at the end no process should have much left while the others wait."""
    tasks = [Task("kills", name, partial(kill_some, name, n)) for name, n in shares(kills, small).items() if n]
    tasks += [Task("faults", name, partial(do_fault, name, faults)) for name in FAULTS if faults]
    for name, kind in (HOSTILE | KINDS).items():
        count = inputs * kind.share // 100
        tasks += [Task("inputs", name, partial(some_inputs, name, kind, count, slice(at, at + AT_MOST)))
                  for at in range(0, count, AT_MOST)]  # fmt: skip
    return [task for task in tasks if only in ("", task.name)]


def shared_work(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Do all tasks in `--jobs` processes; what was tried, by room."""
    a, began, stopped = arguments, time.monotonic(), []
    tasks = all_tasks(a.kills, a.faults, a.inputs, a.only, a.small)
    lines = {task[:2]: Line(*task[:2]) for task in tasks}
    pool = ProcessPoolExecutor(a.jobs, get_context("spawn"), _begin, (folder,))
    try:
        for done in as_completed([pool.submit(_do, number, a) for number in range(len(tasks))]):
            line = done.result()
            lines[line.room, line.name].add(line)
            text = f"[{time.monotonic() - began:5.0f} s] {line.name}: {line.tried} tried, {len(line.wrong)} wrong"
            print(text, *(f"  WRONG: {problem}" for problem in line.wrong), sep="\n", file=sys.stderr, flush=True)
    except (KeyboardInterrupt, BrokenProcessPool) as error:
        stopped.append(f"stopped by {error!r}; the table has what was tried until then")
    finally:
        pool.shutdown(cancel_futures=True)
    words = f"--seed {a.seed} --kills {a.kills} --faults {a.faults} --inputs {a.inputs} --jobs {a.jobs}"
    return {"command": f"python tests/chaos/run.py {words}", "seconds": round(time.monotonic() - began, 1),
            "stopped": stopped, "lines": [asdict(line) for line in lines.values()]}  # fmt: skip


_ground: list[Path] = []  # of this process


def _begin(folder: Path) -> None:
    _ground.append(folder / str(os.getpid()))
    prepare(_ground[0])


def _do(number: int, a: argparse.Namespace) -> Line:
    """The numbers of tasks go to the processes, because strategies of inputs cannot be pickled."""
    return all_tasks(a.kills, a.faults, a.inputs, a.only, a.small)[number].do(_ground[0], a.seed)


def page(results: dict[str, Any]) -> str:
    """The Markdown of docs/develop/reliability.md: every line, a sum of each room, and the limits that were seen."""
    lines = [Line(**line) for line in results["lines"]]
    rows = ["| what | tried | met | wrong |", "|---|---:|---:|---:|"]
    for room in dict.fromkeys(line.room for line in lines):
        total, of_room = Line(room, room), [line for line in lines if line.room == room]
        for line in of_room:
            total.add(line)
        for name, line in [*((f"{room}: {line.name}", line) for line in of_room), (f"**{room}**", total)]:
            rows.append(f"| {name} | {line.tried:,} | {line.hit:,} | {len(line.wrong):,} |")
    slowest, peak = (max((getattr(line, name) for line in lines), default=0) for name in ("slowest", "peak"))
    limits = f"the slowest input {slowest:.1f} s, the most memory of a process {peak / 2**30:.2f} GB."
    return "\n".join([*rows, "", f"`{results['command']}`: {results['seconds'] / 60:.0f} minutes, {limits}"])
