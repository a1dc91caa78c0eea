"""Prediction by a quantile of the tenant's last output lengths.

As in the Past-Future scheduler of LightLLM (Gong et al., ASPLOS 2025), the lengths of recently finished
requests are the distribution of future lengths; here there is one distribution per tenant, because tenants
run different applications. A quantile of 0.5 suits ordering; a high quantile suits memory reservation.
Assumes that a tenant's outputs are alike and change slowly. There are two biases: at the start of a run short
outputs finish first, so early predictions are short; an output truncated by max_tokens counts with its
truncated length.
A prediction reads one integer. An observation is inserted by bisection, which moves up to `window` integers
in memory.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass, field
from math import ceil
from typing import ClassVar

from fieldlimits import Checked, PositiveInt, PositiveShare, check
from policies.core.request import Request
from policies.prediction import within_limits


@dataclass(slots=True)
class _Window:
    """The last output lengths in tokens, in the order of arrival and sorted."""

    recent: deque[int] = field(default_factory=deque)
    by_size: list[int] = field(default_factory=list)

    def add(self, num_tokens: int, max_size: int) -> None:
        if len(self.recent) == max_size:
            del self.by_size[bisect_left(self.by_size, self.recent.popleft())]
        self.recent.append(num_tokens)
        insort(self.by_size, num_tokens)

    def quantile(self, share: float) -> int:
        """Returns the smallest observed length not exceeded by at least this share of the outputs."""
        num_at_most = ceil(share * len(self.by_size) - 1e-9)  # as a float, 0.07 * 100 is slightly above 7
        return self.by_size[max(num_at_most, 1) - 1]


@dataclass(slots=True)
class _Seen:
    all_tenants: _Window = field(default_factory=_Window)
    by_tenant: dict[str, _Window] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningHistogram(Checked):
    """Quantile over a sliding window of the tenant's outputs, or of all outputs while the tenant is new."""

    quantile: PositiveShare = 0.5
    """Share of the outputs in the window that are not longer than the prediction."""
    window: PositiveInt = 1000
    """Number of outputs in the window of each tenant, and in the common window of all tenants."""
    min_observations: PositiveInt = 10
    """Minimum number of a tenant's outputs for using its own window instead of the common one."""
    initial_tokens: PositiveInt = 256
    """Prediction in tokens before the first request has finished."""
    _seen: _Seen = field(default_factory=_Seen, init=False, repr=False)

    needs_truth: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check(self)
        if self.min_observations > self.window:
            raise ValueError(
                f"min_observations={self.min_observations}: must be <= window={self.window}, "
                "or the windows of single tenants would never be used"
            )

    def predict(self, request: Request, true_num_tokens: int | None) -> int:
        """Returns the tenant's quantile, or else the quantile of all tenants, or else initial_tokens."""
        window = self._seen.by_tenant.get(request.tenant)
        if window is None or len(window.recent) < self.min_observations:
            window = self._seen.all_tenants
        num_tokens = window.quantile(self.quantile) if window.recent else self.initial_tokens
        return within_limits(request, num_tokens)

    def observe(self, request: Request, num_output_tokens: int) -> None:
        """Adds a length, and removes the oldest one from a full window."""
        seen = self._seen
        seen.all_tenants.add(num_output_tokens, self.window)
        seen.by_tenant.setdefault(request.tenant, _Window()).add(num_output_tokens, self.window)
