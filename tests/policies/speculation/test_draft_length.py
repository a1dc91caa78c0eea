"""Draft-length policies decide what was worked out by hand, refuse wrong settings, and decide quickly."""

import re
from timeit import repeat

import numpy as np
import pytest

from experiments.app.settings.bounded_yaml import read_yaml
from experiments.app.settings.config_groups import CONFIG_DIR
from policies.speculation import AcceptanceCounts, DraftLength, DraftView
from policies.speculation.draft_lengths import Backoff, ByBatchSize, Fixed, NoDrafts, SloAware
from policies.user_code import name_of
from sim.settings.build import build
from sim.settings.errors import ConfigError

CHOICES = sorted((CONFIG_DIR / "draft_length").glob("*.yaml"))
LARGEST_BATCH = 1024
MAX_CALL_S = 60e-6


def view(num_seqs=3, max_draft_tokens=5, **state):
    """Returns a view of sequences without drafts so far, unless the test says otherwise."""
    arrays = dict.fromkeys(("num_passes", "num_drafted", "num_accepted", "num_misses"), 0)
    arrays |= {"num_output_tokens": 1, "first_token_s": 0.0}
    settings = {"num_requests": num_seqs, "sequences": [None] * num_seqs, "estimate": lambda *_: 1.0}
    settings |= {name: np.full(num_seqs, value) for name, value in arrays.items()}
    settings |= {
        name: np.array(value, settings[name].dtype) if name in arrays else value
        for name, value in state.items()
    }
    return DraftView(max_draft_tokens, AcceptanceCounts.zero(max_draft_tokens), num_blocks=100, **settings)


def shipped(path):
    return build(read_yaml(path), "draft_length")


@pytest.mark.parametrize("path", CHOICES, ids=lambda path: path.stem)
def test_every_choice_is_a_policy_of_that_name(path):
    policy = build(read_yaml(path), "draft_length", DraftLength)
    assert isinstance(policy, DraftLength)
    assert name_of(policy) == path.stem


@pytest.mark.parametrize("path", CHOICES, ids=lambda path: path.stem)
def test_every_choice_decides_for_the_largest_batch_within_60_us(path):
    policy = shipped(path)
    state = view(LARGEST_BATCH, tpot_s=0.02, now=1.0, num_output_tokens=list(range(1, LARGEST_BATCH + 1)))
    calls = 200
    assert min(repeat(lambda: policy.num_draft_tokens(state), number=calls, repeat=5)) / calls < MAX_CALL_S


@pytest.mark.parametrize("path", CHOICES, ids=lambda path: path.stem)
@pytest.mark.parametrize("num_seqs", [0, 1, 7])
def test_every_choice_gives_each_sequence_a_number_that_can_be_drafted(path, num_seqs):
    policy = shipped(path)
    for step in range(500):
        misses = [step % 9] * num_seqs
        state = view(num_seqs, tpot_s=0.02, now=step * 0.03, num_misses=misses, num_output_tokens=misses)
        state.num_iterations = step
        drafted = policy.num_draft_tokens(state)
        assert policy.num_repeats >= 1
        assert np.all((np.asarray(drafted) >= 0) & (np.asarray(drafted) <= 5))
        assert np.ndim(drafted) == 0 or np.shape(drafted) == (num_seqs,)
        assert np.asarray(drafted).dtype.kind == "i"


# fixed, none


def test_fixed_drafts_the_same_number_as_far_as_the_proposer_can():
    assert Fixed(num_tokens=3).num_draft_tokens(view(max_draft_tokens=5)) == 3
    assert Fixed(num_tokens=3).num_draft_tokens(view(max_draft_tokens=2)) == 2
    assert Fixed().num_draft_tokens(view(max_draft_tokens=5)) == 5
    assert Fixed(num_tokens=0).num_draft_tokens(view()) == 0


def test_none_drafts_nothing():
    assert NoDrafts().num_draft_tokens(view()) == 0


# by_batch_size


def by_batch_size(*ranges):
    return ByBatchSize(num_speculative_tokens_per_batch_size=ranges)


@pytest.mark.parametrize(
    ("num_requests", "expected"),
    [(1, 3), (16, 3), (17, 3), (31, 3), (32, 2), (128, 2), (129, 2), (5000, 2)],
)
def test_gaps_and_larger_batches_get_the_number_of_the_range_before_them(num_requests, expected):
    policy = by_batch_size((32, 128, 2), (1, 16, 3))  # vLLM sorts them, too
    assert policy.num_draft_tokens(view(num_requests=num_requests)) == expected


def test_a_range_gives_no_more_than_the_proposer_drafts_and_may_give_none():
    policy = by_batch_size((1, 4, 9), (5, 8, 0))
    assert policy.num_draft_tokens(view(num_requests=4, max_draft_tokens=5)) == 5
    assert policy.num_draft_tokens(view(num_requests=5, max_draft_tokens=5)) == 0


