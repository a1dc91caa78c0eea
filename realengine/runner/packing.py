"""Packs the words of a step (`realengine.runner.work`): the runner's, and steps of any kind for a warm-up."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from realengine.model.lora import AdapterBank
from realengine.runner.launch import Row
from realengine.runner.work import (
    SAMPLING,
    SAMPLING_WORDS,
    DraftSizes,
    Draw,
    Padding,
    Shape,
    StepSize,
    pack,
    pack_sampling,
)

Ints = NDArray[np.int64]
NO_SEGMENTS = np.empty(0, np.int32)
NO_UPDATES = np.empty((0, 2), np.int64)


class DraftRows(NamedTuple):
    """The drafts of a step's rows, in an engine that speculates."""

    depth_D: Ints
    """The most draft tokens that each decoding sequence can accept."""
    has_tree: bool
    num_levels: int
    """Draft tokens, or levels of the tree, to draft for the next step."""
    is_padded: bool
    started_N3: Ints
    """(slot, newest token, its position) of the slots that begin with known tokens."""
    following_C: Ints
    """The token after each chunk that does not complete its prompt."""


class StepRows(NamedTuple):
    """The rows of a step: B sequences, first those that decode; see `realengine.runner.work`."""

    num_decodes: int
    slots_B: Ints
    counts_B: Ints
    """Tokens of each sequence."""
    contexts_B: Ints
    tokens_T: NDArray[np.integer]
    places_T: Ints
    ends: Ints
    """The last rows of those chunks after which a sequence draws, one for each that does."""
    drawn_slots_S: Ints
    drafts: DraftRows | None = None

    @classmethod
    def alike(
        cls,
        num_decodes: int,
        counts_B: Ints,
        slots_B: Ints,
        *,
        num_cached: int = 0,
        token: int = 0,
        completes: bool = True,
        drafts: DraftRows | None = None,
    ) -> StepRows:
        """Returns rows of sequences with as many cached tokens, and one token in all rows.

        completes: whether a sequence draws after each chunk.
        """
        ends = np.cumsum(counts_B)
        num_drawn = len(counts_B) if completes else num_decodes
        return cls(
            num_decodes=num_decodes,
            slots_B=slots_B,
            counts_B=counts_B,
            contexts_B=num_cached + counts_B,
            tokens_T=np.full(ends[-1], token),
            places_T=num_cached + np.arange(ends[-1]) - np.repeat(ends - counts_B, counts_B),
            ends=ends[num_decodes:num_drawn] - 1,
            drawn_slots_S=slots_B[:num_drawn],
            drafts=drafts,
        )

    @property
    def num_decode_tokens(self) -> int:
        """Rows of the decoding sequences."""
        return int(self.counts_B[: self.num_decodes].sum())


class Decodes(NamedTuple):
    """The rows of the decoding sequences of a plan; rows of padding may follow those that are launched."""

    rows: list[Row]
    slots_B: Ints
    counts_B: Ints
    contexts_B: Ints
    tokens_T: NDArray[np.integer]
    places_T: Ints
    max_context_len: int
    lookahead: int = 0
    """Tokens after the longest context that a drafter computes."""
    size: StepSize | None = None
    """Size of the graphs that run the rows; None: they run eagerly."""
    num_drafts: SequenceOf[int] = ()
    """Draft tokens of the launched rows."""
    drafts: DraftRows | None = None


def pack_step(
    rows: StepRows,
    *,
    max_context_len: int,
    draw: Draw,
    sampling_S: np.ndarray | None = None,
    num_logprobs: int = -1,
    num_iterations: int = 1,
    segments: NDArray[np.int32] = NO_SEGMENTS,
    updates_U2: Ints = NO_UPDATES,
) -> tuple[Shape, NDArray[np.int32]]:
    """Returns the shape and the words of a step with several tokens of a sequence, or with drafts.

    sampling_S: settings of the sequences that draw, of dtype SAMPLING; None: zeros. segments: of adapters.
    updates_U2: (place in the flattened block tables, block id).
    """
    num_rows, num_decodes, drafts = len(rows.slots_B), rows.num_decodes, rows.drafts
    num_drawn, num_ours = len(rows.drawn_slots_S), rows.num_decode_tokens
    starts = np.concatenate([[0], np.cumsum(rows.counts_B)])
    sizes: DraftSizes | None = None
    of_drafts: list[NDArray[np.integer]] = []
    if drafts is not None:
        sizes, of_drafts = _drafts(rows, drafts, starts, num_ours)
    first_query = num_decodes if drafts is None else 0  # a drafter computes all rows as chunks
    shape = Shape(
        num_tokens=int(starts[-1]),
        num_rows=num_rows,
        num_drawn=num_drawn,
        num_decodes=num_decodes,
        max_query_len=int(rows.counts_B[first_query:].max(initial=0)),
        max_context_len=max_context_len,
        draw=draw,
        num_iterations=num_iterations,
        num_logprobs=num_logprobs,
        num_segments=len(segments) // 2,
        num_updates=len(updates_U2),
        drafts=sizes,
    )
    num_singles = shape.num_singles
    sampling = np.zeros(num_drawn, SAMPLING) if sampling_S is None else sampling_S
    sections: list[NDArray[np.integer]] = [
        pack_sampling(sampling),
        rows.tokens_T,
        rows.places_T,
        np.repeat(rows.slots_B, rows.counts_B),
        rows.slots_B,
        rows.contexts_B,
        starts[num_singles:] - num_singles,
        np.concatenate([np.arange(num_ours), rows.ends]),
        rows.drawn_slots_S,
        *of_drafts,
        segments,
        updates_U2[:, 0],
        updates_U2[:, 1],
    ]
    return shape, pack(sections)


