from __future__ import annotations

import math
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import sampling as module
from kernels.philox import philox_reference, uniform_reference
from kernels.sampling import (
    IN_PROMPT,
    TILES,
    Penalties,
    Sampling,
    count_tokens,
    greedy,
    greedy_reference,
    keep_reference,
    mark_prompt,
    sample,
    sample_reference,
)
from tests.examples import IS_FAST, examples

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # Philox wraps, -inf - -inf is discarded
DTYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
VOCABS = st.sampled_from([1, 2, 100, 4095, 4096, 4097, 9000])


def make_sampling(num_seqs, **given_values):
    values = {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "seed": 0,
        "request": list(range(num_seqs)),
        "position": 0,
        **given_values,
    }
    integers = {"top_k": torch.int32, "seed": torch.int64, "request": torch.int64, "position": torch.int64}
    return Sampling(
        **{
            name: torch.tensor(
                v if isinstance(v, list) else [v] * num_seqs, dtype=integers.get(name, torch.float32)
            )
            for name, v in values.items()
        }
    )


def make_penalties(num_seqs, vocab, random):
    counts = torch.randint(0, 3, (num_seqs + 2, vocab), generator=random).int()
    counts += (torch.rand(num_seqs + 2, vocab, generator=random) < 0.3).int() * IN_PROMPT
    repetition = torch.tensor([1.0, 1.3, 0.8])[torch.arange(num_seqs) % 3]
    presence, frequency = (
        0.7 * torch.tensor([0.0, 1.0, -1.0])[torch.arange(i, i + num_seqs) % 3] for i in (0, 1)
    )
    row = torch.randperm(num_seqs + 2, generator=random)[:num_seqs]
    return Penalties(repetition=repetition, presence=presence, frequency=frequency, counts=counts, row=row)


def guard_all(values, guarded):
    return replace(values, **{field.name: guarded(getattr(values, field.name)) for field in fields(values)})


@examples(8, 75)
@given(
    vocab=VOCABS,
    dtype=DTYPES,
    choices=st.lists(
        st.tuples(
            st.sampled_from([0.0, 0.3, 1.0, 2.5]),
            st.sampled_from([0, 1, 2, 5, 50, 4096, 100000]),
            st.sampled_from([1.0, 0.95, 0.5, 0.01]),
            st.sampled_from([0.0, 0.02, 0.5, 1.0]),
        ),
        min_size=1,
        max_size=3,
    ),
    penalised=st.booleans(),
    seed=st.integers(0, 999),
)
def test_sample_matches_reference(vocab, dtype, choices, penalised, seed, generator, guarded):
    random = generator(seed)
    n = len(choices)
    logits = (3 * torch.randn(n, vocab, generator=random)).to(dtype)
    logits[torch.rand(n, vocab, generator=random) < 0.2] = -torch.inf
    temperature, top_k, top_p, min_p = (list(column) for column in zip(*choices, strict=True))
    sampling = make_sampling(
        n,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed * 2**33 - 5,
        position=seed,
    )
    sampling = guard_all(sampling, guarded)
    penalties = guard_all(make_penalties(n, vocab, random), guarded) if penalised else None
    logits = guarded(logits)
    out = guarded(torch.full((n,), -1))
    expected = sample_reference(logits, sampling, penalties)
    assert sample(logits, sampling, penalties, out=out) is out
    assert out.tolist() == expected.tolist()


@settings(max_examples=10)
@given(vocab=VOCABS, dtype=DTYPES, seed=st.integers(0, 99))
def test_greedy_takes_the_first_of_the_largest(vocab, dtype, seed, generator, guarded):
    logits = guarded(torch.randint(-3, 4, (3, vocab), generator=generator(seed)).to(dtype))  # many ties
    first = [row.index(max(row)) for row in logits.tolist()]
    assert greedy(logits).tolist() == first == greedy_reference(logits).tolist()
    assert sample(logits, make_sampling(3, temperature=0.0)).tolist() == first


def test_a_token_does_not_depend_on_the_batch_around_it(generator):
    logits = 2 * torch.randn(5, 5000, generator=generator(0))
    sampling = make_sampling(
        5, temperature=[1.0, 0.0, 0.7, 1.3, 1.0], top_p=[0.9, 1.0, 0.9, 1.0, 0.5], top_k=[0, 0, 9, 0, 0]
    )
    together = sample(logits, sampling).tolist()
    order = [3, 0, 4]
    shuffled = Sampling(**{f.name: getattr(sampling, f.name)[order] for f in fields(sampling)})
    assert sample(logits[order], shuffled).tolist() == [together[i] for i in order]


