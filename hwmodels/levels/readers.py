"""Profiles of other projects in the form of `Profile`, and what no device can have measured.

LLMServingSim (Cho et al., IISWC 2024; profiles of its version 2, vLLM 0.19): one transformer layer inside
vLLM, prompt chunks and decodes in one attention call. Vidur (Agrawal et al., MLSys 2024): linear and
element-wise operators; its attention is not part of the stored copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from hwmodels.devices.device import Device
from hwmodels.fitting.limits import TOO_SLOW, slowness
from hwmodels.levels.grid import Floats
from hwmodels.levels.profile import ATTENTION_SIZES, Rows, check_columns
from hwmodels.model.matrices import Ranks, share_of
from hwmodels.model.model_spec import ModelSpec
from hwmodels.model.quantization import weight_format

PHYSICAL_SHARE = 0.8
"""A latency this far below the data sheet's limit is refused: boost clocks make real limits a bit shorter."""

ONCE = {"embedding", "final_layernorm", "lm_head", "sampler"}
TWICE_A_LAYER = {"layernorm", "add"}
GEMMS = {"qkv_proj", "o_proj", "gate_up_proj", "up_proj", "down_proj"}

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


def llmservingsim_rows(*, dense: Rows, attention: Rows, per_sequence: Rows, num_layers: int) -> Rows:
    """Rows of `Profile` from LLMServingSim's three layer tables, for one GPU, model and tp.

    A layer runs each operator once, its norm twice. Times are of kernels alone, without all-reduces.
    """
    check_columns("dense", dense, ("layer", "tokens", "time_us"))
    check_columns("attention", attention, ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us"))
    check_columns("per_sequence", per_sequence, ("layer", "sequences", "time_us"))
    for table, rows in (("dense", dense), ("attention", attention), ("per_sequence", per_sequence)):
        _check_one_setup(table, rows, ("gpu", "model", "tp"))
    return _stacked(
        [
            _named_rows(dense["layer"], dense["time_us"], num_layers, num_tokens=dense["tokens"]),
            _named_rows(
                per_sequence["layer"], per_sequence["time_us"], num_layers, num_seqs=per_sequence["sequences"]
            ),
            _named_rows(
                np.full(len(attention["time_us"]), "attention"),
                attention["time_us"],
                num_layers,
                prefill_tokens=attention["prefill_chunk"],
                cached_tokens=attention["kv_prefill"],
                decode_seqs=attention["n_decode"],
                decode_kv_tokens=attention["kv_decode"],
            ),
        ]
    )


def vidur_rows(linear_ops: Rows, *, num_layers: int) -> Rows:
    """Rows of `Profile` from Vidur's linear operators, for one GPU, model and tp.

    Each once a layer, the residual add twice. Attention, LM head and all-reduces are not there. Operators
    that a model has not are NaN there (phi-2 has one norm a layer).
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
        parts.append(_named_rows(names, latency[measured], num_layers, num_tokens=num_tokens))
    return _stacked(parts)


def check_physical(rows: Rows, *, model: ModelSpec, device: Device, tensor_parallel_size: int = 1) -> None:
    """Raise ValueError for the first row of a profile that is faster than the device can be.

    A matrix product takes 2 m k n / peak, and the bytes of its weights beyond what L2 holds over the memory's
    bandwidth. Attention takes its FLOPs, and the keys and values that it reads (`least_attention_seconds`).
    Rows of matrices that the model names (qkv_proj, o_proj, gate_up_proj, down_proj; lm_head) and of
    attention are checked, others are not. Milliseconds or seconds in a column of microseconds are caught, and
    so are nanoseconds: operators whose large rows take more than `TOO_SLOW` times as long as they must.
    """
    names = np.asarray(rows["operator"])
    for name, (size, limit_s) in _limits(rows, model, device, tensor_parallel_size).items():
        own = np.flatnonzero(names == name)
        latency = np.asarray(rows["latency_us"], dtype=np.float64)[own]
        if (wrong := latency < PHYSICAL_SHARE * 1e6 * limit_s).any():
            first = int(np.argmax(wrong))
            raise ValueError(
                f"profile, row {own[first]} ({name}, {size[first]:g} rows): latency_us="
                f"{latency[first]:g}: {device.name} cannot do it in less than {1e6 * limit_s[first]:.3g} us; "
                "check the unit, the device and the model"
            )
        if (factor := slowness(1e-6 * latency, limit_s)) > TOO_SLOW:
            raise ValueError(
                f"profile, {name}: latency_us: large rows take {factor:,.0f} times as long as {device.name} "
                f"needs at the least (median; must be <= {TOO_SLOW:g}); "
                "check the unit, the device and the model"
            )


def least_attention_seconds(
    rows: Mapping[str, Any], *, model: ModelSpec, device: Device, tensor_parallel_size: int = 1
) -> Floats:
    """The shortest that one layer's attention can take, for each row of a profile, on one rank.

        max(4 heads head_dim pairs / peak, (KV tokens x their bytes - L2) / memory bandwidth)

    pairs of a query and a key that it sees; of several kinds of layers the fastest. 0 for latent and linear
    attention. KV in fp8 may be multiplied in fp8, too.
    """
    layers = [block.attention for block in model.blocks]
    chunk, cached, seqs, context = (np.asarray(rows[name], dtype=np.float64) for name in ATTENTION_SIZES)
    in_fp8 = model.kv_dtype == "fp8" and "fp8" in device.peak_flops_per_s
    peak = device.peak_flops_per_s["fp8" if in_fp8 else device.compute_dtype(model.dtype)]
    least_s = np.full(len(chunk), np.inf)
    for layer in layers:
        pair_flops = layer.least_pair_flops(tensor_parallel_size)
        if not pair_flops:
            return np.zeros(len(chunk))
        window = layer.window or np.inf
        decoded = seqs * np.minimum(context, window)
        pairs = decoded + _pairs(cached + chunk, window) - _pairs(cached, window)
        tokens = decoded + np.where(chunk > 0, np.minimum(cached + chunk, window), 0)
        kv_bytes = tokens * layer.kv_bytes_per_token(model.kv_dtype, tensor_parallel_size)
        from_memory_s = np.maximum(kv_bytes - device.l2_bytes, 0) / device.memory_bandwidth_bytes_per_s
        computed_s = pair_flops * pairs / peak
        least_s = np.minimum(least_s, np.maximum(computed_s, from_memory_s))
    return least_s


def _pairs(length: Floats, window: float) -> Floats:
    """Of the first `length` tokens and those that each of them sees, itself included."""
    ramp = np.minimum(length, window)
    inside = ramp * (ramp + 1) / 2
    return np.asarray(inside if np.isinf(window) else inside + (length - ramp) * window)


def _limits(
    rows: Rows, model: ModelSpec, device: Device, tensor_parallel_size: int
) -> dict[str, tuple[Floats, Floats]]:
    """By operator: what each of its rows has as its size, and the shortest time it can take, in seconds."""
    names, components = np.asarray(rows["operator"]), np.asarray(rows["component"])
    limits = {}
    matrices = model.blocks[0].layer_matrices(model.hidden_size, Ranks(tensor=tensor_parallel_size))
    shapes = {matrix.name: (matrix.k, matrix.n, model.weights or model.dtype) for matrix in matrices}
    shapes["lm_head"] = (model.hidden_size, share_of(model.vocab_size, tensor_parallel_size), model.dtype)
    for name, (k, n, stored) in shapes.items():
        own = np.flatnonzero(names == name)
        if not len(own):
            continue
        size = np.asarray(rows["num_seqs" if name == "lm_head" else "num_tokens"], dtype=np.float64)[own]
        stored_as = weight_format(stored)
        peak = device.peak_flops_per_s[stored_as.compute_dtype(device, model.dtype)]
        from_memory = max(0.0, k * n * stored_as.bytes_per_weight - device.l2_bytes)
        limits[name] = (
            size,
            np.maximum(2 * size * k * n / peak, from_memory / device.memory_bandwidth_bytes_per_s),
        )
    for name in dict.fromkeys(names[components == "attention"].tolist()):
        own = np.flatnonzero(names == name)
        chosen = {column: np.asarray(rows[column], dtype=np.float64)[own] for column in ATTENTION_SIZES}
        least_s = least_attention_seconds(
            chosen, model=model, device=device, tensor_parallel_size=tensor_parallel_size
        )
        limits[name] = (chosen["prefill_tokens"] + chosen["decode_seqs"], least_s)
    return limits


def _named_rows(names: Any, latency_us: Any, num_layers: int, **sizes: Any) -> dict[str, Any]:
    operators = np.asarray(names).astype(str)
    return {
        "operator": operators,
        "component": np.array([_component(name) for name in operators.tolist()]),
        "calls": np.array([_calls(name, num_layers) for name in operators.tolist()]),
        "latency_us": np.asarray(latency_us, dtype=np.float64),
        **{name: np.asarray(size, dtype=np.float64) for name, size in sizes.items()},
    }


def _component(operator: str) -> str:
    if operator in ("lm_head", "sampler"):
        return "lm_head"
    if operator == "attention":
        return "attention"
    return "gemm" if operator in GEMMS else "elementwise"


def _calls(operator: str, num_layers: int) -> int:
    if operator in ONCE:
        return 1
    return 2 * num_layers if operator in TWICE_A_LAYER else num_layers


def _stacked(parts: list[dict[str, Any]]) -> Rows:
    """The parts one below the other; sizes that a part has not are 0."""
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
