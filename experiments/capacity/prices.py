"""Says which prices of GPUs the ranking is based on, and where they come from."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.app.settings.override import Override
from experiments.capacity.candidates import Candidate

PRICE, SOURCE = "hardware.price_usd_per_hour", "hardware.price_source"


def price_sentence(candidates: Sequence[Candidate], base: Sequence[str]) -> str:
    """Returns a sentence on the price of each GPU of the candidates; base: overrides of the command line."""
    prices = []
    for candidate in candidates:
        device = candidate.scenario.hardware
        names = {Override.parse(text).name for text in (*base, *candidate.overrides)}
        source = f"set by {PRICE}" if PRICE in names and SOURCE not in names else device.price_source
        prices.append(f"{device.name} ${device.price_usd_per_hour:,.2f} ({source})")
    return (
        f"Prices of a GPU for an hour: {'; '.join(dict.fromkeys(prices))}. They are the "
        "price_usd_per_hour of configs/hardware and age fast; to use your own, give a GPU its price in "
        "capacity.hardware: "
        f"'mine: hardware=h100_sxm {PRICE}=1.9'."
    )