def _drafts(
    rows: StepRows, drafts: DraftRows, starts: Ints, num_ours: int
) -> tuple[DraftSizes, list[NDArray[np.integer]]]:
    """Returns the sizes and the sections of the drafts of a step."""
    num_decodes, counts = rows.num_decodes, rows.counts_B
    paths = drafts.depth_D + 1 if drafts.has_tree else np.zeros(num_decodes, np.int64)
    path_starts = np.concatenate([[0], np.cumsum(np.concatenate([paths, counts[num_decodes:]]))])
    num_path_rows = int(paths.sum())
    sequences = np.repeat(np.arange(num_decodes), counts[:num_decodes])
    sizes = DraftSizes(
        num_decode_tokens=num_ours,
        max_depth=int(drafts.depth_D.max(initial=0)),
        num_levels=drafts.num_levels,
        num_path_rows=num_path_rows,
        num_started=len(drafts.started_N3),
        is_padded=drafts.is_padded,
    )
    return sizes, [
        starts,
        drafts.following_C,
        np.concatenate([sequences, num_decodes + np.arange(len(rows.ends))]),
        np.repeat(np.arange(num_decodes), paths),
        np.arange(num_path_rows) - np.repeat(path_starts[:num_decodes], paths),
        path_starts if num_path_rows else path_starts[:0],
        drafts.started_N3.reshape(-1),
    ]


def pack_decode(
    slots_B: Ints,
    contexts_B: Ints,
    max_context_len: int,
    *,
    draw: Draw,
    place: int,
    tokens_B: NDArray[np.integer] | None = None,
    sampling_B: np.ndarray | None = None,
    num_logprobs: int = -1,
    segments: NDArray[np.int32] = NO_SEGMENTS,
) -> tuple[Shape, NDArray[np.int32]]:
    """Returns the shape and the words of a step in which each row decodes one token, and no block changes.

    place: of block 0 in the flattened block tables, in a row that no sequence has. tokens_B: None: zeros.
    """
    num_rows = len(slots_B)
    shape = Shape(
        num_tokens=num_rows,
        num_rows=num_rows,
        num_drawn=num_rows,
        num_decodes=num_rows,
        max_query_len=0,
        max_context_len=max_context_len,
        draw=draw,
        num_logprobs=num_logprobs,
        num_segments=len(segments) // 2,
    )
    first = SAMPLING_WORDS * num_rows
    words = np.zeros(first + 5 * num_rows + len(segments), np.int32)
    words[len(words) - len(segments) :] = segments
    if sampling_B is not None:
        words[:first] = pack_sampling(sampling_B)
    tokens, slots, contexts, places, _ = words[first:][: 5 * num_rows].reshape(5, num_rows)
    if tokens_B is not None:
        tokens[:] = tokens_B
    slots[:], contexts[:], places[:] = slots_B, contexts_B, place
    return shape, words


def pack_uniform(
    size: StepSize,
    max_context_len: int,
    draw: Draw,
    padding: Padding,
    *,
    token: int,
    has_tree: bool,
    num_segments: int = 0,
) -> tuple[Shape, NDArray[np.int32]]:
    """Returns a step with drafts and equally many rows of each sequence, all in the padding slot.

    There may be padding, and table updates for one entry of each sequence. token: in each row.
    """
    num_seqs, num_drafts, depth, num_levels = size
    slots, counts = np.full(num_seqs, padding.slot), np.full(num_seqs, 1 + num_drafts)
    drafts = DraftRows(
        depth_D=np.full(num_seqs, depth),
        has_tree=has_tree,
        num_levels=num_levels or 0,
        is_padded=True,
        started_N3=np.empty((0, 3), np.int64),
        following_C=np.empty(0, np.int64),
    )
    return pack_step(
        StepRows.alike(num_seqs, counts, slots, token=token, drafts=drafts),
        max_context_len=max_context_len,
        draw=draw,
        segments=np.zeros(2 * num_segments + bool(num_segments), np.int32),
        updates_U2=np.tile(np.array([[padding.place, 0]], np.int64), (num_seqs, 1)),
    )


def num_pass_segments(size: StepSize, bank: AdapterBank) -> int:
    """Returns the number of segments that hold any adapters of the sequences of a pass with drafts."""
    return size.num_seqs + size.num_rows // bank.max_segment_tokens(False)
