"""Workloads, run step by step on our core and on another engine that must decide the same.

The other one is vLLM's scheduler (vllm_driver.py); nothing in this file imports vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from policies.batching.chunked import Chunked
from policies.batching.paced_prefills import PacedPrefills
from policies.caching.block_tables import KvGroup
from policies.caching.hybrid import KvGroups
from policies.caching.paged import Paged
from policies.caching.pool import Caching, KvMemory
from policies.caching.prefix import PrefixCaching
from policies.core.endings import Ends
from policies.core.engine import EngineCore
from policies.core.plan import StepOutcome, StepPlan
from policies.core.release import VLLM_0_32, Release
from policies.core.request import Prompt, Request
from policies.core.sequence import ENDED, WAITING, FinishReason, Sequence
from policies.scheduling.fcfs import Fcfs
from policies.scheduling.priority import Priority
from tests.parity.drafts_script import Speculation


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of both engines, in vLLM's words; num_blocks does not count the null block."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_blocks: int
    block_size: int
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    long_prefill_token_threshold_adaptive: bool = False
    is_priority: bool = False
    is_prefix_caching: bool = False
    watermark: float = 0.0
    async_scheduling: bool = False
    max_num_scheduled_tokens: int | None = None
    max_num_active_seqs: int | None = None
    scheduler_reserve_full_isl: bool = True
    prefill_schedule_interval: int = 1
    speculation: Speculation | None = None
    groups: tuple[KvGroup, ...] = ()
    release: Release = VLLM_0_32


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """A request, the step of its arrival, and how it ends.

    It arrives at the given step at the earliest; if it quotes an answer, not before the request of that
    answer has ended.
    """

    request_id: int
    step: int
    prompt: Prompt
    num_output_tokens: int
    end: str = "length"  # by the client's limit; "stop": by a token that our core knows beforehand ...
    priority: int = 0  # ... "sampled": by a token that our core learns of when it is sampled
    abort_step: int | None = None
    answer_id: int | None = None  # what later prompts call the content of its answer
    after: int | None = None  # the request whose answer it quotes


class Step(NamedTuple):
    """One step that computed something, with the decisions that led to it.

    With asynchronous scheduling, free blocks and ends are those that the engine knows when it has planned the
    step: the ends are those of the step before.
    """

    tokens: dict[int, int]  # by request id
    admitted: dict[int, int]  # tokens found in the cache, by request id
    preempted: list[int]
    num_free_planned: int | None  # blocks, while the step runs; None: not known
    num_free_after: int | None  # blocks, after it; None: not known
    finished: dict[int, str]  # reason, by request id
    drafts: dict[int, int] | None = None  # draft tokens among the tokens, by request id; None: no speculation


class Engine(Protocol):
    """The other engine, as `first_difference` drives it."""

    def add(self, arrival: Arrival, arrival_s: float) -> None:
        """Adds a request."""

    def abort(self, request_id: int) -> None:
        """Aborts a request; does nothing if the engine does not hold it."""

    def step(self) -> Step:
        """Runs until a step has computed something; must only be called with unfinished requests."""

    def settle(self) -> dict[int, str]:
        """Reads the tokens of the last step, after which no request is unfinished; returns its ends."""

    @property
    def num_unfinished(self) -> int:
        """Requests that have not ended."""


class OurEngine:
    """EngineCore with the policies that stand for vLLM's settings."""

    def __init__(self, settings: Settings) -> None:
        caching = self._caching(settings)
        batching = {"max_num_batched_tokens": settings.max_num_batched_tokens}
        for name, default in (
            ("enable_chunked_prefill", True),
            ("long_prefill_token_threshold", 0),
            ("long_prefill_token_threshold_adaptive", False),
            ("max_num_scheduled_tokens", None),
            ("max_num_active_seqs", None),
            ("scheduler_reserve_full_isl", True),
            ("prefill_schedule_interval", 1),
        ):
            if getattr(settings, name) != default:
                batching[name] = getattr(settings, name)
        self._is_async = settings.async_scheduling
        self._stopped: list[Sequence] = []  # by a sampled token that an asynchronous engine has not read yet
        self._ended: dict[int, str] = {}  # ends of the last step that an asynchronous engine has not read yet
        self.core = self._new_core(
            settings,
            batching=(PacedPrefills if "prefill_schedule_interval" in batching else Chunked)(**batching),
            scheduling=Priority() if settings.is_priority else Fcfs(),
            block_pool=caching.pool(
                KvMemory(
                    settings.num_blocks,
                    max_model_len=settings.max_model_len,
                    groups=settings.groups,
                    max_in_flight_tokens=(1 + self._is_async) * settings.max_num_batched_tokens,
                )
            ),
            max_num_seqs=settings.max_num_seqs,
            max_model_len=settings.max_model_len,
        )
        self._arrivals: dict[int, Arrival] = {}

    @staticmethod
    def _caching(settings: Settings) -> Caching:
        sizes = {"block_size": settings.block_size, "watermark": settings.watermark}
        if settings.groups:
            return KvGroups(enable_prefix_caching=settings.is_prefix_caching, **sizes)
        return (PrefixCaching if settings.is_prefix_caching else Paged)(**sizes)

    def _new_core(self, settings: Settings, **parts: Any) -> EngineCore:
        ends = Ends.one_step_late if self._is_async else Ends.at_once
        return EngineCore(ends=ends, release=settings.release, **parts)

    @property
    def num_unfinished(self) -> int:
        return self.core.num_unfinished + len(self.core.running_set.ending)

    def add(self, arrival: Arrival, arrival_s: float) -> None:
        num_output = arrival.num_output_tokens
        max_tokens = num_output if arrival.end == "length" else None
        self._arrivals[arrival.request_id] = arrival
        self.core.add(
            Request(
                arrival.request_id,
                arrival_s,
                arrival.prompt,
                max_tokens=max_tokens,
                priority=arrival.priority,
                answer_id=arrival.answer_id,
            ),
            stop_after=num_output if arrival.end == "stop" else None,
        )

    def abort(self, request_id: int) -> None:
        self.core.abort(request_id)
        self._ended.pop(request_id, None)
        self._stopped = [seq for seq in self._stopped if seq.request_id != request_id]

    def settle(self) -> dict[int, str]:
        ended, self._ended = self._ended, {}
        ended |= {seq.request_id: "stop" for seq in self._stopped}
        self._stopped = []
        return ended

    def holds(self, request_id: int) -> bool:
        """Returns whether a request has slot and blocks, or waits for them."""
        return self.core.find(request_id) is not None or request_id in self.core.running_set.ending

    def steps(self, now: int, max_iterations: int) -> list[Step]:
        """Runs one plan for as many iterations as its horizon and the caller allow: one step for each.

        Free blocks are None within a leap, which does not report them. Returns no step if the engine has only
        freed complete sequences.
        """
        core = self.core
        plan = core.plan(now)
        while plan is None and core.num_unfinished:
            assert self._is_async, "our engine stands still"
            for seq in self._stopped:
                core.abort(seq.request_id, FinishReason.stop)
                self._ended[seq.request_id] = "stop"
            self._stopped = []
            plan = core.plan(now)
        if plan is None:
            return []
        admitted = {seq.request_id for seq in plan.admitted}
        cached = {c.seq.request_id: c.num_cached for c in plan.chunks if c.seq.request_id in admitted}
        late, self._stopped = self._stopped, []
        preempted = [seq.request_id for seq in plan.preempted if not (self._is_async and seq.state is ENDED)]
        tokens, num_free_planned = plan.tokens_by_request, core.block_pool.num_free
        drafts = self._drafts(plan)
        outcome, stopped = self._run(plan, 1 if late else min(plan.horizon, max_iterations), late)
        if self._is_async:
            self._stopped = stopped
            stopped = [seq for seq in late if seq.state is not WAITING]
        _, ended = core.commit(plan, outcome._replace(ended=tuple(stopped)), now + outcome.iterations - 1)
        for seq in late:
            core.abort(seq.request_id, FinishReason.stop)  # if this step has preempted it
        core.check_integrity()
        finished = {seq.request_id: seq.finish_reason.name for seq in ended if seq not in late}
        if self._is_async:
            finished, self._ended = self._ended, finished
            finished |= {seq.request_id: "stop" for seq in late}
            preempted = [request_id for request_id in preempted if request_id not in finished]
        steps = [Step(tokens, {}, [], None, None, {}, drafts) for _ in range(outcome.iterations)]
        steps[0] = steps[0]._replace(
            admitted=cached, preempted=sorted(preempted), num_free_planned=num_free_planned
        )
        steps[-1] = steps[-1]._replace(num_free_after=core.block_pool.num_free)
        told = 0 if self._is_async else -1
        steps[told] = steps[told]._replace(finished=finished)
        return steps

    def _drafts(self, plan: StepPlan) -> dict[int, int] | None:
        """Returns the draft tokens of a plan."""
        return None

    def _run(
        self, plan: StepPlan, max_iterations: int, late: list[Sequence]
    ) -> tuple[StepOutcome, list[Sequence]]:
        """Runs a plan up to the first sampled token that ends a sequence; returns these sequences, too.

        late: sequences that have ended with the step before.
        """
        num_iterations = max_iterations
        stopped: list[Sequence] = []
        for seq in [*plan.decodes, *(chunk.seq for chunk in plan.chunks if chunk.completes)]:
            arrival = self._arrivals[seq.request_id]
            if arrival.end != "sampled" or seq in late:
                continue
            num_left = arrival.num_output_tokens - seq.num_output_tokens
            if num_left < num_iterations:
                num_iterations, stopped = num_left, []
            if num_left == num_iterations:
                stopped.append(seq)
        return StepOutcome(num_iterations), stopped


