"""Measures the kernels' bytes/s and FLOP/s as shares of this run's limits: the cases of every kernel module.

Beside them: W4A16 products against cuBLAS, and attention of passes with draft tokens against plain decodes.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import partial
from itertools import chain, zip_longest
from typing import Any

import torch

from experiments.calibrate.engine.timing import input_sets, timed
from experiments.gpu.limits import linear_timing
from experiments.gpu.measurement import Measurement, Run
from experiments.gpu.targets import TARGETS
from kernels.ahead import kernel_modules
from kernels.case import Case
from kernels.prefill_attention import prefill_case
from kernels.w4a16 import w4a16_case

SMALL = ("activation/silu_mul-1x1536", "norm/rms_norm-1x576", "rejection/match_drafts_chain-1x5")
"""Cases of a rehearsal."""
W4_LAYERS = {"qkv": (4096, 6144), "o": (4096, 4096), "gate_up": (4096, 28672), "down": (14336, 4096)}


def cases() -> list[Case]:
    """Returns all modules' cases: those with a target, then the first of each module, the second, and so on.

    Specialised warps have never run on a GPU and may hang, so prefill_hopper comes last.
    """
    by_module = [
        [
            case._replace(name=f"{name}/{case.name}")
            for case in importlib.import_module(f"kernels.{name}").cases()
        ]
        for name in kernel_modules()
    ]
    found = [case for case in chain.from_iterable(zip_longest(*by_module)) if case is not None]
    aims = {target.measurement.removeprefix("kernels_speed/") for target in TARGETS}
    return sorted(
        found, key=lambda case: 2 if case.name.startswith("prefill_hopper") else case.name not in aims
    )


def table(run: Run) -> list[Measurement]:
    """Returns the table: cases with a target, W4A16 products, passes with draft tokens, other cases."""
    w4a16 = run.size([(layer, m) for m in (1, 8, 2, 4) for layer in W4_LAYERS], [("o", 1)])
    sizes = run.size(
        [(batch, context) for context in (1024, 8192, 32768) for batch in (1, 8, 32, 64)], [(2, 40)]
    )
    chosen = [case for case in cases() if not run.rehearse or case.name in SMALL]
    timed_cases = [Measurement(case.name, partial(_case, case)) for case in chosen]
    return [
        *timed_cases[:8],
        *(Measurement(f"w4a16_vs_cublas_{layer}_m{m}", partial(_w4a16, m, layer)) for layer, m in w4a16),
        *(
            Measurement(f"verify/batch{batch}-context{context}-k{k}", partial(_verify, batch, context, k))
            for k in run.size((0, 4, 8, 1, 2, 3, 5, 6, 7), (0, 2))
            for batch, context in sizes
        ),
        *timed_cases[8:],
    ]


def _case(case: Case, run: Run, _: None) -> dict[str, Any]:
    """Times a case; returns its rates and their shares of the limits."""
    found = timed(input_sets(case.make, run.device, case.bytes_moved), run.device)
    rates = {"copy": case.bytes_moved / found.median_s, "bf16": case.flops / found.median_s}
    row = found.row() | {"bytes_per_s": rates["copy"], "flops_per_s": rates["bf16"]}
    return row | {f"{name}_share": run.share(rate, name) for name, rate in rates.items()}


def _w4a16(m: int, layer: str, run: Run, _: None) -> Mapping[str, Any]:
    """Times the int4 product and torch's bf16 product at the same sizes."""
    k, n = run.size(W4_LAYERS[layer], (128, 48))
    row = _case(w4a16_case(layer, n, k, 128, m, torch.bfloat16), run, None)
    dense_s = linear_timing(m, k, n, run.device).median_s
    return row | {"dense_s": dense_s, "ratio": dense_s / row["median_s"]}


def _verify(batch: int, context: int, num_drafts: int, run: Run, _: None) -> Mapping[str, Any]:
    """Times the attention of passes with 1 + K rows a sequence, which read its KV once."""
    row = _case(prefill_case("llama_8b", batch, 1 + num_drafts, context, torch.bfloat16), run, None)
    decode = run.row("kernels_speed", f"verify/batch{batch}-context{context}-k0") or row
    return row | {"times_decode": row["median_s"] / decode["median_s"]}
