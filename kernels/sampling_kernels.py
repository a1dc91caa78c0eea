"""Second kernel of `kernels.sampling`, which documents it: thresholds, and the draw."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.sampling_chunks import STEP_ARGS, weight_of

DRAW = tl.constexpr(0)  # purposes of random numbers: of a token from the target's distribution,
ACCEPT = tl.constexpr(1)  # of the test of a draft token,
RESIDUAL = tl.constexpr(2)  # and of a token in place of a draft token that was not accepted
LOWEST = tl.constexpr(-2139095042)  # one below the ordered bits of minus infinity


@triton.jit
def ordered(x):
    """Returns the bits of a float as an integer with the same order as the floats."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # -0.0 becomes 0.0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def weighed(row_ptr, listed, start, largest, count, TILE: tl.constexpr):
    """Returns (ordered bits, weights) of a tile; weight 0 for minus infinity and after the end.

    A row's tokens are in memory at row_ptr, or, if listed is not None, its listed ones are in registers.
    """
    if listed is None:
        offs = start + tl.arange(0, TILE)
        x = tl.load(row_ptr + offs, mask=offs < count, other=-float("inf"))
    else:
        x = listed
    return ordered(x), weight_of(x, largest)


@triton.jit
def cut(row_ptr, listed, low, high, most, largest, count, MASS: tl.constexpr, TILE: tl.constexpr):
    """Returns the ordered bits above which tokens are kept: those with fewer than `most` larger tokens.

    With MASS the weight of the larger tokens is less than `most` instead of their number. The token of `high`
    is always kept, tokens up to `low` never are.
    """
    while high - low > 1:
        step = tl.maximum((high - low) // 4, 1)
        first = low + step
        second = tl.minimum(first + step, high - 1)
        third = tl.minimum(second + step, high - 1)
        above_1 = tl.zeros([TILE], tl.float32)
        above_2 = tl.zeros([TILE], tl.float32)
        above_3 = tl.zeros([TILE], tl.float32)
        for start in range(0, count, TILE):
            key, weight = weighed(row_ptr, listed, start, largest, count, TILE)
            if not MASS:
                weight = 1.0
            above_1 += tl.where(key > first.to(tl.int32), weight, 0.0)
            above_2 += tl.where(key > second.to(tl.int32), weight, 0.0)
            above_3 += tl.where(key > third.to(tl.int32), weight, 0.0)
        sum_1 = tl.sum(above_1)
        sum_2 = tl.sum(above_2)
        sum_3 = tl.sum(above_3)
        kept_to = tl.where(
            sum_1 < most, first, tl.where(sum_2 < most, second, tl.where(sum_3 < most, third, high))
        )
        low = tl.where(
            sum_3 >= most, third, tl.where(sum_2 >= most, second, tl.where(sum_1 >= most, first, low))
        )
        high = kept_to
        if not MASS:  # exactly k tokens above a pivot: the search is done
            low = tl.where(
                sum_1 == most, first, tl.where(sum_2 == most, second, tl.where(sum_3 == most, third, low))
            )
            high = tl.where((sum_1 == most) | (sum_2 == most) | (sum_3 == most), low + 1, high)
    return low


@triton.jit
def kept_above(
    row_ptr, listed, low, high, top_k, top_p, total, largest, vocab, count, TILE: tl.constexpr
):  # fmt: skip
    """Returns the ordered bits above which top-k and top-p keep tokens, of those above `low`.

    total: weight of all tokens, if there is neither a top-k nor a min-p; else below 0.
    """
    by_count = (top_k > 0) & (top_k < vocab)
    if by_count:
        low = cut(row_ptr, listed, low, high, top_k.to(tl.float32), largest, count, False, TILE)
    if top_p < 1:
        if total < 0:
            above = tl.zeros([TILE], tl.float32)
            for start in range(0, count, TILE):
                key, weight = weighed(row_ptr, listed, start, largest, count, TILE)
                above += tl.where(key > low, weight, 0.0)
            total = tl.sum(above)
        # All tokens further below the largest than this have less than 1 - top_p of the weight.
        reach = tl.log(tl.cast(vocab, tl.float32) / (1.0 - top_p)) + 1.0
        low = tl.maximum(low, ordered(largest - reach).to(tl.int64) - 1)
        low = cut(row_ptr, listed, low, high, top_p * total, largest, count, True, TILE)
    return low


@triton.jit
def tokens_at(tokens_ptr, start, count, TILE: tl.constexpr):
    """Returns the tokens of a tile: of a list those that it names, else the places in the row."""
    token = start + tl.arange(0, TILE)
    if tokens_ptr is not None:
        token = tl.load(tokens_ptr + token, mask=token < count, other=0)
    return token


@triton.jit
def remaining(
    row_ptr, listed, tokens_ptr, probs_ptr, scale, start, low, largest, count, TILE: tl.constexpr
):  # fmt: skip
    """Returns the weights of the kept tokens of a tile, less scale times their probabilities in the draft."""
    key, weight = weighed(row_ptr, listed, start, largest, count, TILE)
    weight = tl.where(key > low, weight, 0.0)
    if probs_ptr is not None:
        token = tokens_at(tokens_ptr, start, count, TILE)
        probs = tl.load(probs_ptr + token, mask=weight * scale > 0, other=0.0)
        weight = tl.maximum(weight - scale * probs, 0.0)
    return weight


@triton.jit
def uniform_of(seed_ptr, request_ptr, position_ptr, seq, purpose):
    """Returns the random number in [0, 1) of a row and a purpose."""
    seed = tl.load(seed_ptr + seq)
    request = tl.load(request_ptr + seq)
    position = tl.load(position_ptr + seq).to(tl.uint32)
    random, _, _, _ = tl.philox(seed, position, request.to(tl.uint32), (request >> 32).to(tl.uint32), purpose)
    return (random >> 8).to(tl.int32).to(tl.float32) * (1.0 / 16777216)  # 24 bits


@triton.jit
def tested_draft(
    scaled_ptr, row_ptr, listed, tokens_ptr, probs_ptr, draft, tested, low, largest, total, count,
    TILE: tl.constexpr
):  # fmt: skip
    """Returns whether a draft token is accepted, the draft's scale beside the weights, and what is left."""
    x = tl.load(scaled_ptr + draft)
    weight = tl.where(ordered(x) > low, weight_of(x, largest), 0.0)
    accepted = tested * tl.load(probs_ptr + draft) * total < weight
    left = 0.0
    for start in range(0, count, TILE):
        left += tl.sum(
            remaining(row_ptr, listed, tokens_ptr, probs_ptr, total, start, low, largest, count, TILE)
        )
    # Nothing is left only if both distributions are equal, up to rounding.
    return accepted, tl.where(left > 0, total, 0.0), tl.where(left > 0, left, total)


@triton.jit
def first_above(
    row_ptr, listed, tokens_ptr, probs_ptr, scale, low, largest, passed, token, count, TILE: tl.constexpr
):  # fmt: skip
    """Returns the first token at which the running weight exceeds `passed`; `token` if there is none."""
    before = 0.0
    tile_before = 0.0
    tile_start = -1
    for start in range(0, count, TILE):
        after = before + tl.sum(
            remaining(row_ptr, listed, tokens_ptr, probs_ptr, scale, start, low, largest, count, TILE)
        )
        here = (after > passed) & (tile_start < 0)
        tile_before = tl.where(here, before, tile_before)
        tile_start = tl.where(here, start, tile_start)
        before = after
    if tile_start >= 0:
        weight = remaining(
            row_ptr, listed, tokens_ptr, probs_ptr, scale, tile_start, low, largest, count, TILE
        )
        at = tokens_at(tokens_ptr, tile_start, count, TILE)
        token = first_of(weight, at, passed - tile_before)
    return token


@triton.jit
def first_of(weight, tokens, passed):
    """Returns the first of a tile's tokens at which the running weight exceeds `passed`, or the last one."""
    last = tl.max(tl.where(weight > 0, tokens, -1))  # the scan may round differently than the sum
    hit = (tl.cumsum(weight) > passed) & (weight > 0)
    return tl.minimum(tl.min(tl.where(hit, tokens, 2147483647)), last)


@triton.jit
def drawn(
    scaled_ptr, row_ptr, listed, tokens_ptr, draft_ptr, draft_row_ptr, probs_ptr, seed_ptr, request_ptr,
    position_ptr, seq, low, largest, token, vocab, count, TILE: tl.constexpr
):  # fmt: skip
    """Draws a token of those above `low`, or accepts the row's draft; `token` if nothing has any weight."""
    total = 0.0
    for start in range(0, count, TILE):
        total += tl.sum(remaining(row_ptr, listed, None, None, 0.0, start, low, largest, count, TILE))
    scale = tl.zeros([], tl.float32)
    purpose = tl.full([], DRAW, tl.uint32)
    accepted = tl.full([], False, tl.int1)
    if probs_ptr is not None:
        draft = tl.load(draft_ptr + seq)
        probs_ptr += tl.load(draft_row_ptr + seq) * vocab
        if draft >= 0:
            tested = uniform_of(seed_ptr, request_ptr, position_ptr, seq, tl.full([], ACCEPT, tl.uint32))
            accepted, scale, total = tested_draft(
                scaled_ptr, row_ptr, listed, tokens_ptr, probs_ptr, draft, tested, low, largest, total, count,
                TILE,
            )  # fmt: skip
            token = tl.where(accepted, draft.to(tl.int32), token)
            purpose = tl.full([], RESIDUAL, tl.uint32)
    if accepted == 0:
        passed = uniform_of(seed_ptr, request_ptr, position_ptr, seq, purpose) * total
        token = first_above(
            row_ptr, listed, tokens_ptr, probs_ptr, scale, low, largest, passed, token, count, TILE
        )
    return token


@triton.jit(do_not_specialize_on_alignment=STEP_ARGS)
def draw_kernel(
    scaled_ptr,
    maxima_ptr,
    indices_ptr,
    masses_ptr,
    floors_ptr,
    listed_ptr,
    tokens_ptr,
    out_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seed_ptr,
    request_ptr,
    position_ptr,
    draft_ptr,
    draft_row_ptr,
    probs_ptr,
    vocab,
    chunks,
    GREEDY: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
):
    """Draws one row's token from its scaled logits and the sums of their chunks, or accepts its draft."""
    seq = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, BLOCK_CHUNKS)
    there = chunk < chunks
    maxima = tl.load(maxima_ptr + seq * chunks + chunk, mask=there, other=-float("inf"))
    indices = tl.load(indices_ptr + seq * chunks + chunk, mask=there, other=2147483647)
    largest = tl.max(maxima)
    token = tl.min(tl.where(maxima == largest, indices, 2147483647))
    if not GREEDY:  # noqa: SIM102
        if (tl.load(temperature_ptr + seq) > 0) & (largest > -float("inf")):
            row_ptr = scaled_ptr + seq * vocab
            low = tl.full([], LOWEST, tl.int64)
            high = ordered(largest).to(tl.int64)
            min_p = tl.load(min_p_ptr + seq)
            top_k = tl.load(top_k_ptr + seq)
            top_p = tl.load(top_p_ptr + seq)
            by_count = (top_k > 0) & (top_k < vocab)
            masses = tl.load(masses_ptr + seq * chunks + chunk, mask=there, other=0.0)
            weights = masses * weight_of(maxima, largest)
            total = tl.sum(weights)
            if by_count | (top_p < 1) | (min_p > 0):
                if min_p > 0:
                    low = tl.minimum(ordered(largest + tl.log(min_p)).to(tl.int64), high) - 1
                if by_count | (min_p > 0):
                    total = -1.0
                floors = tl.load(floors_ptr + seq * chunks + chunk, mask=there, other=-float("inf"))
                floor = tl.max(floors)
                floor_key = tl.where(floor == -float("inf"), low, ordered(floor).to(tl.int64))
                slot = tl.arange(0, SLOTS * BLOCK_CHUNKS)
                at = seq * chunks * SLOTS
                listed = tl.load(listed_ptr + at + slot, mask=slot < chunks * SLOTS, other=-float("inf"))
                # The list has all tokens above the floor: it is enough if none at or below it is kept.
                is_above = ordered(listed) > tl.maximum(low, floor_key)
                above = tl.where(is_above, tl.where(by_count, 1.0, weight_of(listed, largest)), 0.0)
                most = tl.where(
                    by_count, top_k.to(tl.float32), tl.where(total > 0, top_p * total, float("inf"))
                )
                if (low >= floor_key) | (tl.sum(above) >= most):
                    low = tl.maximum(low, floor_key)
                    low = kept_above(
                        None, listed, low, high, top_k, top_p, total, largest, vocab, SLOTS * BLOCK_CHUNKS,
                        SLOTS * BLOCK_CHUNKS,
                    )  # fmt: skip
                    token = drawn(
                        row_ptr, None, listed, tokens_ptr + at, draft_ptr, draft_row_ptr, probs_ptr, seed_ptr,
                        request_ptr, position_ptr, seq, low, largest, token, vocab, SLOTS * chunks,
                        SLOTS * BLOCK_CHUNKS,
                    )  # fmt: skip
                else:
                    low = kept_above(
                        row_ptr, None, low, high, top_k, top_p, total, largest, vocab, vocab, TILE
                    )
                    token = drawn(
                        row_ptr, row_ptr, None, None, draft_ptr, draft_row_ptr, probs_ptr, seed_ptr,
                        request_ptr, position_ptr, seq, low, largest, token, vocab, vocab, TILE,
                    )  # fmt: skip
            elif probs_ptr is not None:
                token = drawn(
                    row_ptr, row_ptr, None, None, draft_ptr, draft_row_ptr, probs_ptr, seed_ptr, request_ptr,
                    position_ptr, seq, low, largest, token, vocab, vocab, TILE,
                )  # fmt: skip
            else:  # the chunk first, then the token in it
                draw = tl.full([], DRAW, tl.uint32)
                passed = uniform_of(seed_ptr, request_ptr, position_ptr, seq, draw) * total
                in_chunk = first_of(weights, chunk, passed)
                before = tl.sum(tl.where(chunk < in_chunk, weights, 0.0))
                offs = in_chunk * CHUNK + tl.arange(0, CHUNK)
                x = tl.load(row_ptr + offs, mask=offs < vocab, other=-float("inf"))
                token = first_of(weight_of(x, largest), offs, passed - before)
    tl.store(out_ptr + seq, token.to(tl.int64))
