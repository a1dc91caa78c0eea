"""Pools that take turns on the same GPUs: which are refused, and how long a change takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hwmodels.iterations.memory_profile import GIB
from sim.engine.replica_pool import ReplicaPool
from sim.setup.pool import PoolSettings


def taking_turns(
    pools: Sequence[ReplicaPool], settings: Sequence[PoolSettings], sleep_level: int
) -> list[ReplicaPool]:
    """Returns the pools with a replica in the first one only, and with the times to sleep and to wake.

    Level 1 copies the weights to host memory and back, level 2 loads them from the source of a cold start.
    """
    return [
        replace(
            pool,
            replicas=int(index == 0),
            sleep_s=own.load_from_host_s if sleep_level == 1 else 0.0,
            wake_s=own.load_from_host_s if sleep_level == 1 else own.load_s,
        )
        for index, (pool, own) in enumerate(zip(pools, settings, strict=True))
    ]


def check_turns(pools: Mapping[str, PoolSettings], host_memory_gib: float) -> None:
    """Raises ValueError for pools that cannot take turns on the same GPUs.

    host_memory_gib: host memory per GPU for the weights of all models.
    """
    if len(pools) < 2:
        raise ValueError("turns.sleep_level: needs a pool for each model, at least two; choose `pools`")
    first_name, first = next(iter(pools.items()))
    models = [pool.model.name for pool in pools.values()]
    if len(set(models)) < len(models):
        raise ValueError(f"turns.sleep_level, pools: must serve different models, not {', '.join(models)}")
    for name, pool in pools.items():
        if pool.replicas != 1 or pool.scaling is not None or pool.role != "mixed":
            raise ValueError(
                f"turns.sleep_level, pools.{name}: must have replicas=1, role=mixed and scaling=none, as one "
                "replica at a time runs on the GPUs"
            )
        if (pool.hardware, pool.layout.num_devices) != (first.hardware, first.layout.num_devices):
            raise ValueError(
                f"turns.sleep_level, pools.{name}: must have the hardware and the number of GPUs of "
                f"pools.{first_name}, as they share them"
            )
    weights_gib = sum(pool.plan_memory().weights_bytes for pool in pools.values()) / GIB
    if weights_gib > host_memory_gib:
        raise ValueError(
            f"turns.sleep_level=1: the weights of all models need {weights_gib:.1f} GiB of host memory per "
            f"GPU, more than storage.host_memory_gib={host_memory_gib:g}; choose turns.sleep_level=2"
        )
