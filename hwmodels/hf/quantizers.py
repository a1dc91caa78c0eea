"""Reads each quantiser's description of a checkpoint: its formats, and the modules that have them.

A description is the quantization_config of a config.json, or a file next to it. Its reader returns a `Plan`;
an unknown format is an error with the key.

The module is long because each quantiser has its own reader, and they are read side by side.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hwmodels.checks import is_whole
from hwmodels.hf.fields import load_json_object, shown, wrong
from hwmodels.hf.quantization import (
    FILES,
    HEAD,
    KEYS,
    MODELOPT,
    MODELOPT_FILE,
    Description,
    Modules,
    Names,
    Plan,
    Rule,
    StoredWeights,
    listed,
    method_of,
    modules,
    names_in,
)
from hwmodels.model import Block
from hwmodels.model.weights import Role, in_groups, weight_format

# Weights with an integer number of bits: AWQ, GPTQ, AutoRound, HQQ, AQLM.

WHOLE = {2: "int2_wo", 3: "int3_wo", 4: "int4_wo", 8: "int8_wo"}
UNQUANTISED_BITS = 16


def of_bits(description: Description, allowed: Iterable[int], method: str, *keys: str) -> str:
    """Returns the weight-only integer format of a number of bits. Raises ValueError."""
    bits = description.first(*keys)
    names = [bits for bits in WHOLE if bits in allowed]
    if not is_whole(bits) or bits not in names:
        choices = f"{', '.join(map(str, names[:-1]))} or {names[-1]}"
        key = next((key for key in keys if description.fields.get(key) is not None), keys[0])
        raise wrong(description.at(key), bits, f"must be {choices} for {method}")
    return WHOLE[int(bits)]


def awq(description: Description) -> Plan:
    """Reads AutoAWQ: 4 bits, groups of 128 by default.

    The key is bits in config.json, w_bit in quant_config.json.
    """
    name = of_bits(description, WHOLE, "awq", "bits", "w_bit")
    size = description.group_size("group_size", "q_group_size", default=128)
    return Plan(in_groups(name, size), (description.left_out(),))


def gptq(description: Description) -> Plan:
    """Reads GPTQ; `dynamic` rules of GPTQModel exclude modules (-:) or change their bits (+:)."""
    method = "gptq"
    name = of_bits(description, WHOLE, method, "bits", "w_bit", "wbits")
    size = description.group_size("group_size", "groupsize", default=128)
    stored, rules = in_groups(name, size), [description.left_out()]
    for pattern, given in description.inside("dynamic").items():
        key = f'dynamic["{pattern}"]'
        where = description.at(key)
        named = modules(where, [f"re:{pattern.removeprefix('+:').removeprefix('-:')}"])
        if pattern.startswith("-:"):
            rules.append(Rule(named, None))
            continue
        own = description.of(key, {**description.fields, "dynamic": None, **dict(given or {})})
        other = of_bits(own, WHOLE, method, "bits", "w_bit", "wbits")
        rules.append(Rule(named, in_groups(other, own.group_size("group_size", default=128))))
    inside = description.fields.get("modules_in_block_to_quantize")
    others: str | None = stored
    if inside:
        given = inside if isinstance(inside, list) else [inside]
        flat = [name for part in given for name in (part if isinstance(part, list) else [part])]
        where = description.at("modules_in_block_to_quantize")
        rules.append(Rule(modules(where, listed(where, flat)), stored))
        others = None
    if description.fields.get("lm_head") is True:
        rules.append(Rule(Modules(frozenset({"lm_head"})), stored))
    return Plan(others, tuple(rules))


def auto_round(description: Description) -> Plan:
    """Reads Intel AutoRound (and Neural Compressor): a scheme, and `extra_config` for single layers."""
    rules = [description.left_out()]
    by_format: dict[str | None, list[str]] = {}
    for pattern, given in description.inside("extra_config").items():
        own = description.of(f'extra_config["{pattern}"]', given)
        merged = Description(own.where, {**description.fields, **own.fields})
        # A layer may be named as such, or by a regular expression without a mark.
        regular = any(mark in pattern for mark in ("*", "\\", "(", "["))
        name = f"re:{pattern}" if regular and not pattern.startswith("re:") else pattern
        by_format.setdefault(auto_round_format(merged), []).append(name)
    rules += [
        Rule(modules(description.at("extra_config"), names), stored) for stored, names in by_format.items()
    ]
    return Plan(auto_round_format(description), tuple(rules))


def auto_round_format(description: Description) -> str | None:
    """Returns the format of a scheme of AutoRound. Raises ValueError."""
    bits: Any = description.fields.get("bits")
    kind = str(description.first("data_type", default="int")).lower().replace("_", "")
    activations = description.first("act_bits", default=UNQUANTISED_BITS)
    size = description.group_size("group_size", default=128)
    if isinstance(bits, int) and bits >= UNQUANTISED_BITS:
        return None
    quantised = is_whole(activations) and activations < UNQUANTISED_BITS
    if kind.startswith("int"):
        name = of_bits(description, WHOLE, "auto-round", "bits")
        if quantised:
            with_activations = {("int4_wo", 8): "int4_int8", ("int8_wo", 8): "int8"}
            if (name, activations) not in with_activations:
                raise description.wrong("act_bits", f"cannot be priced with bits={bits}")
            name = with_activations[name, activations]
        return in_groups(name, size)
    names = {("mxfp", 4): "mxfp4_mxfp4" if activations == 4 else "mxfp4_mxfp8", ("mxfp", 8): "mxfp8"}
    names["nvfp", 4] = "nvfp4" if quantised else "nvfp4_wo"
    names["fp", 8] = "fp8" if quantised else "fp8_wo"
    if not quantised:
        names["mxfp", 4] = "mxfp4"
    for start in ("mxfp", "nvfp", "fp"):
        if kind.startswith(start) and (start, bits) in names:
            return names[start, bits]
    known = "known: int, mx_fp, nv_fp, fp"
    raise description.wrong("data_type", f"cannot be priced with bits={shown(bits)}; {known}")


def hqq(description: Description) -> Plan:
    """Reads HQQ: weight-only, groups of 64 by default; one scheme, or one for each kind of matrix."""
    inside = description.of("quant_config", description.inside("quant_config"))
    rules = [description.left_out()]
    if "weight_quant_params" in inside.fields:
        return Plan(hqq_format(inside), tuple(rules))
    if not inside.fields:
        raise description.wrong("quant_config", "must hold weight_quant_params")
    for name, given in inside.fields.items():
        own = inside.of(name, given)
        rules.append(Rule(modules(own.where, [name]), hqq_format(own)))
    return Plan(None, tuple(rules))


def hqq_format(description: Description) -> str:
    """Returns the format of an HQQ scheme. Raises ValueError."""
    own = description.of("weight_quant_params", description.fields.get("weight_quant_params"))
    return in_groups(of_bits(own, WHOLE, "hqq", "nbits"), own.group_size("group_size", default=64))


def aqlm(description: Description) -> Plan:
    """Reads AQLM: codebooks for groups of weights; one of 2^16 vectors of 8 makes 2 bits per weight."""
    sizes = [
        description.first(key, default=1)
        for key in ("num_codebooks", "nbits_per_codebook", "in_group_size", "out_group_size")
    ]
    if not all(is_whole(size) and size > 0 for size in sizes):
        raise description.wrong("nbits_per_codebook", "must be a whole number >= 1, as must the group sizes")
    codebooks, bits, of_inputs, of_outputs = sizes
    per_weight = codebooks * bits / (of_inputs * of_outputs)
    if per_weight not in WHOLE:
        raise description.wrong(
            "nbits_per_codebook", f"makes {per_weight:.3g} bits per weight, which cannot be priced"
        )
    note = "AQLM is priced as weight-only integers; its kernels look up codebooks, which takes longer"
    return Plan(WHOLE[int(per_weight)], (description.left_out(),), notes=(note,))


def bitsandbytes(description: Description) -> Plan:
    """Reads bitsandbytes: NF4 or FP4 in blocks of 64, or LLM.int8() with a scale per row."""
    eight = bool(description.first("load_in_8bit", "_load_in_8bit"))
    if bool(description.first("load_in_4bit", "_load_in_4bit")) == eight:
        raise description.wrong("load_in_4bit", "must be true, or load_in_8bit must, for bitsandbytes")
    if eight:
        note = "LLM.int8() is priced as weight-only int8; its product of outliers in 16 bits takes longer"
        return Plan("int8_wo", (description.left_out(),), notes=(note,))
    kind = description.first("bnb_4bit_quant_type", default="fp4")
    if kind not in ("nf4", "fp4"):
        raise description.wrong("bnb_4bit_quant_type", "must be nf4 or fp4")
    double = description.first("bnb_4bit_use_double_quant", default=False) is True
    return Plan("nf4_double" if double else "nf4", (description.left_out(),))


# FP8 and its blocks.


def fp8(description: Description) -> Plan:
    """Reads DeepSeek's and transformers' fp8: blocks of weights with a scale, or one for a tensor or row.

    ModelOpt keeps this method for a checkpoint in which only the experts have another format.
    """
    stored, notes = blocks_of_fp8(description)
    left_out, rules = description.left_out(), list[Rule]()
    if "quantized_layers" in description.fields:
        # Modules that ModelOpt ignores keep their format.
        rules += quantized_layers(description)
        kept = description.first("modules_to_not_convert", "ignored_layers")
        left_out = Description(description.where, {"ignored_layers": kept}).left_out()
    of_experts = {None: None, "fp8": None, "fp4": "mxfp4_mxfp8"}
    if description.experts_dtype not in of_experts:
        raise wrong("expert_dtype", description.experts_dtype, "cannot be priced; known: fp4, fp8")
    if experts := of_experts[description.experts_dtype]:
        rules.append(Rule(Modules(frozenset({"experts"})), experts))
    return Plan(stored, (left_out, *rules), notes=notes)


def blocks_of_fp8(description: Description) -> tuple[str, tuple[str, ...]]:
    """Returns the format by weight_block_size, and a note on blocks of another size. Raises ValueError."""
    block = description.fields.get("weight_block_size")
    if block is None:
        return "fp8", ()
    if not (isinstance(block, list) and len(block) == 2 and all(is_whole(n) and n > 0 for n in block)):
        raise description.wrong("weight_block_size", "must be two whole numbers, such as [128, 128], or null")
    rows, columns = block
    if rows * columns == 32:
        return "mxfp8", ()
    if block == [128, 128]:
        return "fp8_block", ()
    note = f"scales counted for blocks of 128 x 128 weights, the checkpoint's are {rows} x {columns}"
    return "fp8_block", (note,)


def fixed(name: str, *notes: str) -> Callable[[Description], Plan]:
    """Returns the reader of a method with a single format."""

    def read(description: Description) -> Plan:
        return Plan(name, (description.left_out(),), notes=notes)

    return read


def experts_in(name: str) -> Callable[[Description], Plan]:
    """Returns the reader of a method that stores only routed experts in this format."""

    def read(description: Description) -> Plan:
        return Plan(None, (Rule(Modules(frozenset({"experts"})), name),))

    return read


def w4afp8(description: Description) -> Plan:
    """Reads SGLang's w4afp8: routed experts in int4 with fp8 activations, all else in fp8."""
    size = description.group_size("group_size", default=128)
    experts = Rule(Modules(frozenset({"experts"})), in_groups("int4_fp8", size))
    stored, notes = blocks_of_fp8(description)
    return Plan(stored, (description.left_out(), experts), notes=notes)


