"""Drawn draft tokens follow the draft's distribution, and the distribution is the one that they come with."""

from dataclasses import replace

import pytest
import torch
from scipy import stats

from kernels.sampling import Sampling
from realengine.model.backend import TORCH
from realengine.speculation.drafters.choices import Drawn, Likeliest, choice_of
from realengine.speculation.drafters.draft_model import DraftModel
from tests.realengine.model.test_decoder import cache_of, make
from tests.realengine.speculation.passes import Row, Sequences, next_logits

torch.set_num_threads(1)

NUM_DRAWS = 20_000
LOGITS = torch.tensor([2.0, -1.0, 0.5, 1.0, -3.0, 0.0, 0.7])


def settings(num, temperature=0.8, seed=5):
    return Sampling(
        temperature=torch.full((num,), temperature),
        top_k=torch.full((num,), 2, dtype=torch.int32),
        top_p=torch.full((num,), 0.5),
        min_p=torch.full((num,), 0.3),
        seed=torch.full((num,), seed),
        request=torch.arange(num),
        position=torch.full((num,), 11),
    )


@pytest.mark.parametrize("temperature", [0.5, 1.3])
def test_drawn_tokens_follow_the_distribution_at_their_temperature(temperature):
    choice = Drawn(TORCH, settings(NUM_DRAWS, temperature))
    tokens = choice.tokens(LOGITS.expand(NUM_DRAWS, -1))
    expected = torch.softmax(LOGITS.double() / temperature, dim=0)
    torch.testing.assert_close(choice.probs_NKV[7, 0].double(), expected, atol=1e-6, rtol=0)
    counts = torch.bincount(tokens, minlength=len(LOGITS))
    wanted = expected * (NUM_DRAWS / expected.sum())
    assert stats.chisquare(counts.numpy(), wanted.numpy()).pvalue > 1e-3


def test_draws_are_independent_of_those_of_the_target_and_of_the_step_before():
    sampling = replace(
        settings(NUM_DRAWS), top_k=torch.zeros(NUM_DRAWS, dtype=torch.int32), top_p=torch.ones(NUM_DRAWS),
        min_p=torch.zeros(NUM_DRAWS),
    )  # fmt: skip
    logits = LOGITS.expand(NUM_DRAWS, -1)
    choice = Drawn(TORCH, sampling)
    first, second = choice.tokens(logits), choice.tokens(logits)
    target = TORCH.sample(logits, sampling)
    equal = torch.softmax(LOGITS.double() / 0.8, dim=0).square().sum()
    half_width = 4 * (equal * (1 - equal) / NUM_DRAWS).sqrt()
    for one, other in ((first, target), (first, second)):
        assert abs((one == other).double().mean() - equal) < half_width
    assert choice.probs_NKV.shape == (NUM_DRAWS, 2, len(LOGITS))


def test_a_draw_depends_on_seed_request_and_position_alone():
    logits = LOGITS.expand(50, -1)
    whole = Drawn(TORCH, settings(50)).tokens(logits)
    rows = torch.arange(49, -1, -3)
    some = Sampling(**{name: getattr(settings(50), name)[rows] for name in Sampling.__slots__})
    assert torch.equal(Drawn(TORCH, some).tokens(logits[rows]), whole[rows])
    assert not torch.equal(Drawn(TORCH, settings(50, seed=6)).tokens(logits), whole)


def test_a_greedy_sequence_among_others_has_its_likeliest_token_with_certainty():
    sampling = replace(settings(3), temperature=torch.tensor([0.0, 1.0, 0.0]))
    choice = Drawn(TORCH, sampling)
    tokens = choice.tokens(LOGITS.expand(3, -1))
    assert tokens[0] == tokens[2] == 0
    assert choice.probs_NKV[0, 0].tolist() == [1, 0, 0, 0, 0, 0, 0]
    assert 0 < choice.probs_NKV[1, 0, 4] < 1


@pytest.mark.parametrize(("sampling", "is_drawn"), [(None, True), (settings(1), False)])
def test_greedy_sequences_and_greedy_drafts_have_no_distribution(sampling, is_drawn):
    choice = choice_of(TORCH, sampling, is_drawn=is_drawn)
    assert isinstance(choice, Likeliest)
    assert choice.tokens(LOGITS[None]).tolist() == [0]
    assert choice.probs_NKV is None


def test_a_draft_model_returns_the_distribution_of_each_token():
    spec, weights, decoder = make("llama")
    drafter = DraftModel(decoder, cache_of(spec), TORCH, 64, is_drawn=True)
    seqs = Sequences(70, 4, 64, 1)
    seqs.known[0] = [5, 1, 70, 3]
    passed = seqs.passed([Row(0, list(seqs.known[0]), 4, 8, is_decode=False)])
    drafter.follow(passed)
    drafts = drafter.draft(passed, replace(seqs.start([0]), sampling=settings(1)), 3)
    assert drafts.probs_NKV.shape == (1, 3, spec.vocab_size)
    text = list(seqs.known[0])
    for step, token in enumerate(drafts.tokens_NK[0].tolist()):
        expected = torch.softmax(next_logits(spec, weights, text) / 0.8, dim=0)
        torch.testing.assert_close(drafts.probs_NKV[0, step].double(), expected, atol=1e-4, rtol=1e-3)
        text.append(token)
