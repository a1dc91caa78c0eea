"""Verifies draft tokens: a draft is accepted if it equals the token that the target drew before it.

`match_drafts` is rejection sampling for drafts without probabilities (a distribution of one point, Leviathan
et al., ICML 2023, section 2.3): the target draws a token at every row, and the drafts that continue a row are
accepted if they equal it. So the tokens of a sequence are those that it would draw without drafts.
`reject_drafts` is for drafts that were drawn from a distribution: the draw at a row gives the draft token if
it is accepted, and another one if not.

A sequence has a root row (its newest token) and a row for each draft token. The rows are a chain, or a tree
with the parent of each row. One program per sequence follows the path of accepted rows. Letters of array
names: B sequences, R rows, T tokens, D the most draft tokens that can be accepted, K draft tokens with
probabilities, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.case import Case
from kernels.launch import launch
from kernels.sampling import DraftRows, Penalties, Sampling, sample, sample_reference

TILE = 64  # rows of a tree that are compared at once


class Matched(NamedTuple):
    """Accepted draft tokens of B sequences and one more token, with the rows at which they were drawn."""

    accepted_B: torch.Tensor
    """Number of accepted draft tokens, int64."""
    tokens_BD: torch.Tensor
    """Tokens, int64 [B, D + 1]: the accepted ones, one more, and then copies of that one."""
    rows_BD: torch.Tensor
    """Row at which each token was drawn, int64 [B, D + 1]: root, accepted rows, then copies of the last."""


def match_drafts(
    tokens_T: torch.Tensor,
    drawn_R: torch.Tensor,
    starts_B: torch.Tensor,
    max_depth: int,
    parents_R: torch.Tensor | None = None,
) -> Matched:
    """Accepts the draft tokens that equal the tokens drawn at the rows that they continue.

    tokens_T: token of each row and of any rows after them, int64. drawn_R: token drawn at each row, int64.
    starts_B: first row of each sequence, and the end [B + 1], int32 or int64; each has at least one row.
    max_depth: D. parents_R: the row that each row continues, int64, counted from 0, the root of its sequence;
    of the root -1; None: each row continues the one before it. The first of several equal rows is accepted.
    The host does not wait for the device. Raises ValueError for other shapes and dtypes.
    """
    _check(tokens_T, drawn_R, starts_B, max_depth, parents_R)
    num_seqs = len(starts_B) - 1
    accepted_B = drawn_R.new_empty(num_seqs)
    tokens_BD, rows_BD = (drawn_R.new_empty(num_seqs, max_depth + 1) for _ in range(2))
    launch(
        match_kernel,
        (num_seqs,),
        tokens_T,
        drawn_R,
        starts_B,
        parents_R,
        accepted_B,
        tokens_BD,
        rows_BD,
        max_depth,
        TILE=TILE,
        num_warps=1,
    )
    return Matched(accepted_B, tokens_BD, rows_BD)


def reject_drafts(
    logits_RV: torch.Tensor,
    probs_BKV: torch.Tensor,
    tokens_T: torch.Tensor,
    starts_B: torch.Tensor,
    sampling: Sampling,
    penalties: Penalties | None = None,
) -> Matched:
    """Accepts draft tokens of chains, drawn from probs_BKV; all tokens follow the target's distribution.

    logits_RV: the target's at each row; sampling and penalties: of each row [R], as for `sample`, with the
    position of the token after the row. probs_BKV: the distribution of the draft in row 1 + k of a sequence,
    contiguous fp32. tokens_T, starts_B: as for `match_drafts`; a sequence has up to K drafts, and a negative
    token is no draft. D is K.

    A draft x is accepted if u < p(x) / q(x), p being the distribution from which `sample` draws, with all
    its filters; else a token is drawn from max(0, p - q). After the last draft, `sample` draws. At
    temperature 0 a draft is accepted if its logit is the largest. All random numbers depend on seed, request,
    position and their purpose alone. The host does not wait for the device. Raises ValueError for other
    shapes and dtypes.
    """
    drafts = _draft_rows(logits_RV, probs_BKV, tokens_T, starts_B)
    drawn_R = sample(logits_RV, sampling, penalties, drafts=drafts)
    return match_drafts(tokens_T, drawn_R, starts_B, probs_BKV.shape[1])


STEP_ARGS = ["tokens_ptr", "drawn_ptr", "starts_ptr", "parents_ptr"]


@triton.jit(do_not_specialize=["max_depth"], do_not_specialize_on_alignment=STEP_ARGS)
def match_kernel(
    tokens_ptr,
    drawn_ptr,
    starts_ptr,
    parents_ptr,
    accepted_ptr,
    out_ptr,
    rows_ptr,
    max_depth,
    TILE: tl.constexpr,
):
    """Follows one sequence's path of accepted rows; a row without an accepted child is its own next row."""
    seq = tl.program_id(0).to(tl.int64)
    first = tl.load(starts_ptr + seq).to(tl.int64)
    end = tl.load(starts_ptr + seq + 1).to(tl.int64)
    at = seq * (max_depth + 1)
    row = first
    token = tl.load(drawn_ptr + row)
    accepted = tl.zeros([], tl.int64)
    tl.store(out_ptr + at, token)
    tl.store(rows_ptr + at, row)
    for level in range(1, max_depth + 1):
        child = end
        if parents_ptr is None:
            draft = tl.load(tokens_ptr + row + 1, mask=row + 1 < end, other=-1)
            child = tl.where((row + 1 < end) & (draft == token), row + 1, end)
        else:
            for start in range(first, end, TILE):
                rows = start + tl.arange(0, TILE)
                mask = rows < end
                parent = tl.load(parents_ptr + rows, mask=mask, other=-1)
                draft = tl.load(tokens_ptr + rows, mask=mask, other=-1)
                matches = mask & (parent == row - first) & (draft == token)
                child = tl.minimum(child, tl.min(tl.where(matches, rows, end)))
        accepted += (child < end).to(tl.int64)
        row = tl.where(child < end, child, row)
        token = tl.load(drawn_ptr + row)
        tl.store(out_ptr + at + level, token)
        tl.store(rows_ptr + at + level, row)
    tl.store(accepted_ptr + seq, accepted)