def test_draws_follow_the_softmax():
    """Over (0.5, 0.25, 0.125, 0.125): chi-square below its 99.9th percentile (3 degrees: 16.3)."""
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log().repeat(4000, 1)
    drawn = sample_reference(logits, make_sampling(4000, seed=7))
    expected = torch.tensor([0.5, 0.25, 0.125, 0.125]) * 4000
    assert ((drawn.bincount(minlength=4) - expected) ** 2 / expected).sum() < 16.3
    assert torch.equal(sample(logits[:40], make_sampling(40, seed=7)), drawn[:40])


def test_equal_logits_give_the_token_at_the_drawn_share_of_the_vocabulary():
    """Token floor(u V), in whichever tile it lies."""
    sampling = make_sampling(8, seed=3)
    uniform = uniform_reference(sampling.seed, sampling.request, sampling.position)
    expected = [int(share * 9000) for share in uniform.double().tolist()]
    assert max(expected) > 8192 > 4096 > min(expected)  # first, and last tile
    assert sample(torch.full((8, 9000), -2.5), sampling).tolist() == expected


def test_repetition_makes_negative_logits_smaller():
    """-1 seen with penalty 2: -2, below the -1.5 of the token not seen."""
    one = torch.ones(1)
    counts = torch.tensor([[IN_PROMPT, 0]], dtype=torch.int32)
    penalties = Penalties(
        repetition=2 * one, presence=0 * one, frequency=0 * one, counts=counts, row=torch.zeros(1).long()
    )
    logits = torch.tensor([[-1.0, -1.5]])
    assert sample(logits, make_sampling(1, temperature=0.0), penalties).item() == 1


def test_draws_differ_by_seed_request_and_position():
    logits = torch.zeros(1, 1000)
    names = [{}, {"seed": 1}, {"seed": 2**40}, {"request": [1]}, {"request": [2**35]}, {"position": 1}]
    drawn = [sample(logits, make_sampling(1, **change)).item() for change in names]
    assert len(set(drawn)) == len(drawn)
    assert sample(logits, make_sampling(1)).item() == drawn[0]