@dataclass(frozen=True)
class Workload:
    """One case to compare: settings and arrivals in the order of their ids and steps."""

    settings: Settings
    arrivals: tuple[Arrival, ...] = field(default=())


def first_difference(
    workload: Workload,
    make_theirs: Callable[[Settings], Engine],
    *,
    make_ours: Callable[[Settings], OurEngine] = OurEngine,
    leaps: bool = False,
    decision_log: list[Step] | None = None,
) -> str | None:
    """Describes the first difference between the two engines; None if they agree in every step.

    leaps: our core runs a plan for as long as its horizon says, while the other plans every step.
    decision_log: takes the other engine's steps, for tests that count what happened.
    """
    ours, theirs = make_ours(workload.settings), make_theirs(workload.settings)
    to_come = list(workload.arrivals)
    aborts: dict[int, list[int]] = {}
    for arrival in workload.arrivals:
        if arrival.abort_step is not None:
            aborts.setdefault(arrival.abort_step, []).append(arrival.request_id)
    now = 0
    while to_come or ours.num_unfinished:
        for arrival in _due(to_come, now, ours):
            arrival_s = now + arrival.request_id * 1e-6  # distinct
            ours.add(arrival, arrival_s)
            theirs.add(arrival, arrival_s)
        for request_id in aborts.get(now, ()):
            ours.abort(request_id)
            theirs.abort(request_id)
        if ours.num_unfinished != theirs.num_unfinished:
            return f"step {now}: {ours.num_unfinished} unfinished here, {theirs.num_unfinished} there"
        if not ours.num_unfinished:
            now += 1
            continue
        events = [step - now for step in (*aborts, *(arrival.step for arrival in to_come)) if step > now]
        our_steps = ours.steps(now, min(events, default=1000) if leaps else 1)
        if not our_steps and ours.settle() != theirs.settle():
            return f"step {now}: the ends of the last step differ"
        for our_step in our_steps:
            their_step = theirs.step()
            if decision_log is not None:
                decision_log.append(their_step)
            their_step = _as_reported(their_step, our_step)
            if our_step != their_step:
                return f"step {now}\n  ours   {our_step}\n  theirs {their_step}"
            now += 1
    return None


