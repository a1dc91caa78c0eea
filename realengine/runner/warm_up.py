"""Steps of every kind, for a warm-up and for compilation: they launch each kernel that requests may need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from realengine.model.lora import AdapterBank, make_segments, num_decode_segments
from realengine.runner.work import SAMPLING, Draw, Padding, Shape, Work, pack, pack_sampling

CHUNKS = (1, 16, 100, 600)
"""Tokens of a chunk: some of each tile size of prefill attention."""
CACHED = 4096
"""Tokens before a chunk, so many that the kernels split its context."""


def warm_up_works(padding_slot: int, max_model_len: int) -> Iterator[Work]:
    """Yields a copy of a block, prompt chunks of each kind, and chunks beside a decode.

    All rows are in the padding slot, whose block 0 no request has.
    """
    yield Work(copies=np.zeros((1, 2), np.int32))
    for num_tokens in CHUNKS:
        for num_cached in (0, CACHED):
            for num_decodes in (0, 1):
                if num_tokens + num_cached <= max_model_len:
                    yield mixed_work(num_decodes, [num_tokens], num_cached, None, slot=padding_slot)


def decode_work(
    num_rows: int, context_len: int, draw: Draw, bank: AdapterBank | None, num_slots: int
) -> Work:
    """Returns a step in which each row decodes one token at one context length; all blocks are block 0."""
    segments = _segments(bank, [1] * num_rows, only_decodes=True)
    shape = Shape(
        num_rows,
        num_rows,
        num_rows,
        num_rows,
        0,
        context_len,
        draw,
        num_segments=len(segments) // 2,
    )
    zeros, places = np.zeros(num_rows), np.full(num_rows, Padding(num_slots, 0).place)
    contexts = np.full(num_rows, context_len)
    sections = [_sampling(num_rows), zeros, np.arange(num_rows), contexts, places, zeros, segments]
    return Work(shape=shape, words=pack(sections))


def mixed_work(
    num_decodes: int,
    chunks: Sequence[int],
    num_cached: int,
    bank: AdapterBank | None,
    *,
    drawn: bool = True,
    slot: int | None = None,
) -> Work:
    """Returns a step with prompt chunks, each after num_cached tokens; decodes have as long a context.

    slot: of all rows; None: each row has its own.
    """
    counts = np.array([1] * num_decodes + list(chunks))
    ends = np.cumsum(counts)
    num_tokens, num_rows = int(ends[-1]), len(counts)
    slots = np.arange(num_rows) if slot is None else np.full(num_rows, slot)
    rows_drawn = ends - 1 if drawn else ends[:0]
    segments = _segments(bank, counts.tolist(), only_decodes=False)
    shape = Shape(
        num_tokens,
        num_rows,
        len(rows_drawn),
        num_decodes,
        max(chunks),
        num_cached + max(chunks),
        Draw.sample,
        num_segments=len(segments) // 2,
    )
    sections = [
        _sampling(len(rows_drawn)),
        np.zeros(num_tokens),
        num_cached + np.concatenate([np.arange(count) for count in counts]),
        np.repeat(slots, counts),
        slots,
        num_cached + counts,
        np.concatenate([[0], np.cumsum(chunks)]),
        rows_drawn,
        slots[: len(rows_drawn)],
        segments,
    ]
    return Work(shape=shape, words=pack(sections))


def _sampling(num_rows: int) -> np.ndarray:
    return pack_sampling(np.zeros(num_rows, SAMPLING))


def _segments(bank: AdapterBank | None, num_tokens_B: Sequence[int], *, only_decodes: bool) -> np.ndarray:
    """Returns segments of rows that use all slots of the bank, built as the runner builds them."""
    if bank is None:
        return np.empty(0, np.int32)
    num_rows = len(num_tokens_B)
    slots_B = sorted(row % bank.max_loras for row in range(num_rows))
    most = bank.max_segment_tokens(only_decodes)
    num_segments = num_decode_segments(num_rows, bank.max_loras) if only_decodes else None
    return np.concatenate(make_segments(slots_B, num_tokens_B, most, num_segments))
