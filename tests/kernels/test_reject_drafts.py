"""Draft tokens with probabilities are accepted so that every token follows the target's distribution."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from kernels.rejection import reject_drafts, reject_drafts_reference
from kernels.sampling import IN_PROMPT, Penalties, Sampling, keep_reference, sample_reference
from tests.examples import examples

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # Philox wraps
DRAWS = 100_000
FILTERS = [{}, {"temperature": 0.6}, {"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.2}]


def make_sampling(num_rows, **given_values):
    values = {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "seed": 5,
        "request": torch.arange(num_rows),
        "position": 0,
        **given_values,
    }
    integers = {"top_k": torch.int32, "seed": torch.int64, "request": torch.int64, "position": torch.int64}
    return Sampling(
        **{
            name: torch.as_tensor(value, dtype=integers.get(name, torch.float32))
            .expand(num_rows)
            .contiguous()
            for name, value in values.items()
        }
    )


def target_probs(logits, **filters):
    one = make_sampling(len(logits), **filters)
    scaled = logits / one.temperature[:, None]
    return torch.softmax(
        scaled.masked_fill(~keep_reference(scaled, one.top_k, one.top_p, one.min_p), -torch.inf), -1
    )


def assert_follows(tokens, probs):
    """Asserts that token counts follow probabilities (chi-square), and that none is impossible."""
    counts = tokens.bincount(minlength=len(probs)).double().cpu()
    probs = probs.double().cpu() / probs.double().sum().cpu()
    possible = probs > 0
    assert counts[~possible].sum() == 0
    assert chisquare(counts[possible], probs[possible] * len(tokens)).pvalue > 1e-3


@examples(8, 75)
@given(
    vocab=st.sampled_from([1, 3, 100, 4097, 9000]),
    lengths=st.lists(st.integers(0, 3), min_size=1, max_size=3),
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    top_k=st.sampled_from([0, 5]),
    top_p=st.sampled_from([1.0, 0.8]),
    min_p=st.sampled_from([0.0, 0.02]),
    near=st.booleans(),
    seed=st.integers(0, 999),
)
def test_reject_drafts_matches_reference(
    vocab, lengths, temperature, top_k, top_p, min_p, near, seed, generator, guarded
):
    random = generator(seed)
    starts = torch.tensor([0, *(1 + length for length in lengths)]).cumsum(0).int()
    num_rows = int(starts[-1])
    logits = 3 * torch.randn(num_rows, vocab, generator=random)
    probs = torch.softmax(3 * torch.randn(len(lengths), 3, vocab, generator=random), -1)
    if near:  # drafts that are mostly accepted
        rows = torch.arange(3)[None] + starts[:-1, None]
        probs = torch.softmax(logits[rows.clamp(max=num_rows - 1)], -1)
    drawn = probs.flatten(0, 1).multinomial(1, generator=random).view(-1, 3)
    tokens = torch.full((num_rows,), -1)
    for seq, length in enumerate(lengths):
        tokens[starts[seq] + 1 : starts[seq] + 1 + length] = drawn[seq, :length]
    sampling = make_sampling(
        num_rows, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed, position=seed
    )
    arguments = [guarded(x) for x in (logits, probs, tokens, starts)]
    ours, expected = (verify(*arguments, sampling) for verify in (reject_drafts, reject_drafts_reference))
    assert [part.tolist() for part in ours] == [part.tolist() for part in expected]


def make_penalties(counts, repetition=1.0, presence=0.0, frequency=0.0):
    one = torch.ones(len(counts))
    return Penalties(
        repetition=repetition * one,
        presence=presence * one,
        frequency=frequency * one,
        counts=counts,
        row=torch.arange(len(counts)),
    )


@examples(8, 75)
@given(
    vocab=st.sampled_from([1, 3, 100, 4097]),
    lengths=st.lists(st.integers(0, 3), min_size=1, max_size=3),
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    top_p=st.sampled_from([1.0, 0.8]),
    repetition=st.sampled_from([1.0, 0.7, 1.5]),
    presence=st.sampled_from([0.0, 0.6, -0.4]),
    frequency=st.sampled_from([0.0, 0.3, -0.2]),
    seed=st.integers(0, 999),
)
def test_reject_drafts_with_penalties_matches_reference(
    vocab, lengths, temperature, top_p, repetition, presence, frequency, seed, generator, guarded
):
    """Each row has its own counts, as the draft tokens before it count, too."""
    random = generator(seed)
    starts = torch.tensor([0, *(1 + length for length in lengths)]).cumsum(0).int()
    num_rows = int(starts[-1])
    logits = 3 * torch.randn(num_rows, vocab, generator=random)
    counts = torch.randint(0, 3, (num_rows, vocab), generator=random, dtype=torch.int32)
    counts += IN_PROMPT * torch.randint(0, 2, counts.shape, generator=random, dtype=torch.int32)
    rows = torch.arange(3)[None] + starts[:-1, None]
    probs = torch.softmax(logits[rows.clamp(max=num_rows - 1)], -1)  # without penalties: often rejected
    drawn = probs.flatten(0, 1).multinomial(1, generator=random).view(-1, 3)
    tokens = torch.full((num_rows,), -1)
    for seq, length in enumerate(lengths):
        tokens[starts[seq] + 1 : starts[seq] + 1 + length] = drawn[seq, :length]
    sampling = make_sampling(num_rows, temperature=temperature, top_p=top_p, seed=seed, position=seed)
    penalties = make_penalties(guarded(counts), repetition, presence, frequency)
    arguments = [guarded(x) for x in (logits, probs, tokens, starts)]
    ours = reject_drafts(*arguments, sampling, penalties)
    expected = reject_drafts_reference(*arguments, sampling, penalties)
    assert [part.tolist() for part in ours] == [part.tolist() for part in expected]


def test_tokens_with_penalties_follow_the_penalised_target(generator):
    """The draft knows no penalties: the first tokens follow softmax of the penalised logits all the same."""
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0])
    counts = torch.tensor([2, 0, IN_PROMPT, IN_PROMPT + 1, 0, 1], dtype=torch.int32)
    penalised = torch.tensor([2 / 1.3 - 0.8 - 0.5, 1.0, 0.5 / 1.3, 0.0 - 0.4 - 0.5, -0.5, -1.3 - 0.4 - 0.5])
    draft = torch.softmax(logits, -1)
    tokens = torch.zeros(2 * DRAWS, dtype=torch.int64)
    tokens[1::2] = draft.multinomial(DRAWS, replacement=True, generator=generator(1))
    starts = torch.arange(0, 2 * DRAWS + 1, 2)
    sampling = make_sampling(2 * DRAWS, position=torch.arange(2).repeat(DRAWS))
    penalties = make_penalties(counts.repeat(2 * DRAWS, 1), 1.3, presence=0.5, frequency=0.4)
    found = reject_drafts_reference(
        logits.expand(2 * DRAWS, -1), draft.repeat(DRAWS, 1, 1), tokens, starts, sampling, penalties
    )
    probs = torch.softmax(penalised, -1)
    assert_follows(found.tokens_BD[:, 0], probs)
    share = torch.minimum(probs, draft).sum()  # Leviathan et al., corollary 3.6
    accepted = (found.accepted_B == 1).float().mean()
    assert abs(accepted - share) < 4 * (share * (1 - share) / DRAWS).sqrt()


@pytest.mark.parametrize("is_good", [True, False])
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_first_tokens_follow_the_target(filters, is_good, generator):
    """One draft per sequence, from a distribution near the target's or far from it."""
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -1.5, 0.2])
    draft = torch.softmax(logits + 0.2 * torch.arange(8) if is_good else -logits, -1)
    tokens = torch.zeros(2 * DRAWS, dtype=torch.int64)
    tokens[1::2] = draft.multinomial(DRAWS, replacement=True, generator=generator(1))
    starts = torch.arange(0, 2 * DRAWS + 1, 2)
    sampling = make_sampling(2 * DRAWS, position=torch.arange(2).repeat(DRAWS), **filters)
    found = reject_drafts_reference(
        logits.expand(2 * DRAWS, -1), draft.repeat(DRAWS, 1, 1), tokens, starts, sampling
    )
    probs = target_probs(logits[None], **filters)[0]
    assert_follows(found.tokens_BD[:, 0], probs)
    is_accepted = found.accepted_B == 1
    assert_follows(found.tokens_BD[is_accepted, 1], probs)
    share = torch.minimum(probs, draft).sum()  # Leviathan et al., corollary 3.6
    assert abs(is_accepted.float().mean() - share) < 4 * (share * (1 - share) / DRAWS).sqrt()


