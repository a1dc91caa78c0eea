"""Exact placement by mixed-integer linear programming (HiGHS, through scipy).

Every set of models that fits on one GPU is a column, as in the cutting-stock problem (Gilmore and Gomory,
1961), so the cost of sharing a GPU can be any function. AlpaServe (OSDI 2023) and Helix (ASPLOS 2025) also
place models on GPUs with such programs. Solving takes seconds for hundreds of columns and GPUs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from math import inf

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array, csr_array

from policies.placement import Hosting, Objective, Plan, Pool, Problem, Unit


def units_of(problem: Problem) -> list[Unit]:
    """Returns every possible unit: a replica on several GPUs, or a set of replicas that fit on one GPU."""
    found: list[Unit] = []
    for pool in problem.pools:
        found += _of_pool(problem, pool)
    return found


def unit(problem: Problem, pool: Pool, hostings: Sequence[Hosting]) -> Unit | None:
    """Returns the unit of these replicas; None if they do not fit. Free memory is divided equally, for KV."""
    ordered = sorted(hostings, key=lambda hosting: hosting.model)
    left = pool.memory_bytes - sum(hosting.bytes_each for hosting in ordered)
    if left < 0 or ordered[0].num_gpus > pool.count:
        return None
    rates = tuple(hosting.rate(hosting.bytes_each + left / len(ordered)) for hosting in ordered)
    shares = problem.time_shared and len(ordered) > 1
    return Unit(
        pool=pool.name,
        num_gpus=ordered[0].num_gpus,
        models=tuple(hosting.model for hosting in ordered),
        rates=rates,
        time_share=1 - pool.switch_share if shares else 1.0,
    )


def _of_pool(problem: Problem, pool: Pool) -> Iterator[Unit]:
    own = [hosting for hosting in problem.hostings if hosting.pool == pool.name]
    on_several = [hosting for hosting in own if hosting.num_gpus > 1]
    on_one = [hosting for hosting in own if hosting.num_gpus == 1]
    sets = ([hosting] for hosting in on_several if hosting.num_gpus <= pool.gpus_per_node)
    for hostings in [*sets, *_sets(on_one, problem.max_models_per_gpu)]:
        found = unit(problem, pool, hostings)
        if found is not None:
            yield found


def _sets(hostings: Sequence[Hosting], largest: int) -> Iterator[Sequence[Hosting]]:
    for size in range(1, largest + 1):
        yield from combinations_with_replacement(hostings, size)


Vector = NDArray[np.float64]


@dataclass(slots=True)
class Program:
    """The linear program. Variables: n_u, then t_ur for each replica r of each unit.

    A placement as a linear program: the count of each unit, and the split of its time among its models.

        n_u      number of units of kind u
        t_um     GPU time that model m gets on all units of kind u       sum_m t_um <= time share_u n_u
        served   s_m = sum_u rate_um t_um, at most the demand

        value    max sum_m value_m s_m                     cost    min sum_u price_u n_u,  s_m >= demand_m

    The split of time follows the traffic, because time slices go to replicas with requests, and a router
    distributes the requests.
    """

    problem: Problem
    units: Sequence[Unit]

    @property
    def num_variables(self) -> int:
        return len(self.units) + sum(len(unit.models) for unit in self.units)

    @property
    def served(self) -> csr_array:
        """Rate served per variable [models, variables]."""
        rows = {demand.model: row for row, demand in enumerate(self.problem.demands)}
        entries = [
            (rows[model], len(self.units) + column, rate)
            for column, model, rate in self._replicas()
            if model in rows
        ]
        return self._matrix(entries, len(rows))

    @property
    def usd_per_hour(self) -> Vector:
        """Price of each variable in $/hour."""
        prices = {pool.name: pool.usd_per_hour for pool in self.problem.pools}
        rents = [prices[unit.pool] * unit.num_gpus for unit in self.units]
        return np.array(rents + [0.0] * (self.num_variables - len(rents)))

    def constraints(self) -> tuple[csr_array, Vector]:
        """Returns A and b of A x <= b: time of each unit, GPUs of each pool and node, rates within demand."""
        entries: list[tuple[int, int, float]] = []
        limits: list[float] = []
        column = len(self.units)
        for index, unit in enumerate(self.units):
            rows = [len(limits)] * len(unit.models)
            if not self.problem.time_shared:  # each replica has all of the time
                rows = [len(limits) + i for i in range(len(unit.models))]
            for row in rows:
                entries.append((row, column, 1.0))
                column += 1
            for row in set(rows):
                entries.append((row, index, -unit.time_share))
            limits += [0.0] * len(set(rows))
        for pool in self.problem.pools:
            # Groups of 1, 2, 4, ... GPUs can be placed inside nodes if, for each size, the groups of at least
            # this size need no more groups of this size than the nodes have. (They are placed largest first,
            # and each size divides the next larger one.)
            own = [(i, unit.num_gpus) for i, unit in enumerate(self.units) if unit.pool == pool.name]
            for least in sorted({size for _, size in own}):
                entries += [(len(limits), i, size / least) for i, size in own if size >= least]
                limits.append(float(sum(node // least for node in pool.nodes)))
        if self.problem.objective is Objective.value:
            served = self.served.tocoo()
            for row, demand in enumerate(self.problem.demands):
                if demand.rate is not None:
                    in_row = served.row == row
                    entries += [
                        (len(limits), int(column), float(rate))
                        for column, rate in zip(served.col[in_row], served.data[in_row], strict=True)
                    ]
                    limits.append(demand.rate)
        return self._matrix(entries, len(limits)), np.array(limits)

    def _replicas(self) -> list[tuple[int, str, float]]:
        """Returns (index among the time variables, model, rate) of all replicas."""
        pairs = (pair for unit in self.units for pair in zip(unit.models, unit.rates, strict=True))
        return [(column, model, rate) for column, (model, rate) in enumerate(pairs)]

    def _matrix(self, entries: list[tuple[int, int, float]], num_rows: int) -> csr_array:
        rows, columns, values = zip(*entries, strict=True) if entries else ((), (), ())
        return coo_array((values, (rows, columns)), shape=(num_rows, self.num_variables)).tocsr()


TIE = 1e-7
"""Relative tolerance of the value: among placements within it, the cheapest is chosen."""


def solve(problem: Problem, units: Sequence[Unit]) -> list[int] | None:
    """Returns the count of each unit; ties in value go to the cheapest. None: the demand cannot be met."""
    if not units:
        return (
            [] if problem.objective is Objective.value or not any(d.rate for d in problem.demands) else None
        )
    program = Program(problem, units)
    matrix, limits = program.constraints()
    rules = [LinearConstraint(matrix, -np.inf, limits)]
    whole = (np.arange(program.num_variables) < len(units)).astype(np.int64)
    # GPUs without rent get a small one, so they stay empty if possible.
    rent = program.usd_per_hour
    rent = rent + whole * 1e-9 * max(1.0, float(rent.max(initial=0.0)))
    if problem.objective is Objective.cost:
        least = [demand.rate or 0.0 for demand in problem.demands]
        rules.append(LinearConstraint(program.served, least, np.inf))
        price = rent
    else:
        worth = program.served.T @ np.array([demand.value for demand in problem.demands])
        price = rent * (TIE * _most_value(problem, units) / _whole_rent(problem, rent, units)) - worth
    found = milp(price, constraints=rules, integrality=whole, options={"mip_rel_gap": 0.0})
    if not found.success:
        return None
    return [round(count) for count in found.x[: len(units)].tolist()]


def _most_value(problem: Problem, units: Sequence[Unit]) -> float:
    """Returns an upper bound of the value, from all demand or from all GPUs with each pool's best unit."""
    values = {demand.model: demand.value for demand in problem.demands}
    demanded = sum(inf if d.rate is None and d.value else d.value * (d.rate or 0.0) for d in problem.demands)
    by_gpu = sum(
        pool.count * max((_value_each(unit, values) for unit in units if unit.pool == pool.name), default=0.0)
        for pool in problem.pools
    )
    return min(demanded, by_gpu)


