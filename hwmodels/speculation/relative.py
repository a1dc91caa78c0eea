"""Prices drafting on a device whose target is measured and whose draft is not.

A component of a step of the draft, such as its matrix products, takes as many times the seconds of its
roofline as that component of the target does with the same rows and contexts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from hwmodels.exact import Num
from hwmodels.iterations.decodes import ByContext
from hwmodels.iterations.iteration import DraftWork, Explained, IterationShape

NOT_OPERATORS = ("host", "launch")

Breakdown = Callable[[IterationShape], Mapping[str, Num]]
"""Returns the seconds of an iteration by component."""


class TargetScale:
    """Measured over modelled seconds of a target, by component."""

    def __init__(self, measured: Breakdown, modelled: Breakdown) -> None:
        self._measured = measured
        self._modelled = modelled

    def scaled(self, parts: dict[str, Num], shape: IterationShape) -> dict[str, Num]:
        """Returns the seconds per component of a draft, scaled as the target in an iteration of this shape.

        A component that the target's model counts as 0 s is scaled as all its operators together.
        """
        measured, modelled = self._measured(shape), self._modelled(shape)
        names = [name for name in parts if name not in NOT_OPERATORS]
        of_all = _ratio(sum(measured[name] for name in names), sum(modelled[name] for name in names), 1.0)
        scaled = {name: parts[name] * _ratio(measured[name], modelled[name], of_all) for name in names}
        return parts | scaled


class StepModel(Protocol):
    """Prices steps of a draft: a `Roofline`, or one that is scaled by the target's measured times."""

    def seconds(self, shape: IterationShape) -> Any:
        """Returns the seconds of a step."""

    def pass_seconds(self, num_seqs: int, context_tokens: Any, tokens: int, pairs: Any, rows: int, /) -> Any:
        """Returns the seconds of decodes with further rows; see `Roofline.pass_seconds`."""

    def equal_passes(self, num_seqs: int, tokens: int, rows: int, most_pairs: float, /) -> ByContext | None:
        """Returns the prices of passes that differ in contexts only; None: only `seconds` knows them."""

    def breakdown(self, shape: IterationShape) -> dict[str, Num]:
        """Returns seconds per component; they sum to `seconds`."""

    def explain(self, shape: IterationShape) -> list[Explained]:
        """Returns the operators of a step."""

    def flops(self, shape: IterationShape) -> Num:
        """Returns the FLOPs of a step."""

    def bytes_moved(self, shape: IterationShape) -> Num:
        """Returns the bytes that a step reads."""


class RelativeStep:
    """Prices steps as another model does, each scaled as the target in an iteration of the same shape."""

    def __init__(self, step: StepModel, target: TargetScale) -> None:
        self._step = step
        self._target = target

    def seconds(self, shape: IterationShape) -> Any:
        """Returns the seconds of a step."""
        return sum(self.breakdown(shape).values())

    def pass_seconds(self, num_seqs: int, context: Any, tokens: int, pairs: Any, sampled: int) -> Any:
        """Returns the seconds of decodes with further rows; see `Roofline.pass_seconds`."""
        drafts = DraftWork(tokens, pairs, 0, 0, 0)
        return self.seconds(IterationShape(num_seqs, context, 0, 0, 0, 0, sampled, None, drafts))

    def equal_passes(self, num_seqs: int, tokens: int, sampled: int, most_pairs: float) -> None:
        """Returns None: only `seconds` knows the prices."""
        return

    def breakdown(self, shape: IterationShape) -> dict[str, Num]:
        """Returns seconds per component; they sum to `seconds`."""
        return self._target.scaled(self._step.breakdown(shape), shape)

    def explain(self, shape: IterationShape) -> list[Explained]:
        """Returns the operators of a step; their seconds sum to `seconds`, in the roofline's shares."""
        lines = self._step.explain(shape)
        scale = float(self.seconds(shape)) / max(sum(line.seconds for line in lines), 1e-12)
        return [line._replace(seconds=scale * line.seconds) for line in lines]

    def flops(self, shape: IterationShape) -> Num:
        """Returns the FLOPs of a step."""
        return self._step.flops(shape)

    def bytes_moved(self, shape: IterationShape) -> Num:
        """Returns the bytes of weights and KV that a step reads."""
        return self._step.bytes_moved(shape)


def _ratio(measured: Any, modelled: Any, otherwise: Any) -> Any:
    some = np.asarray(modelled) > 0
    return np.where(some, measured / np.where(some, modelled, 1.0), otherwise)[()]
