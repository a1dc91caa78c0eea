"""The models that are calibrated and validated, and the compositions of their runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments.gpu.record import Record
from experiments.validate.fidelity.settings import Suite, split
from sim.settings.compose import Composition, ConfigSource
from sim.settings.config_groups import CONFIG_DIR
from sim.settings.hydra_errors import composed

LLAMA_8B = ("model=llama3_1_8b",)
LLAMA_1B = (
    *LLAMA_8B,
    "model.name=llama-3.2-1b",
    "model.source=meta-llama/Llama-3.2-1B",
    "model.config.num_hidden_layers=16",
    "model.config.hidden_size=2048",
    "model.config.intermediate_size=8192",
    "+model.config.tie_word_embeddings=true",
)
TINY = (
    "model=random_8m",
    "model.name=tiny",
    "model.config.num_hidden_layers=1",
    "model.config.hidden_size=32",
    "model.config.num_attention_heads=2",
    "model.config.num_key_value_heads=1",
    "model.config.intermediate_size=64",
    "model.config.vocab_size=128",
)
MODELS: Mapping[str, Sequence[str]] = {"llama_8b": LLAMA_8B, "llama_1b": LLAMA_1B}


def model_name(record: Record) -> str:
    """Returns the model's name of a part such as validate_llama_8b."""
    return record.name.partition("_")[2]


def calibrated_folder(record: Record) -> Path:
    """Returns the folder of the configs and tables that `calibrate` writes and `validate` reads."""
    return record.folder / f"calibrated_{model_name(record)}"


def composition(record: Record, overrides: Sequence[str] = ()) -> Composition:
    """Returns the composition of `windtunnel validate` with the part's model and device."""
    model = TINY if record.quick else MODELS[model_name(record)]
    given = [f"device={record.device.type}", "thresholds=gpu", *model, *overrides]
    return Composition(ConfigSource(config_name="validate", dirs=[CONFIG_DIR]), given)


def suite_of(name: str) -> Suite:
    """Returns the suite of that name from the config group `suite`."""
    source = ConfigSource(config_name="validate", dirs=[CONFIG_DIR])
    return split(composed(source, ["device=cpu", f"suite={name}"]))[0].suite
