"""Fits the curve of dense matrix multiplication on one device to measured rows, and predicts rows.

Columns: framework (vllm, trtllm), kernel, dtype (bfloat16, fp8, fp8_block, nvfp4, int8_wo, int4_wo, sq),
m, n, k, latency_us.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hwmodels.devices.device import Device
from hwmodels.fitting.robust import Floats, fit
from hwmodels.model.quantization import WEIGHT_FORMATS
from hwmodels.operators.gemm import GemmCurve, gemm_seconds

Rows = Mapping[str, Any]

GROUP_BY = ("n", "k")
"""Validation keeps back whole matrices; other m of a fitted matrix would show little."""

FORMATS = {"bfloat16": "bf16", "sq": "int8"}
"""Weight format by dtype of the rows, where names differ."""

HOST_BOUND_KERNELS = (
    "CutlassFp8BlockScaledMMKernel",
    "DeepGemmFp8BlockScaledMMKernel",
    "FlashInferFp8BlockScaledMMKernel",
)
"""Kernels measured outside a CUDA graph: their calls take 60 us to 230 us of the host for any shape.

Rows show the longer of host and GPU time. Engines replay graphs, so such rows say nothing about them, and
`modelled_rows` leaves them out. TensorRT-LLM's rows time the same kind of kernels on the GPU.
"""

CAPABILITY_OF_KERNEL = {
    "FlashInferFp8BlockScaledMMKernel": "sm90",
    "FlashInferCuteDslNvFp4LinearKernel": "sm100",
    "FlashInferCutlassNvFp4LinearKernel": "sm120",
}
"""Compute capability by vLLM kernels that run on one kind of chip only."""

STAGES: tuple[tuple[tuple[str, ...], dict[str, tuple[float, float, float]]], ...] = (
    (
        ("bfloat16",),
        {
            "start_s": (0.5e-6, 2.4e-6, 10e-6),
            "bandwidth_share": (0.3, 0.8, 1.0),
            "flops_share": (0.2, 0.6, 1.0),
            "l2_bytes_per_sm_s": (20e9, 60e9, 500e9),
            "store_bytes_per_sm_s": (5e9, 40e9, 500e9),
            "wave_share": (0.0, 0.7, 1.0),
        },
    ),
    (("fp8", "fp8_block", "sq"), {"flops_share_8bit": (0.2, 0.5, 1.0)}),
    (("nvfp4",), {"flops_share_4bit": (0.2, 0.4, 1.0)}),
)
"""Dtypes of rows, and the figures that are fitted to these rows (lower bound, start of the fit, upper bound).

The fit starts at slow arithmetic and slow L2: from above, a figure that limits no row would stay there.
"""


def modelled_rows(rows: Rows) -> NDArray[np.bool_]:
    """Returns a mask of rows that time the GPU."""
    return ~np.isin(np.asarray(rows["kernel"], dtype=str), HOST_BOUND_KERNELS)


def predict_gemm(rows: Rows, device: Device, curve: GemmCurve) -> Floats:
    """Returns the predicted seconds of each row on that device, for repeated calls as in a benchmark."""
    m, n, k = (np.asarray(rows[name], dtype=np.float64) for name in ("m", "n", "k"))
    frameworks, dtypes = np.asarray(rows["framework"], dtype=str), np.asarray(rows["dtype"], dtype=str)
    seconds = np.empty_like(m)
    for framework, dtype in sorted(set(zip(frameworks.tolist(), dtypes.tolist(), strict=True))):
        chosen = (frameworks == framework) & (dtypes == dtype)
        weights = WEIGHT_FORMATS[FORMATS.get(dtype, dtype)]
        seconds[chosen] = gemm_seconds(
            m[chosen], n[chosen], k[chosen], weights, device, curve, kernels=framework, repeated=True
        )
    return seconds


def fit_gemm(rows: Rows, device: Device, *, compute_capability: str | None = None) -> GemmCurve:
    """Returns the curve fitted to the rows of one device, stage by stage (`STAGES`).

    A figure that no row determines keeps its default. compute_capability None: derived from the rows.
    """
    curve = GemmCurve(compute_capability=compute_capability or capability_of(rows["kernel"]))
    modelled, dtypes = modelled_rows(rows), np.asarray(rows["dtype"], dtype=str)
    for stage_dtypes, figures in STAGES:
        chosen = modelled & np.isin(dtypes, stage_dtypes)
        if chosen.any():
            curve = fit_stage({name: np.asarray(rows[name])[chosen] for name in rows}, device, curve, figures)
    return curve


def capability_of(kernels: Any) -> str:
    """Returns the compute capability of the rows' chip: sm80 if no kernel is of a later one.

    Raises ValueError if the kernels point to several.
    """
    found = {CAPABILITY_OF_KERNEL[name] for name in set(map(str, kernels)) & CAPABILITY_OF_KERNEL.keys()}
    if len(found) > 1:
        raise ValueError(f"kernel: rows name kernels of {', '.join(sorted(found))}; give rows of one device")
    return found.pop() if found else "sm80"


def fit_stage(
    rows: Rows, device: Device, curve: GemmCurve, figures: Mapping[str, tuple[float, float, float]]
) -> GemmCurve:
    """Returns the curve with these figures (lower, start, upper) fitted to all rows, the others unchanged."""
    lower, start, upper = np.array(list(figures.values())).T

    def with_figures(parameters: Floats) -> GemmCurve:
        return replace(curve, **dict(zip(figures, parameters.tolist(), strict=True)))

    return with_figures(
        fit(
            lambda parameters: predict_gemm(rows, device, with_figures(parameters)),
            np.asarray(rows["latency_us"], dtype=np.float64) * 1e-6,
            start,
            lower,
            upper,
        )
    )
