"""Maps names in tables of measurements to our presets."""

from __future__ import annotations

import re
from functools import lru_cache

from sim.settings.compose import ConfigSource
from sim.settings.config_groups import CONFIG_DIR, find_groups
from sim.settings.errors import ConfigError
from sim.settings.scenario import build_scenario
from sim.setup.scenario import Scenario

ALIASES = {
    "hardware": {
        "a100_sxm": "a100_80gb_sxm",
        "A100": "a100_80gb_sxm",
        "A100-80GB": "a100_80gb_sxm",
        "H100": "h100_sxm",
        "H200": "h200_sxm",
        "B200": "b200_sxm",
        "RTX PRO 6000 Blackwell Server": "rtx_pro_6000_server",
    },
    "engine": {"trtllm": "tensorrt_llm"},
    "model": {
        "RedHatAI/Llama-4-Scout-17B-16E-Instruct-FP8-dynamic": "llama4_scout",
        "mistralai/Mistral-Nemo-Instruct-2407": "mistral_nemo_12b",
        "mistralai/Mixtral-8x7B-v0.1": "mixtral_8x7b",
        "mistralai/Mixtral-8x22B-v0.1": "mixtral_8x22b",
        "meta-llama/Llama-2-7b-hf": "llama2_7b",
        "meta-llama/Llama-2-13b-hf": "llama2_13b",
        "meta-llama/Llama-2-70b-hf": "llama2_70b",
        "codellama/CodeLlama-34b-Instruct-hf": "codellama_34b",
    },
}
"""Names in tables of measurements that differ from our presets' names, by config group."""


class NotSimulatedError(Exception):
    """The reason why a row gets no prediction."""


@lru_cache(maxsize=256)
def base_scenario(model: str, gpu: str, engine: str) -> Scenario:
    """Returns the default scenario of `windtunnel simulate` with choices named as in tables of measurements.

    Raises NotSimulatedError for a name without a preset.
    """
    choices = {
        "model": preset("model", model),
        "hardware": preset("hardware", gpu),
        "engine": preset("engine", engine),
    }
    source = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR])
    overrides = [f"{group}={choice}" for group, choice in choices.items()]
    cfg = source.compose([*overrides, "workload=offline_batch", "slo=none"])
    try:
        return build_scenario(cfg)
    except ConfigError as error:
        raise NotSimulatedError(str(error)) from error


@lru_cache(maxsize=1024)
def preset(group: str, name: str) -> str:
    """Returns the choice of a config group with this name, up to case and punctuation."""
    known = {plain(choice.name): choice.name for choice in find_groups([CONFIG_DIR])[group]}
    found = known.get(plain(ALIASES.get(group, {}).get(name, name)))
    if found is None:
        raise NotSimulatedError(f"{group}={name}: there is no preset of this name")
    return found


def plain(name: str) -> str:
    """Normalises a name: llama3_1_70b and meta-llama/Llama-3.1-70B-Instruct give llama3170b."""
    return re.sub(r"[^a-z0-9]", "", name.rsplit("/", 1)[-1].lower().removesuffix("-instruct"))
