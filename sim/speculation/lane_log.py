"""The log of the iterations of a lane with draft tokens: what each has beside the columns of any iteration.

A leap adds four numbers. Sums over sequences come from the lane, many iterations at a time, and what was
accepted is counted at the end from the passes of the answers.
"""

from __future__ import annotations

from struct import Struct
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from policies.speculation.engine.drafts import Ints
from sim.records.mapped_buffers import MappedBuffers
from sim.speculation.answer_log import AnswerLog

_ROW: Final = np.dtype(
    [
        ("num_iterations", "i8"),
        ("num_next", "i8"),  # sequences that get draft tokens
        ("num_judged", "i8"),  # decoding sequences that had not ended before
        ("num_blocks", "i8"),  # KV blocks of sequences that do not decode
    ]
)
_PACK: Final = Struct("=4q").pack


class LaneLog:
    """The iterations of one replica while it keeps to a lane, in which every sequence drafts alike.

    num_rows, num_levels: draft tokens of each sequence, and levels of them.
    """

    def __init__(self) -> None:
        self.num_rows = self.num_levels = 0
        self.answers = AnswerLog()
        self._rows = bytearray()
        self._computed = bytearray()  # per iteration, computed tokens before it, summed over sequences
        self._blocks = bytearray()  # per iteration, KV blocks of the decoding sequences
        self._buffers = MappedBuffers(self._rows, self._computed, self._blocks)

    def add(self, num_iterations: int, num_next: int, num_judged: int, num_blocks: int) -> None:
        """Logs iterations, in which so many sequences get draft tokens, and so many have some verified.

        num_blocks: KV blocks of sequences that do not decode.
        """
        self._rows += _PACK(num_iterations, num_next, num_judged, num_blocks)

    def add_sums(self, computed: Ints, blocks: Ints) -> None:
        """Logs the sums of the next iterations: see `policies.speculation.engine.lane_sums`."""
        self._computed += computed.tobytes()
        self._blocks += blocks.tobytes()
        self._buffers.move()

    def columns(self, decode_seqs: NDArray[Any]) -> dict[str, Any]:
        """Returns the columns of `sim.speculation.log` for the iterations of the lane, which come first.

        decode_seqs: sequences that decode in each iteration. The log is dropped, but for the answers.
        """
        rows = self._buffers.take(self._rows, _ROW)
        computed = self._buffers.take(self._computed, np.int64)
        blocks = self._buffers.take(self._blocks, np.int64)
        num = rows["num_iterations"]
        size = decode_seqs[: len(computed)].astype(np.int64)
        num_next, num_judged, num_others = (
            np.repeat(rows[name], num) for name in ("num_next", "num_judged", "num_blocks")
        )
        num_rows, drafts = self.num_rows, int(self.num_rows > 0)
        num_accepted, num_kept = self.answers.sums(len(computed))
        return {
            "decode_context_tokens": computed + size,
            "kv_blocks_used": blocks + num_others,
            "draft_tokens": size * num_rows,
            "draft_pairs": computed * num_rows + size * (num_rows * (num_rows + 3) // 2),
            "draft_seqs": num_next * drafts,
            "draft_steps": np.where(num_next > 0, self.num_levels, 0),
            "drafted_tokens": num_next * num_rows,
            "proposed_tokens": num_next * num_rows,
            "draft_passes": num_judged * drafts,
            "verified_tokens": num_judged * num_rows,
            "accepted_tokens": num_accepted,
            "kept_tokens": num_kept,
        }
