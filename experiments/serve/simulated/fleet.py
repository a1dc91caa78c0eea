"""A simulated fleet as a back end: a live simulation says when the tokens of clients' requests leave.

A limit on the requests that wait in a replica refuses further ones, with status 503.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from itertools import count
from math import inf
from time import thread_time
from typing import TYPE_CHECKING

from experiments.serve.backend import Delta, Generation, ServedModel, Tokenizer
from experiments.serve.errors import ApiError, ConnectionReset, priority_ignored
from experiments.serve.metrics.engine import Histogram
from experiments.serve.metrics.table import TOKEN_DELAY_S
from experiments.serve.simulated.adapters import ServedAdapters
from experiments.serve.simulated.answers import Answer, Answers, OutputLengths
from experiments.serve.simulated.contents import BLOCK, MAX_SEGMENTS, ContentIndex
from experiments.serve.simulated.driver import Driver
from experiments.serve.simulated.record_limit import RecordLimit
from policies.batching.static import check_traffic_ends
from policies.core.request import Prompt, Request
from policies.user_code import name_of
from sim.cluster.gateway import GatewayAttachment, RequestAttempt
from sim.cluster.live import Ended, LiveSimulation
from sim.engine.replica import Replica
from sim.records.requests import Status
from sim.setup.scenario import Scenario
from sim.workload.base import Arrival

if TYPE_CHECKING:
    import pandas as pd

FAILED = "the simulation has failed; the log of the server has the reason"
TIMED_TOGETHER = 16
"""Tokens after which the CPU time of the thread, which takes a system call, is read once for all of them."""


class SimulatedFleet:
    """The replicas of a scenario, in real or scaled time."""

    def __init__(
        self,
        scenario: Scenario,
        *,
        tokenizer: Tokenizer,
        answers: Answers,
        lengths: OutputLengths,
        time_scale: float = 1.0,
        max_record_bytes: float = inf,
        tokens_per_image: int | None = None,
    ) -> None:
        self.scenario = scenario
        self.tokenizer = tokenizer
        self._answers = answers
        self._lengths = lengths
        pools = scenario.pools_by_name.values()
        for pool in pools:
            check_traffic_ends(pool.batching, "a server")
        self._bases = _base_models(scenario, tokens_per_image)
        self._adapters = ServedAdapters(scenario)
        self._has_priorities = any(name_of(pool.scheduling) != "fcfs" for pool in pools)
        self._names_model = len({pool.model.name for pool in pools}) > 1
        self._attached: list[Callable[[Replica], None]] = []
        self.simulation = LiveSimulation(
            pools=scenario.replica_pools(self._adapters.in_engines),
            cluster=scenario.for_a_run(),
            listener=self,
            attach=self._attach_to,
        )
        self.driver = Driver(self.simulation, time_scale)
        self.driver.on_failure.append(self._fail_all)
        self.driver.on_advanced.append(self._advanced)
        self._with_news: list[Output] = []  # outputs whose tokens are to be delivered
        self.token_delays = Histogram(TOKEN_DELAY_S)
        """Wall seconds from the simulated time of tokens of streams until they are written."""
        self.token_work = Histogram(TOKEN_DELAY_S)
        """CPU seconds from the event that has brought such tokens until they are written."""
        self._ids = RecordLimit(self.simulation, max_record_bytes)
        self._answer_ids = count()
        self._outputs: dict[int, Output] = {}
        self.on_begin: list[Callable[[int, Generation], None]] = []
        """Called with the request id of each output before the request enters the simulation."""
        self.on_close: list[Callable[[int, Generation], None]] = []
        """Called with the request id of each output that has ended, or whose client has gone."""
        self._contents = ContentIndex(_max_segments(scenario))
        if self.simulation.kept_prefills is not None:
            self.simulation.kept_prefills.on_gone = self._prefill_gone

    def attach(self, attach_to: Callable[[Replica], None]) -> None:
        """Calls attach_to with every replica, now with those present and later with each new one."""
        self._attached.append(attach_to)
        for replica in self.simulation.replicas:
            attach_to(replica)

    def _attach_to(self, replica: Replica) -> None:
        for attach_to in self._attached:
            attach_to(replica)

    def models(self) -> Sequence[ServedModel]:
        base = self._bases[0]
        adapters = (base._replace(name=adapter, base=base.name) for adapter in self._adapters.names)
        return [*self._bases, *adapters]

    def load_adapter(self, name: str, rank: int | None, *, replaces: bool) -> None:
        """Loads a LoRA adapter. Raises ApiError."""
        self.simulation.serve_adapter(self._adapters.load(name, rank, replaces=replaces))

    def unload_adapter(self, name: str) -> None:
        """Unloads a LoRA adapter; requests in progress keep it. Raises ApiError."""
        self._adapters.unload(name)

    def adapter_number(self, own_name: str) -> int:
        """Returns the number of a LoRA adapter, from 1, by its name in the engines."""
        return self._adapters.number(own_name)

    def answer(self, request_id: int) -> Answer:
        """Returns what an output in progress will be."""
        return self._outputs[request_id].answer

    @property
    def num_in_progress(self) -> int:
        return len(self._outputs)

    def unhealthy_because(self) -> str | None:
        if self.driver.failure is not None:
            return FAILED
        if self.simulation.fleet.serving:
            return None
        return "no replica serves; all are starting or down"

    async def generate(self, generation: Generation) -> AsyncGenerator[Delta, None]:
        if self.driver.failure is not None:
            raise ApiError(FAILED, HTTPStatus.SERVICE_UNAVAILABLE)
        if generation.beam_search is not None:
            raise ApiError(
                "use_beam_search=true: a simulated model has no scores to search by; leave the field out, or "
                "start the server with backend=engine",
                param="use_beam_search",
            )
        sampling, prompt = generation.sampling, generation.prompt_token_ids
        if sampling.logit_bias:
            raise ApiError(
                "logit_bias: a simulated model has no logits; leave the field out, or start the server with "
                "backend=engine",
                param="logit_bias",
            )
        if generation.priority and not self._has_priorities:
            raise priority_ignored(generation.priority)
        adapter = self._adapters.own_name(generation.lora)
        answer_id, request_id = next(self._answer_ids), self._ids.take()
        answer = await self._answer(answer_id, generation)
        now, window_s = self.driver.at(generation.received_s), generation.window_s
        salt = (generation.model, adapter, generation.cache_salt)
        segments = self._contents.segments(prompt, salt)
        request = Request(
            request_id=request_id,
            arrival_s=now,
            prompt=Prompt(len(prompt), segments),
            max_tokens=sampling.max_tokens,
            priority=generation.priority,
            tenant=generation.tenant,
            deadline_s=None if window_s is None else now + window_s * self.driver.time_scale,
            answer_id=answer_id,
            adapter=adapter,
            model=generation.model if self._names_model else None,
        )
        output = self._outputs[request_id] = Output(answer, generation)
        for notify in self.on_begin:
            notify(request_id, generation)
        self.simulation.add(Arrival(request, answer.num_tokens))
        self.driver.wake()
        has_begun = False
        try:
            async for delta in deltas(output):
                due_s, began_work_s = output.due_s, output.began_work_s
                if sampling.prompt_logprobs is not None and not has_begun:
                    known = self._answers.prompt_logprobs(prompt, sampling.prompt_logprobs)
                    delta, has_begun = delta._replace(prompt_logprobs=known), True
                yield delta  # comes back when the delta is written
                if generation.streamed:
                    self._written(due_s, began_work_s)
            tokens = answer.token_ids(0, output.num_tokens)
            self._contents.finish(prompt, segments, answer_id, tokens, salt)
        finally:
            output.is_waiting = False
            del self._outputs[request_id]
            if output.end is None and self.driver.failure is None:
                self.simulation.abort(request_id, self.driver.now())
                self.driver.wake()
            for notify in self.on_close:
                notify(request_id, generation)
            if output.end is not None and not self._is_kept(request_id):
                self._ids.give_back(request_id)

    async def _answer(self, answer_id: int, generation: Generation) -> Answer:
        """Returns what an output will be. Raises ApiError for a form of which none can be drawn."""
        sampling, structure, answer = generation.sampling, generation.structure, None
        num_tokens, ends = self._lengths.draw(
            sampling.max_tokens, sampling.min_tokens, ignore_eos=sampling.ignore_eos
        )
        if structure is not None:
            answer = await self._answers.structured(answer_id, structure, sampling, num_tokens)
        if answer is None:
            prompt = generation.prompt_token_ids
            answer = self._answers.write(answer_id, prompt, num_tokens, ends=ends, seed=sampling.seed)
        return await answer.stopped(sampling.stop, sampling.min_tokens)

    def _written(self, due_s: float, began_work_s: float) -> None:
        """Notes that tokens have been written. due_s, began_work_s: as in `Output`."""
        self._note_delay(due_s)
        self.token_work.observe(thread_time() - began_work_s)

    def _note_delay(self, due_s: float) -> None:
        self.token_delays.observe(max(0.0, self.driver.now() - due_s) / self.driver.time_scale)

    def _advanced(self) -> None:
        if self._with_news:
            # After the first tokens of other outputs, whose tasks have been woken meanwhile.
            asyncio.get_running_loop().call_soon(self._deliver_all)

    def _deliver_all(self) -> None:
        outputs, self._with_news = self._with_news, []
        for start in range(0, len(outputs), TIMED_TOGETHER):
            began_work_s = []
            for output in outputs[start : start + TIMED_TOGETHER]:
                if output.news.is_set() or not output.is_waiting:
                    continue  # its end is there, too, and takes these tokens along
                if output.delivered():
                    output.num_taken = output.num_tokens
                    self._note_delay(output.due_s)
                    began_work_s.append(output.began_work_s)
                else:
                    output.news.set()
            ended_work_s = thread_time()  # a system call
            for began_s in began_work_s:
                self.token_work.observe(ended_work_s - began_s)

    def _is_kept(self, request_id: int) -> bool:
        """Returns whether a request that has ended still has KV for another one."""
        kept_prefills = self.simulation.kept_prefills
        return kept_prefills is not None and kept_prefills.kept(request_id) is not None

    def _prefill_gone(self, request_id: int) -> None:
        if request_id not in self._outputs:  # else its id is given back at its end
            self._ids.give_back(request_id)

    def abort_all(self) -> None:
        """Ends all outputs as they are; their finish_reason is "abort"."""
        for request_id in list(self._outputs):
            self.simulation.abort(request_id, self.driver.now())
        self.driver.wake()

    def _fail_all(self) -> None:
        for output in self._outputs.values():
            output.is_failed = True
            output.news.set()

    def traffic_table(self) -> pd.DataFrame:
        """Returns the requests so far, for `workload=recording`."""
        return self.simulation.traffic.table(self._adapters.ranks)

    # What the simulation reports.

    def progressed(self, request_id: int, num_output_tokens: int) -> None:
        output = self._outputs.get(request_id)
        if output is not None:
            if not output.num_tokens:
                output.num_cached = self.simulation.requests.cached_tokens[request_id]
            has_all = output.num_tokens == output.num_taken and not output.news.is_set()
            output.num_tokens = num_output_tokens
            if has_all:
                output.due_s, output.began_work_s = self.simulation.now, self.driver.began_work_s
                is_between = output.num_taken and num_output_tokens < output.answer.num_tokens
                if is_between and output.generation.deliver is not None and output.is_waiting:
                    self._with_news.append(output)
                else:
                    output.news.set()

    def lost_tokens(self, request_id: int) -> None:
        output = self._outputs.get(request_id)
        if output is not None and output.generation.streamed:
            output.is_lost = True
            output.news.set()

    def ended(self, request: Request, end: Ended) -> None:
        output = self._outputs.get(request.request_id)
        if output is None:
            self._ids.give_back(request.request_id)
        else:
            output.end = end
            output.news.set()

    def finish_reason(self, request_id: int, end: Ended) -> str:
        """Returns why an output ends, as its client is told: stop, length or abort."""
        output = self._outputs.get(request_id)
        if end.status is not Status.finished:
            return "abort"
        return end.reason or "stop" if output is None else finish_reason(output.answer, end)

    @property
    def records_full_s(self) -> float | None:
        """Simulated time at which the memory for records was full; None: everything is recorded."""
        return self._ids.full_s


def _max_segments(scenario: Scenario) -> int:
    """Returns how many segments of finished requests are worth to be known.

    They are four times those of the KV that the fleet can hold, as each turn of a chat repeats those before.
    """
    pools = scenario.pools_by_name.values()
    if any(any(pool.caching.tiers_gib) for pool in pools):
        return MAX_SEGMENTS
    tokens = sum(pool.replicas * pool.plan_memory().num_blocks * pool.caching.block_size for pool in pools)
    return min(MAX_SEGMENTS, 4 * tokens // BLOCK)


def _base_models(scenario: Scenario, tokens_per_image: int | None) -> list[ServedModel]:
    """Returns the models of a scenario's pools."""
    found: dict[str, ServedModel] = {}
    for pool in scenario.pools_by_name.values():
        model, length = pool.model, pool.max_model_len
        known = found.get(model.name)
        length = length if known is None else min(known.max_model_len, length)
        found[model.name] = ServedModel(model.name, length, None, tokens_per_image, model.hidden_size)
    return list(found.values())


