"""Short jobs first: by predicted output, without or with preemption, or by the remaining prompt."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from fieldlimits import Ge, NonNegativeInt, Unit
from policies.core.sequence import SequenceView
from policies.core.step import StepBuilder
from policies.core.view import StepView
from policies.scheduling import Overdue, Scheduling, displace, displaceable


def expected_output_tokens(seq: SequenceView) -> int:
    """Computes the predicted output tokens, doubled until they exceed the output tokens so far.

    This is S3's correction (Jin et al., NeurIPS 2023). Example: a prediction of 10 counts as 10 up to the 9th
    token and as 20 from the 10th on.

    Computes the expected output length of a sequence, corrected when its prediction is exceeded.
    """
    expected, num_produced = seq.num_predicted_tokens, seq.num_output_tokens
    while expected <= num_produced:
        expected *= 2
    return expected


def remaining_output_tokens(seq: SequenceView) -> int:
    """Computes the expected remaining output tokens, >= 1; they stay valid for that many iterations."""
    return expected_output_tokens(seq) - seq.num_output_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class ShortestJobFirst(Scheduling):
    """The shortest predicted output is admitted first, the longest is preempted first.

    Shortest job first by the predicted number of output tokens, not preemptive.

    This order minimises the mean waiting time if predictions are right (Smith, 1956); SSJF (Qiu et al.,
    2024), for example, applies it to LLMs. Requests with long outputs starve while shorter ones keep
    arriving; max_wait_s limits that: requests that have waited that long are served before all others, in
    order of arrival. Assumes that the service time depends on the output length: prompts are not considered.
    Memory pressure: the longest predicted output is preempted. Horizon: until the first waiting request is
    overdue; the order of other requests never changes.
    """

    needs_predictor: ClassVar[bool] = True

    max_wait_s: Annotated[float | None, Ge(0), Unit("s"), "null for no limit"] = None
    """Seconds since its arrival after which a waiting request is served before all others; null: never."""

    _overdue: Overdue = field(init=False, default_factory=Overdue, repr=False, compare=False)

    @property
    def starvation_bound_s(self) -> float | None:
        """Equal to max_wait_s."""
        return self.max_wait_s

    def rank(self, seq: SequenceView) -> tuple[float, ...]:
        """Returns the sort key: (0, arrival) if overdue, else (1, predicted output tokens, arrival)."""
        return self._overdue.rank(seq, self.max_wait_s, seq.num_predicted_tokens)

    def before_step(self, view: StepView, step: StepBuilder, now: float) -> None:
        """Moves overdue requests to the front."""
        self._overdue.bring_forward(view, step, now)

    def on_end(self, seq: SequenceView) -> None:
        """Removes a sequence that has ended."""
        self._overdue.forget(seq)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShortestRemaining(Scheduling):
    """Admits the fewest remaining tokens first; preempts the most, even for a waiting sequence.

    Shortest remaining processing time first (SRPT; Schrage, 1968) by predicted output tokens, preemptive.

    Remaining tokens are the predicted output tokens minus the output so far. An exceeded prediction is
    doubled: a predicted output of 10 tokens counts as 20 from its 10th token on and may then be preempted
    (S3's correction). The estimate thus never reaches zero, which would make a long output unpreemptable, a
    known weakness of SRPT with wrong sizes. A waiting sequence without a slot or memory preempts running ones
    that have more than min_gain_tokens more remaining tokens, the longest first, if that frees enough memory.
    The cost of resuming the preempted sequences is not computed; min_gain_tokens stands for it. Requests with
    long outputs starve while shorter ones keep arriving; max_wait_s limits that: a request that still waits
    that long after its arrival is served before all others, preempts none, and is not preempted. A running
    sequence of that age is not preempted either. Memory pressure: the longest remaining output is preempted.
    Horizon: while a request waits, until the first running output exceeds its prediction; one iteration while
    a sequence that may preempt others has room but no budget.
    """

    needs_predictor: ClassVar[bool] = True

    min_gain_tokens: NonNegativeInt = 64
    """Difference of remaining tokens above which a running sequence is preempted for a waiting one."""
    max_wait_s: Annotated[float | None, Ge(0), Unit("s"), "null for no limit"] = None
    """Seconds since its arrival after which a waiting request is served before all others; null: never."""

    _overdue: Overdue = field(init=False, default_factory=Overdue, repr=False, compare=False)

    @property
    def starvation_bound_s(self) -> float | None:
        """Equal to max_wait_s."""
        return self.max_wait_s

    def rank(self, seq: SequenceView) -> tuple[float, ...]:
        """Returns the sort key: (0, arrival) if overdue, else (1, expected remaining tokens, arrival)."""
        return self._overdue.rank(seq, self.max_wait_s, remaining_output_tokens(seq))

    def before_step(self, view: StepView, step: StepBuilder, now: float) -> None:
        """Updates the remaining tokens of running sequences and preempts those that have too many."""
        self._overdue.bring_forward(view, step, now)
        running = view.running
        for seq in running:
            step.rerank(seq)
        head = next(iter(view.waiting), None)
        if head is None or head.rank[0] == 0:
            return
        able = [seq for seq in running if not self._is_kept(seq, now)]
        if not able:
            return
        step.hold(int(min(seq.rank[1] for seq in able)))
        limit = head.rank[1] + self.min_gain_tokens
        displace(view, step, head, displaceable(seq for seq in able if seq.rank[1] > limit))

    def on_end(self, seq: SequenceView) -> None:
        """Removes a sequence that has ended."""
        self._overdue.forget(seq)

    def _is_kept(self, seq: SequenceView, now: float) -> bool:
        """Returns whether a running sequence would be overdue if it waited; if so, it is not preempted."""
        return self.max_wait_s is not None and seq.request.arrival_s + self.max_wait_s <= now


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthAware(Scheduling):
    """Orders prompts by their uncomputed tokens.

    Length-aware order of prefills: by the remaining prompt tokens, short first or long first.

    Prompt lengths are known, so no predictor is needed. Short first: the fewest uncomputed tokens go first,
    among waiting sequences and among sequences in prefill, which a chunked batching policy serves in this
    order (`StepView.prefilling`). A short prompt that arrives during the prefill of a long one need not wait
    for it if the batching policy runs several prefills at once. Long first: the reverse, so that long prompts
    start early and short ones fill the rest of the budget. Assumes that prefill time grows with tokens.
    Prompts of the other kind starve while preferred ones keep arriving; max_wait_s limits that for waiting
    requests, as in shortest_job_first. Memory pressure: the last sequence in this order, by prompt length, is
    preempted. Horizon: with several sequences in prefill, short first keeps its order because the first only
    gets shorter; long first decides every iteration.
    """

    long_first: bool = False
    """Whether the most uncomputed tokens go first; if not, the fewest."""
    max_wait_s: Annotated[float | None, Ge(0), Unit("s"), "null for no limit"] = None
    """Seconds since its arrival after which a waiting request is served before all others; null: never."""

    _overdue: Overdue = field(init=False, default_factory=Overdue, repr=False, compare=False)

    @property
    def starvation_bound_s(self) -> float | None:
        """Equal to max_wait_s."""
        return self.max_wait_s

    def rank(self, seq: SequenceView) -> tuple[float, ...]:
        """Returns the sort key: (0, arrival) if overdue, else (1, known tokens or minus these, arrival)."""
        return self._overdue.rank(seq, self.max_wait_s, -seq.num_known if self.long_first else seq.num_known)

    def chunk_rank(self, seq: SequenceView) -> tuple[float, ...]:
        """Returns the sort key: (uncomputed tokens or minus these, arrival)."""
        num_left = seq.num_uncomputed
        return (-num_left if self.long_first else num_left, seq.request.arrival_s)

    def before_step(self, view: StepView, step: StepBuilder, now: float) -> None:
        """Moves overdue requests to the front."""
        self._overdue.bring_forward(view, step, now)
        if self.long_first and len(view.prefilling) > 1:
            step.hold(1)

    def on_end(self, seq: SequenceView) -> None:
        """Removes a sequence that has ended."""
        self._overdue.forget(seq)
