"""Answer length from prompt length: a straight line through their logarithms, fitted as answers end.

Least squares of log(output) on log(prompt), as the cost of a translation is estimated from the length of its
source (C-NMT, Chen et al., 2022). Logarithms, because lengths spread over decades.

    log(predicted) = mean_y + slope * (log(prompt) - mean_x),    slope = S_xy / S_xx

Prompts 100 and 400 answered with 50 and 100 tokens: slope log 2 / log 4 = 0.5, prompt 200 -> 71 tokens.
The prediction is the typical answer (geometric mean), shorter than the mean one where lengths scatter. It is
clamped to the lengths seen so far, as the line need not go on beyond them.
Assumes that one line holds for all tenants and all the time. Its biases are those of every predictor that
learns: short answers end first, and those cut by max_tokens count with the length they were cut to.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import exp, inf, log
from typing import ClassVar

from policies.core.request import Request
from policies.prediction import within_limits


@dataclass(slots=True)
class _Line:
    """Running means and centred sums of squares (Welford's): plain sums of squares would lose digits."""

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
        """y of the line at x, clamped to the y seen; the mean while all x were the same."""
        slope = self.s_xy / self.s_xx if self.s_xx > 0 else 0.0
        return min(max(self.mean_y + slope * (x - self.mean_x), self.min_y), self.max_y)


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptLengthRegression:
    """One line for all requests, better with every answer."""

    min_observations: int = 30
    """Number of answers before the line is used."""
    initial_tokens: int = 256
    """Prediction in tokens until then."""
    _line: _Line = field(default_factory=_Line, init=False, repr=False)

    needs_truth: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.min_observations < 2:
            raise ValueError(
                f"min_observations={self.min_observations}: must be >= 2, as a line needs two points"
            )
        if self.initial_tokens < 1:
            raise ValueError(f"initial_tokens={self.initial_tokens}: must be >= 1")

    def predict(self, request: Request, true_num_tokens: int | None) -> int:
        """The value of the line at the prompt's length."""
        if self._line.num_points < self.min_observations:
            return within_limits(request, self.initial_tokens)
        return within_limits(request, round(exp(self._line.at(_log(request.prompt.num_tokens)))))

    def observe(self, request: Request, num_output_tokens: int) -> None:
        """Adds a point to the line."""
        self._line.add(_log(request.prompt.num_tokens), _log(num_output_tokens))


def _log(num_tokens: int) -> float:
    return log(max(num_tokens, 1))
