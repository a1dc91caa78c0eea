"""Measured tables from which a device is calibrated: their columns, and the predictions for their rows.

Columns and units are those of the fits (`hwmodels.fitting`). Every table has the columns `id`, `gpu` and
`latency_us`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hwmodels.device import Device
from hwmodels.fitting import attention, collectives, gemm, limits, mla, moe
from hwmodels.fitting.robust import Floats
from hwmodels.operators import Calibration

Rows = Mapping[str, Any]
Bools = NDArray[np.bool_]

LIBRARIES = ("vllm", "trtllm")
KV_DTYPES = ("bfloat16", "fp8")


def every_row(rows: Rows, device: Device) -> Bools:
    """Returns true for each row."""
    return np.ones(len(rows["latency_us"]), dtype=np.bool_)


@dataclass(frozen=True, kw_only=True, slots=True)
class Operator:
    """Columns and functions of one table."""

    name: str
    """Name of the table's file, without .parquet."""
    title: str
    curve: str
    """Field of `Calibration` that predicts the operator's time."""
    sizes: tuple[str, ...]
    """Columns of numbers > 0."""
    choices: Mapping[str, tuple[str, ...]]
    """Columns of words -> the words allowed; empty: any word."""
    optional: Mapping[str, float] = field(default_factory=dict)
    """Columns that may be missing, or have missing values -> the default."""
    group_by: tuple[str, ...]
    """Columns that define a group of rows; a group is fitted or held out for validation as a whole."""
    predict: Callable[[Rows, Device, Calibration], Floats]
    """Predicted time of every row, in seconds."""
    least_seconds: Callable[[Rows, Device], Floats]
    """Lower bound of the time of every row by the data sheet, in seconds."""
    modelled: Callable[[Rows, Device], Bools] = every_row
    """Rows whose time the calibration models."""
    data_type: Callable[[Rows], list[str]]
    """Data type of every row, by which errors are grouped."""
    size: Callable[[Rows], Floats]
    """Size of every row, the x axis of the residual plot."""
    size_label: str

    @property
    def columns(self) -> tuple[str, ...]:
        return ("id", "gpu", *self.choices, *self.sizes, "latency_us")


def in_a_graph(rows: Rows, device: Device) -> Bools:
    """Selects rows measured in CUDA graphs; others of vLLM time launches from the host, at every size."""
    return np.array([not name.endswith("_eager") for name in rows["implementation"]], dtype=np.bool_)


def column(name: str) -> Callable[[Rows], list[str]]:
    """Returns a function for the values of a column."""
    return lambda rows: np.asarray(rows[name]).tolist()


def product(*names: str) -> Callable[[Rows], Floats]:
    """Returns a function for the product of columns, row by row."""
    return lambda rows: np.asarray(
        np.prod([np.asarray(rows[name], dtype=np.float64) for name in names], axis=0)
    )


def prefill_type(rows: Rows) -> list[str]:
    """Returns the data type of each row: the arithmetic's, and that of the KV cache if it differs."""
    return [
        arithmetic if arithmetic == cache else f"{arithmetic}, {cache} KV"
        for arithmetic, cache in zip(rows["attn_dtype"], rows["kv_dtype"], strict=True)
    ]


def mla_type(rows: Rows) -> list[str]:
    """Returns phase and scope of each row, the classes by which errors of MLA are reported."""
    return [f"{phase}, {scope}" for phase, scope in zip(rows["phase"], rows["scope"], strict=True)]


