"""The rows of the sequences that decode, kept from step to step until one of them joins or leaves.

A decoding sequence grows by one token per iteration, so its context follows from the clock of the decode set.
Everything else of its row stays as it is: in most steps the host writes context lengths and new blocks only.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.core.decode_set import DecodeSet
from policies.core.sequence import Sequence
from realengine.model.lora import NO_ADAPTER
from realengine.runner.launch import Row
from realengine.runner.work import SAMPLING_WORDS, Shape, StepSize


class DecodeRows:
    """B rows of one token each, sorted by adapter, because they then have the fewest segments.

    origins_B: computed tokens minus the clock of the decode set. lora_S: adapter slots by slot.
    """

    def __init__(
        self,
        rows: list[Row],
        slots_B: NDArray[np.int64],
        origins_B: NDArray[np.int64],
        lora_S: NDArray[np.int64],
    ) -> None:
        adapters_B = lora_S[slots_B]
        if (adapters_B != NO_ADAPTER).any():
            order = np.argsort(adapters_B, kind="stable")
            rows = [rows[row] for row in order]
            slots_B, origins_B = slots_B[order], origins_B[order]
        self.rows = rows
        self.slots_B = slots_B
        self.origins_B = origins_B
        self._max_origin = int(origins_B.max()) if rows else 0  # negative for short contexts
        self._last_clock = -1
        self.on_device = False
        """Whether the input tokens of all rows are known to be the newest ones on the device."""
        self.step: RepeatedStep | None = None
        """A step of exactly these rows; None: none was packed yet."""

    @classmethod
    def of(cls, seqs: Iterable[Sequence], lora_S: NDArray[np.int64]) -> DecodeRows:
        """Returns the rows of sequences that decode without branches."""
        members = list(seqs)
        slots = np.array([seq.slot for seq in members], np.int64)
        origins = np.array([seq.origin for seq in members], np.int64)
        return cls(list(zip(members, repeat(0))), slots, origins, lora_S)

    def contexts_B(self, clock: int) -> NDArray[np.int64]:
        """Returns the context lengths of an iteration, its new tokens included."""
        return self.origins_B + (clock + 1)

    def max_context(self, clock: int) -> int:
        """Returns the largest context length of an iteration."""
        return self._max_origin + clock + 1

    def have_blocks(self, clock: int) -> bool:
        """Returns whether the block tables are known to have all blocks of an iteration."""
        return clock <= self._last_clock

    def note_blocks(self, num_ids_S: NDArray[np.int64], block_size: int) -> None:
        """Notes up to which iteration the block tables, with so many ids by slot, have all blocks."""
        num_tokens_B = num_ids_S[self.slots_B] * block_size
        self._last_clock = int((num_tokens_B - self.origins_B).min(initial=1 << 62)) - 1


class RepeatedStep(NamedTuple):
    """A decode step of certain rows, whose words each such step copies."""

    shape: Shape
    """Of one iteration, without the longest context."""
    words: NDArray[np.int32]
    """Without contexts and changed blocks."""
    size: StepSize | None
    """Size of the graphs that run it; None: it runs eagerly."""

    def copy(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Returns new words, and their columns [5, rows]: tokens, slots, contexts, places, block ids."""
        words, num_rows = self.words.copy(), self.shape.num_rows
        first = SAMPLING_WORDS * num_rows
        return words, words[first : first + 5 * num_rows].reshape(5, num_rows)


class MemberRows:
    """The rows of all members of a decode set, made again when these have changed."""

    def __init__(self, decodes: DecodeSet, lora_S: NDArray[np.int64]) -> None:
        self._decodes = decodes
        self._lora_S = lora_S
        self._num_joins = self._num_members = -1
        self._rows = DecodeRows.of((), lora_S)

    def current(self) -> DecodeRows:
        """Returns the rows, which are not to be changed."""
        decodes = self._decodes
        if decodes.num_joins != self._num_joins or decodes.size != self._num_members:
            self._rows = DecodeRows.of(decodes, self._lora_S)
            self._num_joins, self._num_members = decodes.num_joins, decodes.size
        return self._rows

    def forget(self) -> None:
        """Has the rows made again: slots were filled anew, or the device may lack changes of block tables."""
        self._num_joins = -1
