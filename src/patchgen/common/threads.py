"""How many CPU threads torch uses: the number that was asked for, or a sentence why it cannot be.

More threads than cores are allowed, because results depend on their number in the last digits and a run may come from a
larger machine; they only take longer. Beyond `PER_CORE` a step is lost in switching between them, and a thread that
cannot be started ends the process inside the OpenMP library, without a word of ours.
"""

from __future__ import annotations

import os
import threading

import torch

PER_CORE = 32


def use_threads(count: int | None) -> None:
    """Let torch use so many threads; None leaves its own choice.

    Raises:
        ValueError: more than `PER_CORE` for each core, or more than this process may start.
    """
    if not count:
        return
    cores = available_cores()
    fix = f"give --threads {cores}, or none: another number changes results in their last digits alone"
    if count > PER_CORE * cores:
        raise ValueError(
            f"threads must be at most {PER_CORE * cores} on this machine ({PER_CORE} for each of its {cores} cores), "
            f"not {count}; {fix}"
        )
    if count > cores and (started := _startable(count)) < count:
        raise ValueError(f"{count} threads are asked for, and a limit of memory or processes ends at {started}; {fix}")
    torch.set_num_threads(count)


def available_cores() -> int:
    """Cores that this process may run on: a container or a scheduler may give fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _startable(count: int) -> int:
    """How many of `count` threads exist at once: with stacks of the size that those of OpenMP have."""
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
