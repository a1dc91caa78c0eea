"""An event loop whose clock jumps to the next timer, so that no test depends on how busy the machine is.

The client and the scripted server run in one such loop: what happens between two timers takes no time, and
scripted times are kept exactly. Sockets are real, so the clock jumps only if no data has come for a moment.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest

UNDER_WAY_S = 0.001
"""Real seconds that data on the loopback interface is given to arrive."""

T = TypeVar("T")


class JumpingSelector(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        events = super().select(UNDER_WAY_S)
        if not events:
            self.now_s += timeout
        return events


class JumpingLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s

    def take(self, seconds: float) -> None:
        """Lets time pass as if the running task computed for that long."""
        self._jumping.now_s += seconds


def run_jumping(main: Coroutine[Any, Any, T]) -> T:
    """Runs `main` to its end; time.perf_counter and time.monotonic read the loop's clock meanwhile."""
    with pytest.MonkeyPatch.context() as patch, asyncio.Runner(loop_factory=JumpingLoop) as runner:
        for name in ("perf_counter", "monotonic"):
            patch.setattr(time, name, runner.get_loop().time)
        return runner.run(main)
