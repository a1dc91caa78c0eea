"""Torch references beyond one kernel launch: the CPU backend serves whole batches with them."""

from __future__ import annotations

import pytest
import torch

from kernels import decode_attention as decode_module
from kernels.attention import AttentionOptions
from kernels.decode_attention import decode_attention_reference
from kernels.prefill_attention import Chunks, prefill_attention_reference
from kernels.sampling import greedy_reference
from tests.kernels.paged_kv import paged, plain

LENS = [23, 1, 16, 17, 70, 9, 40, 36, 15, 33]
OPTIONS = {
    "plain": {},
    "window": {"window": 12},
    "softcap, sinks, slopes": {"softcap": 2.0, "sinks": torch.linspace(-1, 1, 6), "slopes": torch.rand(6)},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("most", [8192, 50])
def test_decodes_padded_together_see_their_own_context_only(
    options, most, guarded, generator, assert_close, monkeypatch
):
    """Context lengths differ by a block or by much; decodes run all together, or few at a time."""
    monkeypatch.setattr(decode_module, "MAX_GATHERED", most)
    gen = generator(5)
    kv, contexts, dense = paged(LENS, 8, 2, 16, torch.float32, guarded, gen)
    q = torch.randn(len(LENS), 6, 16, generator=gen)
    names = {"sinks": "sinks_H", "slopes": "alibi_slopes_H"}
    given = AttentionOptions(**{names.get(name, name): value for name, value in options.items()})
    got = decode_attention_reference(q, kv, contexts, given)
    expected = torch.stack([plain(q[i], k, v, 0.25, **options) for i, (k, v) in enumerate(dense)]).float()
    assert_close(got, expected, terms=4)


def test_tokens_that_come_alone_are_rows_of_their_own_among_chunks(guarded, generator, assert_close):
    """Chunks of 4, 1, 0, 16, 1, 1 tokens; rows of no sequence stay as they are."""
    gen = generator(6)
    counts, lens = [4, 1, 0, 16, 1, 1], [23, 17, 9, 16, 1, 30]
    kv, contexts, dense = paged(lens, 8, 2, 16, torch.float32, guarded, gen)
    starts = torch.tensor([0, *counts]).cumsum(0)
    q = torch.randn(25, 6, 16, generator=gen)
    chunks = Chunks(starts.int(), 16)
    got = prefill_attention_reference(q, kv, contexts, chunks, out_THD=torch.full_like(q, 7.0))
    rows = []
    for (k, v), start, count, length in zip(dense, starts.tolist(), counts, lens, strict=False):
        for i in range(count):
            end = length - count + i + 1
            rows.append(plain(q[start + i], k[:end], v[:end], 0.25))
    assert_close(got[:23], torch.stack(rows).float(), terms=4)
    assert (got[23:] == 7).all()


def test_greedy_takes_the_largest_that_is_a_number():
    nan, inf = torch.nan, torch.inf
    logits = torch.tensor(
        [[0.0, nan, 2.0, 2.0], [nan, nan, nan, nan], [-inf, -inf, nan, -5.0], [1, inf, 0, nan]]
    )
    assert greedy_reference(logits).tolist() == [2, 0, 3, 1]
