"""Work in forked children: each starts warm, may be killed at any moment, and has a limit of time and memory.

    warm()                                        # import here, once, what children need
    ended = run(work, kill_after=0.7)             # SIGKILL after 0.7 s ...
    ended = run(work, kill_at=31)                 # ... or right before its 31st file operation
    problem(ended)                                # "" or what a user should never see

Forking is safe only while this process has a single thread, so nothing but imports may ever run in it.
"""

import importlib
import os
import resource
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

Work = Callable[[], Any]
LIMIT = 240.0  # seconds until a child counts as hanging; the machine may be busy
MEMORY = 6 << 30  # bytes of address space
FILE_EVENTS = frozenset({"open", "os.rename", "os.remove", "os.truncate", "os.mkdir", "os.rmdir", "shutil.rmtree"})
HEAVY = (
    "patchgen.train.fold", "patchgen.ccd.loop", "patchgen.ccd.close", "patchgen.predict.predictor",
    "patchgen.report.write", "patchgen.data.doctor", "patchgen.sweep.plan", "patchgen.commands.sweep", "patchgen.cli",
    "transformers.models.dinov2_with_registers.modeling_dinov2_with_registers", "sklearn.cluster", "scipy.optimize",
)  # fmt: skip
BROKEN = 70  # exit code of a child whose work raised


@dataclass(frozen=True)
class Ended:
    code: int  # exit code; below 0 the signal that ended it
    said: str  # what it wrote to stdout and stderr
    seconds: float
    late: bool  # it had to be ended because its time was over
    peak: int = 0  # bytes of memory, at most


def run(work: Work, *, kill_after: float | None = None, kill_at: int | None = None, limit: float = LIMIT) -> Ended:
    """Fork, work, wait. The work's return value (a number, or None for 0) is the exit code."""
    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError("this process has threads: a fork of it may hang")
    began = time.monotonic()
    with tempfile.TemporaryFile() as output:
        pid = os.fork()
        if pid == 0:
            _child(work, output.fileno(), kill_at)
        descriptor = os.pidfd_open(pid)
        late = not select.select([descriptor], [], [], limit if kill_after is None else min(kill_after, limit))[0]
        os.close(descriptor)
        if late:
            _kill_group(pid)
        _, status, used = os.wait4(pid, 0)
        _kill_group(pid)  # whatever it has started
        output.seek(0)
        said = output.read().decode("utf-8", "replace")
    code = os.waitstatus_to_exitcode(status)
    return Ended(code, said, time.monotonic() - began, late and kill_after is None, 1024 * used.ru_maxrss)


def command(*words: str) -> Work:
    """The real command line, in the child's own process."""

    def work() -> int:
        from patchgen.cli import main

        return main(list(words))

    return work


def problem(ended: Ended, codes: tuple[int, ...] = (0, 1, 2)) -> str:
    """What a user should never see of a command, or nothing."""
    if ended.late:
        return "hang"
    if "Traceback (most recent call last)" in ended.said:
        return "traceback: " + (ended.said.strip().splitlines() or [""])[-1]
    if ended.code not in codes:
        return f"ended with {ended.code}: {ended.said[-200:]}"
    return "no word about what is wrong" if ended.code == 2 and not ended.said.strip() else ""


def warm() -> None:
    """Import here, once, what children need."""
    for name in HEAVY:
        importlib.import_module(name)


def count_file_events(work: Work) -> int:
    """How many moments `kill_at` has in this work."""
    read, write = os.pipe()

    def counted() -> None:
        seen = _watch(None)
        work()
        os.write(write, str(seen[0]).encode())

    run(counted)
    os.close(write)
    with os.fdopen(read) as pipe:
        return int(pipe.read() or 0)


def _child(work: Work, output: int, kill_at: int | None) -> NoReturn:
    code = BROKEN
    try:
        os.setsid()
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        if kill_at is not None:
            _watch(kill_at)
        code = int(work() or 0)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1 if stop.code else 0
    except BaseException:  # noqa: BLE001  the parent reads it
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _watch(kill_at: int | None) -> list[int]:
    """Count file operations from now on; end this process by SIGKILL right before the given one."""
    seen = [0]

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        exchange = event == "ctypes.dlsym" and arguments[1] == "renameat2"  # it comes right before the call
        if not exchange and (event not in FILE_EVENTS or (event == "open" and not _writes(arguments))):
            return
        seen[0] += 1
        if seen[0] == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    return seen


def _writes(arguments: tuple[Any, ...]) -> bool:
    flags = arguments[2] if len(arguments) > 2 and isinstance(arguments[2], int) else 0
    return bool(flags & (os.O_WRONLY | os.O_RDWR))


def _kill_group(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
