"""Passes in which all sequences decode and have equally many rows: their shapes and words.

CUDA graphs are captured on them, and a warm-up times them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from realengine.runner.work import SAMPLING, Draw, Padding, pack, pack_sampling
from realengine.speculation.work import PassSize, VerifyShape


def uniform_shape(
    size: PassSize,
    max_context_len: int,
    draw: Draw,
    *,
    has_tree: bool,
    num_segments: int = 0,
    num_iterations: int = 1,
) -> VerifyShape:
    """Returns the shape of a pass that may have padding; table updates for one entry of each sequence."""
    num_seqs, num_drafts, depth, num_levels = size
    return VerifyShape(
        num_tokens=size.num_rows,
        num_decodes=num_seqs,
        num_decode_tokens=size.num_rows,
        num_chunks=0,
        num_drawn=num_seqs,
        max_query_len=1 + num_drafts,
        max_context_len=max_context_len,
        max_depth=depth,
        num_levels=num_levels or 0,
        draw=draw,
        num_path_rows=num_seqs * (1 + depth) if has_tree else 0,
        num_iterations=num_iterations,
        num_segments=num_segments,
        num_updates=num_seqs,
        is_padded=True,
    )


def uniform_words(shape: VerifyShape, padding: Padding, token: int) -> NDArray[np.int32]:
    """Returns the words of a pass whose sequences are all in the padding slot, with `token` in each row."""
    num_seqs, num_tokens = shape.num_decodes, shape.num_tokens
    num_rows = num_tokens // num_seqs
    paths = shape.num_path_rows // num_seqs
    slots = np.full(num_seqs, padding.slot)
    sections: list[np.ndarray] = [
        pack_sampling(np.zeros(num_seqs, SAMPLING)),
        np.full(num_tokens, token),
        np.tile(np.arange(num_rows), num_seqs),
        np.full(num_tokens, padding.slot),
        slots,
        np.full(num_seqs, num_rows),
        np.arange(num_seqs + 1) * num_rows,
        np.arange(num_tokens),
        np.repeat(np.arange(num_seqs), num_rows),
        slots,
        np.repeat(np.arange(num_seqs), paths),
        np.tile(np.arange(paths), num_seqs),
        np.arange(num_seqs + 1) * paths if paths else np.zeros(0),
        np.zeros(2 * shape.num_segments + bool(shape.num_segments)),
        np.full(shape.num_updates, padding.place),
        np.zeros(shape.num_updates),
    ]
    return pack(sections)
