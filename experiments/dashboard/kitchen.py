"""Runs behind the page: composed configs stay warm, a newer question ends an older run, curves come in parts.

The answer itself is simulated in the thread that was asked, which can be ended between two events; the other
rates of the curve in one process beside it, so that they never keep an answer waiting.
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

from experiments.dashboard.controls import Board, State
from sim.metrics.result import RunResult
from sim.settings.errors import ConfigError
from sim.settings.resolve import resolved
from sim.settings.scenario import build_run, run
from sim.setup.scenario import Scenario

LOADS = (1.5, 0.5, 2.0, 0.75, 1.25, 3.0, 0.25)
"""Rates of the curve as multiples of the present one, in the order in which they are run."""
MAX_CLIENTS = 16
"""Pages that are remembered."""
MAX_ANSWERS = 8
"""The same of answers: turning a setting back asks for what was just there."""


class Superseded(Exception):
    """A newer question of the same page came."""


class RatePoint(NamedTuple):
    """The same service at another rate."""

    load: float
    """Times the present rate."""
    share: float | None
    """Of the requests, within the SLO; None without one."""
    usd_per_million_output_tokens: float | None


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A run, and what was asked."""

    query: str
    scenario: Scenario
    result: RunResult
    rate_per_s: float | None
    """None for requests without a rate of their own."""
    seconds: float
    """Of wall time, from the question on."""

    @property
    def point(self) -> RatePoint:
        return _point(1.0, self.result.summary)


@dataclass
class Curve:
    """Of an answer: its points so far."""

    answer: Answer
    points: dict[float, RatePoint]
    number: int = 0
    """Of the question."""
    config: dict[str, Any] | None = None
    """Of the run whose other rates are still to be simulated; None once they are, or if it has none."""
    futures: dict[float, Future[RatePoint]] = field(default_factory=dict)
    problem: str = ""
    """Why it will not be complete."""

    @property
    def version(self) -> list[Any]:
        """Equal ones look alike."""
        return [self.number, len(self.points), self.problem]

    def gather(self) -> None:
        """Take in what is done."""
        for load, future in list(self.futures.items()):
            if not future.done():
                continue
            del self.futures[load]
            try:
                self.points[load] = future.result()
            except CancelledError:
                pass
            except (ConfigError, BrokenProcessPool) as error:
                self.problem = str(error)

    @property
    def is_done(self) -> bool:
        return not self.futures and self.config is None


@dataclass
class _Client:
    """A page in a browser."""

    number: int = 0
    """Of its last question."""
    curve: Curve | None = None


class Kitchen:
    """Answers the questions of pages. Use as a context: it has a process of its own."""

    def __init__(self, board: Board, *, curves: bool = True) -> None:
        self.board = board
        self._clients: OrderedDict[str, _Client] = OrderedDict()
        self._answers: OrderedDict[str, tuple[Answer, dict[str, Any]]] = OrderedDict()
        self._lock = threading.Lock()
        self._curves = curves
        self._pool: ProcessPoolExecutor | None = None
        self._context = multiprocessing.get_context("spawn")  # this process has threads
        self._closing = self._context.Event()

    def __enter__(self) -> Kitchen:
        if self._curves:
            self._start_process()
        return self

    def __exit__(self, *error: object) -> None:
        if self._pool is not None:
            self._closing.set()
            self._pool.shutdown(cancel_futures=True)

    def answer(self, client_id: str, state: State) -> Answer:
        """Simulate. Raises ConfigError, and Superseded as soon as a newer question of the client is here."""
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
        """Simulate what a page begins with, so that the first one need not wait. Raises ConfigError."""
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
        """Of the client's last answer."""
        with self._lock:
            client = self._clients.get(client_id)
            return None if client is None else client.curve

    @contextmanager
    def _asked(self, client_id: str) -> Iterator[Any]:
        """The newest question of a client: what it asked before is ended. Gives whether it still is."""
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
        """Simulate the other rates, if that is still to be done: once the page shows the answer."""
        with self._lock:
            config, curve.config = curve.config, None
            if config is None:
                return
            try:
                curve.futures = self._submitted(config)
            except BrokenProcessPool:  # it was killed: once more with a new one
                self._start_process()
                curve.futures = self._submitted(config)

    def _submitted(self, config: dict[str, Any]) -> dict[float, Future[RatePoint]]:
        assert self._pool is not None
        return {load: self._pool.submit(rate_point, config, load) for load in LOADS}

    def _start_process(self) -> None:
        self._pool = ProcessPoolExecutor(
            1,
            mp_context=self._context,
            initializer=_stand_back,
            initargs=(self._closing,),
        )
        self._pool.submit(rate_point, {}, 0.0)  # imports all, while the page is being opened


_is_closing: Callable[[], bool] = bool
"""In the process of the curves: whether the dashboard ends, and nobody waits any more."""


def _stand_back(closing: Event) -> None:
    """In the process of the curves: Ctrl-C is not for it, and answers go first where cores are few."""
    global _is_closing
    _is_closing = closing.is_set
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(10)


def rate_point(config: Mapping[str, Any], load: float) -> RatePoint:
    """The figures of a config of `simulate` at so many times its rate. Raises ConfigError."""
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
    """What has not begun."""
    if curve:
        curve.config = None
    for future in curve.futures.values() if curve else ():
        future.cancel()
