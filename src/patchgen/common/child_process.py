"""Child processes: started without importing from the current folder, and asked to read untrusted files.

child = Child("patchgen.slides.slide", seconds=60)
facts, data = child.ask({"open": "biopsy.svs"})          # ChildDied: it crashed or timed out
serve(answer)                   # in that module: answer({"open": ...}, b"") -> ({...}, b"...")
"""

import json
import math
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

SOURCE = Path(__file__).parents[2]  # the folder that contains this package


def python(*words: str) -> list[str]:
    """The command that starts this Python without the current folder on its module path: its `json.py` would run."""
    return [sys.executable, "-P", *words]


def child_environment(**changes: str) -> dict[str, str]:
    """This process's environment, with this package importable and no empty (= current folder) entry in PYTHONPATH."""
    named = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    own = [] if SOURCE.name in ("site-packages", "dist-packages") else [str(SOURCE)]  # already on the path
    path = os.pathsep.join(dict.fromkeys([*own, *map(os.path.abspath, named)]))
    return {**os.environ, **changes, "PYTHONSAFEPATH": "1", "PYTHONPATH": path}


@contextmanager
def safe_children() -> Iterator[None]:
    """Inside this context, processes that libraries start (spawn, Ray, Slurm) inherit the safe environment."""
    before = {name: os.environ.get(name) for name in ("PYTHONSAFEPATH", "PYTHONPATH")}
    safe = child_environment()
    os.environ.update({name: safe[name] for name in before})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


Message = tuple[dict[str, Any], bytes]


class ChildDied(OSError):
    """The child crashed or timed out; the message says which. It cannot be used any more."""


class ChildError(ValueError):
    """The child reports that it cannot answer."""


class Child:
    """A child process with time limits of one answer and of all; a message is a line of JSON and bytes."""

    def __init__(self, module: str, seconds: float, total: float = math.inf) -> None:
        self.seconds, self.total, self.spent = seconds, total, 0.0
        self._lock, self._late = threading.Lock(), ""
        self.process = subprocess.Popen(
            python("-m", module),
            env=child_environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def ask(self, request: dict[str, Any], data: bytes = b"") -> Message:
        """The child's answer; ChildDied if there is none, ChildError if it is an error."""
        with self._lock:
            begin, allowed = time.monotonic(), max(0.0, min(self.seconds, self.total - self.spent))
            clock = threading.Timer(allowed, self._stop, [allowed])
            clock.daemon = True
            clock.start()
            try:
                assert self.process.stdin and self.process.stdout
                _send(self.process.stdin, request, data)
                answer, found = _receive(self.process.stdout)
            except (OSError, ValueError, EOFError) as error:
                self.process.kill()
                code = self.process.wait()
                raise ChildDied(self._late or f"a crash with exit code {code}") from error
            finally:
                clock.cancel()
                self.spent += time.monotonic() - begin
        if "error" in answer:
            raise ChildError(answer["error"])
        return answer, found

    def close(self) -> None:
        """End the child."""
        with suppress(OSError), self.process:  # closes its streams
            self.process.kill()

    def _stop(self, allowed: float) -> None:
        in_time = f"no answer within {self.seconds:g} s"
        self._late = self._late or (in_time if allowed == self.seconds else f"more than {self.total:g} s in all")
        self.process.kill()


def serve(answer: Callable[[dict[str, Any], bytes], Message], memory: int) -> None:
    """Answer requests until the parent exits, in a child with at most ``memory`` bytes of address space."""
    _, most = resource.getrlimit(resource.RLIMIT_AS)  # an existing limit is kept
    resource.setrlimit(resource.RLIMIT_AS, (memory if most == resource.RLIM_INFINITY else min(memory, most), most))
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of libraries must not mix with answers
    while True:
        try:
            request, data = _receive(sys.stdin.buffer)
        except (ValueError, EOFError):
            return
        try:
            found, pixels = answer(request, data)
        except Exception as error:  # reported by the parent
            found, pixels = {"error": str(error) or type(error).__name__}, b""
        _send(answers, found, pixels)


def _send(stream: IO[bytes], message: dict[str, Any], data: bytes) -> None:
    stream.write(json.dumps({**message, "bytes": len(data)}).encode() + b"\n" + data)
    stream.flush()


def _receive(stream: IO[bytes]) -> Message:
    message = dict(json.loads(stream.readline()))  # raises on an empty line, after the other process has exited
    data = stream.read(message["bytes"])
    if len(data) != message["bytes"]:
        raise EOFError
    return message, data
