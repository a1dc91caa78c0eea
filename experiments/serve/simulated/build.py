"""Builds the simulated fleet of a server from its settings."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from experiments.serve.approximate_tokenizer import ApproximateTokenizer
from experiments.serve.settings import ServeSettings
from experiments.serve.simulated.answers import Answers
from experiments.serve.simulated.fleet import SimulatedFleet
from experiments.serve.simulated.lengths import OutputLengths
from sim.settings.errors import ConfigError
from sim.setup.scenario import Scenario

if TYPE_CHECKING:
    from experiments.serve.backend import Tokenizer


def build_fleet(scenario: Scenario, settings: ServeSettings, time_scale: float) -> SimulatedFleet:
    """Returns the fleet; its clock does not run yet. Raises ConfigError."""
    try:
        tokenizer = _tokenizer(settings.tokenizer)
        longest = min(pool.max_model_len for pool in scenario.pools_by_name.values())
        fleet = SimulatedFleet(
            scenario,
            tokenizer=tokenizer,
            answers=Answers(
                settings.text, tokenizer, scenario.seed, settings.dataset, settings.tool_call_share
            ),
            lengths=OutputLengths(settings.output_length, scenario.workload, scenario.seed, longest),
            time_scale=time_scale,
            max_record_bytes=settings.max_record_mib * (1 << 20),
            tokens_per_image=settings.image_tokens,
        )
        if settings.cold_start:
            fleet.simulation.start_cold()
        return fleet
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error


def _tokenizer(path: Path | None) -> Tokenizer:
    if path is None:
        return ApproximateTokenizer()
    try:
        from experiments.serve.model_tokenizer import ModelTokenizer  # noqa: PLC0415  (torch, by way of GGUF)
    except ImportError as error:
        raise ConfigError(
            f"serve.tokenizer={path}: needs {error.name}: pip install 'windtunnel[engine]'"
        ) from error
    try:
        return ModelTokenizer.from_path(path)
    except (ValueError, OSError) as error:
        raise ConfigError(f"serve.tokenizer={path}: cannot be read: {error}") from error
