"""Prediction from the tenant's last answers: a quantile of their lengths.

After the Past-Future scheduler of LightLLM (Gong et al., ASPLOS 2025), which takes the lengths of recently
ended requests as the distribution of those to come; kept here for each tenant, as tenants run different
applications. A quantile of 0.5 is for ordering, a high one for reserving memory.
Assumes that a tenant's answers are alike and drift slowly. Two biases: at the start of a run short answers
end first, so early predictions are short; an answer cut by max_tokens counts with the length it was cut to.
A prediction reads one integer; an observation finds its place by bisection and moves up to `window` integers
in memory.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass, field
from math import ceil
from typing import ClassVar

from policies.core.request import Request
from policies.prediction import within_limits


@dataclass(slots=True)
class _Window:
    """The last lengths, in order of arrival and in order of size."""

    recent: deque[int] = field(default_factory=deque)
    by_size: list[int] = field(default_factory=list)

    def add(self, num_tokens: int, max_size: int) -> None:
        if len(self.recent) == max_size:
            del self.by_size[bisect_left(self.by_size, self.recent.popleft())]
        self.recent.append(num_tokens)
        insort(self.by_size, num_tokens)

    def quantile(self, share: float) -> int:
        """The smallest length seen that at least this share of the answers did not exceed."""
        num_at_most = ceil(share * len(self.by_size) - 1e-9)  # 0.07 * 100 is a hair above 7
        return self.by_size[max(num_at_most, 1) - 1]


@dataclass(slots=True)
class _Seen:
    all_tenants: _Window = field(default_factory=_Window)
    by_tenant: dict[str, _Window] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningHistogram:
    """A tenant's quantile over a sliding window; that of all tenants while the tenant is new."""

    quantile: float = 0.5
    """Share of the answers in the window that the prediction covers."""
    window: int = 1000
    """Number of answers remembered per tenant, and of all tenants together."""
    min_observations: int = 10
    """Number of answers of a tenant before its own are used; until then those of all tenants are."""
    initial_tokens: int = 256
    """Prediction in tokens before any answer has ended."""
    _seen: _Seen = field(default_factory=_Seen, init=False, repr=False)

    needs_truth: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 0 < self.quantile <= 1:
            raise ValueError(f"quantile={self.quantile}: must be a share, > 0 and <= 1")
        for name in ("window", "min_observations", "initial_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be >= 1")
        if self.min_observations > self.window:
            raise ValueError(
                f"min_observations={self.min_observations}: must be <= window={self.window}, "
                "or no tenant would ever be believed"
            )

    def predict(self, request: Request, true_num_tokens: int | None) -> int:
        """The quantile of the tenant, of all tenants, or initial_tokens.

        The first of these that is available.
        """
        window = self._seen.by_tenant.get(request.tenant)
        if window is None or len(window.recent) < self.min_observations:
            window = self._seen.all_tenants
        num_tokens = window.quantile(self.quantile) if window.recent else self.initial_tokens
        return within_limits(request, num_tokens)

    def observe(self, request: Request, num_output_tokens: int) -> None:
        """Adds a length, and forgets the oldest where a window is full."""
        seen = self._seen
        seen.all_tenants.add(num_output_tokens, self.window)
        seen.by_tenant.setdefault(request.tenant, _Window()).add(num_output_tokens, self.window)
