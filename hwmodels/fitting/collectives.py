"""Fits the curve of collectives on one device to measured rows, and predicts rows.

Columns: framework (nccl, vllm, trtllm), version, collective (all_reduce, all_gather, reduce_scatter,
alltoall), implementation (ends in _eager or _graph for vLLM), num_gpus (one node), bytes, latency_us.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hwmodels.device import Device
from hwmodels.exact import Num
from hwmodels.fitting.robust import Fitted, Floats, fit_curve
from hwmodels.operators.collectives import CollectiveCurve, collective_seconds

Rows = Mapping[str, Any]

GROUP_BY = ("gpu", "implementation", "collective", "num_gpus")
"""Validation holds out complete message-size sweeps; sizes between fitted ones would show nothing."""

RANGES = {
    "start_s": (1e-6, 50e-6),
    "hop_s": (0.1e-6, 10e-6),
    "bandwidth_share": (0.1, 1.0),
    "direct_start_s": (1e-6, 50e-6),
}
"""Fitted parameters of `CollectiveCurve`, with their bounds."""


def fitted_rows(rows: Rows) -> NDArray[np.bool_]:
    """Returns a mask of rows to fit: the newest version of each framework, no vLLM rows outside CUDA graphs.

    Rows outside CUDA graphs also time the host's launches, 20 us to 45 us for messages of any size.
    """
    frameworks = np.asarray(rows["framework"])
    versions = np.array([release(version) for version in rows["version"]], dtype=object)
    newest = {name: max(versions[frameworks == name]) for name in set(frameworks.tolist())}
    graph = np.array([not str(name).endswith("_eager") for name in rows["implementation"]])
    current = [version == newest[name] for version, name in zip(versions, frameworks, strict=True)]
    return np.asarray(graph & np.array(current, dtype=np.bool_))


def release(version: str) -> str:
    """Returns a version as text that sorts numerically: 2.9 before 2.27."""
    return ".".join(f"{int(part):06d}" for part in re.findall(r"\d+", version))


def predict_collectives(rows: Rows, device: Device, curve: CollectiveCurve) -> Floats:
    """Returns the predicted seconds of each row on that device."""
    num_bytes = np.asarray(rows["bytes"], dtype=np.float64)
    keys = list(
        zip(rows["framework"], rows["collective"], rows["implementation"], rows["num_gpus"], strict=True)
    )
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    groups = np.array([numbers[key] for key in keys], dtype=np.intp)
    seconds = np.empty_like(num_bytes)
    for (framework, collective, implementation, num_gpus), number in numbers.items():
        chosen = groups == number
        price = seconds_of(str(collective), str(framework), str(implementation))
        seconds[chosen] = price(num_bytes[chosen], int(num_gpus), device, curve)
    return seconds


def seconds_of(collective: str, framework: str, implementation: str) -> Callable[..., Num]:
    """Returns the operator that prices a row's collective. Raises ValueError for an unknown collective."""
    names = {name: name for name in ("all_reduce", "all_gather", "reduce_scatter")} | {
        "alltoall": "all_to_all"
    }
    if collective not in names:
        raise ValueError(f"collective={collective}: must be one of {', '.join(names)}")
    if collective != "all_reduce":  # engines use NCCL
        return partial(collective_seconds, names[collective])
    return partial(collective_seconds, collective, kernels=framework, eager=implementation.endswith("_eager"))


def fit_collectives(rows: Rows, device: Device, *, seed: int = 0) -> Fitted[CollectiveCurve]:
    """Returns the curve fitted to the rows of one device selected by `fitted_rows`."""
    chosen = fitted_rows(rows)
    columns = {name: np.asarray(values)[chosen] for name, values in rows.items()}
    return fit_curve(
        CollectiveCurve(),
        RANGES,
        lambda curve: predict_collectives(columns, device, curve),
        np.asarray(columns["latency_us"], dtype=np.float64) * 1e-6,
        seed=seed,
    )
