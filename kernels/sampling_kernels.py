"""Kernels of `kernels.sampling`, which documents and launches them."""

from __future__ import annotations

import triton
import triton.language as tl

# Arguments with an alignment that depends on the step's size, so that a kernel compiled for one step serves
# the next.
STEP_ARGS = ["temperature_ptr", "repetition_ptr", "presence_ptr", "frequency_ptr", "count_row_ptr"]
STEP_ARGS += ["top_k_ptr", "top_p_ptr", "min_p_ptr", "seed_ptr", "request_ptr", "position_ptr"]
STEP_ARGS += ["draft_ptr", "draft_row_ptr"]
DRAW = tl.constexpr(0)  # purposes of random numbers: of a token from the target's distribution,
ACCEPT = tl.constexpr(1)  # of the test of a draft token,
RESIDUAL = tl.constexpr(2)  # and of a token in place of a draft token that was not accepted
LOWEST = tl.constexpr(-2139095042)  # one below the ordered bits of minus infinity


@triton.jit(do_not_specialize_on_alignment=STEP_ARGS)
def scale_kernel(
    logits_ptr,
    scaled_ptr,
    maxima_ptr,
    indices_ptr,
    temperature_ptr,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    counts_ptr,
    count_row_ptr,
    stride,
    counts_stride,
    vocab,
    PENALTIES: tl.constexpr,
    GREEDY: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Applies penalties and temperature to one chunk of a row; stores the largest value and its index."""
    seq = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    offs = chunk * CHUNK + tl.arange(0, CHUNK)
    mask = offs < vocab
    x = tl.load(logits_ptr + seq * stride + offs, mask=mask, other=-float("inf")).to(tl.float32)
    x = tl.where(x == x, x, -float("inf"))
    if PENALTIES:
        repetition = tl.load(repetition_ptr + seq)
        presence = tl.load(presence_ptr + seq)
        frequency = tl.load(frequency_ptr + seq)
        if (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0):
            row = tl.load(count_row_ptr + seq).to(tl.int64)
            seen = tl.load(counts_ptr + row * counts_stride + offs, mask=mask, other=0)
            count = seen & ((1 << 30) - 1)
            x = tl.where(seen != 0, tl.where(x > 0, x / repetition, x * repetition), x)
            x -= frequency * count.to(tl.float32) + tl.where(count > 0, presence, 0.0)
    if not GREEDY:
        temperature = tl.load(temperature_ptr + seq)
        if temperature > 0:
            x = x / temperature
            tl.store(scaled_ptr + seq * vocab + offs, x, mask=mask)
    largest = tl.max(x)
    tl.store(maxima_ptr + seq * tl.num_programs(1) + chunk, largest)
    tl.store(indices_ptr + seq * tl.num_programs(1) + chunk, tl.min(tl.where(x == largest, offs, 2147483647)))


@triton.jit
def ordered(x):
    """Returns the bits of a float as an integer with the same order as the floats."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # -0.0 becomes 0.0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def weighed(row_ptr, start, largest, vocab, TILE: tl.constexpr):
    """Returns (ordered bits, weights) of a tile; weight 0 for minus infinity and after the vocabulary."""
    offs = start + tl.arange(0, TILE)
    x = tl.load(row_ptr + offs, mask=offs < vocab, other=-float("inf"))
    weight = tl.where(x == largest, 1.0, tl.exp(x - largest))
    return ordered(x), tl.where(x == -float("inf"), 0.0, weight)


@triton.jit
def cut(row_ptr, low, high, most, largest, vocab, MASS: tl.constexpr, TILE: tl.constexpr):
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
        for start in range(0, vocab, TILE):
            key, weight = weighed(row_ptr, start, largest, vocab, TILE)
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
def remaining(row_ptr, probs_ptr, scale, start, low, largest, vocab, TILE: tl.constexpr):
    """Returns the weights of the kept tokens of a tile, less scale times their probabilities in the draft."""
    key, weight = weighed(row_ptr, start, largest, vocab, TILE)
    weight = tl.where(key > low, weight, 0.0)
    if probs_ptr is not None:
        offs = start + tl.arange(0, TILE)
        probs = tl.load(probs_ptr + offs, mask=offs < tl.where(scale > 0, vocab, 0), other=0.0)
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
def tested_draft(row_ptr, probs_ptr, draft, tested, low, largest, total, vocab, TILE: tl.constexpr):
    """Returns whether a draft token is accepted, the draft's scale beside the weights, and what is left."""
    x = tl.load(row_ptr + draft)
    weight = tl.where(x == largest, 1.0, tl.exp(x - largest))
    weight = tl.where((x > -float("inf")) & (ordered(x) > low), weight, 0.0)
    accepted = tested * tl.load(probs_ptr + draft) * total < weight
    left = 0.0
    for start in range(0, vocab, TILE):
        left += tl.sum(remaining(row_ptr, probs_ptr, total, start, low, largest, vocab, TILE))
    # Nothing is left only if both distributions are equal, up to rounding.
    return accepted, tl.where(left > 0, total, 0.0), tl.where(left > 0, left, total)


@triton.jit
def first_above(row_ptr, probs_ptr, scale, low, largest, passed, token, vocab, TILE: tl.constexpr):
    """Returns the first token at which the running weight exceeds `passed`; `token` if there is none."""
    before = 0.0
    tile_before = 0.0
    tile_start = -1
    for start in range(0, vocab, TILE):
        after = before + tl.sum(remaining(row_ptr, probs_ptr, scale, start, low, largest, vocab, TILE))
        here = (after > passed) & (tile_start < 0)
        tile_before = tl.where(here, before, tile_before)
        tile_start = tl.where(here, start, tile_start)
        before = after
    if tile_start >= 0:
        weight = remaining(row_ptr, probs_ptr, scale, tile_start, low, largest, vocab, TILE)
        offs = tile_start + tl.arange(0, TILE)
        last = tl.max(tl.where(weight > 0, offs, -1))  # the scan may round differently than the sum
        hit = (tile_before + tl.cumsum(weight) > passed) & (weight > 0)
        token = tl.minimum(tl.min(tl.where(hit, offs, 2147483647)), last)
    return token


@triton.jit(do_not_specialize_on_alignment=STEP_ARGS)
def draw_kernel(
    scaled_ptr,
    maxima_ptr,
    indices_ptr,
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
    BLOCK_CHUNKS: tl.constexpr,
):
    """Draws one row's token from its scaled logits and the maxima of their chunks, or accepts its draft."""
    seq = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, BLOCK_CHUNKS)
    maxima = tl.load(maxima_ptr + seq * chunks + chunk, mask=chunk < chunks, other=-float("inf"))
    indices = tl.load(indices_ptr + seq * chunks + chunk, mask=chunk < chunks, other=2147483647)
    largest = tl.max(maxima)
    token = tl.min(tl.where(maxima == largest, indices, 2147483647))
    if not GREEDY:  # noqa: SIM102
        if (tl.load(temperature_ptr + seq) > 0) & (largest > -float("inf")):
            row_ptr = scaled_ptr + seq * vocab
            low = tl.full([], LOWEST, tl.int64)
            high = ordered(largest).to(tl.int64)
            min_p = tl.load(min_p_ptr + seq)
            if min_p > 0:
                low = tl.minimum(ordered(largest + tl.log(min_p)).to(tl.int64), high) - 1
            top_k = tl.load(top_k_ptr + seq)
            if (top_k > 0) & (top_k < vocab):
                low = cut(row_ptr, low, high, top_k.to(tl.float32), largest, vocab, False, TILE)
            top_p = tl.load(top_p_ptr + seq)
            if top_p < 1:
                total = tl.zeros([TILE], tl.float32)
                for start in range(0, vocab, TILE):
                    key, weight = weighed(row_ptr, start, largest, vocab, TILE)
                    total += tl.where(key > low, weight, 0.0)
                # All tokens further below the largest than this have less than 1 - top_p of the weight.
                reach = tl.log(tl.cast(vocab, tl.float32) / (1.0 - top_p)) + 1.0
                low = tl.maximum(low, ordered(largest - reach).to(tl.int64) - 1)
                low = cut(row_ptr, low, high, top_p * tl.sum(total), largest, vocab, True, TILE)

            total_weight = 0.0
            for start in range(0, vocab, TILE):
                total_weight += tl.sum(remaining(row_ptr, None, 0.0, start, low, largest, vocab, TILE))
            scale = tl.zeros([], tl.float32)
            purpose = tl.full([], DRAW, tl.uint32)
            accepted = tl.full([], False, tl.int1)
            if probs_ptr is not None:
                draft = tl.load(draft_ptr + seq)
                probs_ptr += tl.load(draft_row_ptr + seq) * vocab
                if draft >= 0:
                    tested = uniform_of(
                        seed_ptr, request_ptr, position_ptr, seq, tl.full([], ACCEPT, tl.uint32)
                    )
                    accepted, scale, total_weight = tested_draft(
                        row_ptr, probs_ptr, draft, tested, low, largest, total_weight, vocab, TILE
                    )
                    token = tl.where(accepted, draft.to(tl.int32), token)
                    purpose = tl.full([], RESIDUAL, tl.uint32)
            if accepted == 0:
                passed = uniform_of(seed_ptr, request_ptr, position_ptr, seq, purpose) * total_weight
                token = first_above(row_ptr, probs_ptr, scale, low, largest, passed, token, vocab, TILE)
    tl.store(out_ptr + seq, token.to(tl.int64))
