"""Draws small runs from the whole configuration space: choices, their settings, cuts, KV pressure.

The groups are those of configs/scenario.yaml, so a new group or choice is drawn without a line here. A world
is a list of overrides, as on the command line of `windtunnel simulate`. A world that is refused is repaired:
by the advice in the message, or by leaving out what the message names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from functools import cache
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import yaml

from experiments.app.settings.compose import ConfigSource, resolved
from experiments.app.settings.config_groups import CONFIG_DIR, find_groups
from experiments.app.settings.variants import Variants
from sim.records.run import FailureKind, RunRecords
from sim.settings.build import build
from sim.settings.errors import ConfigError
from sim.settings.scenario import build_run
from sim.setup.combinations import remedies
from sim.setup.scenario import Scenario
from tests.worlds.fuzz.values import draw_value, log_uniform, shown

SOURCE = ConfigSource(config_name="scenario", dirs=[CONFIG_DIR])
VARIANTS = Variants(SOURCE)
GROUPS = {group: [choice.name for choice in found] for group, found in find_groups(SOURCE.dirs).items()}
USUAL = {"model": ["random_8m", "random_8m", "smollm2_135m", "qwen3_30b_a3b", "deepseek_v2_lite"]}
"""Choices of a group that are drawn more often than others."""
LEFT_OUT = ("calibration", "tariff", "energy", "layout")
"""Groups with no effect on what a run does; the layout policy replaces sizes that are drawn."""
FIXED = (
    "model",
    "hardware",
    "calibration",
    "latency",
    "failures",
    "pools",
    "name",
    "seed",
    "energy",
    "metrics",
)
"""Root keys the settings of which are not drawn, or drawn in another way."""
SIZES = ("tensor", "pipeline", "context", "attention_data", "expert")
KEPT = (
    "workload",
    *(f"workload.num_{items}" for items in ("requests", "conversations", "tasks")),
    "workload.of.num_requests",
)
"""Keys that repairs do not leave out, because they make a run small."""
ALWAYS_DRAWN = ("value", "mean", "low", "high", "num_users", "rate_per_s")
"""Settings of workloads that are too large for small runs."""
STORMS = 0.85
"""Share of the worlds in which many requests run at once."""
CALMING = (".patience_s", ".duration_s", ".timeout_s", ".max_tokens", ".frontend_s", ".width", ".batch_size")
"""Ends of the keys of settings that keep requests from running at once."""
MAX_REPAIRS = 12
MAX_REQUESTS = 100
"""Limit of the requests of a world that do not follow others."""

Overrides = dict[str, str]


@cache
def families() -> dict[str, list[str]]:
    """Returns the key of every group of a scenario, with its choices that need no file of the user."""
    defaults = yaml.safe_load((CONFIG_DIR / "scenario.yaml").read_text(encoding="utf-8"))["defaults"]
    keys = [next(iter(entry)) for entry in defaults if isinstance(entry, dict)]
    return {key: _choices(key.partition("@")[0]) for key in keys if key not in LEFT_OUT}


@cache
def _choices(group: str) -> list[str]:
    return [name for name in GROUPS[group] if "???" not in _text(group, name)]


@cache
def _text(group: str, name: str) -> str:
    return Path(CONFIG_DIR, group, f"{name}.yaml").read_text(encoding="utf-8")


def draw_choices(rng: Random) -> Overrides:
    """Draws choices: those of half of the groups are the usual ones."""
    drawn: Overrides = {}
    for key, choices in families().items():
        often = USUAL.get(key, [])
        if often and rng.random() < 0.9:
            drawn[key] = rng.choice(often)
        elif rng.random() < 0.5:
            drawn[key] = rng.choice(choices)
    drawn.setdefault("workload", "poisson")
    if drawn["workload"] == "lora" or rng.random() < 0.1:
        drawn["workload"] = "lora"
        drawn["adapters"] = rng.choice([name for name in _choices("adapters") if name != "none"])
    else:
        drawn["adapters"] = "none"
    if rng.random() < 0.15:
        drawn["pools"] = rng.choice(["disaggregated", "disaggregated", *families()["pools"]])
    else:
        drawn["pools"] = "none"
    if drawn["pools"] != "disaggregated":
        drawn.pop("roles", None)
        if drawn.get("batching") in ("prefill_only", "decode_only"):
            drawn.pop("batching")
    drawn |= dict(_parts_of_workload(rng, drawn["workload"], "workload"))
    return drawn


def _parts_of_workload(rng: Random, name: str, package: str) -> Iterator[tuple[str, str]]:
    """Yields choices for the groups that a workload's file names in its defaults."""
    for entry in _defaults_of(name):
        for key, usual in entry.items() if isinstance(entry, dict) else ():
            if key.startswith("override "):  # of a part, which has it already
                continue
            if key.startswith("/workload@"):  # a workload of another one
                inner = f"{package}.{key.partition('@')[2]}"
                yield f"workload@{inner}", usual
                continue
            group = f"workload/{key}"
            if usual != "closed_loop":
                where = group if package == "workload" else f"{group}@{package}.{key}"
                yield where, rng.choice([c for c in _choices(group) if c != "closed_loop"])


