"""A deployment of several servers as one set of settings: servers of prefill and of decode become pools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import yaml

from experiments.app.launch_lines.engines import check_ignored, translated
from experiments.app.launch_lines.flags import Arguments, parse
from experiments.app.launch_lines.shell import Command, Role
from experiments.app.launch_lines.translation import Translation, as_mapping, yaml_of
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
DISAGGREGATED = "disaggregated"
CONFIG_FILE = ("_c", "__config_file")
SERVERS: Mapping[Role, str] = {"prefill": "context_servers", "decode": "generation_servers"}
"""Keys of the file of `trtllm-serve disaggregated`."""
OF_FRONT_END = (
    *("hostname", "port", "urls", "num_instances", "router", "max_retries", "request_timeout"),
    *("perf_metrics_max_requests", "disagg_cluster", "schedule_style", "server_start_timeout"),
)
"""Keys of this file that are about the server in front of the others."""
FLAGS = ("backend", "free_gpu_memory_fraction")
"""Keys of this file that are flags of a server, and no keys of its own YAML file."""
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


def servers_of(command: Command) -> list[Command]:
    """Returns the servers that a command starts: of `trtllm-serve disaggregated -c FILE`, those in the file.

    Raises ConfigError for a file that cannot be read or names no such servers.
    """
    if command.engine != "tensorrt_llm" or command.tokens[:1] != (DISAGGREGATED,):
        return [command]
    words = [part for word in command.tokens[1:] for part in word.split("=", 1)]
    name = next(
        (words[i + 1] for i, word in enumerate(words[:-1]) if word.replace("-", "_") in CONFIG_FILE), ""
    )
    if not name:
        raise ConfigError(f"--from: trtllm-serve {DISAGGREGATED}: needs -c FILE, which has the servers")
    try:
        content = yaml_of(command, name)
    except ValueError as error:
        raise ConfigError(f"--from: {name}: {error}") from None
    shared = {key: value for key, value in content.items() if key not in SERVERS.values()}
    found = []
    for role, key in SERVERS.items():
        if not isinstance(own := content.get(key), Mapping):
            raise ConfigError(f"--from: {name}: {key} must be a mapping of settings, with num_instances")
        settings = {each: value for each, value in {**shared, **own}.items() if each not in OF_FRONT_END}
        model, count = settings.pop("model", None), own.get("num_instances", 1)
        flags = [
            word for flag in FLAGS if flag in settings for word in (f"--{flag}", str(settings.pop(flag)))
        ]
        if type(count) is not int or count < 1:
            raise ConfigError(f"--from: {name}: {key}: num_instances={count}: must be a whole number >= 1")
        found.append(
            replace(
                command,
                tokens=(*([str(model)] if model else []), *flags, "--config", f"{name}: {key}"),
                files={f"{name}: {key}": yaml.safe_dump(settings)},
                copies=count,
                role=role,
            )
        )
    return found


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
