"""The process of one engine of a fleet: takes requests from a pipe, steps, and sends what each step brings.

    wait for a message while idle | take all messages | begin: send the counts | step: send the tokens | ...

One thread does all, and the pipe's buffer is the only queue: an engine whose gateway does not read waits.
The process ends with the gateway, whose end of the pipe closes.
"""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Hashable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from policies.core.plan import Progress as CoreProgress
from policies.core.plan import StepOutcome, StepPlan
from policies.core.sequence import FinishReason
from policies.core.sequence import Sequence as EngineSequence
from policies.gateway.signals import Counts
from realengine.build import Built, build
from realengine.engine import Engine
from realengine.fleet.messages import (
    Abort,
    Began,
    Changed,
    ClearCache,
    Failed,
    Grown,
    Progress,
    Sleep,
    Started,
    Stepped,
    Stop,
    Submit,
    ToEngine,
    WakeUp,
)
from realengine.serving.answer import Answer, Output
from realengine.serving.beams import BeamSampling
from realengine.serving.content_names import chain_of
from realengine.serving.model import Model
from realengine.serving.warm_up import PARAMS as WARM_UP_PARAMS
from realengine.serving.warm_up import SALT as WARM_UP_SALT
from realengine.serving.warm_up import warm_up_prompt
from realengine.settings import EngineSettings


class EngineOfFleet(NamedTuple):
    """One engine: its model and its settings, of which `device` names its own device."""

    model: Model
    settings: EngineSettings


