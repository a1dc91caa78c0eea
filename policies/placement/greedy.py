"""Greedy placements: replicas are added one by one, and kept if they serve more."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from policies.placement import Hosting, Objective, Plan, Pool, Problem, Unit
from policies.placement.milp import plan_of, unit


@dataclass(slots=True)
class Slot:
    """One GPU and its replicas."""

    pool: Pool
    node: int
    hostings: list[Hosting] = field(default_factory=list)

    @property
    def free_bytes(self) -> float:
        """Free memory in bytes."""
        return self.pool.memory_bytes - sum(hosting.bytes_each for hosting in self.hostings)


class Fleet:
    """The GPUs of a problem, in the order of its pools, at first without replicas."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.slots = [
            Slot(pool, node)
            for pool in problem.pools
            for node, size in enumerate(pool.nodes)
            for _ in range(size)
        ]
        self._groups: list[list[Slot]] = []  # the GPUs of each replica on several GPUs

    def candidates(self, hosting: Hosting) -> Iterator[list[Slot]]:
        """Yields GPUs on which the replica fits: a single GPU, or empty GPUs of one node."""
        own_pool = [slot for slot in self.slots if slot.pool.name == hosting.pool]
        if hosting.num_gpus == 1:
            for slot in own_pool:
                is_in_group = any(other.num_gpus > 1 for other in slot.hostings)
                may_add = len(slot.hostings) < self.problem.max_models_per_gpu
                if may_add and not is_in_group and slot.free_bytes >= hosting.bytes_each:
                    yield [slot]
            return
        for node in sorted({slot.node for slot in own_pool}):
            empty = [slot for slot in own_pool if slot.node == node and not slot.hostings]
            if len(empty) >= hosting.num_gpus and empty[0].free_bytes >= hosting.bytes_each:
                yield empty[: hosting.num_gpus]

    def add(self, hosting: Hosting, slots: list[Slot]) -> None:
        """Adds a replica to the GPUs."""
        for slot in slots:
            slot.hostings.append(hosting)
        if len(slots) > 1:
            self._groups.append(slots)

    def remove(self, hosting: Hosting, slots: list[Slot]) -> None:
        """Removes a replica from its GPUs."""
        for slot in slots:
            slot.hostings.remove(hosting)
        if len(slots) > 1:
            self._groups.remove(slots)

    def plan(self) -> Plan:
        """Returns the placement and the rates that it serves."""
        return plan_of(self.problem, list(self._units()))

    def _units(self) -> Iterator[Unit]:
        for slots in self._groups:
            yield self._unit(slots[0])
        for slot in self.slots:
            if slot.hostings and slot.hostings[0].num_gpus == 1:
                yield self._unit(slot)

    def _unit(self, slot: Slot) -> Unit:
        found = unit(self.problem, slot.pool, slot.hostings)
        assert found is not None
        return found


Choose = Callable[[Hosting, list[list[Slot]]], list[Slot]]
"""Chooses one of the candidates; each is a list of GPUs on which the replica fits."""


def fill(problem: Problem, orders: Iterable[Sequence[Hosting]], choose: Choose) -> Plan:
    """Adds replicas in rounds of one turn per order; a turn adds the first hosting that fits and serves more.

    orders: the hostings of each turn, in the order of the attempts. Stops after a round that adds nothing.
    Raises ValueError if the objective is cost and a demand is not met.
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
    """Returns one turn per model, largest model first; within a turn, fewest GPUs first, then by pool."""
    pools = [pool.name for pool in problem.pools]
    turns = []
    for demand in problem.demands:
        own = [hosting for hosting in problem.hostings if hosting.model == demand.model]
        own.sort(key=lambda hosting: (hosting.num_gpus, pools.index(hosting.pool)))
        if own:
            turns.append(own)
    return sorted(turns, key=lambda own: -max(h.bytes_each * h.num_gpus for h in own))


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstFitDecreasing:
    """First fit over the pools in the given order; one replica of each model in turn.

    First fit decreasing (Johnson, 1973): the largest model first, on the first GPU with enough free memory.
    """

    def place(self, problem: Problem) -> Plan:
        """Returns a placement. Raises ValueError if the objective is cost and it leaves demand unmet."""
        return fill(problem, by_size(problem), lambda hosting, candidates: candidates[0])


@dataclass(frozen=True, kw_only=True, slots=True)
class BestFitDecreasing:
    """Best fit over all pools, on as few GPUs as possible; one replica of each model in turn.

    Best fit decreasing (Johnson, 1973): the largest model first, on the fullest GPU on which it fits.
    """

    def place(self, problem: Problem) -> Plan:
        """Returns a placement. Raises ValueError if the objective is cost and it leaves demand unmet."""
        largest = {pool.name: pool.memory_bytes for pool in problem.pools}
        turns = [
            sorted(turn, key=lambda hosting: (hosting.num_gpus, largest[hosting.pool] - hosting.bytes_each))
            for turn in by_size(problem)
        ]
        return fill(problem, turns, tightest)


def tightest(hosting: Hosting, candidates: list[list[Slot]]) -> list[Slot]:
    """Returns the GPUs with the least free memory; ties go to the first."""
    return min(candidates, key=lambda slots: sum(slot.free_bytes for slot in slots))


@dataclass(frozen=True, kw_only=True, slots=True)
class DensestFirst:
    """Adds replicas of the densest model while they serve more, then of the next densest.

    For objective cost, density is the share of the demand served per $ of rent.

    Densest first: the model with the most value per byte of memory first (Dantzig, 1957, for knapsacks).
    """

    def place(self, problem: Problem) -> Plan:
        """Returns a placement. Raises ValueError if the objective is cost and it leaves demand unmet."""
        values = {d.model: d.value for d in problem.demands}
        shares = {d.model: 1 / d.rate for d in problem.demands if d.rate}
        pools = {pool.name: pool for pool in problem.pools}

        def density(index: int) -> float:
            hosting = problem.hostings[index]
            pool = pools[hosting.pool]
            rate = hosting.rate(pool.memory_bytes)
            if problem.objective is Objective.cost:
                rent = hosting.num_gpus * pool.usd_per_hour
                return rate * shares.get(hosting.model, 0.0) / max(rent, 1e-12)
            return rate * values.get(hosting.model, 0.0) / (hosting.bytes_each * hosting.num_gpus)

        order = sorted(range(len(problem.hostings)), key=lambda index: (-density(index), index))
        return fill(problem, [[problem.hostings[index] for index in order]], tightest)
