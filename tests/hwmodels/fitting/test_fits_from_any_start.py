"""Every fit finds the figures that made its rows, whatever its starts and however the processor rounds."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from hwmodels.fitting import attention, collectives, gemm, host, mla, moe
from hwmodels.fitting.robust import fit_curve, spread_points
from hwmodels.operators.attention import AttentionCurve
from hwmodels.operators.collectives import CollectiveCurve
from hwmodels.operators.gemm import GemmCurve
from hwmodels.operators.mla import MlaCurve
from hwmodels.operators.moe import MoeCurve
from tests.hwmodels.conftest import CONFIGS, build_preset

SEEDS = range(10)
SLOW = [pytest.param(seed, marks=[pytest.mark.slow] if seed else []) for seed in SEEDS]
WIDE = ("AVX512", "X86_V4")


def other_processor():
    """Returns the environment in which numpy and OpenBLAS compute, and round, as without AVX-512.

    On a processor without it, as without AVX2.
    """
    found = np.show_config(mode="dicts")["SIMD Extensions"]["found"]
    wide = [name for name in found if name.startswith(WIDE)]
    core = "Haswell" if wide else "Sandybridge"
    return {"OPENBLAS_CORETYPE": core, "NPY_DISABLE_CPU_FEATURES": " ".join(wide or found)}


def table(**columns):
    """Returns the rows of all combinations of the columns' values."""
    axes = np.meshgrid(*(np.arange(len(values)) for values in columns.values()), indexing="ij")
    return {
        name: np.asarray(values)[axis.ravel()]
        for (name, values), axis in zip(columns.items(), axes, strict=True)
    }


def joined(*tables):
    return {name: np.concatenate([rows[name] for rows in tables]) for name in tables[0]}


def drawn(curve, ranges, seed):
    """Returns a curve with figures from the middle of their ranges."""
    shares = np.random.default_rng(seed).uniform(0.25, 0.75, len(ranges)).tolist()
    values = {
        name: lower * (upper / lower) ** share if lower > 0 else lower + share * (upper - lower)
        for (name, (lower, upper)), share in zip(ranges.items(), shares, strict=True)
    }
    return replace(curve, **values)


def gemm_case(device, seed):
    ranges = {name: pair for _, stage in gemm.STAGES for name, pair in stage.items()}
    rows = joined(
        *(
            table(
                m=[1.0, 17, 129, 513, 1024, 4097],
                n=[256.0, 1024, 4096, 12288],
                k=[64.0, 512, 2048, 16384],
                dtype=[dtype],
                framework=["vllm"],
                kernel=["cublas"],
            )
            for dtype in ("bfloat16", "fp8", "nvfp4")
        )
    )
    truth = drawn(GemmCurve(compute_capability="sm100"), ranges, seed)
    rows["latency_us"] = 1e6 * gemm.predict_gemm(rows, device, truth)
    return truth, ranges, gemm.fit_gemm(rows, device, compute_capability="sm100", seed=seed)


def attention_case(device, seed):
    layout = {
        "framework": ["vllm"],
        "kernel": ["vllm_flash_attn_fa3"],
        "kv_dtype": ["bfloat16"],
        "num_heads": [32],
        "num_kv_heads": [8],
        "head_dim": [128],
        "window_size": [0],
    }
    decode = table(batch_size=[1, 8, 64, 512], kv_len=[4, 64, 1024, 8192], **layout)
    prefill = table(batch_size=[1, 8, 64], seq_len=[32, 256, 2048, 8192], attn_dtype=["bfloat16"], **layout)
    ranges = attention.DECODE_RANGES | attention.PREFILL_RANGES
    truth = drawn(AttentionCurve(), ranges, seed)
    decode["latency_us"] = 1e6 * attention.predict_decode(decode, device, truth)
    prefill["latency_us"] = 1e6 * attention.predict_prefill(prefill, device, truth)
    return truth, ranges, attention.fit_attention(decode, prefill, device, seed=seed)


def mla_case(device, seed):
    rows = table(
        num_heads=[16, 128],
        batch_size=[1, 16, 256],
        seq_len=[1],
        kv_len=[4**k for k in range(1, 9)],
        framework=["trtllm"],
        version=["1.3"],
        scope=["kernel"],
        phase=["decode"],
        mla_dtype=["bfloat16"],
        kv_dtype=["bfloat16"],
        gemm_type=["bfloat16"],
    )
    truth = drawn(MlaCurve(), mla.RANGES, seed)
    rows["latency_us"] = 1e6 * mla.predict_mla(rows, device, truth)
    return truth, mla.RANGES, mla.fit_mla(rows, device, compute_capability="sm90", seed=seed)


def moe_case(device, seed):
    rows = joined(
        *(
            table(
                num_tokens=[1, 4, 16, 64, 256, 1024, 4096, 16384],
                hidden_size=[hidden],
                inter_size=[inter],
                topk=[top_k],
                num_experts=[experts],
                moe_tp_size=[tp],
                moe_ep_size=[ep],
                distribution=["balanced", "power_law_1.2"],
                dtype=[dtype],
                kernel=[kernel],
                version=["0.24.0"],
            )
            for hidden, inter, top_k, experts in ((4096, 14336, 2, 8), (2048, 768, 8, 128))
            for tp, ep in ((1, 1), (4, 1), (1, 4))
            for dtype, kernel in (("bfloat16", "vllm_x_triton_tritonexperts"), ("int4_wo", "x_marlinexperts"))
        )
    )
    truth = drawn(MoeCurve(), moe.RANGES, seed)
    rows["latency_us"] = 1e6 * moe.predict_moe(rows, device, truth)
    return truth, moe.RANGES, moe.fit_moe(rows, device, compute_capability="sm90", seed=seed)


