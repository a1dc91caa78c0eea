"""Text on break-evens: an API's bill beside the cost of the fleet, and serving beside training."""

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


def training_line(summary: dict[str, Any]) -> str:
    """Returns how much serving takes as many FLOPs as training; empty without `energy.training_tokens`."""
    figures = summary.get("training")
    if figures is None:
        return ""
    return (
        f"Training on {figures['training_tokens']:,.4g} tokens took {figures['training_flops']:,.3g} FLOPs; "
        f"serving takes as many for {figures['output_tokens_of_equal_flops']:,.4g} output tokens of such "
        "traffic"
    )
