"""First kernel of `kernels.sampling`, which documents it: one chunk of a row, and its largest tokens."""

from __future__ import annotations

import triton
import triton.language as tl

# Arguments with an alignment that depends on the step's size, so that a kernel compiled for one step serves
# the next.
STEP_ARGS = ["temperature_ptr", "repetition_ptr", "presence_ptr", "frequency_ptr", "count_row_ptr"]
STEP_ARGS += ["top_k_ptr", "top_p_ptr", "min_p_ptr", "seed_ptr", "request_ptr", "position_ptr"]
STEP_ARGS += ["draft_ptr", "draft_row_ptr"]
BINS = tl.constexpr(64)
BINS_PER_ROOT = tl.constexpr(12.0)  # bins are narrow near the largest logit: 0.007 there, 0.3 at 4 below it


@triton.jit
def weight_of(x, largest):
    """Returns exp(x - largest): 1 where both are equal, 0 for minus infinity."""
    weight = tl.where(x == largest, 1.0, tl.exp(x - largest))
    return tl.where(x == -float("inf"), 0.0, weight)


@triton.jit(do_not_specialize_on_alignment=STEP_ARGS)
def scale_kernel(
    logits_ptr,
    scaled_ptr,
    maxima_ptr,
    indices_ptr,
    masses_ptr,
    floors_ptr,
    listed_ptr,
    tokens_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
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
    SLOTS: tl.constexpr,
):
    """Applies penalties and temperature to one chunk of a row; stores the largest value and its index.

    Beside them, of rows that draw, it stores the chunk's weight relative to its largest value and, if the row
    keeps only some tokens, a list of up to SLOTS largest ones in order of index, and the largest value that
    is not in the list.
    """
    seq = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    at = seq * tl.num_programs(1) + chunk
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
    tl.store(maxima_ptr + at, largest)
    tl.store(indices_ptr + at, tl.min(tl.where(x == largest, offs, 2147483647)))
    if not GREEDY:  # noqa: SIM102
        if temperature > 0:
            tl.store(masses_ptr + at, tl.sum(weight_of(x, largest)))
            top_k = tl.load(top_k_ptr + seq)
            if (top_k > 0) | (tl.load(top_p_ptr + seq) < 1) | (tl.load(min_p_ptr + seq) > 0):
                below = tl.where(x == largest, 0.0, tl.where(x == -float("inf"), 1e9, largest - x))
                place = tl.minimum(tl.sqrt(below) * BINS_PER_ROOT, BINS - 1.0).to(tl.int32)
                counts = tl.histogram(place, BINS)
                num_bins = tl.sum((tl.cumsum(counts) <= SLOTS).to(tl.int32))
                in_list = place < tl.minimum(num_bins, BINS - 1)
                tl.store(floors_ptr + at, tl.max(tl.where(in_list, -float("inf"), x)))
                slot = tl.cumsum(in_list.to(tl.int32)) - 1
                tl.store(listed_ptr + at * SLOTS + slot, x, mask=in_list)
                tl.store(tokens_ptr + at * SLOTS + slot, offs, mask=in_list)
                slots = tl.arange(0, SLOTS)
                unused = slots >= tl.sum(in_list.to(tl.int32))
                tl.store(listed_ptr + at * SLOTS + slots, -float("inf"), mask=unused)
