"""Converts the operators of measured steps to the rows of a profile: `hwmodels.levels.profile`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from experiments.calibrate.engine.measure import Sections
from experiments.calibrate.engine.watch import HEAD, INPUTS, OUTPUTS
from hwmodels.levels.profile import ATTENTION_SIZES

LEAST_US = 1e-3
"""Least time in a profile, in us, for what is shorter than the resolution of the clock."""


class Operator(NamedTuple):
    """Component of an operator in the profile; per_layer: called once per layer, else once per iteration."""

    component: str
    per_layer: bool


OPERATORS = {
    INPUTS: Operator("elementwise", False),
    "embedding": Operator("elementwise", False),
    "layernorm": Operator("elementwise", True),
    "qk_norm": Operator("elementwise", True),
    "rope_and_write_kv": Operator("elementwise", True),
    "activation": Operator("elementwise", True),
    "qkv": Operator("gemm", True),
    "o": Operator("gemm", True),
    "gate_up": Operator("gemm", True),
    "down": Operator("gemm", True),
    "experts": Operator("gemm", True),
    HEAD: Operator("lm_head", False),
    "sampler": Operator("lm_head", False),
    OUTPUTS: Operator("lm_head", False),
}
"""Operators by name. layernorm covers all norms of a layer together."""

ENGINE_NAMES = {"qkv": "qkv_proj", "o": "o_proj", "gate_up": "gate_up_proj", "down": "down_proj"}
"""Names of the matrices in `hwmodels.levels.physical.check_physical`."""


def profile_rows(sections: Sequence[Sections], num_layers: int) -> pd.DataFrame:
    """Returns one row per measurement; if several steps measure the same, their median.

    For the LM head these are the steps with the fewest tokens: decodes, of which it is a large share. After a
    long chunk its weights are no longer in the caches of a CPU.
    """
    by_size: dict[tuple[str, int], list[float]] = defaultdict(list)
    fewest: dict[int, int] = {}  # by sampled rows: tokens of the smallest step
    for point, _ in sections:
        rows_drawn, tokens = point.step.num_drawn, point.step.num_tokens
        fewest[rows_drawn] = min(tokens, fewest.get(rows_drawn, tokens))
    rows = []
    for point, seconds in sections:
        for name, operator in OPERATORS.items():
            if name not in seconds:
                continue
            size = point.step.num_tokens
            if operator.component == "lm_head":
                size = point.step.num_drawn
                if point.step.num_tokens > fewest[size]:
                    continue
            by_size[name, size].append(seconds[name] / (num_layers if operator.per_layer else 1))
        attention_s = seconds.get("decode_attention", 0.0) + seconds.get("prefill_attention", 0.0)
        sizes = dict(zip((*ATTENTION_SIZES, "prefill_seqs"), point[1:], strict=True))
        rows.append(_row("attention", "attention", num_layers, attention_s / num_layers, **sizes))
    for (name, size), times_s in sorted(by_size.items()):
        operator = OPERATORS[name]
        calls = num_layers if operator.per_layer else 1
        column = "num_seqs" if operator.component == "lm_head" else "num_tokens"
        shown = ENGINE_NAMES.get(name, name)
        rows.append(_row(shown, operator.component, calls, float(np.median(times_s)), **{column: size}))
    return pd.DataFrame(rows).fillna(0)


def _row(operator: str, component: str, calls: int, call_s: float, **sizes: int) -> dict[str, object]:
    return {
        "operator": operator,
        "component": component,
        "calls": calls,
        "latency_us": max(1e6 * call_s, LEAST_US),
        **sizes,
    }
