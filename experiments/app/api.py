"""The Python interface: `from sim import simulate` takes the settings of `windtunnel simulate`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from experiments.app.settings.compose import ConfigSource, resolved
from experiments.app.settings.config_groups import config_dirs, find_groups
from experiments.app.settings.hydra_errors import composed
from experiments.app.settings.override import Override
from experiments.app.settings.renamed import with_new_names
from sim.api import Result, RunConfig, simulate_config, stream_config
from sim.cluster.attached import UserProcess
from sim.settings.errors import ConfigError
from sim.setup.pool import PoolSettings

_BARE = re.compile(r"[A-Za-z_][\w./-]*")
"""Matches the texts that Hydra's command line reads as they are, without quotes."""

_BEFORE_QUOTE = re.compile(r"(\\*)('|$)")


def simulate(
    *overrides: str,
    model: Any = None,
    hardware: Any = None,
    workload: Any = None,
    policy: Any = None,
    config_dir: str | Path | None = None,
    attach: Sequence[UserProcess] = (),
    stream_to: str | Path | None = None,
    iterations: bool = False,
    **settings: Any,
) -> Result:
    """Simulates a workload with a policy on a hardware model; defaults are those of `windtunnel simulate`.

    overrides: settings as on the command line, `"workload.num_requests=500"`.
    model, hardware, workload, and any other group as a keyword: the name of a choice (`windtunnel list`), a
    mapping of settings below it, or an object that replaces it, such as a policy of your own. None selects
    the choice `none` of a group that has one (`slo=None`); for model, hardware and workload it means the
    default. Two underscores stand for the dot of a setting: `workload__num_requests=500`,
    `engine__max_num_seqs=64`.
    policy: the name of an engine (`vllm`), which selects the policies of that engine; a mapping of policy
    groups to choices or objects (`{"batching": "static", "caching": "radix"}`); or a batching policy.
    config_dir: a folder with further choices, as `--config-dir`.
    attach: processes of your own: generator functions of env, fleet and gateway, which SimPy runs beside the
    simulation; env is a `simpy.Environment`. A process reads the state of the fleet (`fleet.replicas`,
    `fleet.serving`, and of a replica `state`, `num_outstanding`, `num_running`, `num_waiting`, `kv_usage`)
    and of the gateway (`num_in_progress`, `in_progress`, `num_ended`), changes a limit
    (`replica.max_num_batched_tokens`), starts, drains, crashes, repairs and slows down replicas, sends
    requests (`gateway.send`; to one replica, to warm its cache), and waits for the end of a request (`yield
    gateway.ended(request)`). See `sim.cluster.attached`.
    stream_to: a folder to which a long run writes its tables while it goes on, in memory that does not grow
    with it, and its summary at the end; the result reads the tables from there. iterations: also write its
    iterations and gaps.

    Raises ConfigError for every mistake in the settings, before the simulation starts, for a disk without
    room for `stream_to`, and for an attached process that raises or yields no event; and OSError if tables
    could not be written, of which those up to then remain. Must not be called from several threads at once,
    because Hydra composes one config at a time per process.
    """
    named = {"model": model, "hardware": hardware, "workload": workload}
    config = run_config(overrides, named | settings, policy, config_dir)
    if stream_to is not None:
        if attach:
            raise ConfigError(
                "attach, stream_to: a run with processes of your own keeps its tables in memory; leave out "
                "one of them"
            )
        return stream_config(config, Path(stream_to), iterations=iterations)
    if iterations:
        raise ConfigError("iterations=True: is about the tables of stream_to; leave it out, or set stream_to")
    return simulate_config(config, attach)


def run_config(
    overrides: Sequence[str], settings: Mapping[str, Any], policy: Any, config_dir: str | Path | None
) -> RunConfig:
    """Composes the config of a call of `simulate`. Raises ConfigError.

    settings: its keywords; None of model, hardware and workload means the default.
    """
    source, texts, objects = _arguments(overrides, settings, policy, config_dir)
    cfg = resolved(composed(replace(source, device=objects.get("hardware")), texts, replaced=objects))
    for key, value in objects.items():
        if key not in cfg:
            raise ConfigError(f"{key}={type(value).__name__}: an object can only replace a key at the root")
        if cfg["pools"] and key in PoolSettings.__dataclass_fields__:
            raise ConfigError(
                f"{key}={type(value).__name__}: each pool has its own {key}; write a config file for the "
                "object and name it in `pools`, or leave out `pools`"
            )
    own_dirs = [word for path in source.dirs[1:] for word in ("--config-dir", str(path))]
    command = None if objects else shlex.join(["windtunnel", "simulate", *texts, *own_dirs])
    return RunConfig(nodes=cfg, objects=objects, command=command)