def collectives_case(device, seed):
    rows = joined(
        *(
            table(
                framework=[framework],
                implementation=[framework],
                version=["2.0"],
                collective=[collective],
                num_gpus=[2, 4, 8],
                bytes=[4**k for k in range(5, 15)],
            )
            for framework, collective in (
                ("nccl", "all_reduce"),
                ("nccl", "all_gather"),
                ("nccl", "alltoall"),
                ("vllm", "all_reduce"),
            )
        )
    )
    truth = drawn(CollectiveCurve(), collectives.RANGES, seed)
    rows["latency_us"] = 1e6 * collectives.predict_collectives(rows, device, truth)
    return truth, collectives.RANGES, collectives.fit_collectives(rows, device, seed=seed)


CASES = {
    "gemm": gemm_case,
    "attention": attention_case,
    "mla": mla_case,
    "moe": moe_case,
    "collectives": collectives_case,
}


def check(family, device, seed):
    """Asserts that a fit is exact: a figure is the true one, or not determined in a range that holds that."""
    truth, ranges, found = CASES[family](device, seed)
    assert found.cost < 1e-6, (family, seed)
    for name in ranges:
        value, true = getattr(found.curve, name), getattr(truth, name)
        if name in found.undetermined:
            low, high = found.undetermined[name]
            assert 0.9 * low <= true <= 1.1 * high, (family, seed, name, value, true, found.undetermined)
        else:
            assert value == pytest.approx(true, rel=0.01), (family, seed, name, found.undetermined)


def device_of(family):
    """Returns the device of a family's rows: one that multiplies in fp4, for GEMMs."""
    name = "b200_sxm" if family == "gemm" else "h100_sxm"
    return build_preset(CONFIGS / "hardware" / f"{name}.yaml")


@pytest.mark.sampled(slow=10)
@pytest.mark.parametrize("family", CASES)
@pytest.mark.parametrize("seed", SLOW)
def test_a_fit_finds_the_curve_that_made_the_rows(family, seed):
    check(family, device_of(family), seed)


@pytest.mark.sampled(slow=2)
@pytest.mark.parametrize("seed", SLOW)
def test_fits_find_the_curves_on_a_processor_that_rounds_otherwise(seed):
    """numpy has other exp and log without AVX-512, so sums differ in their last bits."""
    program = (
        "from tests.hwmodels.fitting.test_fits_from_any_start import CASES, check, device_of\n"
        f"for family in CASES: check(family, device_of(family), {seed})"
    )
    root = Path(__file__).resolve().parents[3]
    environment = os.environ | other_processor() | {"PYTHONPATH": str(root), "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("seed", SEEDS)
def test_a_fit_of_host_times_finds_the_constants_that_made_the_figures(seed):
    """A host time hidden by the GPU has no slope: the response changes where it exceeds the GPU's."""
    draws = np.random.default_rng(seed)
    constants = [
        host.Constant(name="iteration_s", neutral=0.5e-3, lower=0, upper=10e-3, scale=500e-6),
        host.Constant(name="exposed_s", neutral=0, lower=0, upper=10e-3, scale=500e-6),
        host.Constant(name="clock", neutral=0.9, lower=0.5, upper=1, scale=0.05),
    ]
    truth = np.array([draws.uniform(0.2e-3, 3e-3), draws.uniform(0, 2e-3), draws.uniform(0.7, 1)])
    base = draws.uniform(5, 200, 60)
    above = np.stack([draws.uniform(0, 1500, 60), draws.uniform(500, 1500, 60), -0.5 * base], axis=1)
    response = host.Response(
        at=np.tile([1e-3, 0.5e-3, 0.9], (60, 1)), base=base, above=above, below=above * [0, 0.8, 0.8]
    )
    weights = np.full(60, 1e6)
    found = host.fit_constants(response, response.predict(truth), weights, constants, seed=seed)
    assert found[1:] == pytest.approx(truth[1:], rel=0.01, abs=5e-6)
    if truth[0] > 1e-3:  # below, the figures do not depend on it
        assert found[0] == pytest.approx(truth[0], rel=0.01)


def test_a_figure_that_no_row_determines_keeps_its_value_and_has_a_range():
    @dataclass(frozen=True)
    class Line:
        start_s: float = 2e-6
        byte_s: float = 1e-9
        limit_s: float = 5e-6

    sizes = np.array([1e4, 1e5, 1e6])

    def price(line):
        return np.maximum(line.start_s + line.byte_s * sizes, line.limit_s)

    ranges = {"start_s": (1e-7, 1e-4), "byte_s": (1e-11, 1e-7), "limit_s": (1e-8, 1e-2)}
    found = fit_curve(Line(), ranges, price, price(Line(start_s=1e-5, byte_s=2e-9)))
    assert (found.curve.start_s, found.curve.byte_s) == pytest.approx((1e-5, 2e-9), rel=1e-3)
    assert found.curve.limit_s == pytest.approx(5e-6)
    assert set(found.undetermined) == {"limit_s"}
    low, high = found.undetermined["limit_s"]
    assert low == 1e-8
    assert high == pytest.approx(3e-5, rel=0.2)  # the shortest row takes 30 us


def test_starts_are_spread_over_every_range():
    points = spread_points(10, 3, seed=1)
    assert np.sort((10 * points).astype(int), axis=0).tolist() == [[i] * 3 for i in range(10)]
