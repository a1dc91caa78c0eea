"""Simulated time: a SimPy environment with events at absolute times, ordered by phase at equal times.

clock.at(time_s, phase, callback)           an event that calls callback(event)
yield clock.at(time_s, phase)               a process waits for such an event
yield clock.timeout(2.5)                    and for any other event of SimPy's
yield request_has_ended | clock.timeout(2.5)

While it runs, Ctrl-C becomes a flag, so that a simulation stops between two events and never in the middle of
one, and Python's cyclic garbage collector is paused.
"""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from heapq import heapify, heappush
from operator import attrgetter
from types import FrameType
from typing import Final

from simpy import Environment, Event, Process
from simpy.core import StopSimulation
from simpy.events import NORMAL, PENDING, URGENT, EventPriority, Interruption, ProcessGenerator


class Interrupt:
    """A flag: `noted` is true once the user has pressed Ctrl-C.

    The flag is the signal handler. outer: the flag of the enclosing context, such as a study that contains
    the run.
    """

    __slots__ = ("noted", "outer")

    def __init__(self, outer: Interrupt | None = None) -> None:
        self.outer = outer
        self.noted: bool = outer is not None and outer.noted

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Sets the flag and the enclosing flags; raises KeyboardInterrupt if it was set before."""
        if self.noted:
            signal.default_int_handler(number, frame)
        flag: Interrupt | None = self
        while flag is not None:
            flag.noted, flag = True, flag.outer


@contextmanager
def ctrl_c_noted() -> Iterator[Interrupt]:
    """Sets a flag on Ctrl-C instead of raising KeyboardInterrupt; a second Ctrl-C raises it.

    In nested contexts all flags are set, so the program around an interrupted simulation stops as well. Only
    the main thread of a program receives signals; in other threads the flag is never set.
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


Callback = Callable[[Event], None]


class Phase(IntEnum):
    """The order of events at the same time; within a phase, events of replicas are ordered by their index.

    The order is: iterations end; the KV that they computed is replicated; aborted pending requests that reach
    an engine between two steps end; requests arrive or are aborted; replicas crash, start and stop; the
    running replicas plan. A request that arrives exactly at the end of an iteration is therefore in the plan
    made there, whether the replica leapt or stepped to that boundary, and the router does not count requests
    that end at that time.

    SimPy's own events, such as timeouts, are in the phase `control`. Just before it, in `begin`, processes
    start and are interrupted.
    """

    commit = 0
    replicate_kv = 500_000
    abort = 900_000
    arrive = 1_000_000
    begin = 1_499_999
    control = 1_500_000
    plan = 2_000_000


ARRIVE: Final = int(Phase.arrive)
"""A constant, because reading an enum member through its class takes 50 ns in Python 3.11."""
_PHASE_OF: Final[dict[int, int]] = {URGENT: int(Phase.begin), NORMAL: int(Phase.control)}


class Moment(Event):
    """An event at an absolute time, like SimPy's `Timeout`."""

    _ok = True
    _value = None

    def __init__(self, env: Environment, callback: Callback | None) -> None:
        self.env = env
        self.callbacks = [] if callback is None else [callback]

    def happen(self) -> None:
        """Runs immediately, before the caller continues; for actions in the middle of another event."""
        callbacks, self.callbacks = self.callbacks, None  # type: ignore[assignment]
        for callback in callbacks:
            callback(self)


_NEW_MOMENT: Final[Callable[[type[Moment]], Moment]] = Moment.__new__


class Begun(Process):
    """A process that begins as soon as it is created; SimPy's processes begin with a separate event.

    Its first event is therefore ordered as the code suggests. An error is raised at once and unchanged; SimPy
    raises a copy with a separate event.
    """

    def __init__(self, env: Environment, generator: ProcessGenerator) -> None:
        self.env = env
        self.callbacks = []
        self._generator = generator
        self._resume(Moment(env, None))

    def _resume(self, event: Event) -> None:
        env = self.env
        active = env._active_proc
        Process._resume(self, event)
        env._active_proc = active
        if self._value is not PENDING and not self._ok:
            raise self._value


class Clock(Environment):
    """SimPy's environment, with events at absolute times and in phases.

    SimPy schedules by delay, and now + (t - now) may differ from t in the last bit. Leaping and stepping must
    reach bit-identical times, so `at` puts the absolute time into SimPy's queue. (SimPy's private names are
    used in this module only.) Events cannot be cancelled: a callback checks whether its event is still the
    valid one.
    """

    now: float = property(attrgetter("_now"))  # type: ignore[assignment]
    """Simulated time, s."""

    def __init__(self) -> None:
        Environment.__init__(self, 0.0)
        self.events = self._queue
        """The future events, as a heap of (time in s, phase, number, event); only the clock changes it."""
        self.is_stopped = False
        self._num_left = 0
        self._until_s = 0.0
        self._interrupt = Interrupt()

    def at(self, time_s: float, priority: int, callback: Callback | None = None) -> Event:
        """Schedules an event at time_s >= now, which calls callback(event); returns it.

        Events at the same time are processed by priority, smallest first, then in the order of scheduling.
        """
        event = _NEW_MOMENT(Moment)
        event.env = self
        event.callbacks = [] if callback is None else [callback]
        heappush(self._queue, (time_s, priority, next(self._eid), event))  # type: ignore[misc]
        return event

    def place(self, event: Moment, time_s: float, priority: int) -> None:
        """Schedules an event whose time was not known when it was created."""
        heappush(self._queue, (time_s, priority, next(self._eid), event))  # type: ignore[misc]

    def schedule(self, event: Event, priority: EventPriority = NORMAL, delay: float = 0) -> None:
        """Schedules an event like SimPy's method, with the phases of SimPy's two priorities.

        The end of a simulator process is no event if nothing waits for it. Raises ValueError for a NaN delay,
        which cannot be ordered.
        """
        if not delay >= 0:
            raise ValueError(f"delay={delay}: must be >= 0 s")
        if type(event) is Begun and not event.callbacks:
            event.callbacks = None  # type: ignore[assignment]
            return
        at_s, phase = self._now + delay, _PHASE_OF.get(priority, priority)
        heappush(self._queue, (at_s, phase, next(self._eid), event))  # type: ignore[misc]

    def begin(self, generator: ProcessGenerator) -> Process:
        """Begins a process of the simulator now; see `Begun`."""
        return Begun(self, generator)

    def end_users(self) -> None:
        """Drops all events that do not belong to the simulator, so that no user process continues."""
        self._queue[:] = [entry for entry in self._queue if _is_own(entry[3])]
        heapify(self._queue)

    def stop(self) -> None:
        """Makes `run_some` return before the next event."""
        self.is_stopped = True
        self._num_left = 0

    def run_some(self, max_events: int, until_s: float, interrupt: Interrupt) -> bool:
        """Processes up to max_events events that are due by until_s; returns false if it stops earlier."""
        self._num_left, self._until_s, self._interrupt = max_events, until_s, interrupt
        if not self.is_stopped:
            self.run()
        return not (self._num_left or self.is_stopped)

    def step(self) -> None:
        """Processes the next event, as SimPy's `run` does repeatedly, unless `run_some` is over."""
        queue = self._queue
        if not queue or queue[0][0] > self._until_s or not self._num_left or self._interrupt.noted:
            raise StopSimulation(None)
        self._num_left -= 1
        Environment.step(self)


def _is_own(event: Event) -> bool:
    return isinstance(event.process if isinstance(event, Interruption) else event, Moment | Begun)
