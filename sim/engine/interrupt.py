"""Turns Ctrl-C into a flag, so that a simulation stops between two events and never in the middle of one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupt:
    """A flag: `noted` is true once the user has pressed Ctrl-C."""

    __slots__ = ("noted",)

    def __init__(self) -> None:
        self.noted = False


@contextmanager
def ctrl_c_noted() -> Iterator[Interrupt]:
    """Sets a flag on Ctrl-C instead of raising KeyboardInterrupt; a second Ctrl-C raises it.

    Only the main thread of a program receives signals; in other threads the flag is never set.
    """
    interrupt = Interrupt()

    def note(number: int, frame: FrameType | None) -> None:
        if interrupt.noted:
            signal.default_int_handler(number, frame)
        interrupt.noted = True

    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)