@cache
def _defaults_of(workload: str) -> list[Any]:
    found: list[Any] = yaml.safe_load(_text("workload", workload)).get("defaults", [])
    return found


def draw_sizes(rng: Random, cfg: dict[str, Any]) -> Overrides:
    """Draws the settings that make a run small, where the config has them."""
    drawn = {
        "engine.max_num_seqs": shown(rng.choice([1, 2, 4, 8, 8, 16, 40])),
        "engine.max_num_batched_tokens": shown(rng.choice([4, 16, 16, 64, 64, 512])),
        "engine.max_model_len": shown(rng.choice([64, 150, 400])),
        "engine.num_kv_blocks": shown(rng.choice([200, 1000])),
        "replicas": shown(rng.choice([1, 1, 2, 3])),
        "max_resends": shown(rng.choice([0, 1, 2])),
        "signal_age_s": shown(rng.choice([0, 0.001, 0.05])),
        "seed": shown(rng.randrange(1000)),
    }
    if rng.random() < 0.2:
        drawn[f"{rng.choice(SIZES)}_parallel_size"] = "2"
    where = "workload.of" if "of" in cfg["workload"] else "workload"
    workload = cfg["workload"].get("of", cfg["workload"])
    for key in ("num_requests", "num_conversations", "num_tasks"):
        if key in workload:
            some = [3, 12, 20, 30] if key == "num_requests" else [2, 4, 6, 10]
            drawn[f"{where}.{key}"] = shown(rng.choice(some))
    arrivals = workload.get("arrivals", {})
    if "requests_per_minute" in arrivals:
        drawn["load"] = shown(log_uniform(rng, 5, 500))
    if "probabilities" in workload.get("lengths", {}).get("prompt_tokens", {}):
        drawn |= {"prompt_scale": "0.02", "output_scale": "0.05"}
    return drawn


def draw_settings(rng: Random, cfg: dict[str, Any]) -> Overrides:
    """Draws values for a third of the settings of all nodes; each node accepts its values."""
    share = rng.choice([0.1, 0.3, 0.6])
    drawn: Overrides = {}
    for root, node in cfg.items():
        if root in FIXED or not isinstance(node, dict) or not node:
            continue
        for holder, path in list(_leaves(node, (root,))):
            old = holder[path[-1]]
            is_long = path[-1] in ("duration_s", "running_s") and old is not None
            always = root == "workload" and (is_long or path[-1] in ALWAYS_DRAWN)
            if (rng.random() > share and not always) or path[-1] in ("_target_", "until_s", "leap"):
                continue
            is_traffic = root == "workload" and path[-1].endswith("per_s")
            if root == "workload" and is_long:
                value = log_uniform(rng, 0.05, 2)
            else:
                value = log_uniform(rng, 100, 5000) if is_traffic else draw_value(rng, path, old)
            holder[path[-1]] = value
            if value != old and _is_accepted(root, node):
                drawn[".".join(path)] = shown(value)
            else:
                holder[path[-1]] = old
    return drawn


