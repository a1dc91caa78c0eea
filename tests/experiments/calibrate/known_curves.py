"""Tables of operators that known curves give."""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd

from experiments.calibrate.operators import OPERATORS
from experiments.calibrate.relatives import composed
from hwmodels.device import Device
from hwmodels.operators import Calibration
from hwmodels.operators.attention import AttentionCurve
from hwmodels.operators.gemm import GemmCurve

TRUTH = Calibration(
    gemm=GemmCurve(
        start_s=3e-6,
        bandwidth_share=0.7,
        flops_share=0.6,
        flops_share_8bit=0.5,
        l2_bytes_per_sm_s=120e9,
        store_bytes_per_sm_s=30e9,
        wave_share=0.5,
    ),
    attention=AttentionCurve(
        decode_start_s=8e-6,
        decode_item_s=3e-6,
        kv_bandwidth_share=0.7,
        prefill_start_s=12e-6,
        flops_share=0.8,
        tile_s=5e-6,
    ),
)
OPS = Path(__file__).resolve().parents[3].parent / "shared" / "data" / "ops"
LAYOUTS = [(32, 8), (16, 2), (64, 8), (8, 1), (40, 8), (24, 24), (28, 4), (12, 12)]


preset = cache(composed)


def table(names: tuple[str, ...], *axes, **same) -> pd.DataFrame:
    """Returns the product of the axes (single values or tuples), with columns of one value each."""
    rows = [sum((a if isinstance(a, tuple) else (a,) for a in row), ()) for row in itertools.product(*axes)]
    return pd.DataFrame(rows, columns=list(names)).assign(gpu="h100_sxm", **same)


def shapes() -> dict[str, pd.DataFrame]:
    matrices = [*itertools.product((1024, 4096, 6144, 28672), (1024, 2048, 8192))]
    sizes = (1, 16, 100, 512, 3000, 16384)
    gemm = table(("m", "n", "k", "dtype"), sizes, matrices, ("bfloat16", "fp8"), framework="vllm", kernel="x")
    attention = {
        "framework": "vllm",
        "kernel": "vllm_flash_attn_fa3",
        "kv_dtype": "bfloat16",
        "head_dim": 128,
    }
    names = ("num_heads", "num_kv_heads", "batch_size")
    decode = table((*names, "kv_len"), LAYOUTS, (1, 8, 64, 512), (4, 64, 1024, 8192), **attention)
    prefill = table(
        (*names, "seq_len"), LAYOUTS, (1, 8, 64), (32, 256, 2048, 8192), attn_dtype="bfloat16", **attention
    )
    return {"gemm": gemm, "attention_decode": decode, "attention_prefill": prefill.assign(window_size=0)}


def measured(operator: str, rows: pd.DataFrame, device: Device, noise: float = 0.0) -> pd.DataFrame:
    """Returns the rows with the latencies that TRUTH predicts, times exp(noise * z), z standard normal."""
    columns = {"window_size": np.zeros(len(rows))} | {name: rows[name].to_numpy() for name in rows}
    seconds = OPERATORS[operator].predict(columns, device, TRUTH)
    factor = np.exp(noise * np.random.default_rng(0).standard_normal(len(rows)))
    ids = [f"{operator}-{i}" for i in range(len(rows))]
    return rows.assign(id=ids, latency_us=1e6 * seconds * factor)


def write(folder: Path, tables: dict[str, pd.DataFrame]) -> Path:
    for name, rows in tables.items():
        rows.to_parquet(folder / f"{name}.parquet", index=False)
    return folder
