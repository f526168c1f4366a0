"""Jobs on this machine: worker processes, each with its devices and a fixed number of threads.

A worker, `python -m patchgen.sweep.local`, runs jobs sequentially: a line of JSON in, the outcome as a line out. When
its launcher ends, its input pipe closes and it exits; its run resumes at the next launch.
"""

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NoReturn, cast

from patchgen.common.child_process import child_environment, python
from patchgen.common.files import not_through_links
from patchgen.sweep.jobs import Outcome, Work, perform, read_work, to_json
from patchgen.sweep.launch import LOG, WorkerLost


class Worker:
    """One process, started when it is first needed and again when it has died."""

    def __init__(self, threads: int, devices: str | None, log: Path) -> None:
        self.environment = child_environment(OMP_NUM_THREADS=str(threads), MKL_NUM_THREADS=str(threads))
        if devices is not None:
            self.environment["CUDA_VISIBLE_DEVICES"] = devices
        self.log = log
        self.process: subprocess.Popen[str] | None = None
        self.closed = False

    def do(self, job: Work) -> Outcome:
        process = self._running()
        assert process.stdin is not None and process.stdout is not None
        with suppress(BrokenPipeError):  # it died while idle: no answer will come
            process.stdin.write(to_json(job) + "\n")
            process.stdin.flush()
        answer = process.stdout.readline().strip()
        if not answer:
            code = process.wait()
            self.process = None
            reason = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            raise WorkerLost(f"the worker process ended with {reason}; what it printed is in {self.log}")
        if answer == "failed":
            self.end()  # a process may not recover from a device error
        return cast(Outcome, answer)

    def _running(self) -> subprocess.Popen[str]:
        if self.closed:
            raise WorkerLost("the sweep was stopped")
        if self.process is None or self.process.poll() is not None:
            with open(self.log, "a", opener=not_through_links) as log:
                self.process = subprocess.Popen(
                    python("-m", __name__),
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=self.environment,
                    start_new_session=True,  # Ctrl-C is for the launcher, which then ends its workers
                )  # fmt: skip
        return self.process

    def end(self, for_good: bool = False) -> None:
        self.closed = self.closed or for_good
        if self.process is not None:
            with suppress(ProcessLookupError):  # the group: with the processes of a run on several devices
                os.killpg(self.process.pid, signal.SIGKILL) if os.name == "posix" else self.process.kill()
            self.process.wait()


class LocalLauncher:
    """`workers` processes; `devices` names the CUDA devices of each, or is empty without CUDA."""

    pause = 0.02

    def __init__(self, out: Path, workers: int, threads: int, devices: Sequence[str] = ()) -> None:
        out.mkdir(parents=True, exist_ok=True)
        log = out / LOG
        if log.is_symlink() or (log.exists() and not log.is_file()):
            raise ValueError(f"{log} is a link, a pipe or a folder, and what workers print goes there; remove it")
        self.slots = workers
        self.workers = [Worker(threads, devices[i] if devices else None, log) for i in range(workers)]
        self.idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for worker in self.workers:
            self.idle.put(worker)
        self.pool = ThreadPoolExecutor(workers)

    def submit(self, jobs: Sequence[Work]) -> list[Future[Outcome]]:
        return [self.pool.submit(self._do, job) for job in jobs]

    def _do(self, job: Work) -> Outcome:
        worker = self.idle.get()
        try:
            return worker.do(job)
        finally:
            self.idle.put(worker)

    def outcome(self, handle: Future[Outcome]) -> Outcome:
        return handle.result()

    def close(self) -> None:
        for worker in self.workers:
            worker.end(for_good=True)
        self.pool.shutdown(cancel_futures=True)


def main() -> NoReturn:
    """The worker process."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # printed output must not mix with the answers
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(lines,), daemon=True).start()
    while True:
        answers.write(perform(read_work(lines.get())) + "\n")
        answers.flush()


def _read(lines: queue.SimpleQueue[str]) -> None:
    for line in sys.stdin:
        lines.put(line)
    if os.name == "posix":
        os.killpg(0, signal.SIGKILL)  # including the processes of a run on several devices
    os._exit(1)


if __name__ == "__main__":
    main()