def _leaves(node: dict[str, Any], path: tuple[str, ...]) -> Iterator[tuple[dict[str, Any], tuple[str, ...]]]:
    """Yields every setting in a node as (the mapping that holds it, its path)."""
    for name, value in node.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, (*path, name))
        else:
            yield node, (*path, name)


def _is_accepted(root: str, node: dict[str, Any]) -> bool:
    if "_target_" not in node:
        return True
    try:
        build(node, root)
    except ConfigError:
        return False
    return True


def draw_storm(rng: Random, cfg: dict[str, Any], world: Overrides) -> None:
    """Makes many requests of a world run at once, so that KV memory can become short."""
    for key in [key for key in world if key.endswith(CALMING)]:
        del world[key]
    for key in ("admission", "adapters.max_loras"):
        _forget(world, key)
    world["engine.max_num_seqs"] = shown(rng.choice([8, 16, 40]))
    world["engine.max_num_batched_tokens"] = shown(rng.choice([32, 64, 512]))
    if "prompt_scale" in world:  # of lengths in the thousands
        world |= {"prompt_scale": "0.05", "output_scale": "0.2"}
    for holder, path in _leaves(cfg["workload"], ("workload",)):
        name, key = path[-1], ".".join(path)
        if name in ("num_requests", "num_conversations"):
            world[key] = shown(rng.choice([8, 12, 20]))
        elif name.endswith("per_s") and "arrivals" in path:
            world[key] = shown(log_uniform(rng, 1000, 20_000))
        elif name in ("mean", "value", "high") and path[-2].endswith("tokens"):
            world[key] = shown(rng.randint(25, 90))
        elif name == "low":
            world[key] = shown(rng.randint(5, 25))
        elif holder[name] is not None and name == "num_users":
            world[key] = shown(rng.randint(5, 20))


def draw_pools(rng: Random, cfg: dict[str, Any]) -> Overrides:
    """Draws settings of the pools, and at times a mixed pool beside prefill and decode pools."""
    drawn: Overrides = {}
    for name in cfg["pools"]:
        drawn[f"pools.{name}.replicas"] = shown(rng.choice([1, 1, 2]))
        if rng.random() < 0.3:
            drawn[f"++pools.{name}.engine.max_num_seqs"] = shown(rng.choice([1, 2, 4, 16]))
    if "prefill" in cfg["pools"] and rng.random() < 0.3:
        drawn |= {"++pools.mixed.role": "mixed", "++pools.mixed.replicas": "1"}
    return drawn


def draw_world(rng: Random) -> Overrides | None:
    """Draws a world without cuts, failures and pressure; None: it was refused and could not be repaired."""
    world = draw_choices(rng)
    for _ in range(MAX_REPAIRS):
        try:
            cfg = resolved(VARIANTS.config(as_list(world)))
            break
        except ConfigError as error:
            if not repair(rng, world, str(error)):
                return None
    else:
        return None
    world |= draw_sizes(rng, cfg) | draw_settings(rng, cfg) | draw_pools(rng, cfg)
    if rng.random() < STORMS:
        draw_storm(rng, cfg, world)
    return world if accepted(rng, world) and is_small(build_world(as_list(world))) else None


def is_small(scenario: Scenario) -> bool:
    """Returns whether a world has few requests."""
    return sum(1 for _ in islice(scenario.source().arrivals(), MAX_REQUESTS + 1)) <= MAX_REQUESTS


def accepted(rng: Random, world: Overrides) -> bool:
    """Returns whether a run can be built, after repairs of the world."""
    for _ in range(MAX_REPAIRS):
        try:
            build_world(as_list(world))
            return True
        except ConfigError as error:
            if not repair(rng, world, str(error)):
                return False
    return False


def build_world(overrides: list[str]) -> Scenario:
    """Builds the scenario of a world. Raises ConfigError."""
    return build_run(resolved(VARIANTS.config(overrides)))[0]


def as_list(world: Overrides) -> list[str]:
    """Returns the overrides of a world."""
    return [f"{key}={value}" for key, value in world.items()]


