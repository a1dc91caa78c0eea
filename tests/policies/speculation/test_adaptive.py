"""draft_length=adaptive finds the best number of draft tokens from what it measures, and keeps finding it."""

import re

import numpy as np
import pytest

from policies.speculation import AcceptanceCounts, DraftView
from policies.speculation.draft_lengths import Adaptive

PASS_S = (0.010, 0.011, 0.012, 0.013)
RATES = (0.8, 0.5, 0.2)  # goodput of 0 to 3 draft tokens: 100, 164, 183, 175 tokens/s


class ToyEngine:
    """An engine in which each sequence drafts as the policy said one step before."""

    def __init__(self, rates=RATES, pass_s=PASS_S, seed=1):
        self.rates = np.array(rates)
        self.pass_s = pass_s
        self.random = np.random.default_rng(seed)
        self.counts = AcceptanceCounts.zero(len(rates))
        self.num_estimates = 0
        self.lengths = np.zeros(0, int)
        self.tokens, self.seconds, self.num_iterations = 0, 0.0, 0

    def step(self, policy, num_seqs):
        """Asks the policy, runs the pass decided before, and returns the number for each sequence."""
        lengths = np.resize(self.lengths, num_seqs) if self.lengths.size else np.zeros(num_seqs, int)
        lucky = self.random.random((num_seqs, len(self.rates))) < self.rates
        accepted = np.minimum(np.cumprod(lucky, axis=1).sum(axis=1), lengths)
        for place in range(len(self.rates)):
            self.counts.drafted[place] += (lengths > place).sum()
            self.counts.accepted[place] += (accepted > place).sum()
        self.tokens += num_seqs + accepted.sum()
        self.seconds += self.pass_s[round(lengths.mean())]
        view = DraftView(len(self.rates), self.counts, num_blocks=1, estimate=self._estimate)
        view.sequences = [None] * num_seqs
        view.num_iterations = self.num_iterations
        self.num_iterations += 1
        self.lengths = np.broadcast_to(policy.num_draft_tokens(view), num_seqs)
        return self.lengths

    def _estimate(self, num_seqs, num_context_tokens, num_draft_tokens):
        self.num_estimates += 1
        return self.pass_s[num_draft_tokens]


def counts(drafted, accepted):
    return AcceptanceCounts(np.array(drafted), np.array(accepted))


def test_a_place_is_reached_as_often_as_those_before_it_were_accepted():
    assert counts([100, 100, 100], [80, 40, 8]).reached().tolist() == [100, 80, 40]
    # 900 passes draft one token and 100 all three: 80 % of the 100 reach the second place
    assert counts([1000, 100, 100], [800, 40, 8]).reached().tolist() == [1000, 80, 40]
    assert counts([0, 0, 0], [0, 0, 0]).reached().tolist() == [0, 0, 0]


def test_rates_are_conditional_and_begin_at_the_prior():
    assert counts([100, 100], [80, 40]).rates(prior=0.7, weight=0.0).tolist() == [0.8, 0.5]
    assert counts([0, 0], [0, 0]).rates(prior=0.7).tolist() == [0.7, 0.7]
    assert counts([3, 0], [0, 0]).rates(prior=0.8).tolist() == pytest.approx([0.8 / 4, 0.8])