def quanto(description: Description) -> Plan:
    """Reads Quanto: `weights` names the format."""
    names = {"int8": "int8_wo", "int4": "int4_wo", "int2": "int2_wo", "float8": "fp8_wo"}
    given = description.fields.get("weights")
    if not isinstance(given, str) or given not in names:
        raise description.wrong("weights", f"cannot be priced; known: {', '.join(names)}")
    return Plan(names[given], (description.left_out(),))


def fp_quant(description: Description) -> Plan:
    """Reads FP-Quant: weights and activations in 4-bit floats."""
    names = {"mxfp4": "mxfp4_mxfp4", "nvfp4": "nvfp4"}
    given = description.first("forward_dtype", default="nvfp4")
    if not isinstance(given, str) or given not in names:
        raise description.wrong("forward_dtype", f"cannot be priced; known: {', '.join(names)}")
    return Plan(names[given], (description.left_out(),))


def higgs(description: Description) -> Plan:
    """Reads HIGGS: vectors of weights on a grid, with a scale for 256 of them."""
    name = of_bits(description, (2, 3, 4), "higgs", "bits")
    size = description.group_size("group_size", default=256)
    note = "HIGGS is priced as weight-only integers; its kernels look up a grid, which takes longer"
    return Plan(in_groups(name, size), (description.left_out(),), notes=(note,))


