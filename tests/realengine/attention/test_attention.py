"""Implementations of attention for prompts: their numbers, what they leave to the engine, refusals."""

from __future__ import annotations

import itertools
import logging
import sys
import types

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.attention import PLAIN, AttentionOptions
from kernels.paged_kv import PagedKv
from kernels.prefill_attention import Chunks, DraftTree, prefill_attention_reference
from policies.batching.chunked import Chunked
from realengine.attention import flashinfer_attention
from realengine.attention.choice import NAMES, with_attention
from realengine.attention.chunked import ChunkedAttention
from realengine.attention.flashinfer_attention import FlashInferAttention
from realengine.attention.torch_attention import SdpaAttention, VarlenAttention
from realengine.model.backend import TORCH
from tests.examples import examples
from tests.kernels.paged_kv import paged, plain
from tests.realengine.small_models import GREEDY, make, prompts, tokens_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def packed_attention(q, k, v, cu_q, cu_k, max_q, max_k, *, scale, window_size, softcap=None):
    """Computes attention of packed sequences in float64, causal from the lower right."""
    out = torch.zeros_like(q)
    assert window_size[1] == 0
    assert max_q >= int(cu_q.diff().max())
    assert max_k >= int(cu_k.diff().max())
    window = None if window_size[0] < 0 else window_size[0] + 1
    pairs = zip(itertools.pairwise(cu_q.tolist()), itertools.pairwise(cu_k.tolist()), strict=True)
    for (first_q, end_q), (first_k, end_k) in pairs:
        for i in range(first_q, end_q):
            seen = end_k - (end_q - 1 - i)
            keys, values = k[first_k:seen], v[first_k:seen]
            out[i] = plain(q[i], keys, values, scale, window=window, softcap=softcap).to(q.dtype)
    return out


def varlen_without_groups(q, k, v, cu_q, cu_k, max_q, max_k, *, scale, window_size):
    """Has the parameters of torch 2.11's varlen_attn."""
    assert q.shape[1] == k.shape[1]
    return packed_attention(q, k, v, cu_q, cu_k, max_q, max_k, scale=scale, window_size=window_size)


def varlen_with_groups(q, k, v, cu_q, cu_k, max_q, max_k, *, scale, window_size, enable_gqa=False):
    """Has the parameters of torch 2.13's varlen_attn."""
    assert enable_gqa
    return packed_attention(q, k, v, cu_q, cu_k, max_q, max_k, scale=scale, window_size=window_size)


class PagedWrapper:
    """Stands for FlashInfer's wrapper: the plan's pages are gathered, and attended in float64."""

    num_plans = 0

    def __init__(self, workspace, layout):
        assert layout == "NHD"

    def plan(self, starts, page_ends, pages, last_lens, num_heads, num_kv_heads, dim, page_size, **options):
        assert options.pop("causal")
        PagedWrapper.num_plans += 1
        self.plan_of = starts, page_ends, pages, last_lens, page_size, options

    def run(self, q, caches):
        starts, page_ends, pages, last_lens, page_size, options = self.plan_of
        assert options["q_data_type"] == q.dtype
        assert options["kv_data_type"] == caches[0].dtype
        dense, ends = [[], []], [0]
        for (first, end), last in zip(
            itertools.pairwise(page_ends.tolist()), last_lens.tolist(), strict=True
        ):
            length = max(0, (end - first - 1) * page_size + last)
            ends.append(ends[-1] + length)
            for kept, cache in zip(dense, caches, strict=True):
                kept.append(cache[pages[first:end].long()].flatten(0, 1)[:length])
        keys, values = (torch.cat(kept) for kept in dense)
        return packed_attention(
            q,
            keys,
            values,
            starts,
            torch.tensor(ends),
            1 << 20,
            1 << 20,
            scale=options["sm_scale"],
            window_size=(options["window_left"], 0),
            softcap=options["logits_soft_cap"],
        )


