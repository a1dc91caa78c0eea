"""Estimates of a pass follow the passes that were measured, and a recording repeats them."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from policies.caching.paged import Paged
from policies.speculation import TokenTree
from policies.speculation.draft_lengths import Adaptive
from policies.speculation.engine.drafts import DraftPlan
from policies.speculation.proposers import DraftModel, Medusa
from realengine.model.architecture import Architecture
from realengine.speculation.pass_times import (
    INTERVAL,
    Fit,
    MeasuredPass,
    PassTimes,
    RecordedPassTimes,
    fitted,
)
from tests.realengine.small_models import CONFIGS, make
from tests.realengine.speculation.test_lossless import GREEDY, NGRAM, prompts, tokens_of

torch.set_num_threads(1)

COEFFICIENTS = (0.01, 1e-4, 2e-4, 1e-6, 2e-3)
CHAIN = DraftModel(draft=None, num_speculative_tokens=4)
ANCHORS = [
    (MeasuredPass(num_seqs, num_seqs * levels, 0, levels), 0.01 + 1e-4 * num_seqs + 3e-3 * levels)
    for num_seqs in (1, 8)
    for levels in (0, 4)
]


def seconds_of(work):
    return sum(each * factor for each, factor in zip(COEFFICIENTS, work.features(), strict=True))


def plan_of(index, num_seqs, num_tokens, levels, chunks=()):
    numbers = np.full(num_seqs, levels)
    drafts = DraftPlan([None] * num_seqs, *[numbers] * 7, num_seqs * levels)
    drafts.next_drafts, drafts.next_levels = numbers, levels
    return SimpleNamespace(index=index, drafts=drafts, chunks=chunks, num_decode_context_tokens=num_tokens)


class Script:
    """A clock, and passes that take a known time."""

    def __init__(self, proposer=CHAIN, anchors=ANCHORS):
        self.now_s = 0.0
        self.times = PassTimes(proposer, lambda: self.now_s)
        self.times.start(anchors)

    def run(self, *args, seconds=None, **more):
        plan = plan_of(*args, **more)
        self.times.begun(plan, self.now_s)
        _, num_seqs, num_tokens, levels = args
        work = MeasuredPass(num_seqs, num_seqs * levels, num_tokens, levels)
        self.now_s += seconds_of(work) if seconds is None else seconds
        self.times.read()


def test_coefficients_are_found_from_passes_without_noise():
    works = [MeasuredPass(n, n * k, t, k) for n in (1, 4, 16) for k in (0, 2, 5) for t in (100, 5000)]
    assert fitted([(work, seconds_of(work)) for work in works]) == pytest.approx(COEFFICIENTS)


def test_no_coefficient_is_negative():
    works = [MeasuredPass(n, n * k, t, k) for n in (1, 16) for k in (0, 5) for t in (100, 5000)]
    falling = fitted([(work, 0.02 - 1e-3 * work.num_levels) for work in works])
    assert min(falling) == 0
    assert falling[0] == pytest.approx(0.017, rel=0.2)


def test_the_estimate_follows_measured_passes():
    script = Script()
    before = script.times(8, 100_000, 2)
    for index in range(INTERVAL):
        script.run(index, 8, 90_000 + 1000 * index, 2)
    wanted = seconds_of(MeasuredPass(8, 16, 100_000, 2))
    assert abs(script.times(8, 100_000, 2) / wanted - 1) < 0.05 < abs(before / wanted - 1)
    assert [fit.from_iteration for fit in script.times.fits] == [0, INTERVAL]


def test_passes_with_chunks_are_not_measured():
    script = Script()
    for index in range(2 * INTERVAL):
        script.run(index, 8, 100, 2, seconds=9.0, chunks=("chunk",))
    assert len(script.times.fits) == 1


def test_an_overlapped_pass_begins_when_the_one_before_has_ended():
    """Two passes of 1 s are launched at once: the second ends after 2 s and has taken 1 s."""
    script = Script()
    for index in range(INTERVAL // 2):
        begin_s = script.now_s
        for launched in (0, 1):
            script.times.begun(plan_of(2 * index + launched, 8, 100, 2), begin_s)
        for _ in range(2):
            script.now_s += 1.0
            script.times.read()
    assert len(script.times.fits) == 2
    assert {seconds for _, seconds in script.times._measured} == {1.0}


def test_a_tree_counts_its_nodes():
    tree = TokenTree.of_widths([3, 2])
    times = Script(Medusa(draft=None, num_speculative_tokens=tree.num_nodes, tree=tree)).times
    times.fits = [Fit(0, COEFFICIENTS)]
    assert times(2, 100, 1) == pytest.approx(seconds_of(MeasuredPass(2, 6, 100, 1)))
    assert times(2, 100, 2) == pytest.approx(seconds_of(MeasuredPass(2, 18, 100, 2)))


def test_a_recording_repeats_the_estimates():
    script, given, index = Script(), [], 0
    for index in range(3 * INTERVAL):
        given.append(script.times(8, 100 * index, 3))
        script.run(index, 8, 100 * index, 2, seconds=0.01 + 1e-3 * (index % 7))
    fits = [Fit(*each) for each in json.loads(json.dumps(script.times.fits))]
    recorded = RecordedPassTimes(CHAIN, fits, lambda: index)
    repeated = []
    for index in range(3 * INTERVAL):
        repeated.append(recorded(8, 100 * index, 3))
    assert repeated == given
    assert len(set(given)) == 3, "two fits after that of the warm-up"


@pytest.mark.parametrize("max_model_len", [4, 5, 9, 70])
@pytest.mark.parametrize(
    "config",
    [
        {"method": "lookahead", "window": 1, "ngram": 4, "guesses": 1},
        {"method": "lookahead", "window": 5, "ngram": 3, "guesses": 5},
        {"method": "lookahead", "window": 2, "ngram": 2, "guesses": 20},
        {"method": "self_speculative", "num_speculative_tokens": 8},
    ],
)
def test_the_warm_up_fits_into_any_context(config, max_model_len):
    settings = {"caching": Paged(block_size=1), "max_model_len": max_model_len}
    llm = make(**settings, speculative_config=config | {"draft_length": Adaptive()})
    assert tokens_of(llm.generate([[3]], GREEDY)) == tokens_of(make(**settings).generate([[3]], GREEDY))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("method", ["draft_model", "ngram"])
def test_an_engine_measures_its_passes_for_a_policy_that_weighs_costs(method, overlap):
    config = NGRAM
    if method == "draft_model":
        model = Architecture.from_hf(CONFIGS["llama"])
        config = {"method": "draft_model", "model": model, "num_speculative_tokens": 3}
    llm = make(overlap=overlap, speculative_config=config | {"draft_length": Adaptive()})
    times = llm.engine._drafting.pass_times
    assert len(times.fits) == 1, "a warm-up was measured"
    assert times(1, 100, 3) > 0
    drafted = llm.generate(prompts(), GREEDY)
    assert tokens_of(make().generate(prompts(), GREEDY)) == tokens_of(drafted)
    assert times._measured
    assert not times._begun
