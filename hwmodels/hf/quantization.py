"""Reads a checkpoint's quantization_config into names of `hwmodels.model.quantization.WEIGHT_FORMATS`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from hwmodels.hf.fields import shown, wrong

WHERE = "quantization_config"


class StoredWeights(NamedTuple):
    """Storage formats of a checkpoint's matrices, and of its model's keys and values.

    `weights` None: not quantised. `moe_weights` None: as `weights`.
    """

    weights: str | None = None
    moe_weights: str | None = None
    kv_cache_dtype: str = "auto"
    """dtype of keys and values; auto: the dtype that the model computes in."""
    notes: tuple[str, ...] = ()


def stored_weights(config: Any, *, has_experts: bool) -> StoredWeights:
    """Returns the formats of the matrices by a quantization_config; None means that they are not quantised.

    If attention is left out in a model with experts, only routed experts count as quantised.
    Raises ValueError for an unknown method, or a number of bits that the method does not have.
    """
    if not config:
        return StoredWeights()
    if not isinstance(config, Mapping):
        raise wrong(WHERE, config, "must be an object with a quant_method")
    method = config.get("quant_method")
    if not isinstance(method, str) or method not in READERS:
        raise wrong(f"{WHERE}.quant_method", method, f"cannot be priced; known: {', '.join(READERS)}")
    stored = matrices(config, READERS[method](config), has_experts=has_experts)
    kv_cache_dtype, kv_notes = kv_cache(config)
    return stored._replace(kv_cache_dtype=kv_cache_dtype, notes=stored.notes + kv_notes)


def matrices(config: Mapping[str, Any], name: str, *, has_experts: bool) -> StoredWeights:
    """Returns which matrices are stored in the format of that name, with notes."""
    notes = group_size_note(config) if name == "int4_wo" else ()
    # transformers' mxfp4 is made for the experts of gpt-oss and converts nothing else.
    if config["quant_method"] == "mxfp4":
        return StoredWeights(moe_weights=name)
    left_out = modules_left_out(config)
    if not any(SELF_ATTENTION.match(pattern) for pattern in left_out):
        return StoredWeights(weights=name, notes=notes)
    if not has_experts:
        note = f"attention counted in {name} too, which {WHERE} leaves out"
        return StoredWeights(weights=name, notes=(note, *notes))
    if not any("shared_expert" in pattern for pattern in left_out):
        notes = (f"{name} counted for routed experts only, since {WHERE} leaves attention out", *notes)
    return StoredWeights(moe_weights=name, notes=notes)


def kv_cache(config: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    """Returns kv_cache_dtype, and a note on the parts that are not understood.

    compressed-tensors describes a kv_cache_scheme, Model Optimizer names a kv_cache_quant_algo, in older
    files one level down.
    """
    older = config.get("quantization")
    name = "kv_cache_quant_algo"
    algorithm = config.get(name) or (older.get(name) if isinstance(older, Mapping) else None)
    scheme = config.get("kv_cache_scheme")
    if not algorithm and not scheme:
        return "auto", ()
    as_scheme = isinstance(scheme, Mapping) and (scheme.get("type"), scheme.get("num_bits")) == ("float", 8)
    if algorithm == "FP8" or (as_scheme and not algorithm):
        return "fp8", ()
    field, value = (name, algorithm) if algorithm else ("kv_cache_scheme", scheme)
    note = f"keys and values counted in the model's dtype: {WHERE}.{field}={shown(value)} is not known"
    return "auto", (f"{note}; set kv_cache_dtype",)


SELF_ATTENTION = re.compile(r"^(?!.*vis).*self_attn[^a-z]*(o_proj)?[^a-z]*$")
"""Matches self-attention as a whole, or its output projection, except that of a vision tower."""


def modules_left_out(config: Mapping[str, Any]) -> list[str]:
    """Returns the patterns of modules that stay unquantised, under any of the keys in use."""
    keys = ("modules_to_not_convert", "ignore", "ignored_layers", "exclude_modules")
    return [str(pattern) for key in keys for pattern in config.get(key) or ()]


def group_size_note(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns a note if groups are not of 128 weights, for which int4_wo counts one scale each.

    Smaller groups have more scales: 8 % more bytes with groups of 32.
    """
    schemes = [group.get("weights") or {} for group in (config.get("config_groups") or {}).values()]
    sizes = {str(scheme.get("group_size", 128)) for scheme in (config, *schemes)} - {"None", "128", "-1"}
    return tuple(
        f"scales counted for groups of 128 weights, the checkpoint's are {size}" for size in sorted(sizes)
    )


