"""Checks that an engine can serve requests with several outputs."""

from __future__ import annotations

from collections.abc import Mapping

from policies.batching import BatchingTraits
from policies.caching.eviction.future import FutureUses
from policies.caching.settings import pool_of
from policies.core.policy_names import name_of
from policies.user_code.traits import traits_of
from sim.setup.pool import PoolSettings
from sim.workload.base import Workload
from sim.workload.marked import answers_of, branching_key


def check_branching(workload: Workload, pools: Mapping[str, PoolSettings]) -> None:
    """Raises ValueError, with the key of the setting, if requests with several branches cannot be served."""
    answers = answers_of(workload)
    if answers.width == 1:
        return
    key = f"{branching_key(workload)}.width"
    setting = f"{key}={answers.width}"
    for pool in pools.values():
        if pool.role != "mixed":
            raise ValueError(
                f"{setting}, role={pool.role}: a request with several branches cannot continue in "
                f"another replica; choose role=mixed or {key}=1"
            )
        if pool.speculation is not None:
            raise ValueError(
                f"{setting}, speculation={pool.speculation.method}: an engine that speculates serves one "
                f"answer per request; choose speculation=none or {key}=1"
            )
        kv_pool = pool_of(pool.caching, pool.kv_memory(pool.plan_memory().num_blocks, FutureUses(())))
        if not kv_pool.can_fork:
            raise ValueError(
                f"{setting}, caching={name_of(pool.caching)}: cannot share KV between branches; "
                f"choose caching=paged, prefix or radix, or {key}=1"
            )
        traits = traits_of(pool.batching, BatchingTraits)
        for name, limit in (
            ("engine.max_num_seqs", pool.engine.max_num_seqs),
            ("max_num_batched_tokens", pool.max_num_batched_tokens),
            ("batching.max_num_scheduled_tokens", traits.max_num_scheduled_tokens),
            ("batching.n_batch", traits.n_batch),
        ):
            if limit is not None and answers.width > limit:
                raise ValueError(
                    f"{setting}, {name}={limit}: all branches decode together; raise {name} or "
                    "lower the width"
                )
