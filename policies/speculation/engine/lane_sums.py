"""Sums over the sequences of a lane by iteration, known ahead; those that have run are handed on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from policies.speculation.engine.drafts import Ints

NUM_ITERATIONS: Final = 4096
"""Iterations for which new sums have room; they grow with the longest answer."""


def forget(computed: Ints, blocks: Ints) -> None:
    """Does nothing with the sums of iterations that have run."""


class LaneSums:
    """Sums over the decoding sequences of a lane, by iteration.

    clock: iterations that have run, those without decodes included. first: iteration of the first sums.
    computed: computed tokens before each iteration. blocks: KV blocks in it. on_run(computed, blocks): is
    called with the sums of iterations that have run, in their order.
    """

    __slots__ = ("blocks", "clock", "computed", "first", "on_run")

    def __init__(self) -> None:
        self.on_run: Callable[[Ints, Ints], None] = forget
        self.clock = self.first = 0
        self.computed: Ints = np.zeros(NUM_ITERATIONS, np.int64)
        self.blocks: Ints = np.zeros(NUM_ITERATIONS, np.int64)

    def reach(self, end: int) -> None:
        """Lets the sums reach to iteration end - 1, and hands on those of iterations that have run."""
        num_run, size = self.clock - self.first, len(self.blocks)
        if end - self.first <= size:
            return
        self.on_run(self.computed[:num_run], self.blocks[:num_run])
        self.first = self.clock
        while size < end - self.clock:
            size *= 2
        self.computed = _shifted(self.computed, num_run, size)
        self.blocks = _shifted(self.blocks, num_run, size)

    def flush(self) -> None:
        """Hands on the sums of all iterations that have run."""
        self.reach(self.first + len(self.blocks) + 1)

    def advance(self, num_iterations: int) -> None:
        """Counts iterations that have run."""
        self.clock += num_iterations
        self.reach(self.clock + 1)


def _shifted(sums: Ints, num_run: int, size: int) -> Ints:
    """Returns `size` sums of which the first is number num_run of these."""
    shifted = np.zeros(size, np.int64)
    shifted[: len(sums) - num_run] = sums[num_run:]
    return shifted
