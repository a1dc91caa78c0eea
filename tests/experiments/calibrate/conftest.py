"""A device, and a folder of tables that its known curves give."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from hwmodels.device import Device
from tests.experiments.calibrate.known_curves import measured, preset, shapes, write


@pytest.fixture(scope="module")
def h100() -> Device:
    return preset("h100_sxm")[0]


@pytest.fixture(scope="module")
def ops(tmp_path_factory: pytest.TempPathFactory, h100: Device) -> Path:
    """Writes tables with 1 % noise, half of their rows of another GPU that takes twice as long."""
    tables = {name: measured(name, rows, h100, noise=0.01) for name, rows in shapes().items()}
    others = {
        name: rows.assign(gpu="h200_sxm", latency_us=2 * rows["latency_us"]) for name, rows in tables.items()
    }
    both = {name: pd.concat([others[name], rows]) for name, rows in tables.items()}
    return write(tmp_path_factory.mktemp("ops"), both)
