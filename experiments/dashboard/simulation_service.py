"""Simulations behind the page: composed configs stay warm, a newer request of a page ends its older run.

The answer itself is simulated in the thread of the HTTP request, where it can be ended between two events.
The other rates of the curve are simulated in a separate process, so that they never delay an answer, and
arrive one by one.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.synchronize import Event
from typing import Any, NamedTuple

from experiments.app.settings.compose import resolved
from experiments.dashboard.controls import Board, State
from experiments.study.launchers.local import end_with_parent
from policies.user_code import with_quote
from sim.metrics.result import RunResult
from sim.settings.errors import ConfigError
from sim.settings.scenario import build_run, run
from sim.setup.scenario import Scenario

LOADS = (1.5, 0.5, 2.0, 0.75, 1.25, 3.0, 0.25)
"""Rates of the curve as multiples of the present one, in the order in which they are run."""
MAX_CLIENTS = 16
"""Number of open pages whose last answer is kept."""
MAX_ANSWERS = 8
"""Number of answers that are kept: setting a control back asks for an answer that was just computed."""


class Superseded(Exception):
    """Raised in a run when the same page has sent a newer request."""


class RatePoint(NamedTuple):
    """Result of the same configuration at another request rate."""

    load: float
    """Request rate as a multiple of the configured one."""
    share: float | None
    """SLO attainment as a share of the requests; None without an SLO."""
    usd_per_million_output_tokens: float | None


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A finished simulation and the query that asked for it."""

    query: str
    scenario: Scenario
    result: RunResult
    rate_per_s: float | None
    """Mean request rate; None for a workload without one."""
    seconds: float
    """Wall time from the request to the finished simulation, in seconds."""

    @property
    def point(self) -> RatePoint:
        return _point(1.0, self.result.summary)


@dataclass
class Curve:
    """Points over request rates that belong to an answer, as far as they have been simulated."""

    answer: Answer
    points: dict[float, RatePoint]
    number: int = 0
    """Number of the request that the answer belongs to."""
    config: dict[str, Any] | None = None
    """Config whose other rates are still to be submitted; None once they are, or if it has no rate."""
    futures: dict[float, Future[RatePoint]] = field(default_factory=dict)
    problem: str = ""
    """Reason why the curve will stay incomplete; empty if there is none."""

    @property
    def version(self) -> list[Any]:
        """Version of what is drawn: two equal versions draw the same curve."""
        return [self.number, len(self.points), self.problem]

    def gather(self) -> None:
        """Collects the points that have been simulated since the last call."""
        for load, future in list(self.futures.items()):
            if not future.done():
                continue
            del self.futures[load]
            try:
                self.points[load] = future.result()
            except CancelledError:
                pass
            except (ConfigError, BrokenProcessPool) as error:
                self.problem = with_quote(error)

    @property
    def is_done(self) -> bool:
        return not self.futures and self.config is None


@dataclass
class _Client:
    """State of one page in a browser."""

    number: int = 0
    """Number of its last request."""
    curve: Curve | None = None


