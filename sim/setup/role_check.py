"""Whether pools with roles, what is between them, and who changes between them, go together."""

from __future__ import annotations

from collections.abc import Mapping

from policies.batching import supports_mixed_role
from policies.batching.decode_only import DecodeOnly
from policies.batching.prefill_only import PrefillOnly
from policies.roles import Roles
from sim.setup.pool import PoolSettings
from sim.transfer.topology import NetworkSettings

_HALVES = {"prefill": PrefillOnly, "decode": DecodeOnly}


def check_roles(pools: Mapping[str, PoolSettings], network: NetworkSettings, roles: Roles) -> None:
    """Raise ValueError with the key of the setting that does not fit."""
    by_role: dict[str, list[str]] = {}
    for name, pool in pools.items():
        by_role.setdefault(pool.role, []).append(name)
        _check_batching(f"pools.{name}." if name else "", pool)
    if by_role.keys() == {"mixed"}:
        if roles.interval_s is not None:
            raise ValueError(
                f"roles={type(roles).__name__}: must be fixed, no pool has another role than mixed"
            )
        return
    for role, other in (("prefill", "decode"), ("decode", "prefill")):
        if other not in by_role:
            name = by_role[role][0] if role in by_role else ""
            where = f"pools.{name}.role={role}" if name else f"role={role}"
            raise ValueError(f"{where}: needs a pool with role={other}, too, in `pools`")
    check_kv(pools)
    for pool in pools.values():
        network.check(pool.hardware)
    if roles.interval_s is not None:
        _check_alike(pools, by_role, roles)


def _check_batching(where: str, pool: PoolSettings) -> None:
    for role, half in _HALVES.items():
        if isinstance(pool.batching, half) and pool.role != role:
            raise ValueError(
                f"{where}batching={half.__name__}: half of a disaggregated service, no answer ends without "
                f"the other; choose one that does both, such as batching=chunked, or give its pool "
                f"role={role} instead of {pool.role}"
            )
    if pool.role == "mixed" and not supports_mixed_role(pool.batching):
        raise ValueError(
            f"{where}batching={type(pool.batching).__name__}, {where}role=mixed: does not support this role; "
            "choose another policy, such as batching=chunked"
        )


def check_kv(pools: Mapping[str, PoolSettings]) -> None:
    """Raise ValueError where KV that one replica computes is no good for another."""
    first_name, first = next(iter(pools.items()))
    for name, pool in pools.items():
        where = f"pools.{name}." if name else ""
        if pool.model != first.model:
            raise ValueError(
                f"{where}model={pool.model.name}: must be that of pools.{first_name}, "
                f"{first.model.name}: its KV goes from one to the other"
            )
        if pool.caching.changes_outputs:
            raise ValueError(
                f"{where}caching={type(pool.caching).__name__}: keeps a part of the KV only, so no "
                "other replica can continue with it; choose caching=paged, prefix or radix"
            )


def _check_alike(pools: Mapping[str, PoolSettings], by_role: Mapping[str, list[str]], roles: Roles) -> None:
    """Replicas can change between two pools of the same devices."""
    key = f"roles={type(roles).__name__}"
    for role in ("prefill", "decode"):
        if len(by_role[role]) > 1:
            raise ValueError(f"{key}: must find one pool with role={role}, found {', '.join(by_role[role])}")
    one, other = pools[by_role["prefill"][0]], pools[by_role["decode"][0]]
    if (one.hardware, one.layout) != (other.hardware, other.layout):
        raise ValueError(
            f"{key}: pools.{by_role['prefill'][0]} and pools.{by_role['decode'][0]} must have the same "
            "hardware and layout, for a replica to change between them; or choose roles=fixed"
        )
