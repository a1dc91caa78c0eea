"""Prediction policy: predicts the number of output tokens of a request. Describe it here; name the paper.

It sees: the request when it enters an engine (prompt, tenant, priority, max_tokens), and the length of each
output when it has ended. A stand-in for a trained model sets needs_truth = True and is given the true length;
it works in the simulator only.
It may: remember its observations.
It must promise: a whole number >= 1 and <= max_tokens; predictions that depend only on the request and the
observations; and independent deep copies, because each replica has its own.

Memory pressure: none. Horizon: a prediction is made once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from fieldlimits import Checked, PositiveInt, PositiveShare
from policies.core.request import Request
from policies.prediction import within_limits


@dataclass(frozen=True, kw_only=True, slots=True)
class MyPolicy(Checked):
    """Exponentially weighted average of the output lengths of the tenant."""

    needs_truth: ClassVar[bool] = False

    # Settings are the fields, with their defaults. State of the policy is a field with init=False.
    weight: PositiveShare = 0.1
    """Weight of the newest output in the average."""
    initial_tokens: PositiveInt = 256
    """Prediction before any output of the tenant has ended, in tokens."""
    _average: dict[str, float] = field(init=False, default_factory=dict, repr=False, compare=False)

    def predict(self, request: Request, true_num_tokens: int | None) -> int:
        """Returns the predicted number of output tokens; true_num_tokens is not used."""
        return within_limits(request, round(self._average.get(request.tenant, self.initial_tokens)))

    def observe(self, request: Request, num_output_tokens: int) -> None:
        """Adds the output of a request to the average; aborted requests are not reported."""
        average = self._average.get(request.tenant, float(num_output_tokens))
        self._average[request.tenant] = average + self.weight * (num_output_tokens - average)
