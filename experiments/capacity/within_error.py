"""Says whether the cheapest candidate is the cheapest one within the expected error of simulated throughputs.

The number of replicas, and so the cost, is inversely proportional to the throughput of a replica within the
SLO. Two candidates on one GPU with one engine share the calibration and the host times, so most of their
errors are common and cancel in the ratio of their costs: the error of that ratio was measured on pairs of
configurations of one model, GPU and engine. Between GPUs or engines the errors of both throughputs count, and
are taken as independent: 3 % and 4 % are 5 % together. A fleet whose engine may find too little KV memory to
start is not recommended.
"""

from __future__ import annotations

import math
from dataclasses import replace
from enum import Enum
from typing import Any, NamedTuple

from experiments.capacity.candidates import Candidate
from experiments.capacity.results import Ranked
from hwmodels.host import GIB
from hwmodels.trust import RATIO, errors_at, shipped
from sim.setup.notes import place_of, unknown_because
from sim.setup.pool import PoolSettings

FULL = 0.995
"""Share of the KV blocks in use from which KV memory counts as full."""
LEAST_KV_BYTES = 0.5 * GIB
"""KV memory of a GPU that the errors of the memory model may use up."""
SORTING_VERSION = "0.16.0"
"""Last version of vLLM that sorts all logits: see `hwmodels.iterations.memory`."""


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
    """Why the error is not known, or why the winner is not decided whatever the error; empty if neither."""


def verdict(best: Ranked, other: Ranked) -> Verdict | None:
    """Returns the verdict on the winner and the runner-up; None if they cost nothing.

    None as well if the runner-up is cheaper, but may not start.
    """
    if not best.usd_per_hour > 0 or other.usd_per_hour < best.usd_per_hour:
        return None
    more = 100 * (other.usd_per_hour / best.usd_per_hour - 1)
    found = decide(more, best.candidate.scenario, other.candidate.scenario)
    short = kv_shortage(best)
    if short and found.decision is not Decision.unknown:
        return found._replace(decision=Decision.undecided, reason=short)
    return found


def kv_shortage(row: Ranked) -> str:
    """Returns a clause if a fleet's KV memory is too small to rely on it; empty if there is room.

    It is if the working set fills it in a run, or if whether an engine starts depends on its version.
    """
    scenario, name = row.candidate.scenario, row.candidate.name
    plan = scenario.plan_memory()
    use = row.figures["kv_peak"]
    peak = use.mean if math.isnan(use.high) else max(use.mean, use.high)
    if peak >= FULL:
        tokens = plan.num_blocks * plan.block_size
        return (
            f"the working set of {name} fills its KV memory of {tokens:,} tokens per replica, so that "
            "requests wait or lose their KV"
        )
    return start_doubt(row.candidate)


def start_doubt(candidate: Candidate) -> str:
    """Returns a clause if whether an engine starts depends on its version; empty if it surely does.

    vLLM up to 0.16 takes up to 3 GiB more for sampling.
    """
    scenario = candidate.scenario
    if scenario.engine.num_kv_blocks is not None:
        return ""
    kv_bytes = scenario.plan_memory().kv_bytes
    if kv_bytes >= LEAST_KV_BYTES and _starts_with(scenario, SORTING_VERSION):
        return ""
    return (
        f"the KV memory of {candidate.name} is {kv_bytes / GIB:.1f} GiB on each GPU, and whether an engine "
        f"finds that much depends on its version (vLLM {SORTING_VERSION} takes more for sampling)"
    )


def _starts_with(scenario: PoolSettings, version: str) -> bool:
    """Returns whether the replica of a newest vLLM also fits in the memory of an older version."""
    engine = scenario.engine
    if engine.memory_profile != "vllm" or engine.version is not None or engine.num_kv_blocks is not None:
        return True
    try:
        replace(scenario, engine=replace(engine, version=version)).plan_memory()
    except ValueError:
        return False
    return True


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
        f"their ratio, {shared}, is expected within {found.median_percent:.2g} % (median) and "
        f"{found.p90_percent:.2g} % (p90)"
    )
    more_text = f"{found.more_percent:,.0f}" if found.more_percent >= 99.5 else f"{found.more_percent:.2g}"
    cost = f"{more_text} % more" if found.more_percent > 1e-7 else "as much"
    more = f"{name} costs {cost}, and {error}"
    if found.reason:
        return f"The winner is not decided, because {found.reason}; {more}."
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