@pytest.fixture
def implementation(monkeypatch):
    """Returns implementation(name): the real one, with a stand-in for a library that needs a GPU."""

    def of(name):
        if name == "torch_sdpa":
            return SdpaAttention()
        if name == "flashinfer":
            library = types.ModuleType("flashinfer")
            library.BatchPrefillWithPagedKVCacheWrapper = PagedWrapper
            monkeypatch.setitem(sys.modules, "flashinfer", library)
            monkeypatch.setattr(flashinfer_attention, "WORKSPACE_BYTES", 8)
            zeros = torch.zeros
            monkeypatch.setattr(torch, "zeros", lambda *a, **k: zeros(*a, **(k | {"device": "cpu"})))
            made = FlashInferAttention(CUDA)
            monkeypatch.setattr(torch, "zeros", zeros)
            return made
        library = types.ModuleType("varlen")
        library.varlen_attn = varlen_with_groups if name == "torch_varlen 2.13" else varlen_without_groups
        monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", library)
        return VarlenAttention(CUDA)

    return of


def step(query_lens, lens, dtype, *, head_dim=16, group=2, seed=0):
    """Returns queries, caches with NaN in unused slots, contexts, chunks and the dense KV."""
    generator = torch.Generator().manual_seed(seed)
    kv, contexts, dense = paged(lens, 8, 2, head_dim, dtype, torch.clone, generator)
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    q = torch.randn(sum(query_lens), 2 * group, head_dim, generator=generator).to(dtype)
    return q, kv, contexts._replace(splits={}), Chunks(starts, max(query_lens)), dense


@pytest.mark.parametrize("name", ["torch_sdpa", "torch_varlen 2.11", "torch_varlen 2.13", "flashinfer"])
def test_equals_plain_softmax(name, implementation):
    """Whole prompts, chunks behind a prefix, an empty chunk and one query, in one call."""
    attention = ChunkedAttention(implementation(name), prefill_attention_reference)
    support = attention._implementation.support
    dtype, head_dim = (torch.float32, 16) if name == "torch_sdpa" else (torch.float16, 64)
    query_lens, lens = [20, 16, 0, 1, 33], [20, 45, 24, 9, 34]
    windows = [None, 7] if support.window else [None]
    softcaps = [None, 2.0] if support.softcap else [None]
    for window, softcap in itertools.product(windows, softcaps):
        options = AttentionOptions(window=window, softcap=softcap, scale=0.3)
        q, kv, contexts, chunks, dense = step(query_lens, lens, dtype, head_dim=head_dim)
        expected, token = torch.zeros_like(q), 0
        for (k, v), num_queries, n in zip(dense, query_lens, lens, strict=True):
            for i in range(n - num_queries, n):
                row = plain(q[token], k[: i + 1], v[: i + 1], 0.3, window=window, softcap=softcap)
                expected[token] = row.to(dtype)
                token += 1
        got = attention(q, kv, contexts, chunks, options)
        torch.testing.assert_close(got, expected, rtol=2e-3, atol=2e-3)
        again = attention(q, kv, contexts, chunks, options, out_THD=torch.empty_like(q))
        assert torch.equal(got, again)
    assert attention.counts == {name.split()[0]: 2 * len(windows) * len(softcaps)}


