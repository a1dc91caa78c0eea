"""The targets on a GPU, and the table of what was measured of them; it needs no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

Row = dict[str, Any]


class Target(NamedTuple):
    """A value to reach. measurement: STEP/NAME, in which * stands for any text: then the worst row counts.

    key: the field of the row. bound: the least value, or the largest if `at_most`. unit: as printed.
    """

    what: str
    measurement: str
    key: str
    bound: float
    unit: str = "%"
    at_most: bool = False

    def is_met(self, value: float) -> bool:
        """Returns whether a measured value reaches the target."""
        return value <= self.bound if self.at_most else value >= self.bound

    def shown(self, value: float) -> str:
        """Returns a value with its unit."""
        factor, digits = {"%": (100, 1), "us": (1e6, 0), "x": (1, 2)}.get(self.unit, (1, 0))
        return f"{factor * value:.{digits}f} {self.unit}"


VLLM_SIZES, VLLM_H200_S = (8, 32, 128), 0.83353
"""Prompts, tokens of each and output tokens of each, and the median seconds of vLLM on one H200.

Llama-3.1-8B in bf16. Source: vLLM's performance benchmark, https://buildkite.com/vllm/performance-benchmark/builds/9515,
latency test latency_llama8B_tp1. The prompts of its throughput tests are not published.
"""


def _kernel(what: str, case: str, bound: float = 0.8) -> Target:
    return Target(f"{what}: share of the copy bandwidth", f"kernels_speed/{case}", "copy_share", bound)


def _llama(what: str, name: str, key: str, bound: float) -> Target:
    of = {"mbu": "read bandwidth", "mfu": "GEMM rate", "bf16_share": "GEMM rate"}[key]
    return Target(f"Llama-3.1-8B, {what}: share of the {of}", f"llama_8b/{name}", key, bound)


TARGETS = (
    Target("kernels equal their references", "kernels_correct/*", "ok", 1.0),
    Target("greedy tokens equal those of the torch reference", "engine_correct/*", "same_share", 1.0),
    _llama("decode at batch 1", "decode_batch1", "mbu", 0.75),
    _llama("decode at batch 64", "decode_batch64", "mbu", 0.85),
    _llama("decode at batch 256", "decode_batch256", "mbu", 0.85),
    _llama("prefill of 2k tokens", "prefill_2048", "mfu", 0.65),
    _llama("prefill of 8k tokens", "prefill_8192", "mfu", 0.65),
    _llama("attention of a prompt of 8k tokens", "attention_8192", "bf16_share", 0.6),
    Target("GPU idle time between decode steps", "llama_8b/idle_batch1", "gap_s", 1e-4, "us", True),
    Target("first start of Llama-3.1-8B", "llama_8b/start", "seconds", 60.0, "s", True),
    Target("speed relative to vLLM's published one on an H200", "llama_8b/vllm_latency", "ratio", 0.95, "x"),
    Target("median error of the calibration's tables", "calibrate/iterations", "median", 0.03, "%", True),
    Target("decisions of the engine and the simulator are equal", "validate/*", "decisions", 1.0),
    Target("simulated against measured: E2E", "validate/*", "e2e_mean_s", 0.05, "%", True),
    Target("simulated against measured: TPOT", "validate/*", "tpot_mean_s", 0.05, "%", True),
    Target("simulated against measured: TTFT", "validate/*", "ttft_mean_s", 0.06, "%", True),
    Target("attention of a prompt: speed relative to torch's", "peers/sdpa_prefill", "ratio", 0.8, "x"),
    Target("speed relative to transformers' generate_batch", "peers/transformers_*", "ratio", 3.0, "x"),
    _kernel("decode attention, 16 x 4k", "decode_attention/llama_8b-bfloat16-batch16-context4096", 0.85),
    _kernel(
        "decode attention, 63 x 1k and 1 x 32k", "decode_attention/llama_8b-bfloat16-batch64-mixed", 0.85
    ),
    _kernel("decode attention, 1 x 32k", "decode_attention/llama_8b-bfloat16-batch1-context32768", 0.6),
    _kernel("RMSNorm of 4,096 rows", "norm/add_rms_norm-4096x4096"),
    _kernel("RoPE of 2,048 tokens", "rope/rope-2048x32+8x128"),
    _kernel("SwiGLU of 2,048 rows", "activation/silu_mul-2048x14336"),
    Target(
        "top-p of 64 rows of 128,256 logits",
        "kernels_speed/sampling/sample_penalties_top_k_top_p-64x128256",
        *("median_s", 6e-5, "us", True),
    ),
    Target("W4A16, 1 to 8 rows: speed relative to cuBLAS", "kernels_speed/w4a16_vs_*", "ratio", 2.2, "x"),
)


def rows_of(file: Path) -> list[Row]:
    """Reads the rows of a step; a last line that was torn when its process was killed is left out."""
    found = []
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def reached(target: Target, folder: Path) -> float | None:
    """Returns the worst value of a target's rows in a folder; None: not measured; NaN: a row has an error."""
    step, _, name = target.measurement.partition("/")
    rows = [row for row in rows_of(folder / f"{step}.jsonl") if fnmatchcase(row["name"], name)]
    if any("error" in row for row in rows):
        return math.nan
    values = [float(row[target.key]) for row in rows if isinstance(row.get(target.key), int | float)]
    return (max if target.at_most else min)(values, default=None)


def table_of(folders: Sequence[Path]) -> list[str]:
    """Returns the lines of a Markdown table: targets, and a column for each folder of results."""
    heads = [f"{folder.parent.name}, {folder.name}" for folder in folders] or ["measured"]
    lines = [f"| what | target | {' | '.join(heads)} |", f"| {' | '.join(['---'] * (2 + len(heads)))} |"]
    for target in TARGETS:
        bound = f"{'at most' if target.at_most else 'at least'} {target.shown(target.bound)}"
        cells = [_cell(target, reached(target, folder)) for folder in folders] or ["not measured"]
        lines.append(f"| {target.what} | {bound} | {' | '.join(cells)} |")
    return lines


def _cell(target: Target, value: float | None) -> str:
    if value is None or math.isnan(value):
        return "not measured" if value is None else "failed"
    return f"{target.shown(value)}, {'met' if target.is_met(value) else 'missed'}"


def is_failed(row: Mapping[str, Any]) -> bool:
    """Returns whether a row raised or its check does not hold. A target that is missed is no failure."""
    return "error" in row or row.get("ok") is False
