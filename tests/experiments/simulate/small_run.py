"""A small run of `simulate`, by the command line or composed."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.app.cli import main
from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from sim.settings.scenario import build_run

SOURCE = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR])
SMALL = ("workload=poisson", "workload.num_requests=60", "engine.num_kv_blocks=400")


def choices(group: str) -> list[str]:
    return sorted(file.stem for file in (CONFIG_DIR / group).glob("*.yaml"))


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.chdir(folder)
    asked = {argument.partition("=")[0] for argument in arguments}
    small = [choice for choice in SMALL if choice.partition("=")[0] not in asked]
    return main(["simulate", *small, "output.progress=false", *arguments])


def build(*overrides: str):
    return build_run(SOURCE.compose(list(overrides)))
