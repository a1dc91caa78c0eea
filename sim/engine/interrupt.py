"""Ctrl-C as a flag: the simulation stops between two events, never in the middle of one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupt:
    """Whether the user wants the run to stop."""

    __slots__ = ("noted",)

    def __init__(self) -> None:
        self.noted = False


@contextmanager
def ctrl_c_noted() -> Iterator[Interrupt]:
    """Note Ctrl-C instead of raising KeyboardInterrupt; a second one raises it.

    Only a program's main thread gets signals; in any other nothing changes.
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
