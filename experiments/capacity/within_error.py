"""Says whether the cheapest candidate is the cheapest one within the expected error of simulated throughputs.

The number of replicas, and so the cost, is inversely proportional to the throughput of a replica within the
SLO. Two candidates on one GPU with one engine share the calibration and the host times, so most of their
errors are common and cancel in the ratio of their costs: the error of that ratio was measured on pairs of
configurations of one model, GPU and engine. Between GPUs or engines the errors of both throughputs count, and
are taken as independent: 3 % and 4 % are 5 % together.
"""

from __future__ import annotations

import math
from enum import Enum
from typing import Any, NamedTuple

from experiments.capacity.results import Ranked
from hwmodels.trust.lookup import errors_at
from hwmodels.trust.table import RATIO, shipped
from sim.setup.expected_errors import place_of, unknown_because
from sim.setup.pool import PoolSettings


class Decision(Enum):
    """Comparison of a difference in cost with the error of the ratio of two costs."""

    decided = "decided"
    """It exceeds the error of nine in ten cases."""
    likely = "likely"
    """It exceeds the error of half of the cases only."""
    undecided = "undecided"
    """It exceeds the error of fewer than half of the cases."""
    unknown = "unknown"
    """Throughputs of a candidate were never compared with measured ones."""


class Verdict(NamedTuple):
    """Comparison of the winner and the runner-up, given the error of the simulation."""

    decision: Decision
    more_percent: float
    """Cost of the runner-up over that of the winner, minus 1."""
    median_percent: float
    """Error of the ratio of both costs that half of the cases do not exceed; NaN if unknown."""
    p90_percent: float
    is_common: bool
    """True if both have one GPU and engine, so that most of their errors are common."""
    reason: str
    """Why the error is not known; empty if it is."""


def verdict(best: Ranked, other: Ranked) -> Verdict | None:
    """Returns the verdict on the winner and the runner-up; None if they cost nothing."""
    if not best.usd_per_hour > 0:
        return None
    more = 100 * (other.usd_per_hour / best.usd_per_hour - 1)
    return decide(more, best.candidate.scenario, other.candidate.scenario)


def decide(more_percent: float, best: PoolSettings, other: PoolSettings) -> Verdict:
    """Compares a difference in cost with the expected error of the ratio of two candidates."""
    places = [place_of(best), place_of(other)]
    is_common = places[0] == places[1]
    reason = unknown_because(best) or unknown_because(other)
    figure = RATIO if is_common else "throughput"
    rows = [errors_at(shipped(), place, "closed").get(figure) for place in places]
    if reason or None in rows:
        lack = reason or "throughputs of this engine were never compared with measured ones"
        return Verdict(Decision.unknown, more_percent, math.nan, math.nan, is_common, lack)
    of_each = [(row.median_percent, row.p90_percent) for row in rows if row is not None]
    median, p90 = of_each[0] if is_common else map(math.hypot, *of_each)
    decision = Decision.undecided
    if more_percent > median:
        decision = Decision.decided if more_percent > p90 else Decision.likely
    return Verdict(decision, more_percent, median, p90, is_common, "")


def verdict_sentence(found: Verdict, name: str) -> str:
    """Returns the verdict in words. name: of the runner-up."""
    if found.decision is Decision.unknown:
        return f"Whether {name} costs more beyond the simulator's error is unknown: {found.reason}."
    shared = (
        "on one GPU and engine, where most errors are common" if found.is_common else "with other errors each"
    )
    error = (
        f"their ratio, {shared}, is expected within {found.median_percent:.2g} % (half of the cases) and "
        f"{found.p90_percent:.2g} % (nine in ten)"
    )
    cost = f"{found.more_percent:.2g} % more" if found.more_percent > 1e-7 else "as much"
    more = f"{name} costs {cost}, and {error}"
    opening = {
        Decision.decided: "The winner is decided within the expected error",
        Decision.likely: "The winner is probable, but not decided within the expected error",
        Decision.undecided: "The winner is not decided within the expected error",
    }[found.decision]
    return f"{opening}: {more}."


def verdict_json(found: Verdict | None) -> dict[str, Any] | None:
    """Returns the verdict as plain values; an unknown figure is null."""
    if found is None:
        return None
    values = found._asdict() | {"decision": found.decision.value}
    return {
        key: None if isinstance(value, float) and math.isnan(value) else value
        for key, value in values.items()
    }