class WaitingLimit(GatewayAttachment):
    """Lets the router choose only replicas with fewer than max_waiting waiting requests.

    Waiting are those in the queue of the engine, and those on their way to it. A request that finds no such
    replica is refused.
    """

    def __init__(self, fleet: SimulatedFleet, max_waiting: int) -> None:
        self._gateway = fleet.simulation.gateway
        self._max_waiting = max_waiting
        self._reason = f"the queue is full (max_waiting={max_waiting})"
        self._gateway.attach(self)

    def candidates(self, attempt: RequestAttempt, serving: list[Replica], now: float) -> list[Replica] | None:
        free = [replica for replica in serving if self._has_room(replica)]
        if not free:
            self._gateway.fail(attempt, self._reason)
            return None
        return serving if len(free) == len(serving) else free  # the list of all has its counts as arrays

    def _has_room(self, replica: Replica) -> bool:
        num_waiting = replica.core.num_waiting
        return num_waiting < self._max_waiting and (
            num_waiting + len(replica.intake.entries()) < self._max_waiting
        )


@dataclass(slots=True, eq=False)
class Output:
    """An output in progress: what the simulation has reported of it so far."""

    answer: Answer
    generation: Generation
    is_waiting: bool = False
    """Whether its client has all tokens so far."""
    num_taken: int = 0
    """Tokens that its client has."""
    is_failed: bool = False
    """Whether the simulation has failed."""
    is_lost: bool = False
    """Whether its client has tokens of an output that begins again."""
    num_tokens: int = 0
    due_s: float = 0.0
    """Simulated time of the first token that its client does not have."""
    began_work_s: float = 0.0
    """The value of `Driver.began_work_s` when that token came, s."""
    num_cached: int = 0
    end: Ended | None = None
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def delta(self, finish_reason: str | None = None) -> Delta:
        """Returns the tokens that the client does not have."""
        answer, start, end = self.answer, self.num_taken, self.num_tokens
        num_logprobs = self.generation.sampling.logprobs
        return Delta(
            answer.text(start, end),
            answer.token_ids(start, end),
            () if num_logprobs is None else answer.logprobs(start, end, num_logprobs),
            finish_reason,
            answer.stop_reason if finish_reason == "stop" else None,
            self.num_cached,
        )

    def delivered(self) -> bool:
        """Delivers the tokens that the client does not have; returns whether it has them.

        If that fails, the task of the request meets the error, and other requests go on.
        """
        try:
            deliver = self.generation.deliver
            return deliver is not None and deliver(self.delta())
        except Exception:
            return False


