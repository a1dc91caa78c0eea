"""Fits `MoeCurve` to measured fused MoE kernels, and predicts rows.

Columns: num_tokens, hidden_size, inter_size, topk, num_experts, moe_tp_size, moe_ep_size, distribution,
dtype; for fitting also latency_us, kernel, version. inter_size and num_experts are the model's; a rank has
inter_size / moe_tp_size and num_experts / moe_ep_size. All num_tokens tokens enter, and the busiest rank is
measured: it computes its own experts, other assignments are masked (NVIDIA aiconfigurator, collector/vllm).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hwmodels.device import Device
from hwmodels.fitting.robust import Fitted, Floats, fit_curve
from hwmodels.model.weights import WEIGHT_FORMATS, WeightFormat
from hwmodels.operators.moe import MoeCurve, MoeWork, kernel_family, moe_work, work_seconds
from hwmodels.operators.moe_routing import ExpertLayer, Routing

GROUP_BY = ("hidden_size", "inter_size", "topk", "num_experts")
"""Columns that identify an expert layout: its rows are fitted or held out together."""

PLAIN_UP = {(2688, 1856), (1024, 2688), (2048, 5120)}
"""(hidden_size, inter_size) of experts without a gate, squared ReLU: Nemotron 3. No column records it."""

FORMATS = {
    "bfloat16": WEIGHT_FORMATS["bf16"],
    "fp8": WEIGHT_FORMATS["fp8"],
    "fp8_block": WEIGHT_FORMATS["fp8_block"],
    "int4_wo": WEIGHT_FORMATS["int4_wo"],
    "nvfp4": WEIGHT_FORMATS["nvfp4"],
    "w4a16_mxfp4": WEIGHT_FORMATS["mxfp4"],
    "w4a8_mxfp4_mxfp8": WEIGHT_FORMATS["mxfp4_mxfp8"],
    "w4a4_mxfp4": replace(WEIGHT_FORMATS["mxfp4"], name="mxfp4_mxfp4"),
}
"""Weight format by value of the dtype column.

