"""The common loop of greedy placements: replicas are added one by one, and kept if they serve more."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from policies.placement import Hosting, Objective, Plan, Problem
from policies.placement.fleet import Fleet, Slot

Choose = Callable[[Hosting, list[list[Slot]]], list[Slot]]
"""Chooses one of the candidates, each a list of GPUs on which the replica fits."""


def fill(problem: Problem, orders: Iterable[Sequence[Hosting]], choose: Choose) -> Plan:
    """Adds replicas in rounds of one turn per order; a turn adds the first hosting that fits and serves more.

    orders: the hostings of each turn, in the order in which they are tried. Ends after a round that adds
    nothing. Raises ValueError if the objective is cost and a demand is not met.
    """
    fleet, turns = Fleet(problem), [list(order) for order in orders]
    best = fleet.plan()
    grown = True
    while grown:
        grown = False
        for turn in turns:
            after = _one_more(fleet, turn, best, choose)
            if after is not None:
                best, grown = after, True
    if problem.objective is Objective.cost and not best.met:
        missing = [
            f"{demand.model} {best.served[demand.model]:,.6g} of {demand.rate:,.6g}"
            for demand in problem.demands
            if demand.rate and best.served[demand.model] < demand.rate * (1 - 1e-7)
        ]
        raise ValueError(f"objective=cost: this placement leaves demand unmet: {', '.join(missing)} tokens/s")
    return best


def _one_more(fleet: Fleet, turn: Sequence[Hosting], before: Plan, choose: Choose) -> Plan | None:
    for hosting in turn:
        candidates = list(fleet.candidates(hosting))
        if not candidates:
            continue
        chosen = choose(hosting, candidates)
        fleet.add(hosting, chosen)
        after = fleet.plan()
        if _is_better(fleet.problem, after, before):
            return after
        fleet.remove(hosting, chosen)
    return None


def _is_better(problem: Problem, after: Plan, before: Plan) -> bool:
    if problem.objective is Objective.value:
        return after.value > before.value * (1 + 1e-9)
    rates = {demand.model: demand.rate for demand in problem.demands}
    return _met_shares(after, rates) > _met_shares(before, rates) * (1 + 1e-9)


def _met_shares(plan: Plan, rates: dict[str, float | None]) -> float:
    return sum(plan.served[model] / rate for model, rate in rates.items() if rate)


def by_size(problem: Problem) -> list[list[Hosting]]:
    """Returns one turn per model, the largest first; in a turn the fewest GPUs first, then by pool."""
    pools = [pool.name for pool in problem.pools]
    turns = []
    for demand in problem.demands:
        own = [hosting for hosting in problem.hostings if hosting.model == demand.model]
        own.sort(key=lambda hosting: (hosting.num_gpus, pools.index(hosting.pool)))
        if own:
            turns.append(own)
    return sorted(turns, key=lambda own: -max(h.bytes_each * h.num_gpus for h in own))
