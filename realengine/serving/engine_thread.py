"""Drives an engine from one thread, for callers in any event loop.

    submit -> line -- while fewer than max_waiting wait --> Engine.add
                                                            Engine.step, repeatedly
    take   <- newest state of each request <--------------- _publish, after each step

A state contains only the number of tokens of each output, so a late reader finds the newest state and
everything new since its last read. A slow consumer thus delays no other request and needs no buffer.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from itertools import count, islice
from typing import NamedTuple

from realengine.engine import Engine
from realengine.serving.answer import Answer
from realengine.serving.sampling_params import SamplingParams

STOP_TIMEOUT_S = 30
"""Seconds to wait for the running step when the thread ends, so that a hanging step cannot block."""


class QueueFullError(RuntimeError):
    """max_waiting requests are waiting already, so this one was not added."""


class EngineDeadError(RuntimeError):
    """The engine has stopped, for the reason in __cause__ if it was not shut down."""


class End(NamedTuple):
    """Progress of an output. text: if the request has stop strings."""

    num_tokens: int = 0
    finish_reason: str | None = None
    text: str | None = None


class State(NamedTuple):
    """Progress of a request: of each of its outputs."""

    ends: tuple[End, ...]
    is_finished: bool = False
    error: str | None = None


class Stream:
    """One request between its event loop and the engine's thread.

    window_s: seconds from its arrival to its deadline; None: it has none.
    """

    def __init__(
        self,
        tokens: list[int],
        params: SamplingParams,
        priority: int,
        tenant: str,
        lora: str | None,
        cache_salt: str,
        is_final_only: bool,
        window_s: float | None,
    ) -> None:
        self.tokens = tokens
        self.params = params
        self.priority = priority
        self.tenant = tenant
        self.lora = lora
        self.cache_salt = cache_salt
        self.arrival_s = 0.0  # on the engine's clock, set by `submit`
        self.is_final_only = is_final_only
        self.window_s = window_s
        self.request_id: int | str = ""  # set by `submit`
        self.answer: Answer | None = None  # of the engine, once added; its lists only grow
        self.state = State((End(),) * params.n)
        self.failure: Exception | None = None  # exception that the iterator raises
        self.loop = asyncio.get_running_loop()
        self.news = asyncio.Event()
        self.is_notified = False  # true if news is set, or about to be

    @property
    def has_ended(self) -> bool:
        return self.failure is not None or self.state.is_finished


class EngineThread:
    """The only caller of an engine. Public methods may be called from any thread.

    max_waiting: maximum number of requests in the engine's queue. rejects: more requests are rejected;
    otherwise they wait in line.
    """

    def __init__(self, engine: Engine, *, max_waiting: int, rejects: bool) -> None:
        self._engine = engine
        self._max_waiting = max_waiting
        self._rejects = rejects
        self._todo = threading.Condition()
        self._unfinished: dict[int | str, Stream] = {}
        self._ids = count()
        self._line: dict[Stream, None] = {}  # requests that are not in the engine yet
        self._given_up: dict[Stream, None] = {}
        self._clears_cache = False  # before the next step
        self._is_paused = False  # requests stay in line
        self._when_idle: list[tuple[Callable[[], None], Future[None]]] = []
        self._num_waiting = 0  # length of the engine's queue after the last step
        self._is_stopping = False
        self._cause: BaseException | None = None  # cause of the engine's death
        self._streams: dict[int, Stream] = {}  # requests in the engine, by the engine's request id
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def num_unfinished(self) -> int:
        return len(self._unfinished)

    def submit(self, stream: Stream, request_id: str | None) -> None:
        """Puts a request in line, and numbers it if it has no id. Raises as `AsyncLLM.generate`."""
        with self._todo:
            self.check_health()
            stream.request_id = next(self._ids) if request_id is None else request_id
            if stream.request_id in self._unfinished:
                raise ValueError(f"request_id={request_id}: is in use by an unfinished request")
            num_waiting = len(self._line) + self._num_waiting
            if self._rejects and num_waiting >= self._max_waiting:
                raise QueueFullError(
                    f"queue full ({num_waiting} waiting, max_waiting={self._max_waiting}); try again later"
                )
            stream.arrival_s = self._engine.clock.now()
            self._unfinished[stream.request_id] = stream
            self._line[stream] = None
            self._todo.notify()

    def find(self, request_id: int | str) -> Stream | None:
        return self._unfinished.get(request_id)

    def take(self, stream: Stream) -> State:
        """Returns the newest state; later ones set `news`.

        Raises the exception that has ended the request.
        """
        stream.news.clear()
        with self._todo:
            stream.is_notified = False
            if stream.failure is not None:
                raise stream.failure
            return stream.state

    def abort(self, stream: Stream) -> None:
        """Requests the abort of a request; does nothing if it has ended."""
        with self._todo:
            if not stream.has_ended:
                self._given_up[stream] = None
                self._todo.notify()

    def clear_prefix_cache(self) -> None:
        """Evicts, before the next step, the KV that no running request uses."""
        with self._todo:
            self._clears_cache = True
            self._todo.notify()

    @property
    def is_paused(self) -> bool:
        return self._is_paused

    def pause(self, *, aborts: bool) -> None:
        """Keeps requests in line from now on, until `resume`.

        aborts: those that have come before are aborted; otherwise those in the engine are served to the end.
        """
        with self._todo:
            self._is_paused = True
            if aborts:
                self._given_up.update(dict.fromkeys(self._unfinished.values()))
            self._todo.notify()

    def resume(self) -> None:
        """Lets requests into the engine again."""
        with self._todo:
            self._is_paused = False
            self._todo.notify()

    def when_idle(self, call: Callable[[], None]) -> Future[None]:
        """Has a function called in the engine's thread as soon as the engine has no requests."""
        done: Future[None] = Future()
        with self._todo:
            self.check_health()
            self._when_idle.append((call, done))
            self._todo.notify()
        return done

    def check_health(self) -> None:
        if self._cause is not None:
            raise _dead(self._cause)
        if self._is_stopping:
            raise EngineDeadError("the engine was shut down; create a new AsyncLLM")

    def stop(self) -> None:
        """Aborts all unfinished requests and ends the thread."""
        with self._todo:
            self._is_stopping = True
            self._todo.notify()
        if threading.current_thread() is not self._thread:  # the garbage collector runs in any thread
            self._thread.join(STOP_TIMEOUT_S)

    def _run(self) -> None:
        try:
            while self._take_in():
                if self._engine.num_unfinished:
                    self._publish(self._states(self._engine.step()))
                    self._pause()
                elif self._when_idle:
                    self._call_when_idle()
        except BaseException as error:
            with self._todo:
                self._cause = error
                lost = list(self._unfinished.values())
                for stream in lost:
                    stream.failure = _dead(error)
            self._publish({stream: stream.state for stream in lost})
        finally:
            for _, done in self._when_idle:
                done.cancel()

    def _call_when_idle(self) -> None:
        with self._todo:
            calls, self._when_idle = self._when_idle, []
        for call, done in calls:
            if not done.set_running_or_notify_cancel():
                continue
            try:
                call()
            except Exception as error:
                done.set_exception(error)
            else:
                done.set_result(None)

    def _pause(self) -> None:
        """Waits as long as the policies want to wait, unless a request comes."""
        pause_s = self._engine.pause_s
        if pause_s:
            with self._todo:
                if not (self._line or self._given_up or self._is_stopping):
                    self._todo.wait(min(pause_s, threading.TIMEOUT_MAX))

    def _take_in(self) -> bool:
        """Sleeps while there is nothing to do, then gives new requests to the engine.

        Returns false at the end.
        """
        engine = self._engine
        with self._todo:
            while not (self._given_up or engine.num_unfinished or self._is_stopping):
                if self._clears_cache or self._when_idle or (self._line and not self._is_paused):
                    break
                self._todo.wait()
            clears_cache, self._clears_cache = self._clears_cache, False
            if self._is_stopping:
                self._given_up = dict.fromkeys(self._unfinished.values())
            given_up = [stream for stream in self._given_up if not stream.has_ended]
            self._given_up.clear()
            for stream in given_up:
                self._line.pop(stream, None)
            room = 0 if self._is_paused else max(0, self._max_waiting - engine.num_waiting)
            entering = list(islice(self._line, room))
            for stream in entering:
                del self._line[stream]
            self._num_waiting += len(entering)
        if clears_cache:
            engine.core.block_pool.clear_cache()
        self._publish(self._give_up(given_up) | self._enter(entering))
        return not self._is_stopping or engine.num_unfinished > 0

    def _give_up(self, streams: Iterable[Stream]) -> dict[Stream, State]:
        """Aborts requests; returns the states of those that were not in the engine yet."""
        news = {}
        for stream in streams:
            if stream.answer is None:
                news[stream] = State((End(0, "aborted"),) * stream.params.n, is_finished=True)
            else:
                self._engine.abort(stream.answer.request_id)
                news |= self._states([stream.answer])
        return news

    def _enter(self, streams: Iterable[Stream]) -> dict[Stream, State]:
        """Adds requests to the engine; returns the states of those that it rejects."""
        refused = {}
        for stream in streams:
            try:
                answer = self._engine.add(
                    stream.tokens,
                    stream.params,
                    stream.priority,
                    stream.tenant,
                    stream.lora,
                    stream.arrival_s,
                    None if stream.window_s is None else stream.arrival_s + stream.window_s,
                    cache_salt=stream.cache_salt,
                )
            except Exception as error:  # the error concerns this request only
                stream.failure = error
            else:
                stream.answer = answer
                self._streams[answer.request_id] = stream
                if answer.error is not None:
                    stream.failure = ValueError(answer.error)
            if stream.failure is not None:
                refused[stream] = stream.state
        return refused

    def _states(self, answers: Iterable[Answer]) -> dict[Stream, State]:
        """Returns the states of a step's answers; for final-only streams, only at their end."""
        news = {}
        for answer in answers:
            stream = self._streams.get(answer.request_id)
            if stream is not None and (answer.is_finished or not stream.is_final_only):
                news[stream] = _state(answer)
        return news

    def _publish(self, news: Mapping[Stream, State]) -> None:
        """Publishes states to the event loops.

        Each loop is woken once, and only for streams without pending news.
        """
        awake: dict[asyncio.AbstractEventLoop, list[Stream]] = {}
        with self._todo:
            self._num_waiting = self._engine.num_waiting
            for stream, state in news.items():
                stream.state = state
                if stream.has_ended:
                    del self._unfinished[stream.request_id]
                    if stream.answer is not None:
                        del self._streams[stream.answer.request_id]
                if not stream.is_notified:
                    stream.is_notified = True
                    awake.setdefault(stream.loop, []).append(stream)
        for loop, streams in awake.items():
            try:
                loop.call_soon_threadsafe(_set_news, streams)
            except RuntimeError:  # the loop is closed, so it has no readers
                for stream in streams:
                    self.abort(stream)


def _state(answer: Answer) -> State:
    # A list, because a generator takes twice as long, and this runs for each request in each step.
    ends = [End(len(output.tokens), output.finish_reason, output.text) for output in answer.outputs]
    return State(tuple(ends), answer.is_finished, answer.error)


def _set_news(streams: Iterable[Stream]) -> None:
    for stream in streams:
        stream.news.set()


def _dead(cause: BaseException) -> EngineDeadError:
    """Returns a new error for each caller, because every raise adds to its traceback."""
    error = EngineDeadError(f"the engine has died of {type(cause).__name__}: {cause}; create a new AsyncLLM")
    error.__cause__ = cause
    return error
