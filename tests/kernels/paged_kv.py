"""A paged KV cache for tests, poisoned where it is unused, and attention without any tiling."""

from __future__ import annotations

import math

import torch

from kernels.attention import Contexts
from kernels.paged_kv import PagedKv


def paged(lens, block_size, num_kv_heads, head_dim, dtype, guarded, generator):
    """Returns a cache with NaN in unused slots and the null block, shuffled tables, and the dense KV."""
    counts = [-(-n // block_size) for n in lens]
    shape = sum(counts) + 2, block_size, num_kv_heads, head_dim
    keys, values = (torch.full(shape, torch.nan, dtype=dtype) for _ in range(2))
    order = torch.randperm(sum(counts), generator=generator) + 1
    tables = torch.zeros(len(lens), max(counts) + 1, dtype=torch.int32)
    dense, used = [], 0
    for seq, (n, count) in enumerate(zip(lens, counts, strict=True)):
        blocks = order[used : used + count]
        used += count
        tables[seq, :count] = blocks.int()
        k, v = (
            torch.randn(n, num_kv_heads, head_dim, generator=generator, dtype=torch.float32).to(dtype)
            for _ in range(2)
        )
        at = torch.arange(n)
        keys[blocks[at // block_size], at % block_size] = k
        values[blocks[at // block_size], at % block_size] = v
        dense.append((k, v))
    contexts = Contexts(guarded(tables), guarded(torch.tensor(lens, dtype=torch.int32)), max(lens))
    return PagedKv(guarded(keys), guarded(values)), contexts, dense


def plain(q, k, v, scale, *, window=None, softcap=None, sinks=None, slopes=None, distance=None, seen=None):
    """Computes one query [H, D] over k, v [L, K, D], a head at a time, in float64.

    distance: position of each key minus the query's; seen: the keys that the query may see.
    """
    num_heads, length = q.shape[0], k.shape[0]
    group = num_heads // k.shape[1]
    distance = torch.arange(length) - (length - 1) if distance is None else distance
    seen = torch.ones(length, dtype=torch.bool) if seen is None else seen
    if window is not None:
        seen = seen & (distance > -window)
    out = torch.zeros(num_heads, v.shape[2], dtype=torch.float64)
    for head in range(num_heads):
        scores = (k[:, head // group].double() @ q[head].double()) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if slopes is not None:
            scores += slopes[head].double() * distance
        scores[~seen] = -math.inf
        weights = scores.exp()
        total = weights.sum() + (sinks[head].double().exp() if sinks is not None else 0.0)
        out[head] = (weights / total) @ v[:, head // group].double()
    return out
