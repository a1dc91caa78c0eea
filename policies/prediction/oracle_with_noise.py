"""Prediction by the true length times a lognormal error. For the simulator only.

With it one can find how accurate a predictor must be. It is a common model of inexact sizes in size-based
scheduling (Dell'Amico, "Scheduling With Inexact Job Sizes", 2019).

    predicted = true * exp(error * z),    z standard normal

For a true length of 100 and error=0.5, half of the predictions are above 100, and 68 % are between 61 and
165. The median is exact, the mean is too large by the factor exp(error^2 / 2), here by 13 %.
Assumes that errors are independent of everything, also of the length; those of a real model are not.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp
from statistics import NormalDist
from typing import Annotated, ClassVar

from fieldlimits import Checked, Ge, Le
from policies.core.request import Request
from policies.prediction import require_truth, uniform, within_limits

_NORMAL = NormalDist()


@dataclass(frozen=True, kw_only=True, slots=True)
class OracleWithNoise(Checked):
    """Predicts the true length with an error from a known distribution."""

    error: Annotated[
        float, Ge(0), Le(3), "with 3, every third prediction is wrong by more than a factor of 20"
    ] = 0.5
    """Standard deviation of log(predicted / true); 0: always exact."""
    seed: int = 0
    """Seed of the errors."""

    needs_truth: ClassVar[bool] = True

    def predict(self, request: Request, true_num_tokens: int | None) -> int:
        """Returns the true length times the error."""
        truth = require_truth(self, true_num_tokens)
        if not self.error:
            return within_limits(request, truth)
        z = _NORMAL.inv_cdf(uniform(self.seed, "prediction.oracle", request.request_id))
        return within_limits(request, round(truth * exp(self.error * z)))

    def observe(self, request: Request, num_output_tokens: int) -> None:
        """Does nothing: the distribution of the errors is given."""
