"""Converts profiles of other projects to rows of `Profile`.

LLMServingSim (Cho et al., IISWC 2024; profiles of its version 2, vLLM 0.19): one transformer layer inside
vLLM, prompt chunks and decodes in one attention call. Vidur (Agrawal et al., MLSys 2024): linear and
element-wise operators; its attention is not part of the stored copy.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from hwmodels.levels.profile import Rows, check_columns

ONCE = {"embedding", "final_layernorm", "lm_head", "sampler"}
TWICE_A_LAYER = {"layernorm", "add"}
GEMMS = {"qkv_proj", "o_proj", "gate_up_proj", "up_proj", "down_proj", "experts"}
DENSE_MLP = {"gate_up_proj", "up_proj", "down_proj", "act_fn"}
"""Operators of a dense MLP, which layers with experts do not run."""

VIDUR_OPERATORS = {
    "emb_us": "embedding",
    "input_layernorm_us": "input_layernorm",
    "attn_pre_proj_us": "qkv_proj",
    "attn_rope_us": "rotary_emb",
    "attn_post_proj_us": "o_proj",
    "post_attention_layernorm_us": "post_attention_layernorm",
    "mlp_up_proj_us": "gate_up_proj",
    "mlp_act_us": "act_fn",
    "mlp_down_proj_us": "down_proj",
    "add_us": "add",
}


class Layers(NamedTuple):
    """Numbers of layers by what they run, and the experts that a batch reaches."""

    all: int
    dense_mlps: int
    """Layers that run the operators of a dense MLP."""
    experts: int = 0
    active_experts: Callable[[Any], Any] | None = None
    """Returns the expected number of routed experts that receive tokens, by the number of tokens."""


def llmservingsim_rows(
    *, dense: Rows, attention: Rows, per_sequence: Rows, layers: Layers, moe: Rows | None = None
) -> Rows:
    """Returns rows of `Profile` from LLMServingSim's layer tables, for one GPU, model and tp.

    A layer runs each operator once, its norm twice. Times are of kernels alone, without all-reduces. Experts
    are measured by the numbers of tokens and of experts that receive some; the expected number is used.
    """
    check_columns("dense", dense, ("layer", "tokens", "time_us"))
    check_columns("attention", attention, ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us"))
    check_columns("per_sequence", per_sequence, ("layer", "sequences", "time_us"))
    for table, rows in (("dense", dense), ("attention", attention), ("per_sequence", per_sequence)):
        _check_one_setup(table, rows, ("gpu", "model", "tp"))
    experts = [] if moe is None else [_expert_rows(moe, layers)]
    return _stacked(
        [
            _named_rows(dense["layer"], dense["time_us"], layers, num_tokens=dense["tokens"]),
            *experts,
            _named_rows(
                per_sequence["layer"], per_sequence["time_us"], layers, num_seqs=per_sequence["sequences"]
            ),
            _named_rows(
                np.full(len(attention["time_us"]), "attention"),
                attention["time_us"],
                layers,
                prefill_tokens=attention["prefill_chunk"],
                cached_tokens=attention["kv_prefill"],
                decode_seqs=attention["n_decode"],
                decode_kv_tokens=attention["kv_decode"],
            ),
        ]
    )


def vidur_columns(rows: Rows) -> Rows:
    """Returns Vidur's columns in microseconds: from medians in milliseconds, or unchanged."""
    renamed = {}
    for name, values in rows.items():
        median = re.fullmatch(r"time_stats\.(\w+)\.median", name)
        renamed[f"{median[1]}_us" if median else name] = 1e3 * values if median else values
    return renamed


def vidur_rows(linear_ops: Rows, *, layers: Layers) -> Rows:
    """Returns rows of `Profile` from Vidur's linear operators, for one GPU, model and tp.

    Each operator runs once per layer, the residual add twice. Attention, LM head and all-reduces are missing.
    Operators that a model does not have are NaN (phi-2 has one norm per layer).
    """
    present = [name for name in VIDUR_OPERATORS if name in linear_ops]
    check_columns("linear_ops", linear_ops, ("num_tokens", *(present or VIDUR_OPERATORS)))
    _check_one_setup("linear_ops", linear_ops, ("gpu", "model", "tp"))
    parts = []
    for column in present:
        latency = np.asarray(linear_ops[column], dtype=np.float64)
        measured = ~np.isnan(latency)
        names = np.full(int(measured.sum()), VIDUR_OPERATORS[column])
        num_tokens = np.asarray(linear_ops["num_tokens"])[measured]
        parts.append(_named_rows(names, latency[measured], layers, num_tokens=num_tokens))
    return _stacked(parts)


def _expert_rows(moe: Rows, layers: Layers) -> dict[str, Any]:
    """Returns a row per number of tokens, interpolated to the expected number of experts that get some."""
    check_columns("moe", moe, ("tokens", "activated_experts", "time_us"))
    _check_one_setup("moe", moe, ("gpu", "model", "tp", "ep"))
    if layers.active_experts is None:
        raise ValueError("moe: the simulated model has no experts; name the table of this model")
    sizes = np.unique(np.asarray(moe["tokens"], dtype=np.float64))
    times = []
    for tokens, active in zip(sizes, np.asarray(layers.active_experts(sizes)), strict=True):
        own = np.flatnonzero(np.asarray(moe["tokens"]) == tokens)
        own = own[np.argsort(np.asarray(moe["activated_experts"])[own])]
        reached, time_us = (np.asarray(moe[name])[own] for name in ("activated_experts", "time_us"))
        times.append(np.interp(active, reached, time_us))
    return _named_rows(np.full(len(sizes), "experts"), np.array(times), layers, num_tokens=sizes)


def _named_rows(names: Any, latency_us: Any, layers: Layers, **sizes: Any) -> dict[str, Any]:
    operators = np.asarray(names).astype(str)
    return {
        "operator": operators,
        "component": np.array([_component(name) for name in operators.tolist()]),
        "calls": np.array([_calls(name, layers) for name in operators.tolist()]),
        "latency_us": np.asarray(latency_us, dtype=np.float64),
        **{name: np.asarray(size, dtype=np.float64) for name, size in sizes.items()},
    }


def _component(operator: str) -> str:
    if operator in ("lm_head", "sampler"):
        return "lm_head"
    if operator == "attention":
        return "attention"
    return "gemm" if operator in GEMMS else "elementwise"


def _calls(operator: str, layers: Layers) -> int:
    if operator in ONCE:
        return 1
    if operator == "experts":
        return layers.experts
    if operator in DENSE_MLP:
        return layers.dense_mlps
    return 2 * layers.all if operator in TWICE_A_LAYER else layers.all


def _stacked(parts: list[dict[str, Any]]) -> Rows:
    """Concatenates the parts; sizes that a part does not have are 0."""
    names = dict.fromkeys(name for part in parts for name in part)
    zeros = [np.zeros(len(part["operator"])) for part in parts]
    return {
        name: np.concatenate([part.get(name, zero) for part, zero in zip(parts, zeros, strict=True)])
        for name in names
    }


def _check_one_setup(table: str, rows: Mapping[str, Any], names: tuple[str, ...]) -> None:
    for name in names:
        if name in rows and len(values := sorted({str(value) for value in rows[name]})) > 1:
            raise ValueError(f"{table}: {name} is {', '.join(values)}; select the rows of one")
