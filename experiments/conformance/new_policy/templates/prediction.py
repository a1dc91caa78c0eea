"""A length predictor: how many tokens will the answer have? Say here what it does, and after which paper.

It sees: the request at its intake (prompt, tenant, priority, max_tokens), and each answer's length when it
has ended. A stand-in for a trained model, with needs_truth = True, is given the true length, and works in
the simulator only.
It may: remember what it has observed.
It must promise: a whole number >= 1 and <= max_tokens; predictions that depend on the request and the
observations only; and that deep copies share nothing, since each replica has its own.

Memory pressure: not its business. Horizon: a prediction is made once and stands.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from policies.core.request import Request
from policies.prediction import within_limits


@dataclass(frozen=True, kw_only=True, slots=True)
class MyPolicy:
    """An average of the tenant's answers that forgets old ones slowly."""

    needs_truth: ClassVar[bool] = False

    # Settings are the fields, with their defaults; what it remembers is a field with init=False.
    weight: float = 0.1
    """Of the newest answer in the average."""
    initial_tokens: int = 256
    """Predicted before any answer of the tenant has ended."""
    _average: dict[str, float] = field(init=False, default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0 < self.weight <= 1:
            raise ValueError(f"weight={self.weight}: must be > 0 and <= 1")
        if self.initial_tokens < 1:
            raise ValueError(f"initial_tokens={self.initial_tokens}: must be >= 1")

    def predict(self, request: Request, true_num_tokens: int | None) -> int:
        """Predicted output tokens; true_num_tokens is not looked at."""
        return within_limits(request, round(self._average.get(request.tenant, self.initial_tokens)))

    def observe(self, request: Request, num_output_tokens: int) -> None:
        """A request has ended, not by an abort."""
        average = self._average.get(request.tenant, float(num_output_tokens))
        self._average[request.tenant] = average + self.weight * (num_output_tokens - average)
