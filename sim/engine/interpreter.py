"""Changes what the Python interpreter does while a simulation runs: on Ctrl-C, and about garbage.

Ctrl-C becomes a flag, so that a simulation stops between two events and never in the middle of one. The
cyclic garbage collector is paused.
"""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupt:
    """A flag: `noted` is true once the user has pressed Ctrl-C. It is the handler of the signal itself.

    outer: the flag of the context around, such as that of a study around one of its runs.
    """

    __slots__ = ("noted", "outer")

    def __init__(self, outer: Interrupt | None = None) -> None:
        self.outer = outer
        self.noted: bool = outer is not None and outer.noted

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Sets the flag, and those around it; raises KeyboardInterrupt if it was set before."""
        if self.noted:
            signal.default_int_handler(number, frame)
        flag: Interrupt | None = self
        while flag is not None:
            flag.noted, flag = True, flag.outer


@contextmanager
def ctrl_c_noted() -> Iterator[Interrupt]:
    """Sets a flag on Ctrl-C instead of raising KeyboardInterrupt; a second Ctrl-C raises it.

    Inside another such context the flags of both are set, so that what runs around an interrupted simulation
    ends, too. Only the main thread of a program receives signals; in other threads the flag is never set.
    """
    if threading.current_thread() is not threading.main_thread():
        yield Interrupt()
        return
    before = signal.getsignal(signal.SIGINT)
    interrupt = Interrupt(before if isinstance(before, Interrupt) else None)
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def gc_paused() -> Iterator[None]:
    """Disables the collection of cycles in the body of a `with` statement.

    The objects of a run are kept until its end, or freed without cycles. The collector would scan all of
    them again and again and find nothing: 10 to 20 % of the time of a long run.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
