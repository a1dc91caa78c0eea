"""Checks whether a recording was made with the model, hardware and limits that are simulated.

The settings of a recording lie beside it: config.yaml in a folder of our own runs, runs.csv beside a table of
several runs (columns model, gpu, tp, max_num_seqs, ...: `experiments.study.measured_requests`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from experiments.app.settings.bounded_yaml import read_yaml
from experiments.app.settings.config_groups import CONFIG_DIR, find_groups
from experiments.study.measured_requests import scenario_of
from experiments.study.presets import NotSimulatedError, preset
from hwmodels.levels.table_files import read_table_file
from sim.settings.build import moved_to, shown
from sim.setup.scenario import Scenario

CONFIG_KEYS = (
    "model",
    "hardware",
    "engine",
    "batching",
    "scheduling",
    "caching",
    "prediction",
    "speculation",
    "draft_length",
    "routing",
    "replicas",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "pp_layer_partition",
    "context_parallel_size",
    "attention_data_parallel_size",
    "expert_parallel_size",
    "sequence_parallel",
    "lora",
)
"""Parts of a config that decide what an engine does, without the workload and the iteration times."""

DECIDING = (
    "model", "batching", "scheduling", "caching", "prediction", "speculation", "draft_length",
    "tensor_parallel_size",
)  # fmt: skip
DECIDING_LIMITS = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "num_kv_blocks",
    "swap_space_gib",
)

LIMITS = {
    "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "max_model_len": "max_model_len",
    "gpu_memory_utilization": "gpu_memory_utilization",
    "num_gpu_blocks": "num_kv_blocks",
}
"""Columns of runs.csv, and the engine's settings that they contain."""

SIZES = (
    "replicas",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "attention_data_parallel_size",
    "expert_parallel_size",
)
"""Settings that the columns tp, pp, dp and ep contain."""


def differences(file: Path, run: str, scenario: Scenario, config: Mapping[str, Any]) -> list[str]:
    """Returns overrides for the recording's settings that differ from the simulated ones; none if unknown.

    file: the recorded requests; config: of the simulated run, plain data.
    """
    beside = file.parent if file.is_file() else file
    if (recorded := beside / "config.yaml").is_file():
        settings: Any = read_yaml(recorded)
        return list(_config_differences(settings, config)) if isinstance(settings, dict) else []
    if (runs := beside / "runs.csv").is_file():
        table = read_table_file(runs)
        if "run" in table and run in set(table["run"]):
            return list(_run_differences(dict(table.set_index("run").loc[run]), scenario))
    return []


def deciding(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a resolved configuration that our engine's decisions depend on."""
    found = {key: config[key] for key in DECIDING if key in config}
    return found | {"engine": {name: config["engine"][name] for name in DECIDING_LIMITS}}


def config_differences(recorded: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """Returns overrides for the recorded settings that differ from a configuration."""
    return list(_config_differences(recorded, config))


def _config_differences(recorded: Mapping[str, Any], config: Mapping[str, Any]) -> Iterator[str]:
    for key in CONFIG_KEYS:
        if key in recorded and key in config:
            yield from _leaves(key, recorded[key], config[key])


def _leaves(key: str, recorded: Any, given: Any) -> Iterator[str]:
    if isinstance(recorded, Mapping) and isinstance(given, Mapping):
        target = str(recorded.get("_target_"))
        target = moved_to(target) or target
        if target != str(given.get("_target_")):
            yield _choice(key, target)
            return
        names = [*recorded, *(name for name in given if name not in recorded)]
        names = [name for name in names if name != "_target_"]
        for name in names:
            yield from _leaves(f"{key}.{name}", recorded.get(name), given.get(name))
    elif recorded != given:
        yield f"{key}={shown(recorded)}"


def _choice(group: str, target: Any) -> str:
    """Returns the override of a config group whose choice has that class."""
    for choice in find_groups([CONFIG_DIR]).get(group, []):
        if f"_target_: {target}\n" in choice.file.read_text(encoding="utf-8"):
            return f"{group}={choice.name}"
    return f"{group}._target_={target}"


def _run_differences(row: dict[str, Any], scenario: Scenario) -> Iterator[str]:
    """Yields the overrides of runs.csv that differ; none for a model or GPU without a preset."""
    no_requests = pd.DataFrame({name: [] for name in ("arrival_s", "input_tokens", "output_tokens")})
    try:
        recorded = scenario_of({**row, "requests": no_requests}, scenario.latency)
        for group, name in (("model", row["model"]), ("hardware", row["gpu"])):
            if getattr(recorded, group).name != getattr(scenario, group).name:
                yield f"{group}={preset(group, name)}"
    except (NotSimulatedError, ValueError):
        return
    for column, name in LIMITS.items():
        wanted, given = getattr(recorded.engine, name), getattr(scenario.engine, name)
        known = column in row and not pd.isna(row[column])
        if known and wanted != given:
            yield f"engine.{name}={wanted:g}"
    for name in SIZES:
        if (size := getattr(recorded, name)) != getattr(scenario, name):
            yield f"{name}={size}"
    block_size = row.get("block_size")
    if block_size is not None and not pd.isna(block_size) and int(block_size) != scenario.caching.block_size:
        yield f"caching.block_size={int(block_size)}"
