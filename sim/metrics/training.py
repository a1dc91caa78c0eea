"""Figures on training: after how much serving it was worth its computation."""

from __future__ import annotations

from collections.abc import Sequence

from hwmodels.break_even import tokens_to_match_training, training_flops
from hwmodels.iterations.energy import EnergySettings
from sim.metrics.utilisation import PoolHardware, Work


def training_use(
    settings: EnergySettings, pools: Sequence[PoolHardware], works: Sequence[Work], output_tokens: float
) -> dict[str, float] | None:
    """Computes the FLOPs of training, and the output tokens of this traffic that take as many.

    The model is that of the first pool. Returns None without `energy.training_tokens`.
    """
    if settings.training_tokens is None:
        return None
    flops = training_flops(pools[0].model, settings.training_tokens)
    served = sum(work.flops for work in works)
    return {
        "training_tokens": settings.training_tokens,
        "training_flops": flops,
        "output_tokens_of_equal_flops": tokens_to_match_training(flops, served, output_tokens),
    }