def by_bits(config: Mapping[str, Any]) -> str:
    """Returns the weight-only integer format of AWQ, GPTQ and AutoRound by its number of bits."""
    bits = config.get("bits", config.get("w_bit"))
    names = {4: "int4_wo", 8: "int8_wo"}
    if not isinstance(bits, int) or bits not in names:
        raise wrong(f"{WHERE}.bits", bits, f"must be 4 or 8 for {config['quant_method']}")
    return names[bits]


def fp8(config: Mapping[str, Any]) -> str:
    """Returns fp8_block if weight_block_size is set (a scale per block, as in DeepSeek-V3), else fp8.

    fp8 has one scale per tensor or row.
    """
    block = config.get("weight_block_size")
    if block in (None, [128, 128]):
        return "fp8_block" if block else "fp8"
    raise wrong(f"{WHERE}.weight_block_size", block, "must be [128, 128] or null")


def mxfp4(config: Mapping[str, Any]) -> str:
    """Returns "mxfp4", the only format of that quant_method."""
    return "mxfp4"


def modelopt(config: Mapping[str, Any]) -> str:
    """Returns the format of NVIDIA Model Optimizer; older files keep quant_algo one level down."""
    older = config.get("quantization")
    algorithm = config.get("quant_algo", older.get("quant_algo") if isinstance(older, Mapping) else None)
    names = {"FP8": "fp8", "NVFP4": "nvfp4", "W4A16_AWQ": "int4_wo", "INT4_AWQ": "int4_wo"}
    if not isinstance(algorithm, str) or algorithm not in names:
        raise wrong(f"{WHERE}.quant_algo", algorithm, f"cannot be priced; known: {', '.join(names)}")
    return names[algorithm]


def compressed_tensors(config: Mapping[str, Any]) -> str:
    """Returns the scheme of the config groups. Raises ValueError if they do not agree."""
    groups = config.get("config_groups")
    if not (isinstance(groups, Mapping) and groups and all(isinstance(g, Mapping) for g in groups.values())):
        raise wrong(f"{WHERE}.config_groups", groups, "must hold at least one group")
    names = sorted({group_scheme(name, group) for name, group in groups.items()})
    if len(names) > 1:
        raise ValueError(f"{WHERE}.config_groups: {' and '.join(names)} in one checkpoint cannot be priced")
    return names[0]


def group_scheme(name: str, group: Mapping[str, Any]) -> str:
    """Returns the weight format of a group of compressed-tensors; raises ValueError."""
    weights = group.get("weights")
    if not isinstance(weights, Mapping):
        raise wrong(f"{WHERE}.config_groups.{name}.weights", weights, "must be an object")
    kind, bits, strategy = (weights.get(key) for key in ("type", "num_bits", "strategy"))
    with_activations = bool(group.get("input_activations"))
    match kind, bits:
        case "float", 8:
            return "fp8_block" if strategy == "block" else "fp8"
        case "float", 4:
            return "mxfp4" if weights.get("group_size") == 32 else "nvfp4"
        case "int", 8:
            return "int8" if with_activations else "int8_wo"
        case "int", 4 if not with_activations:
            return "int4_wo"
    raise ValueError(
        f"{WHERE}.config_groups.{name}: type={shown(kind)}, num_bits={shown(bits)}"
        f"{' with quantised activations' if with_activations else ''} cannot be priced; known: "
        "float 8 (FP8), float 4 (NVFP4, MXFP4), int 8 (W8A8, W8A16), int 4 (W4A16)"
    )


READERS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "awq": by_bits,
    "gptq": by_bits,
    "auto-round": by_bits,
    "fp8": fp8,
    "fbgemm_fp8": fp8,
    "compressed-tensors": compressed_tensors,
    "mxfp4": mxfp4,
    "modelopt": modelopt,
    "modelopt_fp4": modelopt,
}
