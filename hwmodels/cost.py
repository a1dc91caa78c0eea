"""Money: what a token costs on hardware rented by the hour."""

from __future__ import annotations

import math

from hwmodels.checks import check_finite


def usd_per_million_tokens(price_usd_per_hour: float, tokens_per_s: float) -> float:
    """Price of a million tokens at a steady rate; infinite where no tokens come out.

    price / 3600 / rate * 1e6: 2 $/h at 100 tokens/s is $5.556 per million.
    price_usd_per_hour covers everything that makes the tokens: devices x price of one.
    Raises ValueError for a price or rate that is negative or not finite.
    """
    check_finite("price_usd_per_hour", price_usd_per_hour, unit="$/h", zero_allowed=True)
    check_finite("tokens_per_s", tokens_per_s, unit="tokens/s", zero_allowed=True)
    if tokens_per_s == 0:
        return math.inf
    return price_usd_per_hour / 3600 / tokens_per_s * 1e6
