"""One thread for all model work: hooks and memory need no lock, and the server stays responsive."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from patchgen.viewer.guard import RefusedRequest

T = TypeVar("T")


class ModelThread:
    """Runs jobs one at a time, in order of arrival.

    Args:
        seconds: Time limit of a request, waiting included.
        waiting: Maximum jobs in the queue.
    """

    def __init__(self, seconds: float, waiting: int) -> None:
        self.seconds, self.waiting = seconds, waiting
        self.queued = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="model")

    async def run(self, job: Callable[[], T]) -> T:
        """The job's result.

        Raises:
            RefusedRequest: the queue is full, or the time is up (a job that has not started is then cancelled).
        """
        if self.queued >= self.waiting:
            raise RefusedRequest(503, f"{self.queued} requests are waiting for the model; try again in a moment")
        self.queued += 1
        try:
            async with asyncio.timeout(self.seconds):
                return await asyncio.get_running_loop().run_in_executor(self._thread, job)
        except TimeoutError:
            raise RefusedRequest(503, f"no answer within {self.seconds:g} s: the model is busy or too slow") from None
        finally:
            self.queued -= 1

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