def serve_engine(connection: Connection, spec: EngineOfFleet, num_threads: int, reports_cache: bool) -> None:
    """Loads an engine and serves until its gateway stops it or is gone; the target of a process.

    num_threads: of torch on a CPU. reports_cache: whether changes of the prefix cache are sent.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the gateway stops this one
    warnings.simplefilter("ignore")
    device = torch.device(spec.settings.device or "cuda")
    if device.type == "cpu":
        torch.set_num_threads(num_threads)
    elif device.index is not None:
        torch.cuda.set_device(device)
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the gateway is gone
        try:
            served = ServedEngine(build(*spec), connection, reports_cache=reports_cache)
            served.run()
        except Exception as error:
            connection.send(Failed(f"{type(error).__name__}: {error}"))
            connection.close()
            os._exit(1)  # whatever a broken device would wait for


class ServedEngine:
    """The loop of one engine. reports_cache: see `serve_engine`."""

    def __init__(self, built: Built, connection: Connection, *, reports_cache: bool) -> None:
        self._engine = engine = built.engine
        self._sleep_mode = built.sleep_mode
        self._connection = connection
        self._reports_cache = reports_cache
        self._live: dict[int, Live] = {}  # by the engine's request id
        self._engine_ids: dict[int, int] = {}  # by the gateway's request id
        self._is_stopping = False
        self._busy_s = 0.0
        _warm_up(engine)

    def run(self) -> None:
        """Serves until a stop."""
        engine, core = self._engine, self._engine.core
        engine.observer = Reporter(engine, self._connection, reports_cache=self._reports_cache)
        sizes = core.block_pool.block_size, core.block_pool.num_blocks, core.max_num_seqs, core.max_model_len
        self._connection.send(Started(*sizes, engine.start_s))
        while not self._is_stopping:
            wait_s = engine.pause_s if engine.num_unfinished else None
            while not self._is_stopping and self._connection.poll(wait_s):
                # Sent by the gateway of this fleet.
                self._handle(self._connection.recv())
                wait_s = 0.0
            if engine.num_unfinished and not self._is_stopping:
                self._step()

    def _step(self) -> None:
        began_s = time.monotonic()
        changed = self._engine.step()
        if self._engine.failure is not None:  # the gateway sends its requests to other engines
            raise RuntimeError(str(self._engine.failure))
        self._busy_s += time.monotonic() - began_s
        self._report(changed)

    def _report(self, answers: Sequence[Answer]) -> None:
        """Sends what is new of some requests."""
        news = []
        for answer in answers:
            live = self._live.get(answer.request_id)
            if live is None or (live.is_search and not answer.is_finished):
                continue
            news.append(live.progress())
            if answer.is_finished:
                del self._live[answer.request_id], self._engine_ids[live.request_id]
        if news:
            self._connection.send(Stepped(tuple(news), self._busy_s))

    def _handle(self, message: ToEngine) -> None:
        match message:
            case Submit():
                self._add(message)
            case Abort(request_id):
                if request_id in self._engine_ids:
                    live = self._live[self._engine_ids[request_id]]
                    self._engine.abort(live.answer.request_id)
                    self._report([live.answer])
            case ClearCache():
                self._engine.core.block_pool.clear_cache()
            case Sleep(level):
                self._change(is_asleep=True, level=level)
            case WakeUp():
                self._change(is_asleep=False)
            case Stop():
                self._is_stopping = True

    def _add(self, submit: Submit) -> None:
        """Adds a request to the engine; one that it cannot serve ends at once."""
        request_id = submit.request_id
        try:
            answer = self._engine.add(
                submit.tokens,
                submit.params,
                submit.priority,
                submit.tenant,
                submit.lora,
                submit.arrival_s,
                submit.deadline_s,
                submit.cache_salt,
                submit.known,
            )
        except Exception as error:
            if self._engine.failure is not None:
                raise
            refused = Progress(request_id, (), is_finished=True, error=str(error), is_refused=True)
            self._connection.send(Stepped((refused,), self._busy_s))
            return
        live = Live(request_id, answer, 0 if submit.known is None else len(submit.known.tokens))
        if answer.error is not None:
            refused = live.progress()._replace(is_refused=True)
            self._connection.send(Stepped((refused,), self._busy_s))
            return
        self._live[answer.request_id] = live
        self._engine_ids[request_id] = answer.request_id

    def _change(self, *, is_asleep: bool, level: int = 1) -> None:
        """Puts the engine to sleep, or wakes it; an error leaves it as it was."""
        error = None
        try:
            if self._sleep_mode is None:
                raise ValueError("the sleep mode is not enabled; set enable_sleep_mode=True")
            if is_asleep:
                self._sleep_mode.sleep(level)
            else:
                self._sleep_mode.wake_up()
        except (ValueError, RuntimeError) as failed:
            error, is_asleep = str(failed), not is_asleep
        self._connection.send(Changed(is_asleep, error))


def _warm_up(engine: Engine) -> None:
    """Serves one short request, so that no client waits for what happens once."""
    prompt = warm_up_prompt(engine.vocab_size, engine.core.max_model_len)
    answer = engine.add(prompt, WARM_UP_PARAMS, cache_salt=WARM_UP_SALT)
    engine.run()
    if answer.error is not None:
        raise RuntimeError(f"the warm-up request has failed: {answer.error}")
    engine.core.block_pool.clear_cache()


class Live:
    """A request in the engine, and how much of it was sent. num_known: tokens that it had before."""

    def __init__(self, request_id: int, answer: Answer, num_known: int) -> None:
        self.request_id = request_id
        self.answer = answer
        self.is_search = isinstance(answer.params, BeamSampling)
        self._num_sent = [num_known] + [0] * (len(answer.outputs) - 1)
        self._has_begun = False

    def progress(self) -> Progress:
        """Returns what is new since the last call."""
        answer = self.answer
        if self.is_search:
            self._num_sent = [0] * len(answer.outputs)
        grown = []
        for place, output in enumerate(answer.outputs):
            num_sent, self._num_sent[place] = self._num_sent[place], len(output.tokens)
            if num_sent < len(output.tokens) or output.finish_reason is not None:
                grown.append(_grown(output, num_sent))
        scores = None if self._has_begun else answer.prompt_logprobs
        self._has_begun = self._has_begun or bool(grown)
        return Progress(
            self.request_id,
            tuple(grown),
            is_finished=answer.is_finished,
            error=answer.error,
            is_whole=self.is_search,
            num_cached_tokens=answer.num_cached_tokens,
            drafts=answer.drafts if answer.is_finished else None,
            prompt_logprobs=scores,
        )


def _grown(output: Output, num_sent: int) -> Grown:
    logprobs = None if output.logprobs is None else output.logprobs[num_sent:]
    new = output.tokens[num_sent:]
    return Grown(output.index, new, logprobs, output.finish_reason, output.stop_reason, output.text)


class Reporter:
    """An observer that sends the counts of every plan, and the changes of the prefix cache."""

    def __init__(self, engine: Engine, connection: Connection, *, reports_cache: bool) -> None:
        self._engine = engine
        self._connection = connection
        self._num_entered = self._num_entered_tokens = 0
        self._sent = Began(Counts())
        self._cache = CacheReport(engine) if reports_cache else None

    def entered(self, seq: EngineSequence, now_s: float) -> None:
        self._num_entered += 1
        self._num_entered_tokens += seq.num_prompt_tokens
        if self._cache is not None:
            self._cache.entered(seq)

    def planned(self, plan: StepPlan, num_iterations: int, now_s: float) -> None:
        self._send()

    def waited(self, now_s: float) -> None:
        self._send()

    def _send(self) -> None:
        core = self._engine.core
        counts = len(core.running), core.num_waiting, core.block_pool.num_used
        began = Began(Counts(*counts, self._num_entered, self._num_entered_tokens))
        if self._cache is not None:
            began = began._replace(**self._cache.take()._asdict())
        if began != self._sent:
            self._connection.send(began)
            self._sent = began._replace(stored=(), removed=())

    def committed(self, outcome: StepOutcome, progress: CoreProgress, now_s: float) -> None:
        _, finished = progress
        if finished and not self._engine.core.num_unfinished:
            self._send()  # the last request has ended, and no plan follows

    def verified(self, plan: StepPlan, accepted: NDArray[np.int64]) -> None:
        pass

    def left(self, seq: EngineSequence, reason: FinishReason, now_s: float) -> None:
        if not self._engine.core.num_unfinished:
            self._send()

    def read(self, now_s: float) -> None:
        pass

    def emitted(self, answer: Answer, num_tokens: int, now_s: float) -> None:
        pass


class CacheChange(NamedTuple):
    """Blocks that a prefix cache offers from now on, and those that it has dropped, by their hash."""

    stored: tuple[bytes, ...]
    removed: tuple[bytes, ...]


NUM_KEPT = 64
"""Texts of requests that have ended, after which they are looked for."""


class CacheReport:
    """A `ContentListener` that collects the changes of a prefix cache, of its blocks in the device's memory.

    Two blocks with equal tokens have one hash, which is held until the last of them is removed.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._chains: dict[int, tuple[Answer, list[bytes]]] = {}  # by request id, with the hashes so far
        self._hashes: dict[Hashable, bytes] = {}  # by the name of a block
        self._num_held: dict[bytes, int] = {}
        self._stored: dict[bytes, None] = {}
        self._removed: dict[bytes, None] = {}
        engine.core.block_pool.report_to(self)

    def entered(self, seq: EngineSequence) -> None:
        """Handles a request that the engine has got."""
        self._chains[seq.request_id] = self._engine.answer_of(seq), []

    def take(self) -> CacheChange:
        """Returns the changes since the last call."""
        core = self._engine.core
        core.block_pool.report_delayed(core.running.values())
        if len(self._chains) > core.num_unfinished + NUM_KEPT:
            held = {*core.running, *(seq.request_id for seq in core.unfinished)}
            self._chains = {number: each for number, each in self._chains.items() if number in held}
        change = CacheChange(tuple(self._stored), tuple(self._removed))
        self._stored, self._removed = {}, {}
        return change

    def stored(self, request_id: int, first: int, names: Sequence[Hashable]) -> None:
        answer, known = self._chains[request_id]
        end, size = first + len(names), self._engine.core.block_pool.block_size
        text = (answer.prompt_tokens + answer.outputs[0].tokens)[: end * size]
        known[:] = chain = chain_of(text, size, answer.lora, answer.cache_salt, known)
        for name, link in zip(names, chain[first:end], strict=True):
            self._hashes[name] = link
            self._num_held[link] = self._num_held.get(link, 0) + 1
            if self._num_held[link] == 1:
                self._note(link, self._stored, self._removed)

    def removed(self, names: Sequence[Hashable]) -> None:
        for name in names:
            link = self._hashes.pop(name)
            self._num_held[link] -= 1
            if not self._num_held[link]:
                del self._num_held[link]
                self._note(link, self._removed, self._stored)

    @staticmethod
    def _note(link: bytes, changes: dict[bytes, None], opposite: dict[bytes, None]) -> None:
        """Notes a change, which undoes the opposite one that was not sent yet."""
        if link in opposite:
            del opposite[link]
        else:
            changes[link] = None

    def stored_below(self, tier: str, names: Sequence[Hashable]) -> None:
        pass

    def removed_below(self, tier: str, names: Sequence[Hashable]) -> None:
        pass