# NVIDIA Model Optimizer.

MIXED = "MIXED_PRECISION"


def modelopt(description: Description) -> Plan:
    """Reads Model Optimizer: one algorithm, or one per layer (MIXED_PRECISION); files may nest it."""
    inside = description.fields.get("quantization")
    if isinstance(inside, Mapping):
        description = Description(description.at("quantization"), inside)
    algorithm = description.fields.get("quant_algo")
    if isinstance(algorithm, str) and algorithm.upper() == MIXED:
        rules = quantized_layers(description)
        return Plan(None, (description.left_out(), *rules))
    if algorithm is None and {"quant_algo", "kv_cache_quant_algo"} <= description.fields.keys():
        return Plan(None)  # only keys and values are quantised
    stored = modelopt_format(description)
    groups = [group for group in description.inside("config_groups").values() if isinstance(group, Mapping)]
    if stored == "nvfp4" and groups and not any(group.get("input_activations") for group in groups):
        stored = "nvfp4_wo"
    return Plan(stored, (description.left_out(),))


def modelopt_format(description: Description) -> str:
    """Returns the format that quant_algo names. Raises ValueError."""
    algorithm = description.fields.get("quant_algo")
    name = MODELOPT.get(algorithm.upper()) if isinstance(algorithm, str) else None
    if name is None:
        raise description.wrong("quant_algo", f"cannot be priced; known: {', '.join((*MODELOPT, MIXED))}")
    return in_groups(name, description.group_size("group_size") or None)


