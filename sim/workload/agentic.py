"""Agents: tasks that are graphs of LLM calls, with tools, parallel branches, joins, and sub-agents.

    call 0 --+-- tool ---------------------------------+-- call 1 --+-- tool --+-- call 2
             +-- sub-agent: call -- tool -- call ------+            +-- tool --+

After each call except the last, the agent runs several branches at once. A branch is a tool, which takes
time, or a sub-agent: a separate chain of calls with a tool after each call except the last, or with its own
branches (`sub_agent_depth`). The next call of the agent joins them: it is sent when all have ended, and its
prompt is the previous prompt, the output, and all results.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.core.request import Prompt, Request, Segment
from sim.metrics.distributions import Kept
from sim.metrics.tasks import TaskLatencies, TasksFigure
from sim.workload.arrivals import ArrivalProcess, ClosedLoop
from sim.workload.base import Arrival, Source, WorkloadNotes
from sim.workload.distributions import (
    MAX_TOKENS,
    Distribution,
    FloatArray,
    require_counts,
    require_positive,
    stream,
    whole_numbers,
)
from sim.workload.sessions import begin_s, in_a_loop, require_number_in_a_loop

MAX_STEPS = 1000
"""Limit of the calls of one agent, and of the branches after a call."""
MAX_CALLS = 100_000
"""Limit of the calls of a task, including its sub-agents."""
MAX_DEPTH = 10
"""Limit of the levels of sub-agents."""


class Branch(NamedTuple):
    """A tool or a sub-agent that runs after a call, and its addition to the agent's context.

    tool_s is 0 for a sub-agent; a tool has no calls and no prompt (the first one after the system prompt).
    """

    result: Segment
    tool_s: float
    prompt: Segment
    calls: tuple[AgentCall, ...] = ()


class AgentCall(NamedTuple):
    """One LLM call: the content id and the tokens of its output, and the branches that follow it."""

    content: int
    output_tokens: int
    branches: tuple[Branch, ...] = ()

    @property
    def num_calls(self) -> int:
        """Number of LLM calls: this one, and the calls of the sub-agents that follow it."""
        return 1 + sum(call.num_calls for branch in self.branches for call in branch.calls)


class TaskPlan(NamedTuple):
    """A task is the calls of an agent and its sub-agents; first_content is the id of its first message."""

    calls: tuple[AgentCall, ...]
    system_tokens: int
    sub_agent_tokens: int
    first_content: int
    task_tokens: int

    @property
    def num_calls(self) -> int:
        """Number of LLM calls, including those of sub-agents."""
        return sum(call.num_calls for call in self.calls)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanSettings:
    """Distributions from which tasks are drawn.

    calls: LLM calls of the agent; fan_out: branches after each call except the last; a share of
    sub_agent_share are sub-agents with sub_agent_calls calls each; tool_s: duration of a tool. Tokens:
    task_tokens of the first message (also to a sub-agent), output_tokens of a call, result_tokens that a
    branch returns. sub_agent_depth: levels of sub-agents. Sub-agents of the last level run one tool after
    each call except the last; higher levels run branches like the agent.
    """

    calls: Distribution
    fan_out: Distribution
    sub_agent_share: float
    sub_agent_calls: Distribution
    tool_s: Distribution
    system_prompt_tokens: Distribution
    sub_agent_prompt_tokens: Distribution
    task_tokens: Distribution
    output_tokens: Distribution
    result_tokens: Distribution
    sub_agent_depth: int = 1

    def __post_init__(self) -> None:
        require_counts(self, MAX_STEPS, "calls or branches", "calls", "fan_out", "sub_agent_calls")
        names = ("system_prompt_tokens", "sub_agent_prompt_tokens", "task_tokens", "output_tokens")
        require_counts(self, MAX_TOKENS, "tokens", *names, "result_tokens")
        if not 0 <= self.sub_agent_share <= 1:
            raise ValueError(f"sub_agent_share={self.sub_agent_share}: must be a share, >= 0 and <= 1")
        if not 1 <= self.sub_agent_depth <= MAX_DEPTH:
            raise ValueError(
                f"sub_agent_depth={self.sub_agent_depth}: must be >= 1 and <= {MAX_DEPTH} levels"
            )

    def plans(self, seed: int, count: int) -> list[TaskPlan]:
        """Draws the plans of `count` tasks; each is a function of the seed and the number of the task."""
        z = stream(seed, "agents/system").standard_normal(2)
        system = int(whole_numbers(self.system_prompt_tokens, z[:1])[0])
        sub_agent = int(whole_numbers(self.sub_agent_prompt_tokens, z[1:])[0])
        plans: list[TaskPlan] = []
        content = 2  # the first after the system prompts
        for task in range(count):
            draws = _Draws(stream(seed, "agents/tasks", task), content)
            first, task_tokens = draws.content(), draws.count(self.task_tokens)
            plans.append(TaskPlan(self._calls(draws), system, sub_agent, first, task_tokens))
            content = draws.next_content
        return plans

    def _calls(self, draws: _Draws, level: int = 0) -> tuple[AgentCall, ...]:
        """Draws the calls of the agent (level 0), or of a sub-agent of a level."""
        num_calls = draws.count(self.sub_agent_calls if level else self.calls, MAX_STEPS)
        draws.num_calls += num_calls
        if draws.num_calls > MAX_CALLS:
            raise ValueError(
                f"sub_agent_depth={self.sub_agent_depth}: a task has more than {MAX_CALLS:,} calls; lower "
                "it, sub_agent_share, fan_out or sub_agent_calls"
            )
        return tuple(
            AgentCall(
                draws.content(),
                draws.count(self.output_tokens),
                self._branches(draws, level) if number + 1 < num_calls else (),
            )
            for number in range(num_calls)
        )

    def _branches(self, draws: _Draws, level: int) -> tuple[Branch, ...]:
        """Draws the branches after a call of an agent of a level."""
        is_last = level == self.sub_agent_depth
        count = 1 if is_last else draws.count(self.fan_out, MAX_STEPS)
        return tuple(self._branch(draws, level, is_tool=is_last) for _ in range(count))

    def _branch(self, draws: _Draws, level: int, *, is_tool: bool) -> Branch:
        result = Segment(draws.content(), draws.count(self.result_tokens))
        if is_tool or draws.uniform() >= self.sub_agent_share:
            return Branch(result, draws.seconds(self.tool_s), Segment(0, 0))
        prompt = Segment(draws.content(), draws.count(self.task_tokens))
        return Branch(result, 0.0, prompt, self._calls(draws, level + 1))


class _Draws:
    """Random numbers and content ids of one task."""

    def __init__(self, rng: np.random.Generator, next_content: int) -> None:
        self.next_content = next_content
        self.num_calls = 0
        self._rng = rng

    def content(self) -> int:
        """Returns a new content id."""
        self.next_content += 1
        return self.next_content - 1

    def uniform(self) -> float:
        """Draws a number in [0, 1)."""
        return float(self._rng.random())

    def count(self, distribution: Distribution, maximum: int = MAX_TOKENS) -> int:
        """Draws an integer from 1 to maximum."""
        return int(whole_numbers(distribution, self._rng.standard_normal(1), maximum)[0])

    def seconds(self, distribution: Distribution) -> float:
        """Draws a time in seconds."""
        return float(distribution.from_normal(self._rng.standard_normal(1))[0])


MAIN_PROMPT, SUB_AGENT_PROMPT = 0, 1
"""Content ids of the system prompts of agents and of sub-agents."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Agentic(PlanSettings):
    """Tasks that begin according to `arrivals`.

    Num_tasks and duration_s both limit them, and at least one must be set.

    In a closed loop each user has one task at a time, and num_tasks must be set.

    A task ends with the output of its last call. It fails if a call gets no token (it was rejected) or if a
    prompt and its output no longer fit the context; after an aborted output it continues with the tokens that
    were generated. task_slo_s: maximum latency of a good task, for the summary.
    """

    task: ClassVar[str] = "code"
    """Task of the requests, for published rates of drafts."""

    arrivals: ArrivalProcess | ClosedLoop
    num_tasks: int | None = None
    duration_s: float | None = None
    task_slo_s: float | None = None
    patience_s: float | None = None
    later_calls_first: bool = False
    """Whether a call's priority increases with the calls that its task has made; False: all have priority 0.
    """

    def __post_init__(self) -> None:
        PlanSettings.__post_init__(self)  # super() does not work in a dataclass with slots
        require_positive(self, "num_tasks", "duration_s", "task_slo_s", "patience_s")
        if self.num_tasks is None and self.duration_s is None:
            raise ValueError("num_tasks=null, duration_s=null: at least one must be set")
        require_number_in_a_loop(self, "num_tasks")

    def source(self, *, seed: int, max_model_len: int) -> Source:
        """Creates the traffic; a task and its calls depend only on the seed and the number of the task."""
        arrival_s = self._arrival_s(seed)
        if not len(arrival_s):
            raise ValueError(f"duration_s={self.duration_s}: must be longer; no task begins in this time")
        tasks = AgenticSource(
            arrival_s=arrival_s,
            plans=self.plans(seed, len(arrival_s)),
            patience_s=self.patience_s,
            max_model_len=max_model_len,
            later_calls_first=self.later_calls_first,
        )
        return in_a_loop(tasks, self.arrivals, seed=seed, duration_s=self.duration_s)

    @property
    def slo_terms(self) -> frozenset[str]:
        """Returns the additional latency of these requests: the latency of the complete task."""
        return frozenset({"task"})

    def new_latencies(self, *, seed: int, in_shards: bool, terms: Collection[str]) -> TaskLatencies:
        """Returns the accumulator of the latency of each call's task."""
        return TaskLatencies(partial(self._num_calls, seed))

    def new_section(self, *, seed: int, in_shards: bool, kept: Kept) -> TasksFigure:
        """Returns an accumulator of the section `tasks`: latency and makespan of tasks."""
        return TasksFigure(partial(self._num_calls, seed), self.task_slo_s)

    def _num_calls(self, seed: int) -> NDArray[np.int64]:
        """Returns the number of calls of each task."""
        plans = self.plans(seed, len(self._arrival_s(seed)))
        return np.array([plan.num_calls for plan in plans], np.int64)

    def _arrival_s(self, seed: int) -> FloatArray:
        return begin_s(self.arrivals, seed=seed, num_sessions=self.num_tasks, duration_s=self.duration_s)


