"""Orders by the deadline of the first token, or by the remaining slack."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from fieldlimits import Ge, Gt, MinLen, Unit
from policies.core.request import Request
from policies.core.sequence import SequenceView
from policies.core.step import StepBuilder
from policies.core.view import StepView
from policies.scheduling import Scheduling, displace, displaceable

TimesByPriority = Annotated[tuple[Annotated[float, Gt(0), Unit("s")], ...], MinLen(1)]
"""Times in seconds for priority 0, 1, ...; the last one applies to all further priorities."""


def by_priority(limits_s: tuple[float, ...], request: Request) -> float:
    """Returns the time for a request's priority; priorities beyond the table use the nearest value."""
    return limits_s[min(max(request.priority, 0), len(limits_s) - 1)]


@dataclass(frozen=True, kw_only=True, slots=True)
class EarliestDeadlineFirst(Scheduling):
    """The earliest deadline is admitted first, the latest is preempted first.

    The deadline is the arrival time plus ttft_s of the request's priority, or the request's deadline_s if it
    has one. The order is optimal on one machine if all deadlines can be met; under overload it serves late
    requests before requests that could still meet their deadlines. A request is overtaken only by requests
    with an earlier deadline. These arrive before its own deadline, which is at most max(ttft_s) after its
    arrival unless it has a deadline_s; but their number is not limited.
    Memory pressure: the latest deadline is preempted; a sequence keeps its rank after its first token.
    Horizon: deadlines are fixed, so the order never changes.
    """

    ttft_s: TimesByPriority = (1.0,)
    """TTFT targets in seconds for priority 0, 1, ...; the last one applies to all further priorities."""

    def __post_init__(self) -> None:
        Scheduling.__post_init__(self)
        object.__setattr__(self, "ttft_s", tuple(self.ttft_s))

    def rank(self, seq: SequenceView) -> tuple[float, ...]:
        """Returns the sort key: (deadline, arrival)."""
        request = seq.request
        deadline_s = request.deadline_s
        if deadline_s is None:
            deadline_s = request.arrival_s + by_priority(self.ttft_s, request)
        return (deadline_s, request.arrival_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class LeastSlack(Scheduling):
    """Least slack first: the earliest latest start is admitted first, the latest is preempted first.

    The next token of a sequence is due at arrival + ttft_s + tpot_s x output tokens so far. Its slack is the
    time until then minus the time to compute the uncomputed tokens at prefill_tokens_per_s, which the user
    estimates, because policies do not know durations. `now` is the same for all sequences, so they are
    ordered by their latest start, due time - computation time: it is fixed for a waiting sequence, stays the
    same while its prompt is computed, and increases by tpot_s with every token after that. (If each chunk of
    a prompt increased it, two prompts that do not fit together would preempt each other forever.) When the
    slack of the first waiting sequence is used up and there is no room for it, decoding sequences are
    preempted for it if their latest start is more than margin_s after its own, the largest slack first.
    Sequences in prefill are not preempted. No request starves: a waiting sequence keeps its latest start, and
    later arrivals have later ones, within the range of ttft_s and of prompt lengths. Memory pressure: the
    sequence of largest slack is preempted. Horizon: until the slack of the first waiting sequence is used up;
    from then on, until a running one is margin_s ahead of it.
    """

    ttft_s: TimesByPriority = (1.0,)
    """TTFT targets in seconds for priority 0, 1, ...; the last one applies to all further priorities."""
    tpot_s: TimesByPriority = (0.1,)
    """TPOT targets in seconds for priority 0, 1, ...; the last one applies to all further priorities."""
    prefill_tokens_per_s: Annotated[float, Gt(0)] = 10_000.0
    """Estimated prefill rate of the engine in tokens per second."""
    margin_s: Annotated[float, Ge(0), Unit("s")] = 1.0
    """Minimum difference in slack to the waiting sequence, in seconds, at which a decode is preempted."""

    _targets: dict[int, tuple[float, float, float]] = field(
        init=False, default_factory=dict, repr=False, compare=False
    )
    """Due time of the first token, TPOT target and arrival time, in s, by request id."""

    def __post_init__(self) -> None:
        Scheduling.__post_init__(self)
        for name in ("ttft_s", "tpot_s"):
            object.__setattr__(self, name, tuple(getattr(self, name)))

    def rank(self, seq: SequenceView) -> tuple[float, ...]:
        """Returns the sort key: (latest start, arrival)."""
        targets = self._targets.get(seq.request_id)
        if targets is None:
            request = seq.request
            due_s = request.arrival_s + by_priority(self.ttft_s, request)
            targets = (due_s, by_priority(self.tpot_s, request), request.arrival_s)
            self._targets[seq.request_id] = targets
        due_s, tpot_s, arrival_s = targets
        num_tokens = seq.num_uncomputed - seq.num_swapped
        return (due_s + seq.num_output_tokens * tpot_s - num_tokens / self.prefill_tokens_per_s, arrival_s)

    def before_step(self, view: StepView, step: StepBuilder, now: float) -> None:
        """Updates the slack of decoding sequences, and preempts some for a waiting one without slack."""
        for seq in view.decoding:
            step.rerank(seq)
        head = next(iter(view.waiting), None)
        if head is None:
            return
        latest_s = head.rank[0]
        if latest_s > now:
            step.hold(until_s=latest_s)
            return
        limit_s = latest_s + self.margin_s
        ahead, num_tokens = [], float(2**31)  # tokens until the next one is margin_s ahead
        for seq in view.decoding:
            own_latest_s = seq.rank[0]
            if own_latest_s > limit_s:
                ahead.append(seq)
            else:
                num_tokens = min(num_tokens, (limit_s - own_latest_s) / self._targets[seq.request_id][1])
        step.hold(max(1, int(num_tokens)))  # one iteration early rather than a rounding error late
        displace(view, step, head, displaceable(ahead))

    def on_end(self, seq: SequenceView) -> None:
        """Removes a sequence that has ended."""
        self._targets.pop(seq.request_id, None)
