"""Text on the bill of an API for the traffic of a run, beside the cost of the fleet."""

from __future__ import annotations

from typing import Any


def bill_line(summary: dict[str, Any]) -> str:
    """Returns the bill of an API for this traffic, and the break-even; empty without a tariff."""
    bill, load = summary.get("bill_usd"), summary.get("break_even_load")
    if bill is None or load is None:
        return ""
    return (
        f"API at this tariff: ${bill:,.4g} for the same traffic, the fleet ${summary['cost']['usd']:,.4g}; "
        f"this fleet costs less from {load:.3g} times the traffic on, as far as it can serve it"
    )