def test_sequences_have_the_joint_distribution_of_the_target(generator):
    """Three tokens of a Markov chain over three tokens: 27 sequences, drafted by another chain."""
    random, vocab, depth = generator(3), 3, 2
    target, draft = torch.randn(2, vocab, vocab, generator=random)
    probs_of_draft = torch.softmax(draft, -1)
    tokens = torch.zeros(DRAWS, depth + 1, dtype=torch.int64)
    for level in range(depth):
        tokens[:, level + 1] = probs_of_draft[tokens[:, level]].multinomial(1, generator=random)[:, 0]
    rows, starts = tokens.flatten(), torch.arange(0, DRAWS * (depth + 1) + 1, depth + 1)
    requests = torch.arange(DRAWS).repeat_interleave(depth + 1)
    places = torch.arange(depth + 1).repeat(DRAWS)
    sampling = make_sampling(len(rows), request=requests, position=places)
    found = reject_drafts_reference(
        target[rows], probs_of_draft[tokens[:, :depth]].contiguous(), rows, starts, sampling
    )
    out = found.tokens_BD.clone()
    for level in range(1, depth + 1):  # what a sequence lacks after a rejection is drawn pass by pass
        plain = make_sampling(DRAWS, request=torch.arange(DRAWS), position=level)
        drawn = sample_reference(target[out[:, level - 1]], plain)
        lacking = found.accepted_B < level
        out[lacking, level] = drawn[lacking]
    step = torch.softmax(target, -1)
    joint = step[0][:, None, None] * step[:, :, None] * step[None]
    assert_follows((out * torch.tensor([9, 3, 1])).sum(1), joint.flatten())


