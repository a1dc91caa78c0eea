"""The plan of an agent's task: its calls, what each is followed by, and the length of every part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from policies.core.request import Segment
from sim.workload.checks import MAX_TOKENS, require_counts
from sim.workload.distributions import Distribution, whole_numbers
from sim.workload.streams import stream

MAX_STEPS = 1000
"""Limit of the calls of one agent, and of the branches after a call."""
MAX_CALLS = 100_000
"""Limit of the calls of a task, those of its sub-agents included."""
MAX_DEPTH = 10
"""Limit of the levels of sub-agents."""


class Branch(NamedTuple):
    """A tool or a sub-agent that runs after a call, and what it adds to the agent's context.

    tool_s is 0 for a sub-agent; a tool has no calls, and no prompt (the first one after the system prompt).
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
        """Number of LLM calls: this one, and those of the sub-agents that follow it."""
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
        """Number of LLM calls, those of sub-agents included."""
        return sum(call.num_calls for call in self.calls)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanSettings:
    """Distributions from which tasks are drawn.

    calls: LLM calls of the agent; fan_out: branches after each call but the last, of which sub_agent_share
    are sub-agents with sub_agent_calls calls each; tool_s: duration of a tool. Tokens: task_tokens of the
    first message (also to a sub-agent), output_tokens of a call, result_tokens that a branch returns.
    sub_agent_depth: levels of sub-agents. Those of the last level run one tool after each call but the last,
    those above it run branches as the agent does.
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
        """Draws what runs after a call of an agent of a level."""
        if level == self.sub_agent_depth:
            return (self._tool(draws),)
        return tuple(self._branch(draws, level) for _ in range(draws.count(self.fan_out, MAX_STEPS)))

    def _branch(self, draws: _Draws, level: int) -> Branch:
        result = Segment(draws.content(), draws.count(self.result_tokens))
        if draws.uniform() >= self.sub_agent_share:
            return Branch(result, draws.seconds(self.tool_s), Segment(0, 0))
        prompt = Segment(draws.content(), draws.count(self.task_tokens))
        return Branch(result, 0.0, prompt, self._calls(draws, level + 1))

    def _tool(self, draws: _Draws) -> Branch:
        result = Segment(draws.content(), draws.count(self.result_tokens))
        return Branch(result, draws.seconds(self.tool_s), Segment(0, 0))


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
        """Draws a whole number from 1 to maximum."""
        return int(whole_numbers(distribution, self._rng.standard_normal(1), maximum)[0])

    def seconds(self, distribution: Distribution) -> float:
        """Draws a time in seconds."""
        return float(distribution.from_normal(self._rng.standard_normal(1))[0])
