"""The fit of collectives: known parameters come back, and sweeps that were kept back are predicted."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from experiments.study.errors import errors
from hwmodels.fitting.collectives import GROUP_BY, fit_collectives, fitted_rows, predict_collectives
from hwmodels.fitting.robust import validation_rows
from hwmodels.operators.collectives import CollectiveCurve, collective_seconds

MEASURED = Path(__file__).resolve().parents[3].parent / "shared" / "data" / "ops" / "collectives.parquet"
DEVICES = {
    "a100_sxm": "a100_80gb_sxm",
    "h100_sxm": "h100_sxm",
    "h200_sxm": "h200_sxm",
    "b200_sxm": "b200_sxm",
    "rtx_pro_6000_server": "rtx_pro_6000_server",
}
NVLINK_4_BYTES_PER_S = 450e9


def rows_of(*shapes):
    names = ("framework", "version", "collective", "implementation", "num_gpus", "bytes")
    return dict(zip(names, map(np.array, zip(*shapes, strict=True)), strict=True))


def test_a_row_is_priced_by_its_own_operator(devices):
    rows = rows_of(
        ("nccl", "2.0", "all_reduce", "NCCL", 4, 4096),
        ("vllm", "0.24.0", "all_reduce", "vLLM_custom_graph", 4, 4096),
        ("vllm", "0.24.0", "all_reduce", "vLLM_custom_eager", 8, 2**30),
    )
    device, curve = devices["h100_sxm"], CollectiveCurve()
    assert predict_collectives(rows, device, curve).tolist() == [
        collective_seconds("all_reduce", 4096.0, 4, device, curve, kernels="nccl"),
        collective_seconds("all_reduce", 4096.0, 4, device, curve, kernels="vllm"),
        collective_seconds("all_reduce", 2.0**30, 8, device, curve, kernels="vllm", eager=True),
    ]


def test_newest_versions_in_graphs_are_fitted():
    rows = rows_of(
        ("nccl", "2.9.1", "all_reduce", "NCCL", 2, 1),
        ("nccl", "2.29.2", "all_reduce", "NCCL", 2, 1),
        ("vllm", "0.24.0", "all_reduce", "vLLM_custom_graph", 2, 1),
        ("vllm", "0.24.0", "all_reduce", "vLLM_custom_eager", 2, 1),
    )
    assert fitted_rows(rows).tolist() == [False, True, True, False]


def test_rejects_an_unknown_collective(devices):
    rows = rows_of(("nccl", "2.0", "broadcast", "NCCL", 2, 1))
    with pytest.raises(ValueError, match=r"collective=broadcast: must be one of all_reduce"):
        predict_collectives(rows, devices["h100_sxm"], CollectiveCurve())


@pytest.mark.slow
@pytest.mark.skipif(not MEASURED.exists(), reason="measured collectives are not beside this checkout")
def test_kept_back_sweeps_are_predicted_within_the_target(devices):
    table = pd.read_parquet(MEASURED)
    table = table[fitted_rows_by_device(table)]
    predicted, measured = [], []
    for gpu, rows in table.groupby("gpu"):
        device = with_multicast(devices[DEVICES[gpu]])
        kept_back = validation_rows(rows.to_dict("list"), GROUP_BY)
        curve = fit_collectives(rows[~kept_back].to_dict("list"), device).curve
        predicted.append(predict_collectives(rows[kept_back].to_dict("list"), device, curve))
        measured.append(rows[kept_back].latency_us.to_numpy() * 1e-6)
    over_all = errors(np.concatenate(predicted), np.concatenate(measured))
    assert over_all.median < 12
    assert over_all.p90 < 35


def fitted_rows_by_device(table):
    chosen = pd.Series(False, index=table.index)
    for _, rows in table.groupby("gpu"):
        chosen[rows.index] = fitted_rows(rows.to_dict("list"))
    return chosen


def with_multicast(device):
    if device.scale_up is None:
        return device
    multicast = device.scale_up.bandwidth_bytes_per_s >= NVLINK_4_BYTES_PER_S
    return replace(device, scale_up=replace(device.scale_up, multicast=multicast))