def _value_each(unit: Unit, values: Mapping[str, float]) -> float:
    pairs = zip(unit.models, unit.rates, strict=True)
    return sum(values.get(model, 0.0) * rate for model, rate in pairs) / unit.num_gpus


def _whole_rent(problem: Problem, rent: Vector, units: Sequence[Unit]) -> float:
    """Returns the rent of all GPUs in $/hour."""
    each = {unit.pool: float(rent[index]) / unit.num_gpus for index, unit in enumerate(units)}
    return sum(pool.count * each.get(pool.name, 0.0) for pool in problem.pools)


def plan_of(problem: Problem, units: Sequence[Unit], notes: Sequence[str] = ()) -> Plan:
    """Returns the best result of the listed units. Raises ValueError if a pool has too few GPUs for them."""
    counts = Counter(units)
    kinds = list(counts)
    program = Program(problem, kinds)
    rent = float(program.usd_per_hour[: len(kinds)] @ np.array([counts[kind] for kind in kinds]))
    amounts = _most_served(program, [counts[kind] for kind in kinds])
    demands = problem.demands
    return Plan(
        units=tuple((kind, counts[kind]) for kind in kinds),
        served={demand.model: float(amount) for demand, amount in zip(demands, amounts, strict=True)},
        value=float(sum(demand.value * amount for demand, amount in zip(demands, amounts, strict=True))),
        usd_per_hour=rent,
        met=all(
            demand.rate is None or amount >= demand.rate * (1 - 1e-7)
            for demand, amount in zip(demands, amounts, strict=True)
        ),
        notes=tuple(notes),
    )