def repair(rng: Random, world: Overrides, message: str) -> bool:
    """Follows the advice of a message, or leaves out a setting that it names; returns whether it could.

    What the table of combinations advises comes first.
    """
    for setting in remedies(message):
        key, _, values = setting.partition("=")
        value = re.split("[ ,]", values)[0]
        if key not in KEPT and (key in families() or key in world) and world.get(key) != value:
            _forget(world, key)
            world[key] = value
            return True
    for key, value in re.findall(r"(?:such as|choose|or|set) ([a-z_]+)=([a-z_0-9]+)", message):
        choices = families().get(key) if key not in KEPT else None
        if choices and value in choices and world.get(key) != value and rng.random() < 0.8:
            _forget(world, key)
            world[key] = value
            return True
    named = [key for key in world if re.search(rf"(^|[^\w.]){re.escape(key.lstrip('+'))}\b", message)]
    named = named or [key for key in world if re.search(rf"\b{re.escape(key.split('.')[-1])}=", message)]
    named = named or [key for key in world if "." in key and message.startswith(key.split(".")[0])]
    named = [key for key in named if key not in KEPT]
    if not named:
        return False
    _forget(world, rng.choice(named))
    return True


def _forget(world: Overrides, key: str) -> None:
    """Leaves out an override; with a choice, also the settings of its node, which another may not have."""
    below = key.rpartition("@")[2].replace("/", ".") + "."
    for other in [key, *(other for other in world if other.startswith(below) and "." not in key)]:
        world.pop(other, None)


def draw_pressure(rng: Random, world: Overrides, records: RunRecords) -> Overrides:
    """Returns the world with less KV memory than a run of it has used; mostly, each request fits."""
    rows, requests = records.iterations, records.requests
    if rows.empty:
        return world
    longest = int((requests["prompt_tokens"] + requests["output_tokens"]).max())
    num_longest = longest / records.pools[0].block_size
    num_blocks = rng.uniform(0.3, 0.95) * int(rows["kv_blocks_used"].max())
    if rng.random() < 0.85:
        num_blocks = max(num_blocks, num_longest + rng.choice([0, 0, 1]))
    return world | {"engine.num_kv_blocks": shown(max(1, math.ceil(num_blocks)))}


def draw_cut(rng: Random, world: Overrides, records: RunRecords) -> Overrides:
    """Returns the world with an end in the middle of a run of it, or at the end of one of its iterations."""
    return world | {"sim.until_s": shown(_instant(rng, records))}


def _instant(rng: Random, records: RunRecords) -> float:
    """Draws a time of a run: any, the end of an iteration, or a hair beside one."""
    rows = records.iterations
    if rows.empty or rng.random() < 0.5:
        return max(1e-6, rng.uniform(0.2, 1) * records.end_s)
    row = rows.iloc[rng.randrange(len(rows) // 5, len(rows))]
    end_s = float(row.start_s + row.duration_s)
    return rng.choice([end_s, math.nextafter(end_s, math.inf), math.nextafter(end_s, -math.inf)])


def draw_failures(rng: Random, world: Overrides, records: RunRecords) -> Overrides:
    """Returns the world with up to four failures of any choice, at times of a run of it."""
    events = []
    for _ in range(rng.randint(1, 4)):
        name = rng.choice([name for name in _choices("failures") if name != "none"])
        for event in yaml.safe_load(_text("failures", name))["events"]:
            events.append({key: _of_failure(rng, key, value, records) for key, value in event.items()})
            if "kind" in event:
                kind = rng.choice(list(FailureKind))
                factor = rng.choice([1.5, 2.0, 7.0]) if kind.has_factor else None
                events[-1] |= {"kind": kind.name, "factor": factor}
    return world | {"failures.events": shown(events)}


def _of_failure(rng: Random, key: str, value: Any, records: RunRecords) -> Any:
    if key == "at_s":
        return _instant(rng, records)
    if key.endswith("_s"):
        return log_uniform(rng, 0.02, 1) * max(records.end_s, 1e-3)
    if key == "replicas":
        return [rng.randrange(records.num_replicas)] if rng.random() < 0.6 else []
    return value