def test_philox_matches_known_answers():
    """Random123's kat_vectors for philox4x32-10: all zeros, all ones, digits of pi."""
    full = 0xFFFFFFFF
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0)
    answers = {
        (0,) * 6: (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
        (full,) * 6: (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        pi: (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    }
    for words, answer in answers.items():
        given_words = [torch.tensor([word]) for word in words]
        found = philox_reference(tuple(given_words[:4]), (given_words[4], given_words[5]))
        assert tuple(int(word) for word in found) == answer
    assert uniform_reference(*torch.zeros(3, 1, dtype=torch.int64)).item() == (0x6627E8D5 >> 8) / 2**24


def kept(probabilities, **given_values):
    sampling = make_sampling(1, **given_values)
    scaled = torch.tensor([probabilities]).log()
    mask = keep_reference(scaled, sampling.top_k, sampling.top_p, sampling.min_p)
    return mask[0].nonzero().flatten().tolist()


@pytest.mark.sampled(fast=3, slow=7)
@pytest.mark.parametrize(
    ("given_values", "tokens"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"top_k": 2}, [1, 3]),
        ({"top_k": 3}, [0, 1, 2, 3]),  # 0 and 2 tie for the third place
        ({"top_p": 0.39}, [1]),
        ({"top_p": 0.41}, [1, 3]),
        ({"top_p": 0.71}, [0, 1, 2, 3]),
        ({"min_p": 0.3}, [0, 1, 2, 3]),
        ({"min_p": 0.5}, [1, 3]),
        ({"top_k": 2, "top_p": 0.5}, [1]),  # 0.4 of the 0.7 that top-k left
        ({"top_k": 2, "top_p": 0.6}, [1, 3]),
    ],
)
def test_kept_tokens_are_those_of_the_definition(given_values, tokens):
    probabilities = [0.14, 0.4, 0.14, 0.3, 0.02]
    assert kept(probabilities, **given_values) == tokens
    logits = torch.tensor(probabilities).log().repeat(200, 1)
    drawn = sample_reference(logits, make_sampling(200, **given_values)).tolist()
    assert set(drawn) == set(tokens)
    assert sample(logits[:8], make_sampling(8, **given_values)).tolist() == drawn[:8]


def test_penalties_match_their_formulas():
    """Tokens: 0 unseen, 1 in the prompt, 2 generated twice, 3 both, 4 negative and in the prompt."""
    counts = torch.full((2, 5), 9, dtype=torch.int32)
    mark_prompt(counts, 1, torch.tensor([1, 3, 4]))
    for token in (2, 2, 3):
        count_tokens(counts, torch.tensor([1]), torch.tensor([token]))
    penalised = [4.0, 4.0 / 2, 4.0 / 2 - 2 * 0.25 - 0.5, 4.0 / 2 - 0.25 - 0.5, -1.0 * 2]
    weights = [math.exp(x - 4.0) for x in penalised]
    n = 2000
    each = torch.ones(n)
    penalties = Penalties(
        repetition=2 * each, presence=0.5 * each, frequency=0.25 * each, counts=counts, row=each.long()
    )
    logits = torch.tensor([[4.0, 4.0, 4.0, 4.0, -1.0]]).repeat(n, 1)
    drawn = sample_reference(logits, make_sampling(n), penalties)
    for token, weight in enumerate(weights):
        share = weight / sum(weights)
        assert abs((drawn == token).float().mean() - share) < 4 * math.sqrt(share * (1 - share) / n)
    few = Penalties(
        **{f.name: getattr(penalties, f.name)[: 2 if f.name == "counts" else 40] for f in fields(penalties)}
    )
    assert torch.equal(sample(logits[:40], make_sampling(40), few), drawn[:40])
    assert bool((sample(logits[:40], make_sampling(40, temperature=0.0), few) == 0).all())


def test_rows_without_a_choice_give_a_token_of_the_vocabulary():
    logits = torch.full((4, 100), -torch.inf)
    logits[1] = torch.nan
    logits[2, 42] = -5.0
    logits[3, 17] = torch.inf
    for sampler in (sample, sample_reference):
        assert sampler(logits, make_sampling(4, top_p=0.9)).tolist() == [0, 0, 42, 17]


def test_rows_may_be_apart_and_none_is_fine(generator):
    logits = torch.randn(3, 200, generator=generator(0))
    assert torch.equal(
        sample(logits[:, :150], make_sampling(3)), sample_reference(logits[:, :150], make_sampling(3))
    )
    assert greedy(logits[:0]).shape == (0,)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: greedy(torch.ones(2, 3, dtype=torch.int32)), "fp32, fp16 or bf16"),
        (lambda: greedy(torch.ones(3, 2).t()), "contiguous rows"),
        (lambda: greedy(torch.ones(1, 2_000_000)), "1 to 1048576"),
        (lambda: greedy(torch.ones(2, 3), out=torch.ones(2, dtype=torch.int32)), "out: torch.int32"),
        (lambda: sample(torch.ones(2, 3), make_sampling(1)), r"temperature.*\[2\]"),
        (lambda: sample(torch.ones(1, 3), replace(make_sampling(1), top_k=torch.ones(1))), "top_k.*int32"),
        (
            lambda: sample(
                torch.ones(1, 3),
                make_sampling(1),
                make_penalties(1, 4, torch.Generator(torch.get_default_device())),
            ),
            r"counts.*\[rows, 3\]",
        ),
    ],
)
def test_sample_rejects(call, said):
    with pytest.raises(ValueError, match=said):
        call()


@pytest.mark.sampled(fast=2, slow=6)
@pytest.mark.parametrize("listed", [1, 64, 16384])
@pytest.mark.parametrize("spread", [0.0, 0.5, 6.0])
def test_lists_of_the_largest_tokens_change_no_draw(listed, spread, monkeypatch, generator):
    """Lists that hold every kept token, some or none; flat and peaked distributions, many equal logits."""
    tiles = {"interpreter": TILES["interpreter"]._replace(listed=listed)}
    monkeypatch.setattr(module, "TILES", tiles | {"sm_90": tiles["interpreter"]})
    choices = [(0, 1.0, 0.0), (40, 1.0, 0.0), (0, 0.9, 0.0), (3000, 0.8, 0.0), (7, 0.5, 0.1), (0, 0.999, 0.3)]
    logits = (spread * torch.randn(len(choices), 9000, generator=generator(4))).bfloat16()
    logits[:, ::7] = -torch.inf
    top_k, top_p, min_p = (list(column) for column in zip(*choices, strict=True))
    for seed in range(1 if IS_FAST else 2):
        sampling = make_sampling(len(choices), top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
        assert sample(logits, sampling).tolist() == sample_reference(logits, sampling).tolist()
