"""The packed rows of the log of iterations: their formats and the functions that pack them."""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import Final

import numpy as np

ROW = np.dtype(
    [
        ("start_s", "f8"),
        ("emitted_s", "f8"),  # time of the latest tokens of the decoding sequences before this row
        ("decode_context_tokens", "i8"),
        ("kv_tokens_used", "i8"),
        ("clock", "u4"),  # clock of the decode set
        ("num_iterations", "u4"),
        ("num_apart", "u4"),  # decoding sequences to which emitted_s does not apply: add_gap logs their gaps
        ("num_widening", "u4"),  # decoding sequences the context of which grows by a token per iteration
        ("decode_seqs", "u4"),
        ("running", "u4"),
        ("kv_blocks_used", "u4"),
        ("more", "u4"),  # QUEUED, CHUNKS or their sum: it has a row there, or one per iteration
    ]
)
"""The iterations of a plan. Tokens and blocks are those of the first iteration."""
QUEUE_ROW = np.dtype([("waiting", "i4"), ("preempted", "i4"), ("waits_for_memory", "i4")])
CHUNKS_ROW = np.dtype(
    [
        ("kv_tokens_used", "i8"),
        ("kv_blocks_used", "i4"),
        ("prefill_seqs", "i4"),
        ("prefill_tokens", "i4"),
        ("prefill_pairs", "i8"),
        ("prefill_context_tokens", "i8"),
        ("sampled_seqs", "i4"),
    ]
)
QUEUED: Final = 1
CHUNKS: Final = 2
pack_row: Final = Struct("=2d2q8I").pack
"""Packs the fields of `ROW`."""
pack_queue: Final = Struct("=3i").pack
"""Packs the fields of `QUEUE_ROW`."""
pack_chunks: Final = Struct("=q3i2qi").pack
"""Packs the fields of `CHUNKS_ROW`."""


class _TimePackers(dict[int, Callable[..., bytes]]):
    """Functions that pack times into bytes, by the number of times; twice as fast as `array.extend`."""

    def __missing__(self, num_times: int) -> Callable[..., bytes]:
        self[num_times] = pack = Struct(f"={num_times}d").pack
        return pack


TIME_PACKERS: Final = _TimePackers()


def pack_times(times_s: list[float]) -> bytes:
    """Packs times, in seconds."""
    return TIME_PACKERS[len(times_s)](*times_s)
