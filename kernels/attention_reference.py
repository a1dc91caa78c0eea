"""Attention in torch over a paged cache, from which the kernels' references are built.

Shapes: T tokens, L tokens of one context, B sequences, H query heads, K KV heads, D head_dim, N blocks,
P block_size, M largest number of blocks of a sequence.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.attention import AttentionOptions
from kernels.int4_kv import dequantise_int4_heads
from kernels.paged_kv import INT4


def slots_of(tables_BM: torch.Tensor, tokens_BL: torch.Tensor, block_size: int) -> torch.Tensor:
    """Returns the slots of tokens [B, L], or [1, L] of every sequence: block * block_size + offset."""
    columns_BL = (tokens_BL // block_size).expand(len(tables_BM), -1)
    return tables_BM.gather(1, columns_BL) * block_size + tokens_BL % block_size


def gather_slots(
    cache_NPKD: torch.Tensor, scales_NPK: torch.Tensor | None, slots: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Returns the slots [...] of the cache, multiplied by their scales: [..., K, D]."""

    def rows(stored: torch.Tensor) -> torch.Tensor:
        return stored.flatten(0, 1).index_select(0, slots.flatten()).view(*slots.shape, *stored.shape[2:])

    if scales_NPK is None:
        return rows(cache_NPKD)
    if cache_NPKD.dtype == INT4:
        return dequantise_int4_heads(rows(cache_NPKD), rows(scales_NPK)).to(dtype)
    codes = rows(cache_NPKD.view(torch.uint8)).view(cache_NPKD.dtype)  # indexing fp8 is not always supported
    return (codes.float() * rows(scales_NPK)[..., None]).to(dtype)


def gather_tokens(
    cache_NPKD: torch.Tensor,
    scales_NPK: torch.Tensor | None,
    table_M: torch.Tensor,
    start: int,
    end: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Returns tokens start to end of one sequence from the cache, [L, K, D], multiplied by their scales."""
    tokens_L = torch.arange(start, end, device=table_M.device)
    slots_L = slots_of(table_M[None], tokens_L[None], cache_NPKD.shape[1])[0]
    return gather_slots(cache_NPKD, scales_NPK, slots_L, dtype)


def attend(
    q_THD: torch.Tensor,
    k_LKD: torch.Tensor,
    v_LKD: torch.Tensor,
    options: AttentionOptions,
    mask_TL: torch.Tensor | None = None,
    distance_TL: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the attention of one sequence, or of several in a leading dimension (for torch's fused op).

    mask: True for visible keys; it replaces the window. distance: the key's position minus the query's.
    """
    scale, softcap = options.scale_of(q_THD.shape[-1]), options.softcap
    sinks_H, alibi_slopes_H = options.sinks_H, options.alibi_slopes_H
    *seqs, num_tokens, num_heads, head_dim = q_THD.shape
    num_kv_heads, group = k_LKD.shape[-2], num_heads // k_LKD.shape[-2]

    def rows(of_tokens: torch.Tensor) -> torch.Tensor:
        """Repeats values [..., T, L] for the rows of every KV head; those of a single token are broadcast."""
        return (of_tokens if num_tokens == 1 else of_tokens.repeat_interleave(group, -2)).unsqueeze(-3)

    def rows_of_heads(of_heads: torch.Tensor) -> torch.Tensor:
        return of_heads.view(num_kv_heads, group).repeat(1, num_tokens)[..., None]

    # Rows as in the kernels: query head g of a KV head's group and token t are row t * group + g.
    q = q_THD.reshape(*seqs, num_tokens, num_kv_heads, group, head_dim).transpose(-4, -3).flatten(-3, -2)
    k, v = k_LKD.transpose(-3, -2), v_LKD.transpose(-3, -2)
    mask = None if mask_TL is None else rows(mask_TL)
    if softcap is None and sinks_H is None and alibi_slopes_H is None:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    else:
        scores = torch.matmul(q.float(), k.float().transpose(-2, -1)) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if alibi_slopes_H is not None and distance_TL is not None:
            scores = scores + rows_of_heads(alibi_slopes_H) * rows(distance_TL)
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        if sinks_H is not None:
            scores = torch.cat([scores, rows_of_heads(sinks_H).expand_as(scores[..., :1])], dim=-1)
        out = torch.matmul(scores.softmax(-1)[..., : k.shape[-2]], v.float()).to(q.dtype)
    out = out.view(*seqs, num_kv_heads, num_tokens, group, -1)
    return out.transpose(-4, -3).flatten(-3, -2)