def _arguments(
    overrides: Sequence[str], settings: Mapping[str, Any], policy: Any, config_dir: str | Path | None
) -> tuple[ConfigSource, list[str], dict[str, Any]]:
    """Returns the config, the overrides and the objects of a call of `simulate`. Raises ConfigError.

    settings: its keywords; None of model, hardware and workload means the default.
    """
    given = {
        name: value
        for name, value in settings.items()
        if value is not None or name not in ("model", "hardware", "workload")
    }
    if policy is not None:
        given = _of_policy(policy) | given
    dirs = config_dirs(None if config_dir is None else Path(config_dir))
    _check_engine(policy, dirs)
    own, objects = texts_and_objects(given, dirs)
    texts = [*with_new_names(overrides, dirs), *own]
    for text in (*texts, *objects):
        if Override.parse(text).root == "output":
            raise ConfigError(
                f"{text}: simulate() does not write files; call result.write(folder), for example "
                "result.write(folder, timeline=True, vllm_bench=True)"
            )
    return ConfigSource(config_name="simulate", dirs=dirs), texts, objects


def texts_and_objects(settings: Mapping[str, Any], dirs: Sequence[Path]) -> tuple[list[str], dict[str, Any]]:
    """Returns settings as overrides, and those that no override can be: objects, by their key.

    settings: keys with dots or double underscores -> choices, values, mappings of settings below a group, or
    objects. dirs: the folders of configs.
    """
    given = {name.replace("__", "."): value for name, value in settings.items()}
    groups = _choices(dirs)
    texts, objects = [], {}
    for key, value in zip(with_new_names(given, dirs), given.values(), strict=True):
        if value is None and "none" in groups.get(key, ()):
            texts.append(f"{key}=none")
        elif not _is_plain(value):
            objects[key] = value
        elif isinstance(value, Mapping) and key in groups:
            texts += [override_text(f"{key}.{name}", item) for name, item in value.items()]
        else:
            texts.append(override_text(key, value))
    return texts, objects


def _choices(dirs: Sequence[Path]) -> dict[str, list[str]]:
    return {group: [choice.name for choice in found] for group, found in find_groups(dirs).items()}


def _of_policy(policy: Any) -> dict[str, Any]:
    if isinstance(policy, str):
        return {"engine": policy}
    if isinstance(policy, Mapping):
        return {str(group): value for group, value in policy.items()}
    return {"batching": policy}


def _check_engine(policy: Any, dirs: Sequence[Path]) -> None:
    """Raises ConfigError if `policy` is the name of a batching policy, where an engine's name is expected."""
    groups = _choices(dirs)
    if isinstance(policy, str) and policy not in groups["engine"] and policy in groups["batching"]:
        raise ConfigError(
            f"policy={policy}: must be the name of an engine; for the batching policy write "
            f"policy={{'batching': '{policy}'}}"
        )


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(_is_plain(item) for item in value.values())
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, Real | str | Path)


def override_text(key: str, value: Any) -> str:
    """Returns the override of Hydra's command line that sets a plain value."""
    return f"{key}={''.join(_text(value))}"


def _text(value: Any) -> Iterator[str]:
    """Yields the pieces of the text that Hydra's command line reads as `value`."""
    if value is None or isinstance(value, bool):
        yield {None: "null", True: "true", False: "false"}[value]
    elif isinstance(value, Integral):
        yield str(int(value))
    elif isinstance(value, Real):
        yield repr(float(value))
    elif isinstance(value, Mapping):
        yield "{" + ",".join(f"{name}:{''.join(_text(item))}" for name, item in value.items()) + "}"
    elif isinstance(value, list | tuple):
        yield "[" + ",".join("".join(_text(item)) for item in value) + "]"
    elif _BARE.fullmatch(str(value)) and str(value).lower() not in ("null", "true", "false", "nan", "inf"):
        yield str(value)
    else:
        # Hydra unescapes a backslash only before a quote, so only those are doubled.
        yield (
            "'"
            + _BEFORE_QUOTE.sub(lambda found: 2 * found[1] + ("\\'" if found[2] else ""), str(value))
            + "'"
        )
