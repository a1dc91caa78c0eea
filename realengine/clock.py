"""Clocks of an engine."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A clock in seconds from an arbitrary start, which never goes backwards."""

    def now(self) -> float:
        """Returns the current time in seconds."""
        ...

    def sleep(self, seconds: float) -> None:
        """Waits for `seconds`, with nothing to do."""
        ...


class WallClock:
    """A clock of real (monotonic) time."""

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class ThreadTimeClock:
    """A clock of the calling thread's CPU time, which skips the time it sleeps.

    For an engine on a shared CPU: time taken by other processes does not count. It must be created and called
    in the engine's thread; torch must use that thread alone (torch.set_num_threads(1)), or its work does not
    count.
    """

    def __init__(self) -> None:
        self._skipped_s = -time.thread_time()

    def now(self) -> float:
        return time.thread_time() + self._skipped_s

    def sleep(self, seconds: float) -> None:
        self._skipped_s += seconds
