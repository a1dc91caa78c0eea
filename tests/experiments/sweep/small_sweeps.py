"""Sweeps of small runs, and the table that they write."""

import pandas as pd

from experiments.app.cli import main
from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR

SOURCE = ConfigSource(config_name="sweep", dirs=[CONFIG_DIR])
SMALL = (
    "model=smollm2_135m",
    "hardware=l4",
    "workload=poisson",
    "workload.num_requests=8",
    "sweep.report=false",
)


def sweep(*overrides):
    return main(["sweep", *overrides])


def runs_of(folder="out"):
    return pd.read_parquet(f"{folder}/runs.parquet")


def _noted(finished, run, then=lambda: None, at=None):
    def noting(self):
        finished.append(self.point.index)
        result = run(self)
        if self.point.index == at:
            then()
        return result

    return noting