def match_drafts_reference(
    tokens_T: torch.Tensor,
    drawn_R: torch.Tensor,
    starts_B: torch.Tensor,
    max_depth: int,
    parents_R: torch.Tensor | None = None,
) -> Matched:
    """Computes the reference of `match_drafts` in torch."""
    first_B, end_B = starts_B[:-1].long(), starts_B[1:].long()
    rows_R, drafts_R = torch.arange(len(drawn_R), device=drawn_R.device), tokens_T[: len(drawn_R)]
    row_B, accepted_B, path = first_B, torch.zeros_like(first_B), [first_B]
    for _ in range(max_depth):
        if parents_R is None:
            child_B = row_B + 1
            next_B = child_B.clamp(max=len(drawn_R) - 1)
            is_found_B = (child_B < end_B) & (drafts_R[next_B] == drawn_R[row_B])
        else:
            is_child_BR = parents_R[: len(drawn_R)] == (row_B - first_B)[:, None]
            is_own_BR = (rows_R >= first_B[:, None]) & (rows_R < end_B[:, None])
            matches_BR = is_child_BR & is_own_BR & (drafts_R == drawn_R[row_B][:, None])
            is_found_B, next_B = matches_BR.any(dim=1), matches_BR.int().argmax(dim=1)
        row_B = torch.where(is_found_B, next_B, row_B)
        accepted_B = accepted_B + is_found_B
        path.append(row_B)
    rows_BD = torch.stack(path, dim=1)
    return Matched(accepted_B, drawn_R[rows_BD], rows_BD)


def reject_drafts_reference(
    logits_RV: torch.Tensor,
    probs_BKV: torch.Tensor,
    tokens_T: torch.Tensor,
    starts_B: torch.Tensor,
    sampling: Sampling,
    penalties: Penalties | None = None,
) -> Matched:
    """Computes the reference of `reject_drafts` in torch."""
    drafts = _draft_rows(logits_RV, probs_BKV, tokens_T, starts_B)
    drawn_R = sample_reference(logits_RV, sampling, penalties, drafts=drafts)
    return match_drafts_reference(tokens_T, drawn_R, starts_B, probs_BKV.shape[1])


def cases() -> Iterator[Case]:
    """Yields chains of 4 draft tokens, and trees of 63 with two children per row."""
    for num_seqs in (1, 16, 64):
        for name, num_rows in (("chain", 5), ("tree", 64)):
            moved = 8.0 * num_seqs * num_rows * (3 if name == "tree" else 2)
            make = _match_case(num_seqs, num_rows, is_tree=name == "tree")
            yield Case(f"match_drafts_{name}-{num_seqs}x{num_rows}", make, moved)
        moved = 4.0 * num_seqs * 128256 * (5 * 4 + 4)
        yield Case(f"reject_drafts-{num_seqs}x4x128256", _reject_case(num_seqs, 4, 128256), moved)


