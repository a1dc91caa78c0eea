"""The log of the passes of whole answers: one row per answer, and one byte per pass."""

from __future__ import annotations

from struct import Struct
from typing import Final

import numpy as np
from numpy.typing import NDArray

from policies.speculation.engine.drafts import Ints
from policies.speculation.engine.lane_passes import Passes
from sim.records.mapped_buffers import MappedBuffers

_ROW: Final = np.dtype(
    [
        ("request_id", "i8"),
        ("admission", "i8"),  # number of its admission: the order of the answers in an iteration
        ("first", "i8"),  # iteration of its first pass
        ("num_passes", "i8"),
        ("surplus", "i8"),  # accepted draft tokens of its last pass behind the end of the answer
    ]
)
_PACK: Final = Struct("=5q").pack


class AnswerLog:
    """The passes of the answers of one replica while it keeps to a lane."""

    def __init__(self) -> None:
        self._tokens = bytearray()  # tokens of a pass: per answer, one byte per pass
        self._rows = bytearray()
        self._buffers = MappedBuffers(self._tokens, self._rows)
        self._contents: tuple[NDArray[np.uint8], NDArray[np.void]] | None = None

    def add(self, passes: Passes, num_passes: int) -> None:
        """Logs the first num_passes passes of an answer."""
        seq, is_whole = passes.seq, num_passes == len(passes.tokens)
        surplus = passes.surplus if is_whole else 0
        self._rows += _PACK(seq.request_id, seq.admission, passes.first, num_passes, surplus)
        self._tokens += passes.tokens if is_whole else passes.tokens[:num_passes]
        if len(self._tokens) >= self._buffers.limit:
            self._buffers.move()

    def _read(self) -> tuple[NDArray[np.uint8], NDArray[np.void]]:
        """Returns the accepted draft tokens of all passes, and the rows of answers; nothing can be added."""
        if self._contents is None:
            rows = self._buffers.take(self._rows, _ROW)
            self._contents = self._buffers.take(self._tokens, np.uint8) - np.uint8(1), rows
        return self._contents

    def sums(self, num_iterations: int) -> tuple[Ints, Ints]:
        """Returns the accepted draft tokens of the first num_iterations iterations, and those that stay."""
        accepted, rows = self._read()
        num = rows["num_passes"]
        end = np.cumsum(num)
        iteration = np.arange(len(accepted)) + np.repeat(rows["first"] - (end - num), num)
        sums = np.bincount(iteration, accepted, num_iterations).astype(np.int64)
        has_surplus = rows["surplus"] > 0
        last = (rows["first"] + num - 1)[has_surplus]
        surplus = np.bincount(last, rows["surplus"][has_surplus], num_iterations).astype(np.int64)
        return sums, sums - surplus

    def take(self) -> tuple[NDArray[np.uint8], tuple[Ints, Ints, NDArray[np.uint8]]]:
        """Returns the accepted draft tokens of all passes, and those that stay; the log is dropped.

        The latter as request id, iteration and number of each pass that kept some, in the order of time.
        """
        accepted, rows = self._read()
        rows_by_admission = np.argsort(rows["admission"], kind="stable")
        num = rows["num_passes"]
        end = np.cumsum(num)
        kept = accepted.copy()
        has_surplus = np.flatnonzero(rows["surplus"])
        kept[end[has_surplus] - 1] -= rows["surplus"][has_surplus].astype(np.uint8)
        if (rows_by_admission[1:] < rows_by_admission[:-1]).any():
            begin = (end - num)[rows_by_admission]
            rows, num = rows[rows_by_admission], num[rows_by_admission]
            end = np.cumsum(num)
            kept = kept[np.repeat(begin - (end - num), num) + np.arange(len(kept))]
        at = np.flatnonzero(kept)
        answer = np.repeat(np.arange(len(rows), dtype=np.int32), num)[at]
        iteration = at + (rows["first"] - (end - num))[answer]
        order = _stable_order(iteration)
        return accepted, (rows["request_id"][answer[order]], iteration[order], kept[at[order]])


def _stable_order(iterations: Ints) -> Ints:
    """Returns the stable order of iteration numbers; numpy sorts 16 bits in linear time."""
    order: Ints = np.argsort((iterations & 0xFFFF).astype(np.uint16), kind="stable")
    for shift in range(16, int(iterations.max(initial=0)).bit_length(), 16):
        digits = (iterations[order] >> shift & 0xFFFF).astype(np.uint16)
        order = order[np.argsort(digits, kind="stable")]
    return order