class SimulationService:
    """Service that simulates the states of pages; a context manager, as it owns a process for the curves."""

    def __init__(self, board: Board, *, curves: bool = True) -> None:
        self.board = board
        self._clients: OrderedDict[str, _Client] = OrderedDict()
        self._answers: OrderedDict[str, tuple[Answer, dict[str, Any]]] = OrderedDict()
        self._lock = threading.Lock()
        self._curves = curves
        self._pool: ProcessPoolExecutor | None = None
        self._context = multiprocessing.get_context("spawn")  # this process has threads
        self._closing = self._context.Event()

    def __enter__(self) -> SimulationService:
        if self._curves:
            self._start_process()
        return self

    def __exit__(self, *error: object) -> None:
        if self._pool is not None:
            self._closing.set()
            self._pool.shutdown(cancel_futures=True)

    def answer(self, client_id: str, state: State) -> Answer:
        """Simulates the state. Raises ConfigError, and Superseded once the client sends a newer request."""
        with self._asked(client_id) as is_current:

            def check(simulated_s: float, num_ended: int) -> None:
                if not is_current():
                    raise Superseded

            query = self.board.query(state)
            with self._lock:
                known = self._answers.get(query)
            answer, config = known or self._simulated(query, state, check)
            curve = Curve(answer=answer, points={1.0: answer.point})
            if self._curves and answer.rate_per_s is not None:
                curve.config = config
            with self._lock:
                if not is_current():
                    raise Superseded
                curve.number = self._clients[client_id].number
                self._clients[client_id].curve = curve
                self._answers[query] = answer, config
                self._answers.move_to_end(query)
                if len(self._answers) > MAX_ANSWERS:
                    self._answers.popitem(last=False)
        return answer

    def warm(self) -> None:
        """Simulates the default state, so that the first page gets its answer at once. Raises ConfigError."""
        state = self.board.defaults
        self._answers[self.board.query(state)] = self._simulated("", state, lambda simulated_s, ended: None)

    def _simulated(
        self, query: str, state: State, check: Callable[[float, int], None]
    ) -> tuple[Answer, dict[str, Any]]:
        began = time.perf_counter()
        config = self.board.config(state)
        check(0.0, 0)
        scenario, source = build_run(resolved(config))
        last_s, count = source.last_arrival_s, source.num_requests
        result = run(scenario, source, check)
        check(0.0, 0)
        answer = Answer(
            query=query,
            scenario=scenario,
            result=result,
            rate_per_s=count / last_s if last_s and count else None,
            seconds=time.perf_counter() - began,
        )
        return answer, config

    def curve(self, client_id: str) -> Curve | None:
        """Returns the curve of the client's last answer, None if it has none."""
        with self._lock:
            client = self._clients.get(client_id)
            return None if client is None else client.curve

    @contextmanager
    def _asked(self, client_id: str) -> Iterator[Any]:
        """Registers a request of a client, ends its older one, yields a check that it is still the newest."""
        with self._lock:
            client = self._clients.setdefault(client_id, _Client())
            self._clients.move_to_end(client_id)
            while len(self._clients) > MAX_CLIENTS:
                _cancel(self._clients.popitem(last=False)[1].curve)
            client.number += 1
            number = client.number
            _cancel(client.curve)
        yield lambda: client.number == number

    def begin(self, curve: Curve) -> None:
        """Submits the other rates unless that was done; called once the page shows the answer."""
        with self._lock:
            config, curve.config = curve.config, None
            if config is None:
                return
            try:
                curve.futures = self._submitted(config)
            except BrokenProcessPool:  # the process was killed: try once more with a new one
                self._start_process()
                curve.futures = self._submitted(config)

    def _submitted(self, config: dict[str, Any]) -> dict[float, Future[RatePoint]]:
        assert self._pool is not None
        return {load: self._pool.submit(rate_point, config, load) for load in LOADS}

    def _start_process(self) -> None:
        self._pool = ProcessPoolExecutor(
            1,
            mp_context=self._context,
            initializer=_initialise_worker,
            initargs=(self._closing, os.getpid()),
        )
        self._pool.submit(rate_point, {}, 0.0)  # imports the modules while the page is being opened


_is_closing: Callable[[], bool] = bool
"""Returns true, in the process of the curves, once the dashboard is closing and needs no more results."""


def _initialise_worker(closing: Event, parent: int) -> None:
    """Initialises the process of the curves: it ignores Ctrl-C and runs at a lower priority than answers."""
    global _is_closing
    _is_closing = closing.is_set
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(parent)
    os.nice(10)


def rate_point(config: Mapping[str, Any], load: float) -> RatePoint:
    """Simulates a config of `simulate` at `load` times its request rate. Raises ConfigError."""
    if not config:
        return RatePoint(load, None, None)

    def check(simulated_s: float, num_ended: int) -> None:
        if _is_closing():
            raise Superseded

    scenario, source = build_run(resolved({**config, "load": config["load"] * load}))
    return _point(load, run(scenario, source, check).summary)


def _point(load: float, summary: Mapping[str, Any]) -> RatePoint:
    goodput = summary["goodput"]
    return RatePoint(
        load,
        None if goodput is None else goodput["share"],
        summary["cost"]["usd_per_million_output_tokens"],
    )


def _cancel(curve: Curve | None) -> None:
    """Cancels the rates that have not begun."""
    if curve:
        curve.config = None
    for future in curve.futures.values() if curve else ():
        future.cancel()