def quantized_layers(description: Description) -> list[Rule]:
    """Returns the rules of a format per layer. Raises ValueError if there is none."""
    layers = description.inside("quantized_layers")
    if not layers:
        raise description.wrong(
            "quantized_layers", f"must name the format of each layer for quant_algo={MIXED}"
        )
    by_format: dict[str, list[str]] = {}
    for name, given in layers.items():
        own = description.of(f'quantized_layers["{name}"]', given)
        by_format.setdefault(modelopt_format(own), []).append(name)
    return [
        Rule(modules(description.at("quantized_layers"), names), stored)
        for stored, names in by_format.items()
    ]


# compressed-tensors.


def compressed_tensors(description: Description) -> Plan:
    """Reads llm-compressor: groups of modules with a scheme each, and modules that are ignored."""
    groups = description.fields.get("config_groups")
    if not (isinstance(groups, Mapping) and groups and all(isinstance(g, Mapping) for g in groups.values())):
        raise description.wrong("config_groups", "must hold at least one group")
    named, others, notes = list[Rule](), list[str](), list[str]()
    for name, given in groups.items():
        group = description.of(f"config_groups.{name}", given)
        if given.get("weights") is None and given.get("output_activations"):
            continue  # of keys and values
        stored = group_scheme(group)
        targets = listed(group.at("targets"), given.get("targets") or ["Linear"])
        of_classes = [target for target in targets if is_class(target)]
        if of_classes:
            if unknown := [target for target in of_classes if target not in LINEAR_CLASSES]:
                known = ", ".join(LINEAR_CLASSES)
                raise wrong(group.at("targets"), unknown, f"must be {known}, or names of modules")
            others.append(stored)
        if len(of_classes) < len(targets):
            by_name = [target for target in targets if not is_class(target)]
            named.append(Rule(modules(group.at("targets"), by_name), stored))
    if len(set(others)) > 1:
        raise ValueError(
            f"{description.at('config_groups')}: {' and '.join(sorted(set(others)))} for the same targets "
            "cannot be priced"
        )
    sparsity = description.inside("sparsity_config")
    if sparsity.get("sparsity_structure") == "2:4":
        notes.append("2:4 sparsity of the checkpoint is not counted: its weights are counted as dense")
    rules = (description.left_out(), *named)
    return Plan(others[0] if others else None, rules, notes=tuple(notes))


LINEAR_CLASSES = ("Linear", "LinearBase", "ColumnParallelLinear", "RowParallelLinear", "FusedMoE")
"""Classes that stand for all matrices of attention, MLPs and experts."""


def is_class(target: str) -> bool:
    """Returns whether a target of compressed-tensors is the name of a class."""
    return target.isidentifier() and target[0].isupper()


