"""The part of an iteration model that is in the proportions of another model of the same replica."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hwmodels.exact import Num
from hwmodels.iterations.iteration import Explained, IterationModel, IterationShape, ends_of_decodes


class InProportions(ABC):
    """An iteration with seconds of its own, divided over components and operators as another model says.

    Peaks, FLOPs and bytes are those of the other model, which is of the same replica.
    """

    def __init__(self, other: IterationModel) -> None:
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
        return ends_of_decodes(self.seconds, start_s, num_seqs, num_context_tokens, num_iterations)

    def breakdown(self, shape: IterationShape) -> dict[str, Num]:
        """Returns seconds per component, in the proportions of the other model."""
        parts = self._other.breakdown(shape)
        factor = self.seconds(shape) / sum(parts.values())
        return {name: seconds * factor for name, seconds in parts.items()}

    def explain(self, shape: IterationShape) -> list[Explained]:
        """Returns the operators of one iteration, in the proportions of the other model."""
        seconds = {name: float(np.sum(part)) for name, part in self.breakdown(shape).items()}
        # The other model counts time of no operator as host: launches are part of it.
        seconds["host"] += seconds.pop("launch")
        return share_out(self._other.explain(shape), seconds)

    def flops(self, shape: IterationShape) -> Num:
        """Returns the model FLOPs as the other model counts them; see `IterationModel`."""
        return self._other.flops(shape)

    def bytes_moved(self, shape: IterationShape) -> Num:
        """Returns the bytes moved as the other model counts them; see `IterationModel`."""
        return self._other.bytes_moved(shape)


def share_out(lines: Sequence[Explained], measured_s: Mapping[str, float]) -> list[Explained]:
    """Splits each component's measured seconds over its lines in proportion; returns the longest first.

    Bounds, FLOPs and bytes are unchanged. Lines that all took 0 s get equal shares.
    """
    own_s: dict[str, float] = defaultdict(float)
    count: dict[str, int] = defaultdict(int)
    for line in lines:
        own_s[line.component] += line.seconds
        count[line.component] += 1
    total_s = sum(measured_s[name] for name in count)
    changed = []
    for line in lines:
        name = line.component
        part = line.seconds / own_s[name] if own_s[name] else 1 / count[name]
        seconds = part * measured_s[name]
        changed.append(line._replace(seconds=seconds, share=seconds / total_s))
    return sorted(changed, key=lambda line: -line.seconds)
