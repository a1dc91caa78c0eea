"""Builds models, devices and tariffs of `configs` for the functions of claims."""

from __future__ import annotations

from functools import cache
from typing import Any

from experiments.app.settings.compose import ConfigSource, resolved
from experiments.app.settings.config_groups import CONFIG_DIR
from experiments.papers.speculation import deployment_of
from hwmodels.costs import Tariff
from hwmodels.device import Device
from hwmodels.iterations.ops import OperatingPoint, decode_shape, operating_point, prefill_shape
from hwmodels.model import ModelSpec
from sim.settings.build import build

PALM = (  # 48 heads of 128 in 118 layers, each with its own keys and values
    "model=llama2_70b",
    "model.config.num_hidden_layers=118",
    "model.config.hidden_size=18432",
    "model.config.num_attention_heads=48",
    "model.config.num_key_value_heads=48",
    "+model.config.head_dim=128",
    "model.config.intermediate_size=73728",
)


@cache
def _node(name: str, *overrides: str) -> Any:
    """Returns a part of the config of `windtunnel simulate` with these overrides, built."""
    source = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR])
    return build(resolved(source.compose(list(overrides)))[name], name)


def model(*overrides: str) -> ModelSpec:
    """Returns the model of the settings; it does not need to fit any hardware."""
    found: ModelSpec = _node("model", *overrides)
    return found


def tariff(name: str) -> Tariff:
    """Returns a shipped tariff."""
    found: Tariff = _node("tariff", f"tariff={name}")
    return found


def decode(*settings: str, batch: int = 1, context: int) -> OperatingPoint:
    """Returns the operating point of a decode iteration with these settings of `windtunnel simulate`."""
    return operating_point(deployment_of(settings).iteration_model(), decode_shape(batch, context))


def prefill(*settings: str, batch: int = 1, prompt: int) -> OperatingPoint:
    """Returns the operating point of an iteration of whole prompts with these settings."""
    return operating_point(deployment_of(settings).iteration_model(), prefill_shape(batch, prompt))


def device(*overrides: str) -> Device:
    """Returns the device of the settings."""
    found: Device = _node("hardware", *overrides)
    return found


@cache
def lengths_of(name: str) -> Any:
    """Returns the shipped distributions of prompt and output lengths of this name."""
    source = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR])
    cfg = resolved(source.compose(["workload=poisson", f"workload/lengths={name}"]))
    return build(cfg["workload"]["lengths"], "workload.lengths")
