"""A deployment of several servers as one set of settings: servers of prefill and of decode become pools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from experiments.app.launch_lines.engines import check_ignored, translated
from experiments.app.launch_lines.flags import Arguments, parse
from experiments.app.launch_lines.shell import Command, Role
from experiments.app.launch_lines.translation import Translation, as_mapping
from sim.settings.errors import ConfigError

ROLES: Mapping[str, Role] = {
    "prefill": "prefill",
    "kv_producer": "prefill",
    "context": "prefill",
    "decode": "decode",
    "kv_consumer": "decode",
    "generation": "decode",
}
"""Value of a flag, in small letters -> the role of the server."""
SENDERS = ("Nixl", "P2pNccl", "Mooncake", "MoRIIO", "LMCache")
"""Beginnings of vLLM's connectors that send KV from prefill to decode servers."""
LAYOUT = ("parallel_size", "layer_partition")
"""Ends of the settings that must divide each other: a pool has all of them, or the run has."""
OF_ROLES = (
    "--disaggregation-mode",
    "--is-prefill-worker",
    "--is-decode-worker",
    "--kv-transfer-config",
    "--server-role",
    "--disagg-cluster-uri",
    "--metadata-server-config-file",
)
"""Flags that only say how prefill and decode servers work together."""


def with_roles(commands: Sequence[Command]) -> list[Command]:
    """Returns commands with their roles, if they are prefill and decode servers; otherwise without roles.

    A server beside prefill servers that does not say what it is decodes.
    """
    roles = [_role_in_flags(one) or one.role for one in commands]
    if "prefill" in roles and "decode" not in roles:
        roles = [role or "decode" for role in roles]
    is_whole = {*roles} == {"prefill", "decode"}
    return [replace(one, role=role if is_whole else None) for one, role in zip(commands, roles, strict=True)]


def _role_in_flags(command: Command) -> Role | None:
    try:
        values = parse(command.engine, command.tokens).values
    except ConfigError:  # which its translation raises
        return None
    if values.get("--is-prefill-worker"):
        return "prefill"
    if values.get("--is-decode-worker"):
        return "decode"
    transfer = as_mapping(values.get("--kv-transfer-config"))
    given = (values.get("--disaggregation-mode"), values.get("--server-role"), transfer.get("kv_role"))
    return next((ROLES[name] for one in given if (name := str(one).lower()) in ROLES), None)


def deployed(
    commands: Sequence[Command],
    dirs: Sequence[Path],
    beside: Sequence[str] = (),
    ignored: Sequence[str] = (),
) -> Translation:
    """Returns the servers of a deployment as settings. Raises ConfigError as `translated`.

    commands: one, or those of prefill and decode, by their roles. Other arguments: see `translated`.
    """
    parts = [translated(one, dirs, beside, ignored, _apart(one)) for one in commands]
    check_ignored(parts, ignored)
    if len(parts) == 1:
        return parts[0]
    pools = {
        role: _alike([part for one, part in zip(commands, parts, strict=True) if one.role == role], role)
        for role in ("prefill", "decode")
    }
    prefill, decode = pools["prefill"], pools["decode"]
    for key in ("engine", "model"):
        if prefill.settings.get(key) != decode.settings.get(key):
            raise ConfigError(
                f"--from: the prefill servers have {key}={prefill.settings.get(key)}, the decode servers "
                f"{key}={decode.settings.get(key)}; both pools must have the same"
            )
    whole = Translation(engine=decode.engine, ignored=[*prefill.ignored, *decode.ignored])
    routing = prefill.settings.get("routing")
    for part in (prefill, decode):
        whole.without_effect |= part.without_effect
        part.settings.pop("routing", None)
    shared = {key: value for key, value in decode.settings.items() if prefill.settings.get(key) == value}
    layouts = [{key for key in part.settings if key.endswith(LAYOUT)} for part in (prefill, decode)]
    own = set[str]() if layouts[0] | layouts[1] <= shared.keys() else layouts[0] | layouts[1]
    shared = {key: value for key, value in shared.items() if key not in {"replicas", *own}}
    whole.settings |= shared
    whole.put("pools", "disaggregated")
    if routing is not None:
        whole.put("routing", routing)
    for role, part in pools.items():
        for key, value in {"replicas": "1", **part.settings}.items():
            if key not in shared:
                whole.put(f"pools.{role}.{key}", value)
    return whole


def _apart(command: Command) -> Sequence[str]:
    """Returns the flags of a prefill or decode server that its pool stands for."""
    if command.role is None:
        return ()
    found: Arguments = parse(command.engine, command.tokens)
    connector = str(as_mapping(found.values.get("--kv-transfer-config")).get("kv_connector", ""))
    sends = connector.startswith(SENDERS) or not connector
    return [flag for flag in OF_ROLES if sends or flag != "--kv-transfer-config"]


def _alike(parts: Sequence[Translation], role: str) -> Translation:
    """Returns servers of one role as one, with their number. Raises ConfigError if they differ."""
    first = parts[0]
    count = sum(int(part.settings.get("replicas", 1)) for part in parts)
    for part in parts:
        for own in (first, part):
            own.settings.pop("replicas", None)
        if part.settings != first.settings:
            differing = {key for key, _ in part.settings.items() ^ first.settings.items()}
            raise ConfigError(
                f"--from: the {role} servers differ in {', '.join(sorted(differing))}; a pool has servers of "
                "one kind"
            )
    first.put("replicas", count)
    return first
