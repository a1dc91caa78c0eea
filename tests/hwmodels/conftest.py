"""Presets of the project's own configuration, built as Hydra would build them."""

from pathlib import Path

import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def build_preset(path: Path):
    return instantiate(OmegaConf.load(path), _convert_="all")


@pytest.fixture(scope="session")
def models():
    """ModelSpec by preset name."""
    return {p.stem: build_preset(p) for p in (CONFIGS / "model").glob("*.yaml") if p.stem != "hf"}


@pytest.fixture(scope="session")
def devices():
    """Device by preset name."""
    return {p.stem: build_preset(p) for p in (CONFIGS / "hardware").glob("*.yaml")}