def group_scheme(group: Description) -> str:
    """Returns the weight format of a group of compressed-tensors; raises ValueError."""
    weights, beside = group.of("weights", group.fields.get("weights")), ""
    inputs = group.fields.get("input_activations")
    activations = group.of("input_activations", inputs).fields if inputs else {}
    kind, bits = weights.first("type", default="int"), weights.fields.get("num_bits")
    strategy, symmetric = weights.fields.get("strategy"), weights.fields.get("symmetric", True) is not False
    act_kind, act_bits = activations.get("type"), activations.get("num_bits", 8)
    if activations and act_kind is None:  # Kind and bits of activations are those of weights unless given.
        act_kind = kind
    size = weights.group_size("group_size")
    match kind, bits, act_kind, act_bits:
        case "float", 8, None, _:
            return "mxfp8" if size == 32 else "fp8_wo"
        case "float", 8, _, _:
            return "mxfp8" if size == 32 else "fp8_block" if strategy == "block" else "fp8"
        case "float", 4, None, _:
            return "mxfp4" if size == 32 else "nvfp4_wo"
        case "float", 4, _, 8:
            return "mxfp4_mxfp8" if size == 32 else "nvfp4_fp8"
        case "float", 4, _, _:
            return "mxfp4_mxfp4" if size == 32 else "nvfp4"
        case "int", 8, "int", 8:
            return "int8"
        case "int", (2 | 3 | 4 | 8), None, _:
            return in_groups(WHOLE[bits], None if strategy == "channel" else size, symmetric=symmetric)
        case "int", 4, "int", 8:
            return in_groups("int4_int8", size)
        case "int", 4, "float", 8:
            return in_groups("int4_fp8", size)
    if activations:
        beside = f" with activations of type={shown(act_kind)}, num_bits={shown(act_bits)}"
    raise ValueError(
        f"{group.where}: type={shown(kind)}, num_bits={shown(bits)}{beside} cannot be priced; known: "
        "float 8 (FP8, MXFP8), float 4 (NVFP4, MXFP4), int 8 (W8A8, W8A16), int 4 (W4A16, W4A8), int 3, int 2"
    )


# AMD Quark.


def quark(description: Description) -> Plan:
    """Reads AMD Quark: a global scheme, and others for layers by name; `exclude` omits modules."""
    rules = [description.left_out()]
    for name, given in description.inside("layer_quant_config").items():
        own = description.of(f'layer_quant_config["{name}"]', given)
        rules.append(Rule(modules(own.where, [name]), quark_format(own)))
    by_class = description.inside("layer_type_quant_config")
    scheme = description.fields.get("global_quant_config")
    key = "global_quant_config"
    if scheme is None and "Linear" in by_class:
        key, scheme = 'layer_type_quant_config["Linear"]', by_class["Linear"]
    if scheme is None:
        if len(rules) == 1:
            raise description.wrong("global_quant_config", "must be an object")
        return Plan(None, tuple(rules))
    return Plan(quark_format(description.of(key, scheme)), tuple(rules))


def quark_format(description: Description) -> str | None:
    """Returns the format of a scheme of Quark. Raises ValueError."""
    specs = description.fields.get("weight")
    if specs is None:
        return None
    weights = [description.of("weight", one) for one in (specs if isinstance(specs, list) else [specs])]
    inputs = description.fields.get("input_tensors")
    last = inputs[-1] if isinstance(inputs, list) and inputs else inputs
    activations = "" if not last else str(description.of("input_tensors", last).fields.get("dtype"))
    own = weights[-1]
    kind, size = str(own.fields.get("dtype")).lower(), own.group_size("group_size")
    if kind in ("bfloat16", "float16"):
        return None
    if kind.startswith("fp8"):
        return "fp8" if activations else "fp8_wo"
    if kind.startswith(("fp4", "mxfp4")) or (kind == "mx" and own.fields.get("mx_element_dtype") == "fp4"):
        if size == 16:
            return "nvfp4" if activations else "nvfp4_wo"
        return f"mxfp4_mxfp{'8' if 'fp8' in activations else '4'}" if activations else "mxfp4"
    if kind.startswith("fp6"):
        return "mxfp6"
    names = {"int8": ("int8_wo", "int8"), "int4": ("int4_wo", "int4_int8")}
    if "fp8" in activations:
        names["int4"] = ("int4_wo", "int4_fp8")
    if (name := kind.removeprefix("u")) in names:
        return in_groups(names[name][bool(activations)], size)
    raise own.wrong("dtype", f"cannot be priced; known: fp8_e4m3, fp4, fp6_e2m3, {', '.join(names)}")


# torchao.