def test_requests_count_whether_they_get_a_token_or_not():
    policy = by_batch_size((1, 4, 5), (5, 8, 1))
    assert policy.num_draft_tokens(view(num_seqs=3, num_requests=6)) == 1


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ([], "must have at least one range"),
        ([[2, 8, 1]], "begins at 2 requests; it must begin at 1"),
        ([[1, 8, 3], [8, 9, 1]], "one ends at 8 requests and one begins at 8"),
        ([[1, 8, -1]], "the range [1, 8, -1] must have >= 0 draft tokens"),
        ([[0, 8, 1]], "the range [0, 8, 1] must have 1 <= smallest <= largest requests"),
        ([[1, 8, 3], [12, 9, 1]], "the range [12, 9, 1] must have 1 <= smallest <= largest requests"),
        ([[1, 8]], "must be a list of 3, found 2"),
        ([[1, 8, 2.5]], "must be an integer"),
    ],
)
def test_by_batch_size_rejects_ranges_that_are_no_table(ranges, message):
    node = {"_target_": "policies.speculation.draft_lengths.ByBatchSize"}
    with pytest.raises(ConfigError, match=re.escape(message)):
        build(node | {"num_speculative_tokens_per_batch_size": ranges}, "draft_length")


# slo_aware


def test_only_sequences_behind_their_tpot_get_drafts():
    policy = SloAware(tpot_s=0.1, margin=0.2, num_tokens=3)  # a token each 0.08 s is fast enough
    state = view(
        5,
        now=2.0,
        first_token_s=[1.0, 1.0, 1.9, 1.0, np.nan],  # elapsed: 1, 1, 0.1, 1 s; the last has no token yet
        num_output_tokens=[13, 14, 2, 1, 0],  # allowed: 0.96, 1.04, 0.08 s
    )
    assert policy.num_draft_tokens(state).tolist() == [3, 0, 3, 0, 0]


def test_the_slo_gives_the_tpot_unless_it_is_set():
    state = view(1, now=2.0, num_output_tokens=[11], tpot_s=0.25)  # TPOT so far: 0.2 s
    assert SloAware(margin=0).num_draft_tokens(state).tolist() == [0]
    assert SloAware(margin=0, tpot_s=0.1).num_draft_tokens(state).tolist() == [5]
    assert SloAware().needs_tpot
    assert not SloAware(tpot_s=0.1).needs_tpot


# backoff


def test_a_sequence_pauses_after_failed_drafts_and_tries_again_at_multiples_of_its_interval():
    policy = Backoff(max_misses=2, retry_interval=4, max_interval=16, num_tokens=3)

    def drafting(num_misses):
        outputs = np.arange(33)
        misses = np.full(33, num_misses)
        drafted = policy.num_draft_tokens(view(33, num_misses=misses, num_output_tokens=outputs))
        assert set(drafted.tolist()) <= {0, 3}
        return np.flatnonzero(drafted).tolist()

    assert drafting(1) == list(range(33))
    assert drafting(2) == [0, 4, 8, 12, 16, 20, 24, 28, 32]
    assert drafting(3) == [0, 8, 16, 24, 32]
    assert drafting(4) == [0, 16, 32]
    assert drafting(100) == [0, 16, 32]  # no longer than max_interval


def test_an_accepted_token_ends_a_pause():
    policy = Backoff()
    state = view(2, num_misses=[4, 0], num_output_tokens=[17, 17])
    assert policy.num_draft_tokens(state).tolist() == [0, 5]


@pytest.mark.parametrize(
    ("policy", "settings", "message"),
    [
        (Fixed, {"num_tokens": -1}, "num_tokens=-1: must be >= 0"),
        (SloAware, {"tpot_s": 0.0}, "tpot_s=0.0: must be a finite number > 0 s, or null for that of the SLO"),
        (
            SloAware,
            {"tpot_s": float("nan")},
            "tpot_s=nan: must be a finite number > 0 s, or null for that of the SLO",
        ),
        (SloAware, {"margin": 1.0}, "margin=1.0: must be a share, >= 0 and < 1"),
        (SloAware, {"num_tokens": 0}, "num_tokens=0: must be >= 1"),
        (Backoff, {"max_misses": 0}, "max_misses=0: must be >= 1"),
        (Backoff, {"retry_interval": 0}, "retry_interval=0: must be >= 1"),
        (Backoff, {"num_tokens": 0}, "num_tokens=0: must be >= 1"),
        (Backoff, {"max_interval": 48}, "max_interval=48: must be retry_interval=16 times a power of 2"),
        (Backoff, {"max_interval": 8}, "max_interval=8: must be retry_interval=16 times a power of 2"),
    ],
)
def test_wrong_settings_are_rejected(policy, settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        policy(**settings)
