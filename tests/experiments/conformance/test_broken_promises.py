"""Policies that break their promises: each kind is caught and described."""

import time
from dataclasses import dataclass, field
from math import inf
from typing import ClassVar

import numpy as np
import pytest

from experiments.conformance import draft_promises
from experiments.conformance.claims import BrokenPromise, claims_of
from experiments.conformance.speculating import SpeculatingWorld
from experiments.conformance.worlds import Ask, Traffic
from policies.admission import Refusal
from policies.admission.token_bucket import TokenBucket
from policies.caching.paged import Paged
from policies.caching.pool import BlockPool
from policies.scheduling import Scheduling
from tests.experiments.conformance.sound_policies import Filling, Guessing, Scales


class Cheating(Filling):
    def order(self, waiting):
        return sorted(waiting, key=lambda seq: (seq._end_known, seq.request_id))


class Dicing(Filling):
    def order(self, waiting):
        np.random.shuffle(waiting)  # noqa: NPY002
        return waiting


class Looking(Filling):
    """Reads the wall clock."""

    def order(self, waiting):
        return sorted(waiting, key=lambda seq: hash((time.perf_counter_ns() // 100, seq.request_id)))


class Forgetful(Filling):
    """Promises a horizon, although it counts the steps."""

    def fill(self, view, step, now):
        step.budget(self.max_num_batched_tokens)
        if view.num_iterations % 3 == 2 and view.num_decoding > 1:
            step.decode(view.decoding[0])
        else:
            super().fill(view, step, now)
        step.repeat()


class Overconfident(Filling):
    """Declares that all decodes go on, and preempts one now and then."""

    max_unasked_decodes = 64

    def fill(self, view, step, now):
        if view.num_iterations % 4 == 3 and view.decoding:
            step.preempt(view.decoding[-1])
        super().fill(view, step, now)


class Greedy(Filling):
    def fill(self, view, step, now):
        super().fill(view, replace_budget(step), now)


def replace_budget(step):
    """Returns the step with a budget that does not bind."""
    step.budget(10**6)
    return Unbudgeted(step)


class Unbudgeted:
    def __init__(self, step):
        self._step = step

    def __getattr__(self, name):
        return getattr(self._step, name)

    def budget(self, max_num_tokens):
        """Ignores the budget."""


class Starving(Filling):
    """Serves no prompt above 20 tokens."""

    def fill(self, view, step, now):
        super().fill(view, step, now)
        step.wait_until(float("inf"))

    def order(self, waiting):
        return [seq for seq in waiting if seq.num_uncomputed <= 20]


class Leaking(Paged):
    """Frees one block too few."""

    def pool(self, memory):
        pool = LeakingPool(memory.num_blocks, self.block_size)
        return pool


class LeakingPool(BlockPool):
    def release(self, seq, num_tokens, num_planned=0):
        super().release(seq, num_tokens, num_planned)
        self.num_free -= 1


@dataclass(frozen=True, kw_only=True, slots=True)
class LastComeFirst(Scheduling):
    starvation_bound: ClassVar[int] = 2

    def rank(self, seq):
        return (-seq.request.arrival_s,)


class BeyondTheLast:
    def choose(self, request, replicas, now):
        return -1


class Fortunate:
    """Draws a replica with Python's shared random numbers."""

    def choose(self, request, replicas, now):
        return int(np.random.randint(len(replicas)))  # noqa: NPY002


class Overshooting(Guessing):
    def predict(self, request, true_num_tokens):
        return 1000


class Peeking(Guessing):
    def predict(self, request, true_num_tokens):
        return min(true_num_tokens or 10, request.max_tokens or 10)


SHARED = []


class Sharing(Guessing):
    def predict(self, request, true_num_tokens):
        return 1 + len(SHARED) % 2 if request.max_tokens != 1 else 1

    def observe(self, request, num_output_tokens):
        SHARED.append(request)


class Mumbling:
    """Refuses a request without a reason."""

    def refusal(self, request, replicas, now):
        return True


class Spying:
    """Reads signals that it has not declared."""

    def refusal(self, request, replicas, now):
        return None if replicas[0].num_waiting < 3 else Refusal("full")


class Whimsical:
    def refusal(self, request, replicas, now):
        return Refusal("heads") if np.random.random() < 0.5 else None  # noqa: NPY002


@dataclass(kw_only=True, slots=True)
class Jamming:
    """Counts every request that comes in, but of those that leave only the answered ones."""

    num_outstanding: int = 0
    _answered: set = field(init=False, default_factory=set)

    def refusal(self, request, replicas, now):
        if self.num_outstanding >= 4:
            return Refusal("full")
        self.num_outstanding += 1
        return None

    def on_first_token(self, request, now):
        self._answered.add(request.request_id)

    def on_end(self, request, now):
        if request.request_id in self._answered:
            self._answered.remove(request.request_id)
            self.num_outstanding -= 1


class Rash:
    """Says "never" to a request that it would admit later."""

    def refusal(self, request, replicas, now):
        return Refusal("too many", inf) if sum(r.num_outstanding for r in replicas) > 2 else None


@dataclass(kw_only=True, slots=True)
class Promising(TokenBucket):
    """Names half of the time after which it will admit the request."""

    rate_per_s: float = 0.5

    def refusal(self, request, replicas, now):
        refusal = TokenBucket.refusal(self, request, replicas, now)
        return refusal and refusal._replace(retry_after_s=refusal.retry_after_s / 2)


@dataclass(kw_only=True, slots=True)
class Hoarding(TokenBucket):
    """Keeps a bucket for every tenant that ever sent a request."""

    per: str = "tenant"

    def _sweep(self, now):
        pass


@dataclass(frozen=True, kw_only=True)
class Drafting:
    """A draft-length policy of one token, which the policies below replace."""

    needs_cost: ClassVar[bool] = False
    reads_sequences: ClassVar[bool] = False
    num_repeats: int = 1

    def num_draft_tokens(self, view):
        return 1


class Exceeding(Drafting):
    def num_draft_tokens(self, view):
        return view.max_draft_tokens + 1


class Foreseeing(Drafting):
    """Drafts only for sequences with a short answer."""

    def num_draft_tokens(self, view):
        return np.array([int(seq._end_known < 30) for seq in view.sequences], int)


@dataclass(frozen=True, kw_only=True)
class Overpromising(Drafting):
    """Promises to draft the same in 50 steps, and drafts nothing in every fifth one."""

    num_repeats: int = 50

    def num_draft_tokens(self, view):
        return int(view.num_iterations % 5 > 0)


BROKEN = [
    (Exceeding(), "draft_lengths_within_limits"),
    (Foreseeing(), "independent_of_true_lengths"),
    (Overpromising(), "leap_equals_step"),
    (Mumbling(), "returns_none_or_refusal"),
    (Spying(), "returns_none_or_refusal"),
    (Whimsical(), "admission_is_reproducible"),
    (Jamming(), "admits_when_idle"),
    (Rash(), "permanent_refusals_stay"),
    (Promising(), "retry_after_holds"),
    (Hoarding(), "forgets_ended_requests"),
    (Cheating(), "independent_of_true_lengths"),
    (Dicing(), "run_is_reproducible"),
    (Looking(), "run_is_reproducible"),
    (Forgetful(), "leap_equals_step"),
    (Overconfident(), "unasked_decodes_equal_fill"),
    (Greedy(), "budget_respected"),
    (Starving(), "every_request_ends"),
    (Leaking(), "no_leaked_blocks"),
    (LastComeFirst(), "starvation_bound_holds"),
    (BeyondTheLast(), "chooses_a_replica"),
    (Fortunate(), "run_is_reproducible"),
    (Overshooting(), "predicts_within_limits"),
    (Peeking(), "needs_truth_is_declared"),
    (Sharing(), "copies_share_nothing"),
]


@pytest.mark.parametrize(
    ("policy", "name"), BROKEN, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_broken_promise_is_caught(policy, name, monkeypatch):
    monkeypatch.setattr("experiments.conformance.claims.MAX_SHRINKING_S", 0.0)
    (claim,) = (claim for claim in claims_of(policy) if claim.name == name)
    with pytest.raises(BrokenPromise, match=rf"^{name}: [^\n]*\nBroken in this world:\n\n\d+ engine"):
        claim.check(num_worlds=60)


class Losing(SpeculatingWorld):
    """Its engines lose the last token of every answer."""

    def _source(self):
        return Traffic([ask._replace(num_output_tokens=ask.num_output_tokens - 1) for ask in self.asks])


def test_a_lost_token_is_caught():
    asks = (Ask(0.0, 4, 9),)
    draft_promises.answers_are_complete(SpeculatingWorld(asks=asks))
    with pytest.raises(AssertionError, match="the answer of request 0 has 8 tokens, and 9 without drafts"):
        draft_promises.answers_are_complete(Losing(asks=asks))


class ScalesBeyond(Scales):
    def target(self, pool, now):
        return pool.num_waiting // 10 + 1


class ScalesAShare(Scales):
    def target(self, pool, now):
        return 4 * pool.busy_share


class ScalesInTurns(Scales):
    """Scales by a counter that all pools share."""

    num_askings = 0

    def target(self, pool, now):
        type(self).num_askings += 1
        return 1 + self.num_askings % 4


@pytest.mark.parametrize(
    ("policy", "broken", "message_part"),
    [
        (Scales(), [], ""),
        (ScalesBeyond(), ["target_within_bounds"], "must be a whole number from 1 to 4"),
        (ScalesAShare(), ["target_within_bounds"], "target() returned 0.0"),
        (ScalesInTurns(), ["target_is_reproducible"], "in another pool at 10 s"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Scales) else "",
)
def test_broken_promises_of_autoscalers_are_caught_and_reported(policy, broken, message_part):
    found = {}
    for claim in claims_of(policy):
        try:
            claim.check(num_worlds=50)
        except BrokenPromise as error:
            found[claim.name] = str(error)
    assert list(found) == broken
    for message in found.values():
        assert message_part in message
        assert "a pool of initially" in message
