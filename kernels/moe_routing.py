"""Routing of a mixture of experts: the choice of each token's experts, and their order by expert.

Letters: T tokens, J choices per token (top-k), E experts. An entry is one choice of a token, entry = token *
J + j. `moe_align` gives every expert whole blocks of rows: the rows of expert e are ends[e - 1] .. ends[e],
and each contains an entry, or -1 for padding.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from kernels.launch import launch
from kernels.moe_kernels import moe_count_kernel, moe_place_kernel, moe_route_kernel

LOGIT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_EXPERTS = 512
MAX_CHOICES = 32
ONE_HOT_ELEMENTS = 8192  # of the matrix that counts a chunk's entries by expert: chunk * experts


class Routing(NamedTuple):
    """Routing: weights fp32 [T, J]; experts int32 [T, J], by decreasing weight; -1: not computed here."""

    weights_TJ: torch.Tensor
    experts_TJ: torch.Tensor


class Alignment(NamedTuple):
    """Entries by row, int32, -1 for padding, undefined from ends[-1] on; end row per expert, int32 [E]."""

    rows: torch.Tensor
    ends_E: torch.Tensor
    block_rows: int


def moe_route(logits_TE: torch.Tensor, num_choices: int, *, renormalise: bool = True) -> Routing:
    """Returns the num_choices largest softmax weights of each token, in fp32; ties go to the lowest expert.

    logits_TE: bf16, fp16 or fp32, contiguous, up to 512 experts. renormalise: whether the weights of a token
    are scaled to sum to one (Mixtral, Qwen3). Raises ValueError for other dtypes and numbers.
    """
    num_tokens, num_experts = logits_TE.shape
    if logits_TE.dtype not in LOGIT_DTYPES or not logits_TE.is_contiguous():
        raise ValueError(f"logits are {logits_TE.dtype}; must be contiguous bfloat16, float16 or float32")
    _check_numbers(num_experts, num_choices)
    weights_TJ = torch.empty(num_tokens, num_choices, dtype=torch.float32, device=logits_TE.device)
    experts_TJ = torch.empty(num_tokens, num_choices, dtype=torch.int32, device=logits_TE.device)
    rows = 4
    launch(
        moe_route_kernel,
        (triton.cdiv(num_tokens, rows),),
        logits_TE,
        weights_TJ,
        experts_TJ,
        num_tokens,
        num_experts,
        CHOICES=num_choices,
        RENORMALISE=renormalise,
        ROWS=rows,
        EXPERTS=triton.next_power_of_2(num_experts),
        CHOICES_TILE=triton.next_power_of_2(num_choices),
        num_warps=4,
    )
    return Routing(weights_TJ, experts_TJ)


def moe_route_reference(logits_TE: torch.Tensor, num_choices: int, *, renormalise: bool = True) -> Routing:
    """Computes the reference of `moe_route` in torch."""
    shares_TE = torch.softmax(logits_TE.float(), dim=-1)
    experts_TJ = torch.sort(shares_TE, dim=-1, descending=True, stable=True).indices[:, :num_choices]
    weights_TJ = shares_TE.gather(1, experts_TJ)
    if renormalise:
        weights_TJ = weights_TJ / weights_TJ.sum(-1, keepdim=True)
    return Routing(weights_TJ, experts_TJ.to(torch.int32))


def moe_align(experts_TJ: torch.Tensor, num_experts: int, block_rows: int) -> Alignment:
    """Returns entries sorted by expert (stable); each expert's rows start at a multiple of block_rows.

    experts_TJ: int32, contiguous; entries of -1 get no row. block_rows: a power of two. Raises ValueError for
    other dtypes and numbers.
    """
    if experts_TJ.dtype != torch.int32 or not experts_TJ.is_contiguous():
        raise ValueError(f"experts are {experts_TJ.dtype}; must be contiguous torch.int32")
    _check_numbers(num_experts, 1)
    if block_rows & (block_rows - 1) or block_rows < 1:
        raise ValueError(f"block_rows is {block_rows}; must be a power of two")
    num_entries = experts_TJ.numel()
    num_rows = most_blocks(num_entries, num_experts, block_rows) * block_rows
    rows = torch.empty(num_rows, dtype=torch.int32, device=experts_TJ.device)
    ends_E = torch.empty(num_experts, dtype=torch.int32, device=experts_TJ.device)
    experts_tile = triton.next_power_of_2(num_experts)
    chunk = min(ONE_HOT_ELEMENTS // experts_tile, max(16, triton.next_power_of_2(num_entries)))
    num_chunks = max(triton.cdiv(num_entries, chunk), 1)
    counts = torch.empty(num_chunks, num_experts, dtype=torch.int32, device=experts_TJ.device)
    if num_chunks > 1:
        launch(
            moe_count_kernel,
            (num_chunks,),
            experts_TJ,
            counts,
            num_entries,
            num_experts,
            CHUNK=chunk,
            EXPERTS=experts_tile,
            num_warps=8,
        )
    launch(
        moe_place_kernel,
        (num_chunks,),
        experts_TJ,
        counts,
        rows,
        ends_E,
        num_entries,
        num_experts,
        num_chunks,
        ONE_CHUNK=num_chunks == 1,
        BLOCK_ROWS=block_rows,
        CHUNK=chunk,
        EXPERTS=experts_tile,
        num_warps=8,
    )
    return Alignment(rows, ends_E, block_rows)


def moe_align_reference(experts_TJ: torch.Tensor, num_experts: int, block_rows: int) -> Alignment:
    """Computes the reference of `moe_align` in torch; rows from ends[-1] on are -1."""
    flat = experts_TJ.flatten().long()
    entries = torch.argsort(flat, stable=True)
    entries = entries[flat[entries] >= 0]
    counts_E = torch.bincount(flat[entries], minlength=num_experts)
    padded_E = (counts_E + block_rows - 1) // block_rows * block_rows
    ends_E = padded_E.cumsum(0)
    first_of_entry = (ends_E - padded_E)[flat[entries]]
    rank = torch.arange(len(entries), device=flat.device) - (counts_E.cumsum(0) - counts_E)[flat[entries]]
    size = most_blocks(experts_TJ.numel(), num_experts, block_rows) * block_rows
    rows = torch.full((size,), -1, dtype=torch.int32, device=flat.device)
    rows[first_of_entry + rank] = entries.to(torch.int32)
    return Alignment(rows, ends_E.to(torch.int32), block_rows)


def most_blocks(num_entries: int, num_experts: int, block_rows: int) -> int:
    """Returns an upper bound of the blocks: every expert that can have entries ends in a partial block."""
    used = min(num_experts, num_entries)
    return max((num_entries - used) // block_rows + used, 1)


def _check_numbers(num_experts: int, num_choices: int) -> None:
    if not 1 <= num_choices <= min(num_experts, MAX_CHOICES) or num_experts > MAX_EXPERTS:
        raise ValueError(
            f"{num_choices} of {num_experts} experts: must be 1 to {MAX_CHOICES} of at most {MAX_EXPERTS}"
        )