vLLM 0.24 has no kernel that multiplies mxfp4 by mxfp4: Marlin unpacks the weights of w4a4_mxfp4.
"""

IMPLEMENTATIONS = {
    "triton": ("tritonexperts", "vllm_fused_moe", "oaitriton"),
    "cutlass": ("flashinfer_cutlass",),
    "marlin": ("marlinexperts",),
    "trtllm_gen": ("flashinfer_trtllm",),
}
"""Substrings of the kernel column by prefix of names in `hwmodels.operators.moe.FAMILIES`."""

_KEYS = (
    "hidden_size",
    "inter_size",
    "topk",
    "num_experts",
    "moe_tp_size",
    "moe_ep_size",
    "distribution",
    "dtype",
)

RANGES = {
    "kernel_s": (1e-6, 2e-5),
    "weight_bandwidth_share": (0.3, 1.0),
    "flops_share": (0.1, 1.0),
    "activation_bandwidth_share": (0.1, 1.0),
    "saturating_tiles_per_sm": (0.01, 1.0),
    "tile_fill_rows": (0.5, 150.0),
}
"""Fitted parameters of `MoeCurve`, with their bounds."""


def fitted_rows(rows: Mapping[str, Any], device: Device, compute_capability: str) -> NDArray[np.bool_]:
    """Returns a mask of rows that represent engines: the engine's own choice of kernel, and valid routing.

    It excludes kernels forced by a model's unusual router or activation, and expert-parallel rows of vLLM
    before 0.20. Their collector gave the surplus of hot experts to their neighbours, so that with few tokens
    one rank held every expert of a token.
    """
    chosen = np.zeros(len(rows["num_tokens"]), dtype=np.bool_)
    for key, index in _groups(rows, (*_KEYS, "kernel")):
        layer, weights, _ = _arguments(key)
        implementation = kernel_family(device, layer, weights, compute_capability=compute_capability)
        names = next(parts for start, parts in IMPLEMENTATIONS.items() if implementation.startswith(start))
        chosen[index] = any(name in key[-1] for name in names)
    minor = np.array([int(version.split(".")[1]) for version in rows["version"]])
    sound = (minor >= 20) | (np.asarray(rows["moe_ep_size"]) == 1)
    return np.asarray(chosen & sound)


def fit_moe(
    rows: Mapping[str, Any], device: Device, *, compute_capability: str, seed: int = 0
) -> Fitted[MoeCurve]:
    """Returns the curve of one device from its `fitted_rows`; each format has the same weight in the fit.

    Raises ValueError if no row is left.
    """
    used = fitted_rows(rows, device, compute_capability)
    if not used.any():
        raise ValueError(f"no row of {device.name} was measured with the kernel that vLLM chooses there")
    rows = {name: np.asarray(column)[used] for name, column in rows.items()}
    work = _work(rows, device, compute_capability)
    measured = rows["latency_us"].astype(np.float64) * 1e-6
    formats, which, counts = np.unique(rows["dtype"].astype(str), return_inverse=True, return_counts=True)
    return fit_curve(
        MoeCurve(compute_capability=compute_capability),
        RANGES,
        lambda curve: work_seconds(work, curve),
        measured,
        weights=len(measured) / (len(formats) * counts[which]),
        seed=seed,
    )


def predict_moe(rows: Mapping[str, Any], device: Device, curve: MoeCurve) -> Floats:
    """Returns the seconds of each row with the kernels that vLLM chooses; the column kernel is not read."""
    if not len(rows["num_tokens"]):
        return np.empty(0)
    return work_seconds(_work(rows, device, curve.compute_capability), curve)


def _work(rows: Mapping[str, Any], device: Device, compute_capability: str) -> MoeWork:
    num_tokens = np.asarray(rows["num_tokens"], dtype=np.float64)
    order, parts = [], []
    for key, index in _groups(rows, _KEYS):
        layer, weights, routing = _arguments(key)
        order.append(index)
        parts.append(
            moe_work(
                num_tokens[index],
                layer,
                weights,
                device,
                routing=routing,
                compute_capability=compute_capability,
            )
        )
    back = np.argsort(np.concatenate(order))
    return MoeWork(*(np.concatenate(columns, axis=-1)[..., back] for columns in zip(*parts, strict=True)))


def _groups(rows: Mapping[str, Any], names: Iterable[str]) -> list[tuple[tuple[Any, ...], NDArray[np.int64]]]:
    """Groups rows by their values in names; returns the values and the rows' indices of each group."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for i, key in enumerate(zip(*(np.asarray(rows[name]).tolist() for name in names), strict=True)):
        groups.setdefault(key, []).append(i)
    return [(key, np.array(index)) for key, index in groups.items()]


def _arguments(key: tuple[Any, ...]) -> tuple[ExpertLayer, WeightFormat, Routing]:
    hidden, inter, top_k, num_experts, tp, ep, distribution, dtype = key[: len(_KEYS)]
    if dtype not in FORMATS:
        raise ValueError(f"dtype={dtype}: unknown; known: {', '.join(FORMATS)}")
    if inter % tp:
        raise ValueError(f"moe_tp_size={tp}: must divide inter_size={inter}")
    layer = ExpertLayer(
        hidden_size=hidden,
        intermediate_size=inter // tp,
        top_k=top_k,
        num_experts=num_experts,
        ep_size=ep,
        gated=(hidden, inter) not in PLAIN_UP,
    )
    return layer, FORMATS[dtype], _routing(distribution)


def _routing(distribution: str) -> Routing:
    """Returns the routing named by the distribution column: balanced, or power_law_<exponent>."""
    if distribution.startswith("power_law_"):
        return Routing(kind="power_law", exponent=float(distribution.removeprefix("power_law_")))
    return Routing(kind=distribution)
