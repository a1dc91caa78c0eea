"""The settings of the engine of a server, from the scenario and from `serve.engine`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from experiments.calibrate.engine.scenario_settings import alone_settings_of
from experiments.serve.engine.settings import RealEngine
from policies.adapters.fixed_slots import FixedSlots
from policies.user_code import name_of
from realengine.model.backend import choose_device
from realengine.settings import EngineSettings
from realengine.speculation.settings import MAY_NEED_MODEL
from sim.setup.scenario import Scenario


def engine_settings(
    scenario: Scenario, chosen: RealEngine, device: str, config: Mapping[str, Any]
) -> EngineSettings:
    """Returns the settings of the engine.

    config: the scenario's resolved configuration. Raises ValueError, with the key, for settings that only the
    simulator has, and RuntimeError for a device that does not exist.
    """
    adapters = scenario.adapters
    if adapters is not None and not isinstance(adapters, FixedSlots):
        raise ValueError(f"adapters={name_of(adapters)}: the engine has adapters=fixed_slots only")
    if adapters is not None and not chosen.lora_modules:
        raise ValueError(
            f"adapters={name_of(adapters)}: there is no adapter to serve; set serve.engine.lora_modules, "
            "such as {sql: /adapters/sql}"
        )
    if chosen.speculative_config is not None and scenario.speculation is not None:
        raise ValueError(
            f"speculation={scenario.speculation.method}: serve.engine.speculative_config already says how "
            "the engine speculates; set speculation=none"
        )
    if isinstance(scenario.speculation, MAY_NEED_MODEL):
        method = scenario.speculation.method
        raise ValueError(
            f"speculation={method}: needs the weights of a draft; set serve.engine.speculative_config="
            f"{{method: {method}, model: DRAFT, num_speculative_tokens: 4}} instead"
        )
    settings = alone_settings_of(replace(scenario, adapters=None), choose_device(device), config)
    own: dict[str, Any] = {
        "lora_adapters": dict(chosen.lora_modules or {}),
        "adapters": adapters,
        "max_iterations": chosen.max_iterations,
        "attention_backend": chosen.attention_backend,
        "enable_sleep_mode": chosen.enable_sleep_mode,
        "overlap": settings.overlap and device == "cuda",  # on a CPU there is no device beside the host
    }
    if chosen.cudagraph_mode is not None:
        own["cudagraph_mode"] = chosen.cudagraph_mode
    if chosen.speculative_config is not None:
        own["speculative_config"] = dict(chosen.speculative_config)
    return replace(settings, **own)