def test_flashinfer_plans_once_for_layers_of_a_kind(implementation):
    attention = ChunkedAttention(implementation("flashinfer"), prefill_attention_reference)
    q, kv, contexts, chunks, _ = step([20], [40], torch.float16, head_dim=64)
    before = PagedWrapper.num_plans
    for _ in range(3):
        for window in (None, 7):
            attention(q, kv, contexts, chunks, AttentionOptions(window=window))
    assert PagedWrapper.num_plans == before + 2
    attention(q, kv, contexts._replace(splits={}), chunks)
    assert PagedWrapper.num_plans == before + 3


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"query_lens": [15]}, "chunks of fewer than 16 queries"),
        ({"options": AttentionOptions(window=9)}, "a window"),
        ({"options": AttentionOptions(softcap=2.0)}, "a soft cap"),
        ({"options": AttentionOptions(sinks_H=torch.ones(4))}, "sinks"),
        ({"options": AttentionOptions(alibi_slopes_H=torch.ones(4))}, "ALiBi"),
        ({"dtype": torch.bfloat16}, None),
        ({"max_len": 1 << 22}, "contexts of more than 512 MiB"),
        ({"tree": True}, "a token tree"),
    ],
)
def test_what_is_not_supported_is_computed_by_the_engine_counted_and_logged_once(change, reason, caplog):
    caplog.set_level(logging.INFO, "windtunnel.engine")
    attention = ChunkedAttention(SdpaAttention(), prefill_attention_reference)
    query_lens = change.get("query_lens", [20])
    q, kv, contexts, chunks, _ = step(query_lens, [40], change.get("dtype", torch.float32))
    contexts = contexts._replace(max_len=change.get("max_len", 40))
    options, tree = change.get("options", PLAIN), None
    if "tree" in change:
        mask = torch.eye(20, dtype=torch.bool)
        tree = DraftTree(mask, torch.zeros(1, dtype=torch.int32))
    args = (q, kv, contexts, chunks, options)
    for _ in range(2):
        got = attention(*args, tree=tree)
    expected = prefill_attention_reference(*args, tree=tree)
    if reason is None:
        assert attention.counts == {"torch_sdpa": 2}
        assert not caplog.records
        return
    assert torch.equal(got, expected)
    assert attention.counts == {reason: 2}
    assert [record.getMessage() for record in caplog.records] == [
        f"attention_backend=torch_sdpa does not compute {reason}; the engine's own kernel does"
    ]


def test_quantised_caches_are_widened_for_sdpa():
    q, kv, contexts, chunks, _ = step([20], [40], torch.float32)
    generator = torch.Generator().manual_seed(1)
    codes = [torch.randint(-90, 90, x.shape, generator=generator).to(torch.int8) for x in kv[:2]]
    scales = [torch.rand(x.shape[:3], generator=generator) / 50 for x in kv[:2]]
    attention = ChunkedAttention(SdpaAttention(), prefill_attention_reference)
    args = (q, PagedKv(*codes, *scales), contexts, chunks)
    torch.testing.assert_close(attention(*args), prefill_attention_reference(*args))
    assert attention.counts == {"torch_sdpa": 1}


@examples(10, 60, derandomize=True)
@given(
    chunks=st.lists(st.tuples(st.sampled_from([0, 1, 16, 31]), st.integers(1, 30)), min_size=1, max_size=4)
)
def test_sdpa_equals_the_reference(chunks):
    query_lens = [16, *(count for count, _ in chunks)]
    lens = [20, *(count + cached for count, cached in chunks)]
    q, kv, contexts, of_chunks, _ = step(query_lens, lens, torch.float64)
    attention = ChunkedAttention(SdpaAttention(), prefill_attention_reference)
    args = (q, kv, contexts, of_chunks)
    torch.testing.assert_close(attention(*args), prefill_attention_reference(*args))


def test_an_engine_with_sdpa_gives_the_same_tokens():
    """Chunked prompts behind cached prefixes, decodes beside them."""
    settings = {"batching": Chunked(max_num_batched_tokens=40)}
    expected = tokens_of(make(**settings).generate(prompts(), GREEDY))
    llm = make(attention_backend="torch_sdpa", **settings)
    assert tokens_of(llm.generate(prompts(), GREEDY)) == expected


def test_a_missing_library_is_one_clear_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ValueError, match=r"attention_backend=flashinfer: .* cannot be imported"):
        with_attention(TORCH, "flashinfer", CUDA)
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", None)
    with pytest.raises(ValueError, match=r"attention_backend=torch_varlen: torch .* has no varlen_attn"):
        with_attention(TORCH, "torch_varlen", CUDA)


@pytest.mark.parametrize("name", ["torch_varlen", "flashinfer", "triton_hopper"])
def test_what_needs_a_gpu_is_refused_without_one(name):
    with pytest.raises(ValueError, match=f"attention_backend={name}: needs .*; choose torch_sdpa"):
        make(attention_backend=name)


def test_unknown_names_are_refused_with_all_names():
    with pytest.raises(ValueError, match=f"attention_backend=xformers: must be one of {', '.join(NAMES)}"):
        make(attention_backend="xformers")