TORCHAO = {
    "int4weightonly": "int4_wo",
    "int8weightonly": "int8_wo",
    "float8weightonly": "fp8_wo",
    "int8dynamicactivationint8weight": "int8",
    "int8dynamicactivationint4weight": "int4_int8",
    "float8dynamicactivationint4weight": "int4_fp8",
    "float8dynamicactivationfloat8weight": "fp8",
    "nvfp4dynamicactivationnvfp4weight": "nvfp4",
    "nvfp4weightonly": "nvfp4_wo",
    "nvfp4inference": "nvfp4",
}
"""Schemes of torchao, in lower case without underscores and "Config" -> weight format."""


def torchao(description: Description) -> Plan:
    """Reads torchao: quant_type is a name, or a class with its fields, for all modules or by name."""
    given = description.fields.get("quant_type")
    rules = [description.left_out()]
    if isinstance(given, Mapping) and isinstance(given.get("default"), Mapping):
        given = given["default"]
    if isinstance(given, str):
        kwargs = description.inside("quant_type_kwargs")
        return Plan(torchao_format(description, given, kwargs), tuple(rules))
    if not isinstance(given, Mapping):
        raise description.wrong("quant_type", "must be the name of a scheme, or an object with a _type")
    kind, data = str(given.get("_type")), given.get("_data")
    fields: Mapping[str, Any] = data if isinstance(data, Mapping) else {}
    by_name = fields.get("fqn_to_config") or fields.get("module_fqn_to_config")
    if not isinstance(by_name, Mapping):
        return Plan(torchao_format(description, kind, fields), tuple(rules))
    others = None
    for name, own in by_name.items():
        stored = None
        if isinstance(own, Mapping):
            inner = own.get("_data")
            data = inner if isinstance(inner, Mapping) else {}
            stored = torchao_format(description, str(own.get("_type")), data)
        if name == "_default":
            others = stored
        else:
            rules.append(Rule(modules(description.at("quant_type"), [name]), stored))
    return Plan(others, tuple(rules))


def torchao_format(description: Description, kind: str, fields: Mapping[str, Any]) -> str:
    """Returns the format of a scheme of torchao. Raises ValueError."""
    name = TORCHAO.get(kind.replace("_", "").lower().removesuffix("config"))
    if name is None:
        raise wrong(description.at("quant_type"), kind, f"cannot be priced; known: {', '.join(TORCHAO)}")
    size = Description(description.at("quant_type"), fields).group_size("group_size", default=128)
    return in_groups(name, size if name == "int4_wo" else None)


READERS: Mapping[str, Callable[[Description], Plan]] = {
    "awq": awq,
    "awq_marlin": awq,
    "auto_awq": awq,
    "gptq": gptq,
    "gptq_marlin": gptq,
    "auto_gptq": gptq,
    "gptqmodel": gptq,
    "auto-round": auto_round,
    "intel/auto-round": auto_round,
    "inc": auto_round,
    "fp8": fp8,
    "finegrained_fp8": fp8,
    "deepseek_v4_fp8": fp8,
    "fbgemm_fp8": fixed("fp8"),
    "w8a8_fp8": fixed("fp8"),
    "w8a8_int8": fixed("int8"),
    "blockwise_int8": fixed("int8"),
    "w4afp8": w4afp8,
    "qqq": fixed("int4_int8"),
    "experts_int8": experts_in("int8_wo"),
    "compressed-tensors": compressed_tensors,
    "mxfp4": experts_in("mxfp4"),
    "gpt_oss_mxfp4": experts_in("mxfp4"),
    "mxfp8": fixed("mxfp8"),
    "modelopt": modelopt,
    "modelopt_fp8": modelopt,
    "modelopt_fp4": modelopt,
    "modelopt_mxfp8": modelopt,
    "modelopt_mixed": modelopt,
    "petit_nvfp4": modelopt,
    "bitsandbytes": bitsandbytes,
    "quark": quark,
    "torchao": torchao,
    "hqq": hqq,
    "eetq": fixed("int8_wo"),
    "quanto": quanto,
    "aqlm": aqlm,
    "higgs": higgs,
    "bitnet": fixed("ternary"),
    "fp_quant": fp_quant,
}
"""quant_method -> its reader."""

NOT_PRICED = {
    "vptq": "its weights are looked up in codebooks of several sizes per layer",
    "spqr": "its outliers are stored apart, a number of them per layer",
    "quip": "its weights are looked up in lattices",
    "squeezellm": "its weights are looked up in a table per row, and engines no longer serve it",
    "gguf": "the types of its tensors are in the GGUF file; give that file's model by model.weights",
    "deepspeedfp": "engines no longer serve it",
    "marlin": "engines no longer serve it",
    "gptq_marlin_24": "engines no longer serve 2:4 sparse weights in 4 bits",
}
"""quant_method -> why it is rejected."""