def test_the_token_after_the_last_draft_is_that_of_sample(generator):
    """Drafts equal to the target's only token are all accepted; the next token is a plain draw."""
    logits = torch.full((4, 50), -torch.inf)
    logits[torch.arange(3), torch.tensor([7, 8, 9])] = 0.0
    logits[3] = torch.randn(50, generator=generator(0))
    probs = torch.softmax(logits[None, :3], -1).contiguous()
    sampling = make_sampling(4, request=11, position=torch.arange(4))
    for verify in (reject_drafts, reject_drafts_reference):
        found = verify(logits, probs, torch.tensor([1, 7, 8, 9]), torch.tensor([0, 4]), sampling)
        assert found.tokens_BD.tolist() == [[7, 8, 9, int(sample_reference(logits, sampling)[3])]]


def test_a_verification_does_not_depend_on_the_batch_around_it(generator):
    random = generator(2)
    logits, probs = torch.randn(6, 40, generator=random), torch.full((3, 1, 40), 1 / 40)
    tokens, starts = torch.tensor([0, 4, 0, 9, 0, 30]), torch.tensor([0, 2, 4, 6])
    sampling = make_sampling(6)
    together = reject_drafts(logits, probs, tokens, starts, sampling).tokens_BD
    last = Sampling(**{field.name: getattr(sampling, field.name)[4:] for field in fields(sampling)})
    alone = reject_drafts(logits[4:], probs[2:], tokens[4:], torch.tensor([0, 2]), last).tokens_BD
    assert alone.tolist() == together[2:].tolist()


@pytest.mark.parametrize(
    ("probs", "said"),
    [
        (torch.ones(1, 2, 4), r"fp32 \[1, drafts, 3\]"),
        (torch.ones(1, 2, 3).double(), "probs_BKV: torch.float64"),
        (torch.ones(1, 3, 2).mT, "contiguous"),
        (torch.ones(1, 0, 3), "at least one draft"),
    ],
)
def test_reject_drafts_rejects(probs, said):
    with pytest.raises(ValueError, match=said):
        reject_drafts(torch.ones(2, 3), probs, torch.zeros(2).long(), torch.tensor([0, 2]), make_sampling(2))
