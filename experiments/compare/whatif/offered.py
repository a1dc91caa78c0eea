"""Changes that `windtunnel whatif` offers for any baseline, and the reasons why one may not apply."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from hwmodels.model.weights import Role, weight_format
from policies.caching.content import FutureUses
from policies.caching.pool import pool_of
from sim.setup.pool import PoolSettings
from sim.setup.scenario import Scenario
from sim.workload.base import Source

FASTER_GPUS = ("l40s", "h100_sxm", "h200_sxm", "b200_sxm")
"""Choices of `hardware` by memory bandwidth; the first one faster than the baseline's is offered."""


class Change(NamedTuple):
    """Change of settings: its name and its overrides."""

    name: str
    overrides: tuple[str, ...]


class DoesNotApply(Exception):
    """Raised with the reason why a change does not apply to the baseline."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Baseline:
    """Scenario that is changed, and its traffic."""

    scenario: Scenario
    source: Source
    bandwidth_by_gpu: Callable[[str], float]
    """Function from a choice of `hardware` to its memory bandwidth, in bytes/s."""

    @property
    def pools(self) -> list[PoolSettings]:
        return list(self.scenario.pools_by_name.values())

    @property
    def only_pool(self) -> PoolSettings:
        """The one pool of the scenario. Raises DoesNotApply with several pools, and with autoscaling."""
        if self.scenario.pools:
            raise DoesNotApply("the baseline has pools; change one of them, such as pools.NAME.replicas=2")
        if self.scenario.scaling is not None:
            raise DoesNotApply("autoscaling sets the number of replicas")
        return self.scenario


def more_traffic(base: Baseline) -> Change:
    """Doubles the load; raises DoesNotApply if the requests have no rate."""
    if base.source.last_arrival_s is None or not base.source.last_arrival_s:
        raise DoesNotApply("the workload has no request rate (a closed loop, or all requests at once)")
    return Change("double the traffic", (f"load={2 * base.scenario.load:g}",))


def longer_prompts(base: Baseline) -> Change:
    """Doubles the prompts."""
    return Change("prompts twice as long", (f"prompt_scale={2 * base.scenario.prompt_scale:g}",))


def faster_gpu(base: Baseline) -> Change:
    """Replaces the GPU by the first of FASTER_GPUS with more memory bandwidth; raises DoesNotApply."""
    if base.scenario.pools:
        raise DoesNotApply("the baseline has pools; change one of them, such as pools.NAME.hardware=h200_sxm")
    present = base.scenario.hardware
    for name in FASTER_GPUS:
        if base.bandwidth_by_gpu(name) > present.memory_bandwidth_bytes_per_s:
            return Change(f"GPU: {name}", (f"hardware={name}",))
    raise DoesNotApply(f"no GPU of {', '.join(FASTER_GPUS)} has more memory bandwidth than {present.name}")


def fp8(base: Baseline) -> Change:
    """Stores the weights in FP8; raises DoesNotApply if the GPU lacks FP8, or 8 bits are not fewer."""
    for pool in base.pools:
        if "fp8" not in pool.hardware.peak_flops_per_s:
            raise DoesNotApply(f"{pool.hardware.name} does not compute in fp8")
        stored = weight_format(pool.model.weight_format_of(Role.dense))
        if stored.bits <= 8:
            raise DoesNotApply(f"the weights of {pool.model.name} are already {stored.name}")
    return Change("FP8 weights", ("model.weights=fp8",))


def prefix_cache(base: Baseline) -> Change:
    """Turns the prefix cache on, or off if all pools have one."""
    pools = base.pools
    has_cache = [
        pool_of(p.caching, p.kv_memory(p.plan_memory().num_blocks, FutureUses(()))).finds_kv for p in pools
    ]
    if all(has_cache):
        return Change("prefix cache off", ("caching=paged",))
    return Change("prefix cache on", ("caching=prefix",))


def half_fail(base: Baseline) -> Change:
    """Crashes every other replica in the middle of the traffic; raises DoesNotApply."""
    num_replicas, last_s = base.scenario.num_replicas, base.source.last_arrival_s
    if num_replicas < 2:
        raise DoesNotApply("there is only one replica")
    if base.scenario.failures.events:
        raise DoesNotApply("the baseline already has failures")
    if not last_s:
        raise DoesNotApply("the end of the traffic is not known in advance")
    failing = ",".join(str(replica) for replica in range(1, num_replicas, 2))
    return Change(
        "half the replicas fail",
        (
            "failures=crash",
            f"failures.events.0.at_s={last_s / 2:.6g}",
            f"failures.events.0.duration_s={100 * last_s:.6g}",
            f"failures.events.0.replicas=[{failing}]",
        ),
    )


def replica_more(base: Baseline) -> Change:
    """Adds a replica."""
    return Change("one more replica", (f"replicas={base.only_pool.replicas + 1}",))


def replica_less(base: Baseline) -> Change:
    """Removes a replica; raises DoesNotApply if there is only one."""
    if base.only_pool.replicas < 2:
        raise DoesNotApply("there is only one replica")
    return Change("one replica fewer", (f"replicas={base.only_pool.replicas - 1}",))


OFFERED: Mapping[str, Callable[[Baseline], Change]] = {
    function.__name__: function
    for function in (
        more_traffic,
        longer_prompts,
        faster_gpu,
        fp8,
        prefix_cache,
        replica_more,
        replica_less,
        half_fail,
    )
}
"""Name in `whatif.offered` -> function that makes the change, or raises DoesNotApply."""
