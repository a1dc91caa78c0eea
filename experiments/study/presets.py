"""Maps names in tables of measurements to our presets."""

from __future__ import annotations

import re
from functools import lru_cache

from experiments.app.settings.compose import ConfigSource, resolved
from experiments.app.settings.config_groups import CONFIG_DIR, find_groups
from experiments.app.settings.hydra_errors import composed
from experiments.app.settings.renamed import NamedModel, model_named
from hwmodels.model import ModelSpec
from sim.settings.build import build
from sim.settings.errors import ConfigError, suggest
from sim.settings.scenario import build_scenario
from sim.setup.engine_profile import Client
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
}
"""Names in tables of measurements that differ from our presets' names, by config group."""


SOURCE = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR])
MODELS = ConfigSource(config_name="calibrate", dirs=[CONFIG_DIR])
"""Composes fewer groups than a scenario has, in a quarter of the time."""


class NotSimulatedError(Exception):
    """The reason why a row gets no prediction."""


@lru_cache(maxsize=256)
def base_scenario(model: str, gpu: str, engine: str, overrides: tuple[str, ...] = ()) -> Scenario:
    """Returns the scenario of `windtunnel simulate` with choices named as in tables of measurements.

    overrides: further settings. Raises NotSimulatedError for a name without a preset or a wrong setting.
    """
    named = model_preset(model)
    choices = {
        "model": named.choice,
        "hardware": preset("hardware", gpu),
        "engine": preset("engine", engine),
    }
    chosen = [f"{group}={choice}" for group, choice in choices.items()]
    if named.weights is not None:
        chosen.append(f"model.weights={named.weights}")
    try:
        return build_scenario(
            resolved(composed(SOURCE, [*chosen, "workload=offline_batch", "slo=none", *overrides]))
        )
    except ConfigError as error:
        raise NotSimulatedError(str(error)) from error


@lru_cache(maxsize=1024)
def base_model(name: str) -> ModelSpec:
    """Returns the model with this name. Raises NotSimulatedError for a name without a preset."""
    named = model_preset(name)
    weights = [] if named.weights is None else [f"model.weights={named.weights}"]
    try:
        cfg = resolved(composed(MODELS, [f"model={named.choice}", *weights]))
        model: ModelSpec = build(cfg["model"], "model")
    except ConfigError as error:
        raise NotSimulatedError(str(error)) from error
    return model


@lru_cache(maxsize=16)
def load_generator(name: str) -> Client:
    """Returns the client that measured a table's rows, a choice of the group client."""
    return build_scenario(resolved(composed(SOURCE, [f"client={name}"]))).client


@lru_cache(maxsize=1024)
def preset(group: str, name: str) -> str:
    """Returns the choice of a config group with this name, up to case and punctuation."""
    if group == "model":
        return model_preset(name).choice
    known = {plain(choice.name): choice.name for choice in find_groups([CONFIG_DIR])[group]}
    found = known.get(plain(ALIASES[group].get(name, name)))
    if found is None:
        remedy = suggest(str(name), known.values())
        raise NotSimulatedError(f"{group}={name}: there is no preset of this name; {remedy}")
    return found


@lru_cache(maxsize=1024)
def model_preset(name: str) -> NamedModel:
    """Returns the choice of `model` with this name, by the rule of `experiments.app.settings.renamed`."""
    found = model_named(name, [CONFIG_DIR])
    if found is None:
        raise NotSimulatedError(f"model={name}: there is no preset of this name; all: windtunnel list model")
    return found


def taken_for(name: str) -> str | None:
    """Returns a sentence on the preset that simulates a model; None for its own name and for no preset."""
    try:
        found = model_preset(name)
    except NotSimulatedError:
        return None
    if plain(name) == plain(found.choice):
        return None
    weights = "" if found.weights is None else f" model.weights={found.weights}"
    return f"model={name} is simulated as model={found.choice}{weights}: {found.summary}."


def plain(name: str) -> str:
    """Normalises a name: h100_sxm and H100-SXM give h100sxm."""
    return re.sub(r"[^a-z0-9]", "", name.lower())
