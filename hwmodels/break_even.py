"""Break-even of a fleet of one's own against the bill of an API."""

from __future__ import annotations

import math

from hwmodels.checks import check_finite


def break_even_load(fleet_usd: float, bill_usd: float) -> float:
    """Returns the multiple of the traffic from which on the same fleet costs less than the API's bill.

    The fleet costs the same for any traffic that it can serve; the bill grows with the traffic. $2.70 an hour
    against a bill of $10 for the same hour: 0.27 of the traffic. Infinite if the API is free.
    """
    check_finite("fleet_usd", fleet_usd, unit="$", zero_allowed=True)
    check_finite("bill_usd", bill_usd, unit="$", zero_allowed=True)
    return fleet_usd / bill_usd if bill_usd else math.inf