@dataclass(slots=True)
class _Chain:
    """The calls of one agent or sub-agent: its context, and the next call."""

    task: int
    calls: Sequence[AgentCall]
    context: tuple[Segment, ...]
    parent: _Chain | None = None
    num_sent: int = 0
    num_running: int = 0
    """Sub-agents that the next call waits for."""
    ready_s: float = 0.0
    """Time at which all tools before the next call have ended."""


class AgenticSource:
    """The calls of tasks; `session_id` is the task. Contents 0 and 1 are the system prompts."""

    def __init__(
        self,
        *,
        arrival_s: FloatArray,
        plans: list[TaskPlan],
        patience_s: float | None,
        max_model_len: int,
        later_calls_first: bool = False,
    ) -> None:
        """Creates the traffic. arrival_s, plans: one per task."""
        self.num_requests: int | None = sum(plan.num_calls for plan in plans)
        self.last_arrival_s: float | None = None
        self.last_begin_s = float(arrival_s[-1])
        self.patience_s = patience_s
        self.notes = WorkloadNotes()
        self._arrival_s = arrival_s
        self._plans = plans
        self._max_model_len = max_model_len
        self._num_created = 0
        self._num_calls = [0] * len(plans) if later_calls_first else None  # calls that each task has made
        self._chains: dict[int, _Chain] = {}  # by id of the request in progress

    def arrivals(self) -> Iterator[Arrival]:
        for task, (arrival_s, plan) in enumerate(zip(self._arrival_s.tolist(), self._plans, strict=True)):
            context = (
                Segment(MAIN_PROMPT, plan.system_tokens),
                Segment(plan.first_content, plan.task_tokens),
            )
            arrival = self._send(_Chain(task, plan.calls, context), arrival_s)
            if arrival is None:
                self.notes.skip("tasks with a first call longer than the context")
            else:
                yield arrival

    def follow_ups(self, request: Request, now: float, num_output_tokens: int) -> Sequence[Arrival]:
        chain = self._chains.pop(request.request_id)
        call = chain.calls[chain.num_sent - 1]
        if num_output_tokens == 0:
            return ()  # the task has failed; its other branches run to their end
        chain.context += (Segment(call.content, num_output_tokens),)
        if chain.num_sent == len(chain.calls):
            return self._ended(chain, now)
        chain.context += tuple(branch.result for branch in call.branches)
        chain.ready_s = now + max((branch.tool_s for branch in call.branches), default=0.0)
        started = [
            self._send(self._sub_agent(chain, branch), now) for branch in call.branches if branch.calls
        ]
        chain.num_running = len(started)
        if not started:
            started = [self._send(chain, chain.ready_s)]
        return self._sent(started)

    def _ended(self, chain: _Chain, now: float) -> Sequence[Arrival]:
        """Returns the call that joins an ended sub-agent, if all other branches have ended."""
        parent = chain.parent
        if parent is None:
            return ()
        parent.num_running -= 1
        if parent.num_running:
            return ()
        return self._sent([self._send(parent, max(now, parent.ready_s))])

    def _sub_agent(self, parent: _Chain, branch: Branch) -> _Chain:
        system = Segment(SUB_AGENT_PROMPT, self._plans[parent.task].sub_agent_tokens)
        return _Chain(parent.task, branch.calls, (system, branch.prompt), parent)

    def _sent(self, arrivals: list[Arrival | None]) -> list[Arrival]:
        """Returns the calls that fit in the context; a task is cut at the first call that does not fit."""
        sent = [arrival for arrival in arrivals if arrival is not None]
        self.notes.num_conversations_cut += len(arrivals) - len(sent)
        return sent

    def _send(self, chain: _Chain, arrival_s: float) -> Arrival | None:
        """Creates the next call of a chain; None if prompt and output together do not fit the context."""
        call = chain.calls[chain.num_sent]
        num_tokens = sum(segment.num_tokens for segment in chain.context)
        if num_tokens + call.output_tokens > self._max_model_len:
            return None
        prompt = Prompt(num_tokens, chain.context)
        priority = 0
        if self._num_calls is not None:
            priority = -self._num_calls[chain.task]
            self._num_calls[chain.task] += 1
        request = Request(
            self._num_created,
            arrival_s,
            prompt,
            session_id=chain.task,
            answer_id=call.content,
            priority=priority,
        )
        self._num_created += 1
        chain.num_sent += 1
        self._chains[request.request_id] = chain
        return Arrival(request, call.output_tokens)
