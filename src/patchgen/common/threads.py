"""Set the number of CPU threads of torch, or explain why it is not possible.

More threads than cores are allowed, because results depend on their number in the last digits and a run may come from a
larger machine; they are only slower. Beyond `PER_CORE`, a step is lost in context switches, and a thread that cannot be
started ends the process inside the OpenMP library, without a message.
"""

from __future__ import annotations

import os
import threading

import torch

PER_CORE = 32


def use_threads(count: int | None) -> None:
    """Set the number of threads of torch; None keeps its default.

    Raises:
        ValueError: more than `PER_CORE` per core, or more than this process may start.
    """
    if not count:
        return
    cores = available_cores()
    fix = f"give --threads {cores}, or none: the number affects only the last digits of results"
    if count > PER_CORE * cores:
        raise ValueError(
            f"threads must be at most {PER_CORE * cores} on this machine ({PER_CORE} for each of its {cores} cores), "
            f"not {count}; {fix}"
        )
    if count > cores and (started := _startable(count)) < count:
        raise ValueError(f"{count} threads requested, but limits on memory or processes allow {started}; {fix}")
    torch.set_num_threads(count)


def available_cores() -> int:
    """Cores that this process may run on: a container or a scheduler may give fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _startable(count: int) -> int:
    """How many of `count` threads can be started at once, with stacks as large as OpenMP's."""
    end, threads = threading.Event(), list[threading.Thread]()
    try:
        for _ in range(count):
            thread = threading.Thread(target=end.wait, daemon=True)
            thread.start()
            threads.append(thread)
    except (RuntimeError, MemoryError):  # "can't start new thread"
        pass
    finally:
        end.set()
        for thread in threads:
            thread.join()
    return len(threads)
