"""Whose time an engine tells."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds from some beginning, never going backwards."""

    def now(self) -> float:
        """The time."""
        ...

    def sleep(self, seconds: float) -> None:
        """Let that much time pass, with nothing to do."""
        ...


class WallClock:
    """Real time."""

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class ThreadTimeClock:
    """The CPU time of the thread that asks, and jumps over what it sleeps.

    For an engine on a CPU that is shared with others: what they take does not count. Made and asked in the
    engine's thread; torch must use that one alone (torch.set_num_threads(1)), or its work is not seen.
    """

    def __init__(self) -> None:
        self._skipped_s = -time.thread_time()

    def now(self) -> float:
        return time.thread_time() + self._skipped_s

    def sleep(self, seconds: float) -> None:
        self._skipped_s += seconds