@pytest.mark.parametrize("num_seqs", [1, 5, 300])
def test_it_finds_the_number_with_the_highest_goodput(num_seqs):
    policy, engine = Adaptive(), ToyEngine()
    for _ in range(4000 // num_seqs + 200):
        engine.step(policy, num_seqs)
    chosen = [int(np.median(engine.step(policy, num_seqs))) for _ in range(100)]
    assert np.median(chosen) == 2
    assert policy.rates()[:2] == pytest.approx(RATES[:2], abs=0.06)


def test_the_docstring_computes_the_goodput_right():
    tokens = 1 + np.concatenate(([0], np.cumsum(np.cumprod(RATES))))
    assert tokens.tolist() == pytest.approx([1, 1.8, 2.2, 2.28])
    assert np.round(tokens / PASS_S).tolist() == [100, 164, 183, 175]


def test_it_drafts_nothing_where_no_draft_pays_except_for_a_rare_probe():
    policy = Adaptive(probe_share=0.06, probe_sequences=3)  # a probe may take 3 passes more: each 50 steps
    engine = ToyEngine(pass_s=(0.01, 0.02, 0.03, 0.04))
    for _ in range(10):
        engine.step(policy, 64)
    lengths = np.array([engine.step(policy, 64) for _ in range(500)])
    assert lengths.any(axis=1).sum() == 10
    assert lengths.sum() == 10 * 3 * 3
    assert lengths.any(axis=0).sum() == 30  # the sequences take turns


def test_probes_find_that_drafts_have_become_better():
    policy, engine = Adaptive(window=500), ToyEngine(rates=(0.02, 0.02, 0.02))
    for _ in range(300):
        engine.step(policy, 32)
    assert np.median(engine.step(policy, 32)) == 0
    engine.rates = np.array((0.9, 0.9, 0.9))
    for _ in range(20_000):
        if engine.step(policy, 32).min() == 3:
            break
    assert engine.step(policy, 32).min() == 3


@pytest.mark.parametrize(("min_gain", "expected"), [(0.0, 2), (0.11, 2), (0.13, 1), (0.63, 1), (0.9, 0)])
def test_more_tokens_are_drafted_only_for_a_gain(min_gain, expected):
    """183 tokens/s are 12 % more than 164, and 83 % more than 100."""
    policy, engine = Adaptive(min_gain=min_gain, window=10**5), ToyEngine()
    for _ in range(500):
        engine.step(policy, 100)
    assert np.median(engine.step(policy, 100)) == expected


def test_old_acceptance_is_forgotten():
    policy, engine = Adaptive(window=500), ToyEngine(rates=(0.95, 0.95, 0.95))
    for _ in range(300):
        engine.step(policy, 32)
    assert engine.step(policy, 32).min() == 3
    engine.rates = np.array((0.05, 0.05, 0.05))
    for _ in range(60):  # 1,920 passes
        engine.step(policy, 32)
    assert engine.step(policy, 32).max() == 0


@pytest.mark.sampled(fast=3, slow=6)
@pytest.mark.parametrize("rates", [(0.0, 0.0, 0.0), (0.09, 0.1, 0.1), RATES, (0.95, 0.9, 0.9)])
@pytest.mark.parametrize("pass_s", [PASS_S, (0.01, 0.014, 0.018, 0.022), (0.01, 0.021, 0.031, 0.041)])
def test_it_is_never_slower_than_no_drafts_and_near_the_best_number(rates, pass_s):
    policy, engine = Adaptive(), ToyEngine(rates, pass_s)
    for _ in range(20_000):
        engine.step(policy, 8)
    goodputs = (1 + np.concatenate(([0], np.cumsum(np.cumprod(rates))))) / pass_s
    reached = engine.tokens / engine.seconds / 8
    assert reached >= 0.99 / pass_s[0]
    assert reached >= 0.97 * goodputs.max()


def test_it_decides_anew_after_an_interval_or_with_another_batch():
    policy, engine = Adaptive(interval=10), ToyEngine()

    def estimated(num_steps, num_seqs):
        before = engine.num_estimates
        for _ in range(num_steps):
            engine.step(policy, num_seqs)
        return (engine.num_estimates - before) / len(PASS_S)

    assert estimated(1, 80) == 1  # the first step
    assert estimated(9, 80) == 0
    assert estimated(1, 80) == 1
    assert estimated(1, 90) == 0  # an eighth more
    assert estimated(1, 91) == 1
    assert estimated(1, 79) == 1
    assert estimated(30, 79) == 3


def test_it_decides_the_same_in_all_the_steps_that_it_promises():
    policy, engine = Adaptive(interval=10), ToyEngine()
    promised, promises = [], []
    for _ in range(2000):
        lengths = engine.step(policy, 20).tolist()
        if promised:
            assert lengths == promised.pop()
        else:
            promises.append(policy.num_repeats)
            promised = [lengths] * (policy.num_repeats - 1)
    assert set(promises) >= {1, 10}  # a probe, and an interval without one


def test_a_step_without_tokens_is_no_step():
    policy, engine = Adaptive(interval=3), ToyEngine()
    engine.step(policy, 1)
    num_estimates = engine.num_estimates
    for _ in range(10):
        view = DraftView(3, engine.counts, num_blocks=1, num_iterations=engine.num_iterations)
        assert policy.num_draft_tokens(view) == 0
    engine.step(policy, 1)
    assert engine.num_estimates == num_estimates


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"interval": 0}, "interval=0: must be >= 1"),
        ({"window": 0}, "window=0: must be >= 1"),
        ({"min_gain": -0.1}, "min_gain=-0.1: must be a finite number >= 0"),
        ({"probe_share": 0.0}, "probe_share=0.0: must be a share, > 0"),
        ({"probe_share": 1.5}, "probe_share=1.5: must be a share, > 0 and <= 1"),
        ({"probe_sequences": 0}, "probe_sequences=0: must be >= 1"),
        ({"prior_rate": 1.2}, "prior_rate=1.2: must be a share, >= 0 and <= 1"),
        ({"prior_weight": 0.0}, "prior_weight=0.0: must be a finite number > 0 draft tokens"),
        ({"prior_weight": float("inf")}, "prior_weight=inf: must be a finite number > 0 draft tokens"),
    ],
)
def test_adaptive_rejects_wrong_settings(settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Adaptive(**settings)
