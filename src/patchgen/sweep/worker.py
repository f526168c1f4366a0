"""A process that runs jobs sequentially: a line of JSON in, the outcome as a line out.

python -m patchgen.sweep.worker

Importing torch takes seconds, so a worker is reused for many runs. It ends with its launcher, in whatever way that
ends: when its input pipe closes, it exits, and its run resumes from the last evaluation at the next launch.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
from typing import NoReturn


def main() -> NoReturn:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # printed output must not mix with the answers
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(lines,), daemon=True).start()
    from patchgen.common.reading import process_cache
    from patchgen.sweep.jobs import perform, read_work

    with process_cache():  # reads a table, its images and a backbone's weights once for the runs that share them
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
