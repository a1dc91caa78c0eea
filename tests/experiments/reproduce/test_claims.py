"""Functions of claims: copies of padded KV, bills of writes, published formulas, launches, restarts."""

from __future__ import annotations

from types import SimpleNamespace

import pandas as pd
import pytest

from experiments.reproduce.claims import batching, caching, decoding, scheduling, speculation

KV_BYTES = 2 * 40 * 40 * 128 * 2  # of a token of Llama-2-13B
BYTES_PER_S = 0.9 * 1.555e12


def run_of(iterations: list[tuple[float, int, int, int]], requests: list[tuple[float, float]]):
    """Returns a run with iterations (start_s, prompts, decodes, context) and requests (first token, end)."""
    columns = ["start_s", "prefill_seqs", "decode_seqs", "decode_context_tokens"]
    table = pd.DataFrame(requests, columns=["first_token_s", "finished_s"]).assign(prompt_tokens=10)
    return SimpleNamespace(
        records=SimpleNamespace(iterations=pd.DataFrame(iterations, columns=columns)), requests=table
    )


def tokens_of(run) -> float:
    return batching.copy_seconds(run) * BYTES_PER_S / KV_BYTES


def test_one_sequence_has_no_padding_but_copies():
    run = run_of([(0, 1, 0, 0), (1, 0, 1, 11), (2, 0, 1, 12)], [(1, 3)])
    # Both decodes copy 11 and 12 tokens: read and write. It leaves after the second, which copies once more.
    assert tokens_of(run) == pytest.approx(2 * (11 + 12) + 2 * 12)


def test_short_sequences_are_padded_to_the_longest():
    run = run_of([(0, 1, 0, 0), (1, 0, 1, 11), (2, 1, 0, 0), (3, 0, 2, 12 + 11)], [(1, 4), (3, 4)])
    # In the last decode, sequences of 12 and 11 tokens take 2 x 12.
    padding, copies = 24 - 23, 2 * (11 + 24)
    changes = 2 * (11 + 24)  # one leaves the decodes for a prompt at 1, both end after the last
    assert tokens_of(run) == pytest.approx(padding + copies + changes)


def test_no_writes_after_the_first_save_most_of_the_bill():
    saved = [caching.saved_with_writes(num_writes) for num_writes in range(1, 11)]
    assert saved == sorted(saved, reverse=True)
    assert saved[0] == pytest.approx(76.6, abs=0.1)
    assert saved[-1] < 0  # writing every time costs more than not caching


@pytest.mark.parametrize("rate", speculation.ALPHAS)
def test_runs_have_the_published_improvement(rate):
    assert speculation.by_run(rate, seed=0) == pytest.approx(speculation.improvement(rate), rel=0.02)


def test_more_launches_make_eager_decodes_slower_in_proportion():
    one, two = (decoding.speed("engine=hf_static", f"engine.host.launch_s={s}") for s in (100e-6, 200e-6))
    host_s = 2e-3 + 5e-6
    assert (1 / two - host_s) == pytest.approx(2 * (1 / one - host_s), rel=1e-6)


def test_a_restarted_batch_repeats_what_it_had_done():
    """Copies of its KV arrive together and stay in one batch of the pipeline, which takes a little longer."""
    assert scheduling.restarted(0.5) == pytest.approx(1.5, rel=0.06)