def _draft_rows(
    logits_RV: torch.Tensor, probs_BKV: torch.Tensor, tokens_T: torch.Tensor, starts_B: torch.Tensor
) -> DraftRows:
    """Returns the draft token that continues each row, and its distribution."""
    shape = (len(starts_B) - 1, logits_RV.shape[1])
    if probs_BKV.dim() != 3 or probs_BKV.shape[::2] != shape or probs_BKV.dtype != torch.float32:
        raise ValueError(
            f"probs_BKV: {probs_BKV.dtype} {list(probs_BKV.shape)}; must be fp32 "
            f"[{shape[0]}, drafts, {shape[1]}]"
        )
    if not probs_BKV.is_contiguous() or not probs_BKV.shape[1]:
        raise ValueError("probs_BKV: must be contiguous, with at least one draft token")
    num_drafts = probs_BKV.shape[1]
    rows_R = torch.arange(len(logits_RV), device=logits_RV.device)
    seqs_R = torch.searchsorted(starts_B[1:].long(), rows_R, right=True).clamp(max=max(shape[0] - 1, 0))
    levels_R = rows_R - starts_B[seqs_R]
    next_R = (rows_R + 1).clamp(max=len(tokens_T) - 1)
    is_draft_R = (rows_R + 1 < starts_B[seqs_R + 1]) & (levels_R < num_drafts)
    return DraftRows(
        torch.where(is_draft_R, tokens_T[next_R], -1),
        seqs_R * num_drafts + levels_R.clamp(max=num_drafts - 1),
        probs_BKV.view(-1, shape[1]),
    )


def _check(
    tokens_T: torch.Tensor,
    drawn_R: torch.Tensor,
    starts_B: torch.Tensor,
    max_depth: int,
    parents_R: torch.Tensor | None,
) -> None:
    for name, x in (("tokens_T", tokens_T), ("drawn_R", drawn_R), ("parents_R", parents_R)):
        if x is not None and (x.dim() != 1 or x.dtype != torch.int64 or not x.is_contiguous()):
            raise ValueError(f"{name}: {x.dtype} {list(x.shape)}; must be contiguous int64 [rows]")
        if x is not None and len(x) < len(drawn_R):
            raise ValueError(f"{name}: {len(x)} rows; must have the {len(drawn_R)} rows of drawn_R")
    if starts_B.dim() != 1 or not len(starts_B) or starts_B.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"starts_B: {starts_B.dtype} {list(starts_B.shape)}; must be int32 or int64 [sequences + 1]"
        )
    if max_depth < 0 or not starts_B.is_contiguous():
        raise ValueError(f"max_depth={max_depth}, starts_B: must be at least 0, and contiguous")


def _match_case(
    num_seqs: int, num_rows: int, *, is_tree: bool
) -> Callable[[torch.device], Callable[[], object]]:
    def make(device: torch.device) -> Callable[[], object]:
        tokens = torch.zeros(num_seqs * num_rows, dtype=torch.int64, device=device)
        starts = torch.arange(0, num_seqs * num_rows + 1, num_rows, dtype=torch.int32, device=device)
        if not is_tree:
            return lambda: match_drafts(tokens, tokens, starts, num_rows - 1)
        parents = (torch.arange(num_rows, device=device) - 1).div(2, rounding_mode="floor").repeat(num_seqs)
        return lambda: match_drafts(tokens, tokens, starts, num_rows.bit_length() - 2, parents)

    return make


def _reject_case(
    num_seqs: int, num_drafts: int, vocab: int
) -> Callable[[torch.device], Callable[[], object]]:
    def make(device: torch.device) -> Callable[[], object]:
        num_rows = num_seqs * (num_drafts + 1)
        number = torch.arange(num_rows, device=device)
        one = torch.ones(num_rows, device=device)
        sampling = Sampling(
            temperature=0.8 * one,
            top_k=one.int() * 0,
            top_p=one,
            min_p=0 * one,
            seed=number,
            request=number,
            position=number,
        )
        logits = torch.randn(num_rows, vocab, device=device) * 3
        probs = torch.full((num_seqs, num_drafts, vocab), 1 / vocab, device=device)
        starts = torch.arange(0, num_rows + 1, num_drafts + 1, dtype=torch.int32, device=device)
        return lambda: reject_drafts(logits, probs, number, starts, sampling)

    return make
