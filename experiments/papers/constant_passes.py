"""A latency level in which every pass of the target takes a second, for prices in units of a pass."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, repeat
from typing import Any

from hwmodels.exact import Num
from hwmodels.iterations import IterationModel, IterationShape
from hwmodels.levels import Calibrated, Replica

PASS_S = 1.0


class ConstantModel:
    """An `IterationModel` of passes of one second; all other quantities come from the roofline."""

    def __init__(self, base: IterationModel) -> None:
        self._base = base

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)

    def seconds(self, shape: IterationShape) -> Num:
        """Returns a second, for each of several iterations too."""
        return PASS_S + 0.0 * shape.decode_context_tokens

    def decode_ends(
        self, start_s: float, num_seqs: int, num_context_tokens: int, num_iterations: int
    ) -> list[float]:
        """Returns the end times of consecutive iterations; see `IterationModel`."""
        return list(accumulate(repeat(PASS_S, num_iterations), initial=start_s))[1:]


@dataclass(frozen=True, kw_only=True, slots=True)
class ConstantPasses:
    """A latency level whose passes last a second each, and whose drafts have the prices of `calibrated`."""

    def iteration_model(self, replica: Replica) -> IterationModel:
        """Returns the iteration model."""
        return ConstantModel(Calibrated().iteration_model(replica))

    def basis(self, replica: Replica) -> str:
        return "Iteration times: a second for every pass."
