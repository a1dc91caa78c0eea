"""The part of an iteration model that is in the proportions of another model of the same replica."""

from __future__ import annotations

from abc import ABC, abstractmethod
from itertools import accumulate
from typing import Any

import numpy as np

from hwmodels.exact import Num
from hwmodels.iterations.iteration import Explained, IterationModel, IterationShape
from hwmodels.levels.explained import share_out


class InProportions(ABC):
    """An iteration with seconds of its own, divided over components and operators as another model says."""

    def __init__(self, other: IterationModel) -> None:
        """Creates the model; peaks and FLOPs are those of the other one, which has the same replica."""
        self._other = other
        self.peak_flops_per_s = other.peak_flops_per_s
        self.peak_bytes_per_s = other.peak_bytes_per_s

    @abstractmethod
    def seconds(self, shape: IterationShape) -> Any:
        """Returns the wall time of the iteration in seconds; for arrays, of each iteration."""

    def decode_ends(
        self, start_s: float, num_seqs: int, num_context_tokens: int, num_iterations: int
    ) -> list[float]:
        """Returns the end times of consecutive decode-only iterations; see `IterationModel`."""
        contexts = num_context_tokens + num_seqs * np.arange(num_iterations)
        durations = self.seconds(IterationShape(num_seqs, contexts, 0, 0, 0, 0, num_seqs))
        return list(accumulate(durations.tolist(), initial=start_s))[1:]

    def breakdown(self, shape: IterationShape) -> dict[str, Num]:
        """Returns seconds per component, in the proportions of the other model."""
        parts = self._other.breakdown(shape)
        factor = self.seconds(shape) / sum(parts.values())
        return {name: seconds * factor for name, seconds in parts.items()}

    def explain(self, shape: IterationShape) -> list[Explained]:
        """Returns the operators of one iteration, in the proportions of the other model."""
        seconds = {name: float(part) for name, part in self.breakdown(shape).items()}
        seconds["host"] += seconds.pop("launch")
        return share_out(self._other.explain(shape), seconds)

    def flops(self, shape: IterationShape) -> Num:
        """Returns the model FLOPs of the tokens that are kept."""
        return self._other.flops(shape)
