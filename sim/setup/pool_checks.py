"""Checks that the pools of a service go with each other, and with what stands beside them in a scenario.

- Pools of a disaggregated service, their network and their roles policy.
- Pools that take turns on the same GPUs: which are refused, and how long a change takes.
- A workload and the latencies that an SLO limits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hwmodels.iterations.memory_profile import GIB
from policies.batching import supports_mixed_role
from policies.batching.decode_only import DecodeOnly
from policies.batching.prefill_only import PrefillOnly
from policies.roles import Roles
from policies.user_code.traits import name_of
from sim.engine.replica_pool import ReplicaPool
from sim.metrics.slo import WORKLOAD_TERMS, Slo
from sim.setup.pool import PoolSettings
from sim.setup.speculation import stores_kv
from sim.transfer.topology import NetworkSettings
from sim.workload.base import Workload, own_slo_terms
from sim.workload.modified import answers_of, branching_key

_HALVES = {"prefill": PrefillOnly, "decode": DecodeOnly}


def check_roles(pools: Mapping[str, PoolSettings], network: NetworkSettings, roles: Roles) -> None:
    """Raises ValueError, with the key of the setting, for pools or policies that are incompatible."""
    by_role: dict[str, list[str]] = {}
    for name, pool in pools.items():
        by_role.setdefault(pool.role, []).append(name)
        _check_batching(f"pools.{name}." if name else "", pool)
    if by_role.keys() == {"mixed"}:
        if roles.interval_s is not None:
            raise ValueError(f"roles={name_of(roles)}: must be fixed, as all pools have role=mixed")
        return
    for role, other in (("prefill", "decode"), ("decode", "prefill")):
        if other not in by_role:
            name = by_role[role][0] if role in by_role else ""
            where = f"pools.{name}.role={role}" if name else f"role={role}"
            raise ValueError(f"{where}: needs a pool with role={other} as well; add one to `pools`")
    check_kv(pools)
    for pool in pools.values():
        network.check(pool.hardware)
    if roles.interval_s is not None:
        _check_alike(pools, by_role, roles)


def _check_batching(where: str, pool: PoolSettings) -> None:
    for role, half in _HALVES.items():
        if isinstance(pool.batching, half) and pool.role != role:
            raise ValueError(
                f"{where}batching={name_of(pool.batching)}, {where}role={pool.role}: needs role={role}; "
                "set that, or choose a policy that prefills and decodes, such as batching=chunked"
            )
    if pool.role == "mixed" and not supports_mixed_role(pool.batching):
        raise ValueError(
            f"{where}batching={name_of(pool.batching)}, {where}role=mixed: does not support this role; "
            "choose another policy, such as batching=chunked"
        )


def check_kv(pools: Mapping[str, PoolSettings]) -> None:
    """Raises ValueError if a pool cannot use the KV that another one computes."""
    first_name, first = next(iter(pools.items()))
    for name, pool in pools.items():
        where = f"pools.{name}." if name else ""
        if pool.model != first.model:
            if pool.model.name == first.model.name:
                raise ValueError(_other_settings(where, pool.model, first_name, first.model))
            raise ValueError(
                f"{where}model={pool.model.name}: must be {first.model.name} as in pools.{first_name}, as KV "
                "is transferred between them"
            )
        if pool.role != "prefill" and stores_kv(pool.speculation, pool.model, pool.layout):
            _check_prompts_drafted(where, pool, pools)
        if pool.caching.changes_outputs:
            raise ValueError(
                f"{where}caching={name_of(pool.caching)}: keeps only a part of the KV, with which "
                "no other replica can continue; choose caching=paged, prefix or radix"
            )


def _check_prompts_drafted(where: str, pool: PoolSettings, pools: Mapping[str, PoolSettings]) -> None:
    """Raises ValueError if a pool whose prompts come to this one does not compute the KV of its draft."""
    for name, other in pools.items():
        own = None if pool.speculation is None else pool.speculation.draft
        if other.speculation is None or other.speculation.draft != own:
            raise ValueError(
                f"{where}speculation: its draft has KV of its own, which pools.{name} does not compute for "
                "the prompts that it hands over; choose the same speculation there, or one without KV of its "
                "own, such as ngram, suffix, medusa or self_speculative"
            )


def _other_settings(where: str, model: object, first_name: str, first: object) -> str:
    """Returns the message for two pools whose models have the same name but differ, such as in KV type."""
    why = f"pools.{first_name}, as KV is transferred between them"
    if (own := getattr(model, "kv_dtype", None)) != (other := getattr(first, "kv_dtype", None)):
        return f"{where}model.kv_cache_dtype={own}: must be {other} as in {why}"
    return f"{where}model: must have the same settings as the model of {why}"


def _check_alike(pools: Mapping[str, PoolSettings], by_role: Mapping[str, list[str]], roles: Roles) -> None:
    """Raises ValueError unless replicas can change between the prefill pool and the decode pool."""
    key = f"roles={name_of(roles)}"
    for role in ("prefill", "decode"):
        if len(by_role[role]) > 1:
            raise ValueError(f"{key}: needs one pool with role={role}, has {', '.join(by_role[role])}")
    one, other = pools[by_role["prefill"][0]], pools[by_role["decode"][0]]
    if (one.hardware, one.layout) != (other.hardware, other.layout):
        raise ValueError(
            f"{key}: pools.{by_role['prefill'][0]} and pools.{by_role['decode'][0]} must have the same "
            "hardware and layout, as replicas change between them; or choose roles=fixed"
        )


def first_token_at(pools: Mapping[str, PoolSettings]) -> str:
    """Returns which replica sends the first token of an answer to the client, by the decode replicas' engine.

    With vLLM (NixlConnector and llm-d's sidecar), SGLang, TensorRT-LLM's disaggregated serving and NVIDIA
    Dynamo, the client reads the answer from the decode replica, which sends the first token, too. In the
    papers that proposed the split (Splitwise, DistServe), the prefill replica sends it.
    """
    families = {pool.engine.family for pool in pools.values() if pool.role == "decode"}
    return "decode" if families and None not in families else "prefill"


def check_slo(slo: Slo | None, workload: Workload) -> None:
    """Raises ValueError for a limit of a latency that no request of the workload has."""
    limited = () if slo is None else slo.workload_terms
    for term in limited:
        assert slo is not None
        setting = f"slo.{term}_ms={slo.limits_s[term] * 1e3:g}"
        if term not in own_slo_terms(workload):
            raise ValueError(f"{setting}: {WORKLOAD_TERMS[term]}, or set slo.{term}_ms=null")
        width, key = answers_of(workload).width, f"{branching_key(workload)}.width"
        if term == "publish" and width > 1:
            raise ValueError(
                f"{setting}, {key}={width}: the time to publish of requests with several outputs is not "
                f"known; set {key}=1 or slo.publish_ms=null"
            )


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
