"""Steps of every kind, for a warm-up and for compilation: they launch each kernel that requests may need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from policies.speculation.engine.drafts import Shapes
from realengine.model.lora import AdapterBank, make_segments, num_decode_segments
from realengine.runner.packing import DraftRows, StepRows, pack_decode, pack_step, pack_uniform
from realengine.runner.work import Draw, Padding, StepSize, Work

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
    slots, contexts = np.arange(num_rows), np.full(num_rows, context_len)
    place = Padding(num_slots, 0).place
    shape, words = pack_decode(slots, contexts, context_len, draw=draw, place=place, segments=segments)
    return Work(shape=shape, words=words)


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
    slots = np.arange(len(counts)) if slot is None else np.full(len(counts), slot)
    rows = StepRows.alike(num_decodes, counts, slots, num_cached=num_cached, completes=drawn)
    segments = _segments(bank, counts.tolist(), only_decodes=False)
    longest = num_cached + max(chunks)
    shape, words = pack_step(rows, max_context_len=longest, draw=Draw.sample, segments=segments)
    return Work(shape=shape, words=words)


def eager_passes(shapes: Shapes, padding: Padding, max_model_len: int) -> Iterator[Work]:
    """Yields passes of one sequence, with and without drafts, for short and for long contexts.

    Attention splits long contexts only, and graphs are captured for long ones: eager passes need both.
    """
    for num_levels in levels_of(shapes, max_model_len):
        num_drafts = int(shapes.rows[num_levels])
        size = StepSize(1, num_drafts, num_levels, num_levels)
        for longest in sorted({room_of(num_drafts, shapes, max_model_len), max_model_len}):
            yield pass_work(size, longest, Draw.greedy, padding, shapes)


def levels_of(shapes: Shapes, max_model_len: int) -> list[int]:
    """Returns 0 and the most levels of drafts for which a sequence has room."""
    return sorted({0, int(shapes.depth[min(shapes.num_rows, (max_model_len - 1) // 2)])})


def room_of(num_drafts: int, shapes: Shapes, max_model_len: int) -> int:
    """Returns the most tokens of a sequence that runs a pass and is drafted for."""
    return min(2 + num_drafts + shapes.num_rows, max_model_len)


def pass_work(size: StepSize, max_context_len: int, draw: Draw, padding: Padding, shapes: Shapes) -> Work:
    """Returns a pass of equal sequences at the beginning of their context, all in the padding slot.

    max_context_len: bound of the tokens of the pass and of the draft after it.
    """
    shape, words = pack_uniform(size, max_context_len, draw, padding, token=0, has_tree=not shapes.is_chain)
    return Work(shape=shape, words=words)


def drafting_work(
    num_decodes: int, shapes: Shapes, chunks: Sequence[int], max_context_len: int, slot: int, *, drafts: bool
) -> Work:
    """Returns a step with all drafts of its decodes beside chunks, each of which completes a prompt.

    slot: of all rows. drafts: whether the device drafts for the next step.
    """
    depth = shapes.max_depth
    counts = np.array([1 + shapes.num_rows] * num_decodes + list(chunks))
    slots = np.full(len(counts), slot)
    of_drafts = DraftRows(
        depth_D=np.full(num_decodes, depth),
        has_tree=not shapes.is_chain,
        num_levels=depth if drafts else 0,
        is_padded=False,
        started_N3=np.empty((0, 3), np.int64),
        following_C=np.zeros(len(chunks), np.int64),
    )
    rows = StepRows.alike(num_decodes, counts, slots, drafts=of_drafts)
    shape, words = pack_step(rows, max_context_len=max_context_len, draw=Draw.sample)
    return Work(shape=shape, words=words)


def _segments(bank: AdapterBank | None, num_tokens_B: Sequence[int], *, only_decodes: bool) -> np.ndarray:
    """Returns segments of rows that use all slots of the bank, built as the runner builds them."""
    if bank is None:
        return np.empty(0, np.int32)
    num_rows = len(num_tokens_B)
    slots_B = sorted(row % bank.max_loras for row in range(num_rows))
    most = bank.max_segment_tokens(only_decodes)
    num_segments = num_decode_segments(num_rows, bank.max_loras) if only_decodes else None
    return np.concatenate(make_segments(slots_B, num_tokens_B, most, num_segments))