async def deltas(output: Output) -> AsyncGenerator[Delta, None]:
    """Yields the deltas of an output until its end, without those that are delivered meanwhile."""
    while True:
        output.is_waiting = True
        await output.news.wait()
        output.is_waiting = False
        output.news.clear()
        ended = output.end
        if output.is_failed:
            raise ApiError(FAILED, HTTPStatus.INTERNAL_SERVER_ERROR)
        if output.is_lost:
            raise ConnectionReset("its replica crashed")
        if ended is not None and ended.status is Status.rejected:
            raise _failure(ended, has_begun=output.num_taken > 0 and output.generation.streamed)
        if output.num_tokens == output.num_taken and ended is None:
            continue
        delta = output.delta(None if ended is None else finish_reason(output.answer, ended))
        output.num_taken = output.num_tokens
        yield delta
        if ended is not None:
            return


def finish_reason(answer: Answer, ended: Ended) -> str:
    """Returns why an output ends, as its client is told: stop, length or abort."""
    if ended.status is Status.aborted:
        return "abort"
    if ended.reason == "length" or ended.num_output_tokens < answer.num_tokens:
        return "length"
    return answer.finish_reason


def _failure(ended: Ended, *, has_begun: bool) -> Exception:
    """Returns the error of a request that the fleet has rejected or lost."""
    if has_begun:
        return ConnectionReset(ended.reason or "the request was aborted")
    return ApiError(ended.reason or "the request was aborted", HTTPStatus.SERVICE_UNAVAILABLE)
