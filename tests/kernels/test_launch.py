"""Launches that are repeated on other tensors compute what new launches compute."""

from __future__ import annotations

import pytest
import torch

from kernels.attention import PLAIN, Contexts
from kernels.decode_attention import decode_attention
from kernels.launch import Repeated, recorded_launches
from kernels.prefill_attention import Chunks, prefill_attention
from tests.kernels.paged_kv import paged


@pytest.mark.parametrize("num_ranges", [1, 3])
def test_attention_is_repeated_on_another_layers_kv(num_ranges, guarded, generator):
    gen = generator(1)
    lens = [33, 70]
    first, contexts, _ = paged(lens, 16, 2, 32, torch.float32, guarded, gen)
    second = first._replace(keys=0.5 * first.keys, values=1.0 + first.values)
    tables, own_lens, longest, _ = contexts
    of_decodes, of_chunks = (Contexts(tables.clone(), own_lens.clone(), longest, {}) for _ in range(2))
    decodes = torch.randn(2, 4, 32, generator=gen)
    chunks = torch.randn(7, 4, 32, generator=gen)
    starts = Chunks(torch.tensor([0, 3, 7], dtype=torch.int32), 4)
    out, rows = torch.empty_like(decodes), torch.empty_like(chunks)

    def attend(kv):
        decode_attention(decodes, kv, of_decodes, PLAIN, num_ranges=num_ranges, out_BHD=out)
        prefill_attention(chunks, kv, of_chunks, starts, PLAIN, num_ranges=num_ranges, out_THD=rows)
        return out.clone(), rows.clone()

    expected = attend(second)
    of_decodes.splits.clear()
    of_chunks.splits.clear()
    with recorded_launches() as launches:
        attend(first)
    assert len(launches) == 2 * 3  # a split, attention and the combination of its parts, each twice
    repeated = Repeated(launches, first)
    assert len(repeated._launches) == 2 * 2  # the split depends on no KV
    out.fill_(float("nan"))
    rows.fill_(float("nan"))
    repeated.on(second)
    assert torch.equal(out, expected[0])
    assert torch.equal(rows, expected[1])


def test_nothing_is_recorded_outside(guarded, generator):
    kv, contexts, _ = paged([9], 16, 1, 16, torch.float32, guarded, generator(0))
    with recorded_launches() as launches:
        pass
    decode_attention(torch.zeros(1, 1, 16), kv, contexts)
    assert launches == []