OPERATORS = {
    operator.name: operator
    for operator in (
        Operator(
            name="gemm",
            title="Matrix multiplication",
            curve="gemm",
            sizes=("m", "n", "k"),
            choices={
                "framework": LIBRARIES,
                "kernel": (),
                "dtype": ("bfloat16", "fp8", "fp8_block", "nvfp4", "int8_wo", "int4_wo", "sq"),
            },
            group_by=gemm.GROUP_BY,
            predict=lambda rows, device, fitted: gemm.predict_gemm(rows, device, fitted.gemm),
            least_seconds=limits.least_gemm_seconds,
            modelled=lambda rows, device: gemm.modelled_rows(rows),
            data_type=column("dtype"),
            size=product("m"),
            size_label="m, rows of the activations",
        ),
        Operator(
            name="attention_decode",
            title="Decode attention",
            curve="attention",
            sizes=("batch_size", "kv_len", "num_heads", "num_kv_heads", "head_dim"),
            choices={"framework": LIBRARIES, "kernel": (), "kv_dtype": KV_DTYPES},
            optional={"window_size": 0},
            group_by=attention.GROUP_BY,
            predict=lambda rows, device, fitted: attention.predict_decode(rows, device, fitted.attention),
            least_seconds=limits.least_decode_seconds,
            data_type=column("kv_dtype"),
            size=product("batch_size", "kv_len"),
            size_label="tokens in the cache, all sequences",
        ),
        Operator(
            name="attention_prefill",
            title="Prefill attention",
            curve="attention",
            sizes=("batch_size", "seq_len", "num_heads", "num_kv_heads", "head_dim"),
            choices={
                "framework": LIBRARIES,
                "kernel": (),
                "attn_dtype": KV_DTYPES,
                "kv_dtype": KV_DTYPES,
            },
            optional={"window_size": 0},
            group_by=attention.GROUP_BY,
            predict=lambda rows, device, fitted: attention.predict_prefill(rows, device, fitted.attention),
            least_seconds=limits.least_prefill_seconds,
            data_type=prefill_type,
            size=product("batch_size", "seq_len"),
            size_label="new tokens, all sequences",
        ),
        Operator(
            name="mla",
            title="Multi-head latent attention",
            curve="mla",
            sizes=("num_heads", "batch_size", "seq_len", "kv_len"),
            choices={
                "framework": LIBRARIES,
                "version": (),
                "scope": ("kernel", "module"),
                "phase": ("decode", "prefill"),
                "mla_dtype": KV_DTYPES,
                "kv_dtype": KV_DTYPES,
                "gemm_type": ("", "bfloat16", "fp8_block", "nvfp4"),
            },
            group_by=mla.GROUP_BY,
            predict=lambda rows, device, fitted: mla.predict_mla(
                rows, device, fitted.mla, fitted.gemm, fitted.stream
            ),
            least_seconds=limits.least_mla_seconds,
            data_type=mla_type,
            size=product("batch_size", "kv_len"),
            size_label="tokens in the cache, all sequences",
        ),
        Operator(
            name="moe",
            title="Mixture of experts",
            curve="moe",
            sizes=(
                "num_tokens",
                "hidden_size",
                "inter_size",
                "topk",
                "num_experts",
                "moe_tp_size",
                "moe_ep_size",
            ),
            choices={"version": (), "kernel": (), "dtype": tuple(moe.FORMATS), "distribution": ()},
            group_by=moe.GROUP_BY,
            predict=lambda rows, device, fitted: moe.predict_moe(rows, device, fitted.moe),
            least_seconds=limits.least_moe_seconds,
            data_type=column("dtype"),
            size=product("num_tokens"),
            size_label="tokens",
        ),
        Operator(
            name="collectives",
            title="Collectives",
            curve="collectives",
            sizes=("num_gpus", "bytes"),
            choices={
                "framework": (*LIBRARIES, "nccl"),
                "version": (),
                "collective": ("all_reduce", "all_gather", "reduce_scatter", "alltoall"),
                "implementation": (),
            },
            group_by=collectives.GROUP_BY,
            predict=lambda rows, device, fitted: collectives.predict_collectives(
                rows, device, fitted.collectives
            ),
            least_seconds=limits.least_collective_seconds,
            modelled=in_a_graph,
            data_type=column("collective"),
            size=product("bytes"),
            size_label="bytes",
        ),
    )
}
"""Operators by the name of their table."""
