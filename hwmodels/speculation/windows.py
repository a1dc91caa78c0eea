"""Lookahead decoding whose window is refined in a pass of its own, after the one that verifies."""

from __future__ import annotations

from typing import Any

from hwmodels.exact import Num, larger, smaller
from hwmodels.iterations.iteration import DraftWork, Explained, IterationShape
from hwmodels.speculation.relative import RelativeStep, StepModel, TargetScale
from hwmodels.speculation.steps import drafting_context, drafts_of, waiting


class Windows:
    """A pass of the target over the newest token of each sequence that drafts and its window's rows.

    guesses: rows of a window. columns: those of them from which tokens are sampled. start_s: seconds in which
    the devices wait for the host after each pass.
    """

    def __init__(self, target: StepModel, *, guesses: int, columns: int, start_s: float) -> None:
        self._target = target
        self._guesses, self._columns, self._start_s = guesses, columns, start_s

    def scaled_by(self, target: TargetScale) -> Windows:
        """Returns the same passes with prices that are scaled as the target's."""
        step = RelativeStep(self._target, target)
        return Windows(step, guesses=self._guesses, columns=self._columns, start_s=self._start_s)

    def seconds(self, shape: IterationShape) -> Any:
        """Returns the seconds of the pass; without a sequence that drafts there is none."""
        return self._start_s + self._count(shape) * self._target.seconds(self._pass(shape))

    def breakdown(self, shape: IterationShape) -> dict[str, Num]:
        """Returns seconds per component; the start is the host's."""
        count = self._count(shape)
        parts = {name: count * part for name, part in self._target.breakdown(self._pass(shape)).items()}
        return parts | {"host": parts["host"] + self._start_s}

    def explain(self, shape: IterationShape) -> list[Explained]:
        """Returns the operators of the pass."""
        lines = self._target.explain(self._pass(shape)) if self._count(shape) else []
        return [waiting(self._start_s), *lines]

    def flops(self, shape: IterationShape) -> Num:
        """Returns the FLOPs of the pass."""
        flops: Num = self._count(shape) * self._target.flops(self._pass(shape))
        return flops

    def bytes_moved(self, shape: IterationShape) -> Num:
        """Returns the bytes of weights and KV that the pass reads."""
        moved: Num = self._count(shape) * self._target.bytes_moved(self._pass(shape))
        return moved

    def _count(self, shape: IterationShape) -> Any:
        """Returns the number of passes, 0 or 1."""
        _, _, seqs, steps, _ = drafts_of(shape)
        return smaller(seqs, 1) * smaller(steps, 1)

    def _pass(self, shape: IterationShape) -> IterationShape:
        """Returns the pass of all sequences that draft, of at least one."""
        seqs, context = larger(drafts_of(shape).seqs, 1), drafting_context(shape)
        guesses = self._guesses
        pairs = guesses * context + (guesses * (guesses + 1) // 2) * seqs
        rows = DraftWork(guesses * seqs, pairs, 0, 0, 0)
        return IterationShape(seqs, context, 0, 0, 0, 0, self._columns * seqs, None, rows)
