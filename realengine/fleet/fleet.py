"""The engines of a fleet: their processes and their states.

    starting --ready--> serving --drain--> draining --last request ended--> gone, or asleep --wake--> waking
        ^                  | ^                                                                          |
        |              killed +-------------------------------------------------------------------------+
        +----restart---- down

All of it runs in one event loop, which is woken by the pipes of the processes and by their ends: nothing
polls. Messages that a process has sent before its end are read first, so no token is lost that has left it.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Protocol

from policies.gateway.gateway import Now
from realengine.fleet.messages import Began, Changed, Failed, Sleep, Started, Stepped, WakeUp
from realengine.fleet.process import EngineOfFleet
from realengine.fleet.replica import EngineProcess, EngineReplica, State
from realengine.fleet.request import FleetRequest

READ_AT_ONCE = 16
"""Messages of one engine that are handled before others have their turn."""

_LOG = logging.getLogger("windtunnel.fleet")


class FleetListener(Protocol):
    """Receives what happens to the engines of a fleet, in its event loop."""

    def stepped(self, replica: EngineReplica, stepped: Stepped) -> None:
        """Handles what a step has brought."""

    def began(self, replica: EngineReplica, began: Began) -> None:
        """Handles the counts of an iteration that begins; those of the replica are up to date."""

    def lost(self, numbers: list[int]) -> None:
        """Handles the requests that the end of a process has lost."""

    def fleet_changed(self) -> None:
        """Handles an engine that has begun to serve, or a starting one that has failed."""


class Fleet:
    """The engines of a fleet by index, which is never reused. A list that changes is replaced by a new one.

    specs: one per engine at the start. restarts: whether a process that has ended is replaced by a new one.
    start_timeout_s: time in which an engine must start, s. max_engines: number of engines that may serve at
    the same time, if it may become more than those at the start; on a CPU they share its cores.
    """

    def __init__(
        self,
        specs: Sequence[EngineOfFleet],
        requests: dict[int, FleetRequest],
        listener: FleetListener,
        *,
        clock: Now,
        reads_signals: bool,
        reads_caches: bool,
        signal_age_s: float,
        restarts: bool,
        start_timeout_s: float,
        max_engines: int = 1,
    ) -> None:
        self.replicas: list[EngineReplica] = []
        self.is_stopping = False
        self.is_paused = False
        """Whether requests wait for a wake-up."""
        self.start_from_zero: Callable[[], bool] | None = None
        """Starts an engine if none serves; returns whether one will serve. None: the fleet is not scaled."""
        self.last_start_s = 0.0
        """Seconds that the last start or wake-up has taken."""
        self._requests = requests
        self._listener = listener
        self._clock = clock
        self._reads_signals = reads_signals
        self._reads_caches = reads_caches
        self._signal_age_s = signal_age_s
        self._restarts = restarts
        self._start_timeout_s = start_timeout_s
        self._num_threads = max(1, len(os.sched_getaffinity(0)) // max(len(specs), max_engines))
        self._loop: asyncio.AbstractEventLoop
        self._serving: dict[str | None, list[EngineReplica]] = {None: []}
        for spec in specs:
            self._append(spec)

    @property
    def serving_model(self) -> Mapping[str | None, list[EngineReplica]]:
        """The engines that accept requests, under None, as all serve one model."""
        return self._serving

    def will_serve(self, model: str | None) -> bool:
        """Returns whether an engine is starting or waking, after starting one if the fleet has none left."""
        if self.is_paused or self.of(State.starting, State.waking):
            return True
        return self.start_from_zero is not None and self.start_from_zero()

    def of(self, *states: State) -> list[EngineReplica]:
        """Returns the engines in any of these states, by index."""
        return [replica for replica in self.replicas if replica.state in states]

    async def start(self) -> None:
        """Starts all engines, and returns when they serve. Raises RuntimeError, with the engine's name."""
        self._loop = asyncio.get_running_loop()
        starting = [self._launch(replica) for replica in self.replicas]
        try:
            await asyncio.gather(*starting)
        except BaseException:
            for replica in self.replicas:
                self.end(replica)
            raise

    # Engines start.

    def _append(self, spec: EngineOfFleet) -> EngineReplica:
        replica = EngineReplica(
            len(self.replicas),
            spec,
            self._requests,
            reads_signals=self._reads_signals,
            reads_caches=self._reads_caches,
            signal_age_s=self._signal_age_s,
            clock=self._clock,
        )
        self.replicas.append(replica)
        return replica

    def add(self, spec: EngineOfFleet) -> asyncio.Future[None]:
        """Starts one more engine; the result is done when it serves."""
        started = self._launch(self._append(spec))
        started.add_done_callback(_log_failure)
        return started

    def _launch(self, replica: EngineReplica) -> asyncio.Future[None]:
        """Starts the process of an engine, or a new one after its end."""
        replica.state, replica.failure, replica.changed_s = State.starting, "", self._clock.now
        process = replica.start(num_threads=self._num_threads)
        for descriptor in (process.connection.fileno(), process.process.sentinel):
            self._loop.add_reader(descriptor, self._readable, replica, process)
        replica.changing = self._loop.create_future()
        self._loop.call_later(self._start_timeout_s, self._late, replica, process)
        return replica.changing

    def _late(self, replica: EngineReplica, process: EngineProcess) -> None:
        """Ends an engine that has not started in time."""
        if replica.process is process and replica.state is State.starting:
            replica.failure = f"it has not started within {self._start_timeout_s:g} s"
            self._detach(process)
            process.kill()
            self._ended(replica)

    # Engines report.

    def _readable(self, replica: EngineReplica, process: EngineProcess) -> None:
        """Handles messages of an engine, or the end of its process."""
        try:
            for _ in range(READ_AT_ONCE):
                if not process.connection.poll():
                    break
                self._handle(replica, process.connection.recv())
            else:
                return  # the loop calls again for those that are left
        except (EOFError, OSError):
            self._detach(process)
            self._ended(replica, process.kill())
            return
        if process.has_ended() and not process.connection.poll():
            self._detach(process)
            self._ended(replica, process.kill())

    def _detach(self, process: EngineProcess) -> None:
        self._loop.remove_reader(process.process.sentinel)
        self._loop.remove_reader(process.connection.fileno())

    def _handle(self, replica: EngineReplica, message: object) -> None:
        match message:
            case Stepped(_, busy_s):
                replica.stepped(busy_s)
                self._listener.stepped(replica, message)
                self._leave_if_drained(replica)
            case Began():
                replica.began(message)
                self._listener.began(replica, message)
            case Started():
                replica.started(message)
                self._serve(replica)
            case Failed(reason):
                replica.failure = reason
            case Changed(is_asleep, error):
                self._changed(replica, is_asleep=is_asleep, error=error)

    def _serve(self, replica: EngineReplica) -> None:
        """Lets an engine accept requests."""
        if replica.state in (State.starting, State.waking):
            now = self._clock.now
            self.last_start_s = now - replica.changed_s
            if replica.ready_s is None:
                replica.ready_s = now
            if replica.down and replica.down[-1][1] == inf:
                replica.down[-1][1] = now
            replica.state = State.serving
            self._list_serving()
            _done(replica)
            self._listener.fleet_changed()

    def _changed(self, replica: EngineReplica, *, is_asleep: bool, error: str | None) -> None:
        """Handles the end of a change to sleep or back, or its failure."""
        if error is not None:
            _done(replica, RuntimeError(f"{replica.name}: {error}"))
        if is_asleep:
            replica.state = State.asleep
            _done(replica)
        else:
            replica.state = State.waking
            self._serve(replica)

    def _ended(self, replica: EngineReplica, exit_code: int | None = None) -> None:
        """Handles the end of a process: its requests are lost, and a new process may take its place."""
        before = replica.state
        if before in (State.down, State.gone):
            return
        reason = replica.failure or f"its process has ended with exit code {exit_code}"
        replica.process = None
        if self.is_stopping or before is State.draining:
            replica.state, replica.gone_s = State.gone, self._clock.now
            self._list_serving()
            self._listener.lost(replica.lost())
            _done(replica)
            return
        if before is State.starting:
            replica.state, replica.gone_s = State.gone, self._clock.now
            _done(replica, RuntimeError(f"{replica.name} cannot start: {reason}"))
            self._listener.fleet_changed()
            return
        _LOG.warning("%s has died: %s", replica.name, reason)
        replica.state, replica.failure = State.down, reason
        replica.down.append([self._clock.now, inf])
        self._list_serving()
        _done(replica, RuntimeError(f"{replica.name} has died: {reason}"))
        self._listener.lost(replica.lost())
        if self._restarts:
            self._launch(replica).add_done_callback(_log_failure)

    # Engines stop.

    def drain(self, replica: EngineReplica, sleep_level: int | None = None) -> asyncio.Future[None]:
        """Sends no more requests to a serving engine, which ends, or sleeps, after its last request."""
        replica.state, replica.sleeps_drained = State.draining, sleep_level
        replica.drain_s = self._clock.now
        replica.changing = self._loop.create_future()
        self._list_serving()
        self._leave_if_drained(replica)
        return replica.changing

    def _leave_if_drained(self, replica: EngineReplica) -> None:
        if replica.state is State.draining and not replica.num_outstanding and replica.process is not None:
            if replica.sleeps_drained is None:
                replica.process.stop()
            else:
                replica.process.send(Sleep(replica.sleeps_drained))

    def wake(self, replica: EngineReplica) -> asyncio.Future[None]:
        """Wakes a sleeping engine; the result is done when it serves."""
        assert replica.process is not None
        replica.state, replica.changed_s = State.waking, self._clock.now
        replica.changing = self._loop.create_future()
        replica.process.send(WakeUp())
        return replica.changing

    def end(self, replica: EngineReplica) -> None:
        """Ends a process at once."""
        process = replica.process
        if process is not None:
            self._detach(process)
            process.kill()
            replica.process, replica.state, replica.gone_s = None, State.gone, self._clock.now
            self._listener.fleet_changed()

    def stop(self) -> None:
        """Ends all processes; may be called from any thread, also without the event loop."""
        self.is_stopping = True
        processes = [replica.process for replica in self.replicas if replica.process is not None]
        for process in processes:
            process.stop()
        for process in processes:
            process.join()

    def _list_serving(self) -> None:
        self._serving = {None: self.of(State.serving)}


def _done(replica: EngineReplica, error: Exception | None = None) -> None:
    """Tells the tasks that wait for a change of an engine that it is complete, or has failed."""
    changing, replica.changing = replica.changing, None
    if changing is not None and not changing.done():
        if error is None:
            changing.set_result(None)
        else:
            changing.set_exception(error)


def _log_failure(started: asyncio.Future[None]) -> None:
    if not started.cancelled() and started.exception() is not None:
        _LOG.error("%s", started.exception())