def _as_reported(their_step: Step, our_step: Step) -> Step:
    """Returns their step without the free blocks that our step does not report."""
    if our_step.num_free_planned is None:
        their_step = their_step._replace(num_free_planned=None)
    if our_step.num_free_after is None:
        their_step = their_step._replace(num_free_after=None)
    return their_step


def _due(to_come: list[Arrival], now: int, ours: OurEngine) -> list[Arrival]:
    """Removes the requests that arrive now from to_come and returns them."""
    ids_to_come = {arrival.request_id for arrival in to_come}
    due = []
    for arrival in to_come:
        is_early = arrival.after is not None and (arrival.after in ids_to_come or ours.holds(arrival.after))
        if arrival.step <= now and not is_early:
            due.append(arrival)
    for arrival in due:
        to_come.remove(arrival)
    return due


def shrunk(workload: Workload, fails: Callable[[Workload], bool]) -> Workload:
    """Returns a smaller workload that still fails: without some arrivals, then with smaller numbers.

    A workload that raises does not count as a smaller failure, because it may make no sense.
    """
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for candidate in _smaller(workload):
            try:
                is_smaller = fails(candidate)
            except Exception:
                is_smaller = False
            if is_smaller:
                workload = candidate
                break
    return workload


def _smaller(workload: Workload) -> Iterator[Workload]:
    arrivals = workload.arrivals
    for i in range(len(arrivals)):
        yield replace(workload, arrivals=arrivals[:i] + arrivals[i + 1 :])
    for i, arrival in enumerate(arrivals):
        for change in _simpler(arrival):
            if change != arrival:
                yield replace(workload, arrivals=(*arrivals[:i], change, *arrivals[i + 1 :]))


def _simpler(arrival: Arrival) -> Iterator[Arrival]:
    if arrival.abort_step is not None:
        yield replace(arrival, abort_step=None)
    if arrival.end != "length":
        yield replace(arrival, end="length")
    for num_output in (1, arrival.num_output_tokens // 2, arrival.num_output_tokens - 1):
        if 1 <= num_output < arrival.num_output_tokens:
            yield replace(arrival, num_output_tokens=num_output)
    num_named = sum(segment.num_tokens for segment in arrival.prompt.segments)
    for num_prompt in (1, arrival.prompt.num_tokens // 2, arrival.prompt.num_tokens - 1):
        if max(num_named, 1) <= num_prompt < arrival.prompt.num_tokens:
            yield replace(arrival, prompt=arrival.prompt._replace(num_tokens=num_prompt))
    if arrival.prompt.segments:
        yield replace(arrival, prompt=arrival.prompt._replace(segments=arrival.prompt.segments[:-1]))