# Keys and values.

KV_ALGORITHMS = {
    "FP8": "fp8",
    "FP8_CAST": "fp8",
    "FP8_AFFINE": "fp8",
    "INT8": "int8",
    "NVFP4": "nvfp4",
    "NVFP4_CAST": "nvfp4",
    "NVFP4_ROTATE": "nvfp4",
    "BF16": "auto",
    "FP16": "auto",
    "AUTO": "auto",
    "NONE": "auto",
    "NO_QUANT": "auto",
}
"""kv_cache_quant_algo -> kv_cache_dtype."""

KV_SCHEMES = {("float", 8): "fp8", ("int", 8): "int8", ("float", 4): "nvfp4", ("int", 4): "int4"}
"""type and num_bits of a kv_cache_scheme -> kv_cache_dtype."""


def kv_cache(description: Description) -> str:
    """Returns kv_cache_dtype. Raises ValueError for an unknown format.

    Model Optimizer names a kv_cache_quant_algo, in older files one level down; compressed-tensors and newer
    files describe a kv_cache_scheme; Quark describes the outputs of the projections of keys and values.
    """
    inside = description.fields.get("quantization")
    if isinstance(inside, Mapping):
        description = Description(description.at("quantization"), inside)
    given = description.first("kv_cache_quant_algo", "kv_cache_scheme")
    key = "kv_cache_quant_algo" if description.fields.get("kv_cache_quant_algo") else "kv_cache_scheme"
    if isinstance(given, str) and given:
        if given.upper() not in KV_ALGORITHMS:
            known = ", ".join(KV_ALGORITHMS)
            raise description.wrong(key, f"is not known; set kv_cache_dtype; known: {known}")
        return KV_ALGORITHMS[given.upper()]
    if given:
        return kv_scheme(description, key, given)
    for name, group in description.inside("config_groups").items():
        if isinstance(group, Mapping) and group.get("weights") is None and group.get("output_activations"):
            outputs = group["output_activations"]
            return kv_scheme(description, f"config_groups.{name}.output_activations", outputs)
    for name, scheme in description.inside("kv_cache_quant_config").items():
        outputs = scheme.get("output_tensors") if isinstance(scheme, Mapping) else None
        kind = str(outputs.get("dtype")) if isinstance(outputs, Mapping) else None
        if kind is not None:
            found = {"fp8_e4m3": "fp8", "fp8_e5m2": "fp8", "int8": "int8", "bfloat16": "auto"}.get(kind)
            if found is None:
                raise wrong(
                    description.at(f'kv_cache_quant_config["{name}"].output_tensors.dtype'),
                    kind,
                    "is not known; set kv_cache_dtype",
                )
            return found
    return "auto"


def kv_scheme(description: Description, key: str, given: Any) -> str:
    """Returns kv_cache_dtype by type and number of bits. Raises ValueError."""
    scheme = description.of(key, given).fields
    bits: Any = scheme.get("num_bits")
    found = KV_SCHEMES.get((str(scheme.get("type")), bits if is_whole(bits) else 0))
    if found is None:
        raise wrong(description.at(key), given, "is not known; set kv_cache_dtype")
    return found


# Formats of all matrices of a checkpoint.


def stored_weights(
    description: Description,
    layers: Sequence[Block],
    *,
    dtype: str,
    folder: Path | None = None,
    asked: Mapping[str, str] | None = None,
    experts_beside_mlp: bool = False,
) -> StoredWeights:
    """Returns the formats of all matrices by the description.

    layers: one block for each layer. dtype: of unquantised matrices. asked: formats set by the user; with
    both `weights` and `kv_cache_dtype` the description is not needed. experts_beside_mlp: see `names_in`.
    Raises ValueError for an unknown format.
    """
    asked = asked or {}
    notes = list[str]()
    is_file = description.where in FILES
    try:
        plan = plan_of(description)
        names = names_in(json.dumps(dict(description.fields)), experts_beside_mlp=experts_beside_mlp)
        stored = of_layers(plan, layers, names, dtype, description.where)
        notes += plan.notes
    except ValueError as error:
        if "weights" not in asked:
            raise
        notes.append(f"weights are stored as model.weights says; the checkpoint's are not known: {error}")
        stored = StoredWeights()
    if "kv_cache_dtype" not in asked:
        kv, kv_notes = keys_and_values(description, folder)
        stored, notes = stored._replace(kv_cache_dtype=kv), [*notes, *kv_notes]
    if is_file:
        notes.append(f"number formats are those of {description.where.removesuffix(': ')}")
    return stored._replace(notes=tuple(notes))


