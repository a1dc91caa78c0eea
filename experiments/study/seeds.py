"""Checks the seeds of a study, and finds those that give different runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice

from sim.cluster.failures import Failures
from sim.setup.scenario import Scenario
from sim.workload.base import Arrival

DRAWING = ("routing", "decode_routing", "prediction", "retries")
"""Parts of a scenario that may draw random numbers, from the seed of the run unless another was set."""
COMPARED = 2000
"""Number of first requests by which the traffic of two seeds is compared."""


def check_seeds(seeds: Sequence[int], usual: str) -> None:
    """Raises ValueError unless seeds are given, distinct and >= 0. usual: their usual number, in words."""
    if not seeds:
        example = {"three": "[0,1,2]", "five": "[0,1,2,3,4]"}[usual]
        raise ValueError(
            f"seeds=[]: must contain at least one seed; {usual} give a confidence interval, such as "
            f"seeds={example}"
        )
    if min(seeds) < 0:
        raise ValueError(f"seeds={min(seeds)}: must be >= 0")
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds={list(seeds)}: must be distinct, because equal seeds give equal runs")


def distinct_seeds(arms: Sequence[Callable[[int], Scenario]], seeds: Sequence[int]) -> tuple[int, ...]:
    """Returns the seeds of a study: only the first if all seeds give the same runs, as those of a trace do.

    arms: each returns the scenario of a seed. A scenario in which a part may draw random numbers is taken to
    be another one with every seed.
    """
    for scenario_of in arms:
        first = scenario_of(seeds[0])
        if draws(first):
            return tuple(seeds)
        begins = _begin(first)
        if any(_begin(scenario_of(seed)) != begins for seed in seeds[1:]):
            return tuple(seeds)
    return (seeds[0],)


def _begin(scenario: Scenario) -> list[Arrival]:
    """Returns the first requests of the traffic, by which two seeds are compared."""
    return list(islice(scenario.source().arrivals(), COMPARED))


def draws(scenario: Scenario) -> bool:
    """Returns whether a part of a scenario besides its traffic may draw random numbers."""
    names = [name for name in DRAWING if name != "retries" or scenario.retries.max_attempts > 1]
    pools = scenario.pools_by_name.values()
    if any(hasattr(getattr(scenario, name), "seed") for name in names):
        return True
    return (
        any(
            pool.acceptance is not None or pool.jitter is not None or hasattr(pool.prediction, "seed")
            for pool in pools
        )
        or scenario.failures != Failures()
    )
