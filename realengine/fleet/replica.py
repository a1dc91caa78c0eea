"""One engine of a fleet as the gateway sees it: its process, the pipe to it, and the counts for routers."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from enum import Enum, auto
from itertools import takewhile
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from queue import SimpleQueue

from policies.core.limits import RejectedError, StopAfter
from policies.core.request import Request
from policies.gateway.gateway import Now
from policies.gateway.load_counts import LoadCounts
from policies.gateway.signals import AgedSignals
from realengine.fleet.messages import Abort, Began, Started, Stop, Submit, ToEngine
from realengine.fleet.process import EngineOfFleet, serve_engine
from realengine.fleet.request import FleetRequest
from realengine.serving.answer import Output

STOP_TIMEOUT_S = 30
"""Seconds to wait for the running step of an engine that ends, so that a hanging step cannot block."""


class State(Enum):
    """State of an engine of a fleet."""

    starting = auto()
    serving = auto()
    draining = auto()
    asleep = auto()
    waking = auto()
    down = auto()
    gone = auto()


class EngineProcess:
    """A process with an engine, and the pipe to it. Messages are sent by a thread, as a full pipe blocks.

    It is forked from a server that has imported torch once and never uses a device, so an engine starts
    without the seconds of an import, and CUDA begins in the process itself.
    """

    def __init__(self, spec: EngineOfFleet, name: str, *, num_threads: int, reports_cache: bool) -> None:
        context = get_context("forkserver")
        context.set_forkserver_preload([serve_engine.__module__])
        self.connection, theirs = context.Pipe()
        self.process: ForkServerProcess = context.Process(
            target=serve_engine, args=(theirs, spec, num_threads, reports_cache), name=name
        )
        self.process.start()
        theirs.close()  # so that the end of the process ends the pipe
        self._lock = threading.Lock()  # multiprocessing reads the exit code once, for one thread
        self._queue: SimpleQueue[ToEngine | None] = SimpleQueue()
        threading.Thread(target=_send_all, args=(self._queue, self.connection), daemon=True).start()

    def send(self, message: ToEngine) -> None:
        """Sends a message, after those before."""
        self._queue.put(message)

    def stop(self) -> None:
        """Asks the process to end; `join` waits for it."""
        self.send(Stop())
        self._queue.put(None)

    def has_ended(self) -> bool:
        """Returns whether the process has ended."""
        with self._lock:
            return not self.process.is_alive()

    def join(self) -> None:
        """Waits for the end of the process; kills one that does not end in time."""
        wait([self.process.sentinel], STOP_TIMEOUT_S)
        self.kill()

    def kill(self) -> int | None:
        """Ends the process at once, if it has not ended; returns its exit code."""
        self._queue.put(None)
        if not self.has_ended():
            self.process.kill()
            wait([self.process.sentinel], STOP_TIMEOUT_S)
        with self._lock:
            return self.process.exitcode


def _send_all(queue: SimpleQueue[ToEngine | None], connection: Connection) -> None:
    with suppress(OSError):  # the process has ended, which its sentinel tells
        while (message := queue.get()) is not None:
            connection.send(message)


class HeldBlocks:
    """The content of the prefix cache of an engine, by hash: a `CacheReader`.

    requests: the requests in progress, by number.
    """

    def __init__(self, requests: dict[int, FleetRequest]) -> None:
        self.block_size = 1
        self._requests = requests
        self._held: set[bytes] = set()

    def num_cached(self, request: Request) -> int:
        """Returns the number of tokens of a prompt that are cached, at least one less than the prompt has."""
        chain = self._requests[request.request_id].chain(self.block_size)
        num_most = (request.prompt.num_tokens - 1) // self.block_size
        held = takewhile(self._held.__contains__, chain[:num_most])
        return sum(1 for _ in held) * self.block_size

    def change(self, began: Began) -> None:
        """Handles what an engine reports."""
        self._held.difference_update(began.removed)
        self._held.update(began.stored)

    def clear(self) -> None:
        """Empties the content, for a new engine."""
        self._held.clear()


class EngineReplica(LoadCounts):
    """An engine of a fleet: a `policies.gateway.gateway.GatewayReplica`.

    spec: its model and settings. requests: the requests of the fleet in progress, by number. reads_signals,
    reads_caches: whether policies read them. clock: of the gateway.
    """

    price_usd_per_hour = 0.0

    def __init__(
        self,
        index: int,
        spec: EngineOfFleet,
        requests: dict[int, FleetRequest],
        *,
        reads_signals: bool,
        reads_caches: bool,
        signal_age_s: float,
        clock: Now,
    ) -> None:
        LoadCounts.__init__(self, 1, 0)
        self.index = index
        self.spec = spec
        self.state = State.starting
        self.sizes: Started | None = None
        """The sizes of the engine; None: it has not started yet."""
        self.process: EngineProcess | None = None
        self.changing: asyncio.Future[None] | None = None
        """Is done when the engine has started, sleeps, is awake again, or has ended after a drain."""
        self.failure = ""
        """Why its process has ended, as far as the process has said."""
        self.sleeps_drained: int | None = None
        """While it drains: the level of the sleep that follows; None: its process ends."""
        self.added_s = self.changed_s = clock.now
        """Times at which it was added to the fleet, and at which its last start or wake-up began, s."""
        self.ready_s: float | None = None
        self.drain_s: float | None = None
        self.gone_s: float | None = None
        self.down: list[list[float]] = []
        """[start, end] of each downtime, s."""
        self.busy_s = 0.0
        """Seconds of its steps, since it was added to the fleet."""
        self._busy_before_s = 0.0  # of processes before the present one
        self._requests = requests
        self._clock = clock
        self._sent: dict[int, FleetRequest] = {}  # requests that it has, by number
        self._tokenless: set[int] = set()  # those of them without a token from here
        self._own_signals: AgedSignals | None = None
        self._blocks: HeldBlocks | None = None
        if reads_signals:
            self.signals = self._own_signals = AgedSignals(clock, signal_age_s)
        if reads_caches:
            self.cache_view = self._blocks = HeldBlocks(requests)

    @property
    def name(self) -> str:
        """Its name in messages."""
        return f"engine {self.index}"

    def start(self, *, num_threads: int) -> EngineProcess:
        """Starts the process of the engine and returns it. num_threads: of torch on the CPU."""
        reports = self._blocks is not None
        self.process = EngineProcess(self.spec, self.name, num_threads=num_threads, reports_cache=reports)
        return self.process

    def started(self, sizes: Started) -> None:
        """Notes the sizes of an engine that has started."""
        self.sizes = sizes
        self._block_size = sizes.block_size
        self.num_kv_tokens = sizes.num_blocks * sizes.block_size
        if self._blocks is not None:
            self._blocks.block_size = sizes.block_size

    def has_adapter(self, name: str) -> bool:
        """Returns whether the engine serves a LoRA adapter."""
        return name in self.spec.settings.lora_adapters

    # Requests.

    def submit(self, request: Request, stop_after: StopAfter) -> None:
        """Sends a request to the engine, which begins with it."""
        self.take_in(request, None)

    def take_in(self, request: Request, known: Output | None) -> None:
        """Sends a request to the engine, which goes on after `known`.

        Raises RejectedError for a prompt that is too long.
        """
        own, sizes, process = self._requests[request.request_id], self.sizes, self.process
        assert sizes is not None
        assert process is not None
        if request.prompt.num_tokens >= sizes.max_model_len:
            raise RejectedError(
                f"a prompt of {request.prompt.num_tokens} tokens: must have < {sizes.max_model_len} tokens, "
                f"max_model_len of {self.name}"
            )
        num_tokens = request.prompt.num_tokens
        self._sent[own.number] = own
        self.num_outstanding += 1
        self.num_outstanding_tokens += num_tokens
        self._tokenless.add(own.number)
        if known is None:
            self.count_queued(own.number, num_tokens)
        if self._own_signals is not None:
            self._own_signals.sent(request)
        process.send(
            Submit(
                own.number,
                own.tokens,
                own.params,
                request.priority,
                request.tenant,
                request.adapter,
                own.cache_salt,
                own.request.arrival_s,
                request.deadline_s,
                known,
            )
        )

    def can_resume(self, num_known: int) -> bool:
        """Returns whether a sequence of so many tokens fits into the engine."""
        sizes = self.sizes
        return sizes is not None and num_known < min(sizes.max_model_len, self.num_kv_tokens)

    def abort(self, request_id: int) -> None:
        """Has the engine abort a request before its next step."""
        assert self.process is not None
        self.process.send(Abort(request_id))

    def has(self, number: int) -> bool:
        """Returns whether the engine has a request."""
        return number in self._sent

    def is_first_token(self, number: int) -> bool:
        """Counts a request with tokens as no longer queued; returns whether they are its first from here."""
        if number not in self._tokenless:
            return False
        self._tokenless.remove(number)
        self.num_queued_tokens -= self._queued.pop(number, 0)
        return True

    def ended(self, number: int) -> None:
        """Counts a request that has ended here."""
        num_tokens = self._sent.pop(number).request.prompt.num_tokens
        self._tokenless.discard(number)
        self.num_outstanding -= 1
        self.num_outstanding_tokens -= num_tokens
        self.num_queued_tokens -= self._queued.pop(number, 0)

    # What the engine reports.

    def began(self, began: Began) -> None:
        """Handles the counts of an iteration."""
        if self._own_signals is not None:
            self._own_signals.publish(began.counts, self._clock.now)
        if self._blocks is not None:
            self._blocks.change(began)

    def stepped(self, busy_s: float) -> None:
        """Notes the seconds of all steps of the present process."""
        self.busy_s = self._busy_before_s + busy_s

    def lost(self) -> list[int]:
        """Empties the counts after the end of the process; returns the numbers of the lost requests."""
        lost = sorted(self._sent)
        self._sent.clear()
        self._tokenless.clear()
        self._uncount_all()
        self._busy_before_s = self.busy_s
        if self._own_signals is not None:
            self._own_signals.reset()
        if self._blocks is not None:
            self._blocks.clear()
        return lost