def plan_of(description: Description) -> Plan:
    """Returns the formats by module. Raises ValueError for an unknown quantiser."""
    method = method_of(description.fields)
    if method is not None and method in NOT_PRICED:
        raise description.wrong(
            "quant_method",
            f"cannot be priced, since {NOT_PRICED[method]}; set model.weights to price another format",
        )
    if method is None or method not in READERS:
        raise description.wrong("quant_method", f"cannot be priced; known: {', '.join(READERS)}")
    return READERS[method](description)


def keys_and_values(description: Description, folder: Path | None) -> tuple[str, tuple[str, ...]]:
    """Returns kv_cache_dtype; if the config.json does not name it, hf_quant_config.json may."""
    kv = kv_cache(description)
    if kv != "auto" or description.where not in KEYS or folder is None:
        return kv, ()
    file = folder / MODELOPT_FILE
    if not file.exists() or {"kv_cache_quant_algo", "kv_cache_scheme"} & description.fields.keys():
        return kv, ()
    kv = kv_cache(Description(MODELOPT_FILE, load_json_object(file)))
    if kv == "auto":
        return kv, ()
    return kv, (
        f"keys and values in {kv} as {MODELOPT_FILE} says, which TensorRT-LLM reads; vLLM reads config.json "
        "alone: kv_cache_dtype=auto keeps them in the model's dtype there",
    )


def of_layers(plan: Plan, layers: Sequence[Block], names: Names, dtype: str, where: str) -> StoredWeights:
    """Returns the formats of the layers' matrices: the most common one per role, and the exceptions."""
    found = [dict(formats_of(plan, layer, number, names)) for number, layer in enumerate(layers)]
    sizes: dict[Role, Counter[str | None]] = {Role.dense: Counter(), Role.routed: Counter()}
    for layer, own in zip(layers, found, strict=True):
        for matrix in layer.layer_matrices(1 << 10):
            if matrix.role is not Role.plain:
                sizes[matrix.role][own[matrix.name]] += matrix.elements
    head = head_format(plan)
    quantised = head is not None or any(name for own in found for name in own.values())
    if not quantised and (plan.others is not None or any(rule.stored is not None for rule in plan.rules)):
        raise ValueError(
            f"{where}: the formats that it names are of no matrix of this model, or of none that is not left "
            "out; set model.weights"
        )
    commonest = {role: max(of, key=lambda name: of[name], default=None) for role, of in sizes.items()}
    dense, routed = commonest[Role.dense], commonest[Role.routed]
    if not sizes[Role.routed] or routed == dense:
        routed = None
    elif routed is None:
        routed = dtype
    of_role = {Role.dense: dense or dtype, Role.routed: routed or dense or dtype}
    formats = tuple(
        tuple(
            (matrix.name, own[matrix.name] or dtype)
            for matrix in layer.layer_matrices(1 << 10)
            if matrix.role is not Role.plain and (own[matrix.name] or dtype) != of_role[matrix.role]
        )
        for layer, own in zip(layers, found, strict=True)
    )
    return StoredWeights(dense, routed, head, formats=formats if any(formats) else ())


def formats_of(plan: Plan, layer: Block, number: int, names: Names) -> Iterator[tuple[str, str | None]]:
    """Yields each matrix of a layer and its format; for joined matrices, the widest format is used."""
    for matrix in layer.layer_matrices(1 << 10):
        if matrix.role is not Role.plain:
            formats = [format_of(plan, part) for part in names.parts(number, matrix.name)]
            yield matrix.name, max(formats, key=bits_of)


def bits_of(name: str | None) -> float:
    """Returns the bytes per weight of a format; unquantised matrices have the most."""
    return float("inf") if name is None else weight_format(name).bytes_per_weight


def format_of(plan: Plan, module: Sequence[str]) -> str | None:
    """Returns the format of a module under all its names; None: it is not quantised."""
    for rule in plan.rules:
        if rule.modules.match(module):
            return rule.stored
    return plan.others


def head_format(plan: Plan) -> str | None:
    """Returns the format of the LM head: it is quantised only if a rule names it."""
    return next((rule.stored for rule in plan.rules if rule.modules.match(HEAD)), None)