def _most_served(program: Program, counts: Sequence[int]) -> Vector:
    """Returns the rates per model that maximise the value; for objective cost, the shares of demand."""
    if not program.units:
        return np.zeros(len(program.problem.demands))
    served = program.served
    capped = Program(_as_value(program.problem), program.units)
    matrix, limits = capped.constraints()
    worth = served.T @ np.array([demand.value for demand in capped.problem.demands])
    least, most = np.zeros(program.num_variables), np.full(program.num_variables, np.inf)
    least[: len(counts)] = most[: len(counts)] = counts
    found = milp(-worth, constraints=LinearConstraint(matrix, -np.inf, limits), bounds=Bounds(least, most))
    if not found.success:
        raise ValueError(f"the placement needs more GPUs than there are: {found.message}")
    amounts: Vector = served @ found.x
    return amounts


def _as_value(problem: Problem) -> Problem:
    """Returns the problem with objective value; for cost, every complete demand has the value 1."""
    if problem.objective is Objective.value:
        return problem
    return Problem(
        pools=problem.pools,
        demands=tuple(
            type(demand)(model=demand.model, rate=demand.rate, value=1 / demand.rate if demand.rate else 0.0)
            for demand in problem.demands
        ),
        hostings=problem.hostings,
        max_models_per_gpu=problem.max_models_per_gpu,
        time_shared=problem.time_shared,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Milp:
    """Optimal placement; ties in value go to the cheapest."""

    def place(self, problem: Problem) -> Plan:
        """Returns the best placement. Raises ValueError if the objective is cost and demand cannot be met."""
        units = units_of(problem)
        counts = solve(problem, units)
        if counts is None:
            rates = ", ".join(f"{demand.model} {demand.rate:,.6g}" for demand in problem.demands)
            gpus = ", ".join(f"{pool.count} {pool.name}" for pool in problem.pools)
            raise ValueError(
                f"objective=cost: no placement serves {rates} tokens/s on {gpus}; allow more GPUs"
            )
        return plan_of(
            problem, [unit for unit, count in zip(units, counts, strict=True) for _ in range(count)]
        )
