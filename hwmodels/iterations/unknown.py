"""The iterations of a machine without a description: they were measured, and no more is known of them."""

from __future__ import annotations

from math import nan

from hwmodels.exact import Num
from hwmodels.iterations.iteration import Explained, IterationShape


class UnknownMachine:
    """An `IterationModel` of a machine without a description: its figures are NaN."""

    peak_flops_per_s = nan
    peak_bytes_per_s = nan

    def seconds(self, shape: IterationShape) -> Num:
        return nan

    def decode_ends(
        self, start_s: float, num_seqs: int, num_context_tokens: int, num_iterations: int
    ) -> list[float]:
        return [nan] * num_iterations

    def breakdown(self, shape: IterationShape) -> dict[str, Num]:
        return {"measured": 1.0}

    def explain(self, shape: IterationShape) -> list[Explained]:
        return []

    def flops(self, shape: IterationShape) -> Num:
        return shape.decode_seqs * nan

    def bytes_moved(self, shape: IterationShape) -> Num:
        return shape.decode_seqs * nan
