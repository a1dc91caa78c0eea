"""All sets of replicas that fit on one GPU, or on one group of GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations_with_replacement

from policies.placement import Hosting, Pool, Problem, Unit


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
