"""Cost per token and per request on hardware rented by the hour."""

from __future__ import annotations

import math
from typing import NamedTuple

from hwmodels.checks import check_finite


class SplitCost(NamedTuple):
    """The rent of a run, split over its tokens and requests; infinite where a count is 0."""

    usd_per_million_input_tokens: float
    """Prefill share of the rent per million input tokens."""
    usd_per_million_output_tokens: float
    """Decode share of the rent per million output tokens."""
    usd_per_thousand_requests: float
    """Whole rent per thousand requests."""


def split_cost(
    *,
    usd: float,
    prefill_time_share: float,
    num_input_tokens: float,
    num_output_tokens: float,
    num_requests: float,
) -> SplitCost:
    """Splits the rent over input tokens, output tokens and requests, idle time included.

    Prefill and decode share the rent in proportion to their busy time; idle time is split in the same
    proportion.

    Of $1, a prefill share of 0.25 over 500,000 input tokens makes $0.50 per million, the rest over 100,000
    output tokens $7.50, and 200 requests $5 per thousand. usd: the rent of all devices. Raises ValueError for
    a figure that is negative or not finite, and for a share above 1.
    """
    check_finite("usd", usd, unit="$", zero_allowed=True)
    check_finite("prefill_time_share", prefill_time_share, zero_allowed=True)
    if prefill_time_share > 1:
        raise ValueError(f"prefill_time_share={prefill_time_share}: must be a share, 0 to 1")
    check_finite("num_input_tokens", num_input_tokens, unit="tokens", zero_allowed=True)
    check_finite("num_output_tokens", num_output_tokens, unit="tokens", zero_allowed=True)
    check_finite("num_requests", num_requests, unit="requests", zero_allowed=True)
    return SplitCost(
        _each(prefill_time_share * usd, num_input_tokens) * 1e6,
        _each((1 - prefill_time_share) * usd, num_output_tokens) * 1e6,
        _each(usd, num_requests) * 1e3,
    )


def _each(usd: float, count: float) -> float:
    return usd / count if count else math.inf
