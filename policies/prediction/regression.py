"""Prediction of the output length from the prompt length by linear regression of their logarithms.

The line is a least squares fit of log(output) on log(prompt), updated as requests finish, as the cost of a
translation is estimated from the length of its source (C-NMT, Chen et al., 2022). Logarithms are used because
lengths vary over orders of magnitude.

    log(predicted) = mean_y + slope * (log(prompt) - mean_x),    slope = S_xy / S_xx

Example: if prompts of 100 and 400 tokens had outputs of 50 and 100 tokens, the slope is log 2 / log 4 = 0.5,
and the prediction for a prompt of 200 tokens is 71 tokens. The prediction is a geometric mean, which is
shorter than the arithmetic mean of scattered lengths. It is clamped to the range of output lengths observed
so far. Assumes that one line holds for all tenants at all times. It has the biases of every learning
predictor: short outputs finish first, and outputs truncated by max_tokens count with their truncated length.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import exp, inf, log
from typing import Annotated, ClassVar

from fieldlimits import Checked, Ge, PositiveInt
from policies.core.request import Request
from policies.prediction import within_limits


@dataclass(slots=True)
class _Line:
    """Running means and centred sums of squares (Welford's method, as plain sums would lose precision)."""

    num_points: int = 0
    mean_x: float = 0.0
    mean_y: float = 0.0
    s_xx: float = 0.0
    s_xy: float = 0.0
    min_y: float = inf
    max_y: float = -inf

    def add(self, x: float, y: float) -> None:
        self.num_points += 1
        dx = x - self.mean_x
        self.mean_x += dx / self.num_points
        self.mean_y += (y - self.mean_y) / self.num_points
        self.s_xx += dx * (x - self.mean_x)
        self.s_xy += dx * (y - self.mean_y)
        self.min_y = min(self.min_y, y)
        self.max_y = max(self.max_y, y)

    def at(self, x: float) -> float:
        """Returns the line's y at x, clamped to the observed y; the mean if all x were equal."""
        slope = self.s_xy / self.s_xx if self.s_xx > 0 else 0.0
        return min(max(self.mean_y + slope * (x - self.mean_x), self.min_y), self.max_y)


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptLengthRegression(Checked):
    """Regression line of all requests, updated by every finished one."""

    min_observations: Annotated[int, Ge(2), "as a line needs two points"] = 30
    """Minimum number of finished requests for using the line."""
    initial_tokens: PositiveInt = 256
    """Prediction in tokens until then."""
    _line: _Line = field(default_factory=_Line, init=False, repr=False)

    needs_truth: ClassVar[bool] = False

    def predict(self, request: Request, true_num_tokens: int | None) -> int:
        """Returns the line's value at the prompt's length, or initial_tokens while it has too few points."""
        if self._line.num_points < self.min_observations:
            return within_limits(request, self.initial_tokens)
        return within_limits(request, round(exp(self._line.at(_log(request.prompt.num_tokens)))))

    def observe(self, request: Request, num_output_tokens: int) -> None:
        """Adds a point to the line."""
        self._line.add(_log(request.prompt.num_tokens), _log(num_output_tokens))


def _log(num_tokens: int) -> float:
    return log(max(num_tokens, 1))
