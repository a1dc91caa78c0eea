"""Rates measured by `windtunnel capacity` within an SLO, used instead of the roofline's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from policies.placement import Hosting
from sim.settings.errors import ConfigError
from sim.settings.recorded import read_json_object
from sim.setup.deployment import Deployment

EXAMPLE = "outputs/capacity/DATE/TIME/summary.json"


class Replica(NamedTuple):
    """A replica whose rate was measured."""

    model: str
    weights: str | None
    gpu: str
    num_gpus: int


def measured_rates(files: Sequence[str]) -> dict[Replica, float]:
    """Returns output tokens/s; of candidates that differ in engine settings only, the best.

    Raises ConfigError.
    """
    rates: dict[Replica, float] = {}
    for i, file in enumerate(files):
        try:
            for row in read_json_object(Path(file).expanduser())["ranked"]:
                if row["gpus_per_replica"] != row["tensor_parallel_size"]:
                    continue  # `place` has no replicas of this layout
                replica = Replica(row["model"], row["weights"], row["gpu"], row["gpus_per_replica"])
                rate = float(row["kept_output_tokens_per_s_and_replica"])
                if not 0 <= rate < math.inf:
                    raise ValueError(f"rate {rate}")
                rates[replica] = max(rate, rates.get(replica, 0.0))
        except ConfigError as error:
            raise ConfigError(f"measured[{i}]={error}; give a file such as {EXAMPLE}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"measured[{i}]={file}: is not a summary.json of capacity; give a file such as {EXAMPLE}"
            ) from error
    return rates


def with_measured(hosting: Hosting, deployment: Deployment, rates: Mapping[Replica, float]) -> Hosting:
    """Returns the hosting with its measured rate, if there is one; it then has its GPUs to itself."""
    model = deployment.model
    key = Replica(model.name, model.weights, deployment.hardware.name, hosting.num_gpus)
    if key not in rates:
        return hosting
    rate = rates[key]
    alone_bytes = deployment.usable_bytes
    return replace(hosting, bytes_each=alone_bytes, rate=lambda num_bytes: rate)
