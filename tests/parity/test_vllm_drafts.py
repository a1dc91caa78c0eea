"""Drafts by prompt lookup and synthetic acceptance, compared with vLLM's functions."""

import numpy as np
import pytest

pytest.importorskip("vllm", reason="needs vLLM for CPUs: `make parity` installs it")

from vllm.config.speculative import SpeculativeConfig
from vllm.v1.spec_decode.ngram_proposer import _find_longest_matched_ngram_and_propose_tokens
from vllm.v1.spec_decode.utils import unconditional_to_conditional_rates

from policies.speculation.matching import ngram_draft, ngram_matches
from sim.speculation.acceptance.by_position import ByPosition, rates_of

pytestmark = pytest.mark.parity

NUM_CONTEXTS = 5000


def test_drafts_of_ngrams_are_those_of_vllm():
    rng = np.random.default_rng(0)
    for _ in range(NUM_CONTEXTS):
        context = rng.integers(0, rng.integers(1, 6), rng.integers(1, 40))
        shortest = int(rng.integers(1, 4))
        longest, num_tokens = shortest + int(rng.integers(0, 4)), int(rng.integers(1, 6))
        expected = _find_longest_matched_ngram_and_propose_tokens(
            context, shortest, longest, 1 << 20, num_tokens
        ).tolist()
        assert ngram_draft(context, shortest, longest, num_tokens).tolist() == expected
        text = np.append(context, 0)
        (start,), (limit,) = ngram_matches(text, len(context), shortest, longest)
        assert text[start : start + min(num_tokens, limit)].tolist() == expected


def test_synthetic_acceptance_has_the_rates_of_vllm():
    rng = np.random.default_rng(1)
    for _ in range(200):
        num_tokens = int(rng.integers(1, 12))
        rates = np.sort(rng.random(num_tokens))[::-1] * rng.integers(0, 2, num_tokens).cumprod()
        model = ByPosition(synthetic_acceptance_rates=tuple(rates.tolist()))
        theirs = unconditional_to_conditional_rates(rates.tolist())
        assert rates_of(model, num_tokens, 1)[:, 0].tolist() == pytest.approx(theirs)
        length = float(rng.uniform(1, num_tokens + 1))
        unconditional = SpeculativeConfig._acceptance_length_to_rates(length, num_tokens)
        model = ByPosition(synthetic_acceptance_length=length)
        theirs = unconditional_to_conditional_rates(unconditional)
        assert rates_of(model, num_tokens, 1)[:, 0].tolist() == pytest.approx(theirs)
