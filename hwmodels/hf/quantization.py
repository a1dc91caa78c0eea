"""The storage format of each matrix of a checkpoint, by its quantiser's description.

The description is the quantization_config of the config.json or, without one, a file beside it.
"""

from __future__ import annotations

import difflib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from hwmodels.hf.fields import load_json_object, wrong
from hwmodels.hf.modules import HEAD, Names, names_in
from hwmodels.hf.quantizers import MODELOPT, NOT_PRICED, READERS, Description, Plan, kv_cache, method_of
from hwmodels.model.model_spec import Block, ModelSpec
from hwmodels.model.weights import WEIGHT_FORMATS, Role, kind_of, weight_format

WHERE = "quantization_config"
KEYS = (WHERE, "compression_config")
"""Keys of a config.json under which a quantiser describes the checkpoint."""

MODELOPT_FILE = "hf_quant_config.json"
LAYERS_FILE = "quant_cfg.json"
"""File of TensorRT-LLM beside it, which names the format of each layer of a mixed checkpoint."""
FILES = {
    MODELOPT_FILE: "modelopt",
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "quantization_config.json": None,
}
"""Files beside a config.json that describe the checkpoint, and the quantiser whose name they leave out."""

EXPERTS_BESIDE_MLP = "Gemma4"
"""Start of the architectures whose layers have experts beside a dense MLP."""


class StoredWeights(NamedTuple):
    """Storage formats of a checkpoint's matrices, and of its model's keys and values.

    `weights` None: not quantised. `moe_weights` None: as `weights`.
    """

    weights: str | None = None
    moe_weights: str | None = None
    lm_head_weights: str | None = None
    kv_cache_dtype: str = "auto"
    """dtype of keys and values; auto: the dtype that the model computes in."""
    formats: tuple[tuple[tuple[str, str], ...], ...] = ()
    """For each layer: the matrices that are stored otherwise, and their formats; empty: none is."""
    notes: tuple[str, ...] = ()


def description_of(config: Mapping[str, Any], folder: Path | None = None) -> Description | None:
    """Returns what the checkpoint says of its formats; None if it says nothing. Raises ValueError.

    folder: that of the config.json, in which other files may describe the formats; None: there is none.
    """
    experts_dtype = config.get("expert_dtype")
    for key in KEYS:
        if given := config.get(key):
            if not isinstance(given, Mapping):
                raise wrong(key, given, "must be an object with a quant_method")
            return Description(key, given, experts_dtype if isinstance(experts_dtype, str) else None)
    for name in FILES if folder is not None else ():
        if folder is not None and (folder / name).exists():
            fields = load_json_object(folder / name)
            if name == MODELOPT_FILE and (folder / LAYERS_FILE).exists():
                fields = with_layers(fields, load_json_object(folder / LAYERS_FILE))
            method = method_of(fields) or FILES[name]
            return Description(name, {**fields, "quant_method": method})
    return None


def with_layers(fields: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Returns Model Optimizer's fields with the `quantized_layers` of another file, if they have none."""
    inside = fields.get("quantization")
    if "quantized_layers" not in more or not isinstance(inside, Mapping):
        return dict(fields)
    return {**fields, "quantization": {"quantized_layers": more["quantized_layers"], **inside}}


def stored_weights(
    description: Description | None,
    layers: Sequence[Block],
    *,
    dtype: str,
    folder: Path | None = None,
    asked: Mapping[str, str] | None = None,
    experts_beside_mlp: bool = False,
) -> StoredWeights:
    """Returns the formats of all matrices by the description; None means that they are not quantised.

    layers: one block for each layer. dtype: that of matrices which are not quantised. asked: formats that the
    user sets; with `weights` and `kv_cache_dtype` among them nothing has to be understood.
    experts_beside_mlp: see `modules.names_in`. Raises ValueError for what names a format and is not known.
    """
    if description is None:
        return StoredWeights()
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
    """Returns the formats by module. Raises ValueError for a quantiser that is not known."""
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
    """Returns kv_cache_dtype; where the config.json does not name it, hf_quant_config.json may."""
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
    """Returns the formats of the layers' matrices: the commonest of each role, and what differs from it."""
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
    """Yields each matrix of a layer and its format; of matrices that are joined, the widest format counts."""
    for matrix in layer.layer_matrices(1 << 10):
        if matrix.role is not Role.plain:
            formats = [format_of(plan, part) for part in names.parts(number, matrix.name)]
            yield matrix.name, max(formats, key=bits_of)


def bits_of(name: str | None) -> float:
    """Returns the bytes per weight of a format; those of matrices that are not quantised are the largest."""
    return float("inf") if name is None else weight_format(name).bytes_per_weight


def format_of(plan: Plan, module: Sequence[str]) -> str | None:
    """Returns the format of a module under all its names; None: it is not quantised."""
    for rule in plan.rules:
        if rule.modules.match(module):
            return rule.stored
    return plan.others


def head_format(plan: Plan) -> str | None:
    """Returns the format of the LM head: only what names it quantises it."""
    return next((rule.stored for rule in plan.rules if rule.modules.match(HEAD)), None)


IS_QUANTISED = "the checkpoint is quantised already"
"""Part of the message on a format that an engine would have to make from another one."""


def as_asked(model: ModelSpec, asked: Mapping[str, str], method: str | None, *, is_given: bool) -> ModelSpec:
    """Returns the model in the formats that the user asks for. Raises ValueError for what cannot be served.

    model: with the checkpoint's own formats. asked: setting -> format. method: the checkpoint's quantiser;
    None: it is not quantised. is_given: the checkpoint is the user's own; else it is a published model, of
    which checkpoints in other formats may exist.
    """
    if "weights" in asked:
        model = _with_weights(model, asked["weights"], method, is_given=is_given)
    if "moe_weights" in asked:
        blocks = tuple(block.without_formats(Role.routed) for block in model.blocks)
        model = replace(model, blocks=blocks, moe_weights=asked["moe_weights"])
    return replace(
        model,
        dtype=asked.get("dtype", model.dtype),
        kv_cache_dtype=asked.get("kv_cache_dtype", model.kv_cache_dtype),
    )


def _with_weights(model: ModelSpec, name: str, method: str | None, *, is_given: bool) -> ModelSpec:
    meaning, is_format = meaning_of(name), _is_format(name)
    own = {
        _base(stored) for stored in (model.weights, model.moe_weights) if stored not in (None, model.dtype)
    }
    if is_format:
        if _base(name) in own:
            return model
        if is_given and own and meaning is not None and meaning.is_online:
            raise ValueError(_mismatch(name, method, own))
        blocks = tuple(block.without_formats(Role.dense) for block in model.blocks)
        return replace(model, blocks=blocks, weights=name)
    if meaning is None:
        try:
            weight_format(name)
        except ValueError as error:
            raise ValueError(f"{error}{nearest_to(name)}") from None
        return model
    stored = meaning.weights or meaning.moe_weights
    if method in meaning.methods or (stored is not None and _base(stored) in own):
        return model
    return _as_an_engine_would(model, name, meaning, method, own, is_given=is_given)


def _as_an_engine_would(
    model: ModelSpec, name: str, meaning: Meaning, method: str | None, own: set[str], *, is_given: bool
) -> ModelSpec:
    """Returns the model whose checkpoint is quantised online, or replaced by one that is quantised so."""
    if method is not None and is_given:
        raise ValueError(_mismatch(name, method, own))
    stored = meaning.weights or meaning.moe_weights
    if stored is None:
        raise ValueError(
            f"weights={name}: does not say the format, which a checkpoint does; give the folder of one "
            f"(model=hf model.path=FOLDER), or a format: {', '.join(DESCRIBED)}"
        )
    if method is None and not meaning.is_online and is_given:
        raise ValueError(
            f"weights={name}: the checkpoint is not quantised, and engines load {name} from one that is; "
            f"set weights={stored} to price such a checkpoint, or fp8, which engines make of 16 bits"
        )
    if meaning.weights is None and not model.has_experts:
        raise ValueError(f"weights={name}: quantises experts alone, and {model.name} has none; nearest: fp8")
    replaced = model.with_weights(meaning.weights, meaning.moe_weights if model.has_experts else None)
    if meaning.is_online and method is None:
        return replaced
    note = f"weights in {stored}: those of a checkpoint of {model.name} that is quantised for {name}"
    return replace(replaced, notes=(*replaced.notes, note))


def _mismatch(name: str, method: str | None, own: set[str]) -> str:
    stored = f" in {' and '.join(sorted(own))}" if own else ""
    return (
        f"weights={name}: {IS_QUANTISED}, by {method}{stored}, and engines do not quantise it again; "
        "leave it out (null), or read the checkpoint of 16 bits"
    )


def _is_format(name: str) -> bool:
    try:
        weight_format(name)
    except ValueError:
        return False
    return True


def _base(name: str | None) -> str:
    """Returns the kind of a format, whatever its groups and blocks: int4_wo_g32 is int4_wo."""
    kind = kind_of(name or "")
    return "fp8" if kind == "fp8_block" else kind


class Meaning(NamedTuple):
    """Meaning of an engine's name."""

    weights: str | None = None
    """Format of all weights; None: the name does not say, the checkpoint does."""
    moe_weights: str | None = None
    """Format of routed experts; None: as `weights`."""
    methods: tuple[str, ...] = ()
    """quant_method of the checkpoints that have it."""
    is_online: bool = False
    """Whether the engine quantises a checkpoint of 16 bits in this way while it loads it."""


AWQ, GPTQ = ("awq", "auto_awq", "awq_marlin"), ("gptq", "auto_gptq", "gptq_marlin", "gptqmodel")
FP8 = ("fp8", "finegrained_fp8", "fbgemm_fp8", "deepseek_v4_fp8")
OF_MODELOPT = ("modelopt", "modelopt_fp8", "modelopt_fp4", "modelopt_mxfp8", "modelopt_mixed", "petit_nvfp4")
MXFP4 = ("mxfp4", "gpt_oss_mxfp4")
AUTO_ROUND = ("auto-round", "intel/auto-round", "inc")

ENGINE_NAMES: dict[str, Meaning] = {
    # vLLM 0.32: QUANTIZATION_METHODS.
    "awq": Meaning("int4_wo", methods=AWQ),
    "auto_awq": Meaning("int4_wo", methods=AWQ),
    "fp8": Meaning("fp8", methods=FP8, is_online=True),
    "fbgemm_fp8": Meaning("fp8", methods=FP8),
    "fp_quant": Meaning(methods=("fp_quant",)),
    "modelopt": Meaning("fp8", methods=OF_MODELOPT),
    "modelopt_fp4": Meaning("nvfp4", methods=OF_MODELOPT),
    "modelopt_mxfp8": Meaning("mxfp8", methods=OF_MODELOPT),
    "modelopt_mixed": Meaning(methods=OF_MODELOPT),
    "auto_gptq": Meaning("int4_wo", methods=GPTQ),
    "gptq": Meaning("int4_wo", methods=GPTQ),
    "gptq_marlin": Meaning("int4_wo", methods=GPTQ),
    "awq_marlin": Meaning("int4_wo", methods=AWQ),
    "humming": Meaning(methods=(*AWQ, *GPTQ, *FP8, *OF_MODELOPT, *MXFP4, "compressed-tensors")),
    "compressed-tensors": Meaning(methods=("compressed-tensors",)),
    "experts_int8": Meaning(moe_weights="int8_wo", methods=("experts_int8",), is_online=True),
    "quark": Meaning(methods=("quark",)),
    "moe_wna16": Meaning("int4_wo", methods=(*AWQ, *GPTQ)),
    "torchao": Meaning(methods=("torchao",)),
    "inc": Meaning(methods=AUTO_ROUND),
    "mxfp4": Meaning("mxfp4", methods=MXFP4, is_online=True),
    "gpt_oss_mxfp4": Meaning(moe_weights="mxfp4", methods=MXFP4),
    "deepseek_v4_fp8": Meaning("fp8_block", "mxfp4_mxfp8", methods=FP8),
    "online": Meaning(),
    "fp8_per_tensor": Meaning("fp8", methods=FP8, is_online=True),
    "fp8_per_block": Meaning("fp8_block", methods=FP8, is_online=True),
    "fp8_per_channel": Meaning("fp8", methods=FP8, is_online=True),
    "int8_per_channel_weight_only": Meaning(moe_weights="int8_wo", is_online=True),
    "nvfp4_per_token": Meaning(moe_weights="nvfp4", is_online=True),
    "mxfp8": Meaning("mxfp8", methods=("mxfp8", *OF_MODELOPT), is_online=True),
    # Earlier versions of vLLM.
    "bitsandbytes": Meaning("nf4", methods=("bitsandbytes",), is_online=True),
    "auto-round": Meaning("int4_wo", methods=AUTO_ROUND),
    "hqq": Meaning(methods=("hqq",)),
    "aqlm": Meaning("int2_wo", methods=("aqlm",)),
    "ptpc_fp8": Meaning("fp8", is_online=True),
    "tpu_int8": Meaning("int8_wo", is_online=True),
    "qqq": Meaning("int4_int8", methods=("qqq",)),
    "bitblas": Meaning("int4_wo", methods=(*AWQ, *GPTQ)),
    "gptq_bitblas": Meaning("int4_wo", methods=GPTQ),
    # SGLang 0.5.
    "modelopt_fp8": Meaning("fp8", methods=OF_MODELOPT),
    "nvfp4_online": Meaning("nvfp4", is_online=True),
    "blockwise_int8": Meaning("int8", methods=("blockwise_int8",)),
    "w8a8_int8": Meaning("int8", methods=("w8a8_int8",)),
    "w8a8_fp8": Meaning("fp8", methods=("w8a8_fp8",), is_online=True),
    "w4afp8": Meaning("fp8", "int4_fp8", methods=("w4afp8",)),
    "petit_nvfp4": Meaning("nvfp4_wo", methods=OF_MODELOPT),
    "quark_mxfp4": Meaning("mxfp4_mxfp4", is_online=True),
    "quark_int4fp8_moe": Meaning(moe_weights="int4_fp8", is_online=True),
    "auto-round-int8": Meaning("int8", methods=AUTO_ROUND),
    # TensorRT-LLM: quant_algo.
    **{name.lower(): Meaning(stored) for name, stored in MODELOPT.items() if name != "FP8"},
}
"""Engine's name -> its meaning. Those that are also formats of ours are taken as formats (`hf.asked`)."""

REFUSED = {
    "squeezellm": ("engines no longer serve it", "gptq"),
    "marlin": ("engines no longer serve it", "gptq_marlin"),
    "gptq_marlin_24": ("engines no longer serve 2:4 sparse weights in 4 bits", "gptq_marlin"),
    "deepspeedfp": ("engines no longer serve it", "fp8"),
    "neuron_quant": ("it is for chips that are not priced", "int8_wo"),
    "ipex": ("it is for CPUs", "awq"),
    "cpu_awq": ("it is for CPUs", "awq"),
    "gguf": ("the file says the format of each tensor", "int4_wo"),
    "modelslim": ("it is for chips that are not priced", "w8a8_int8"),
    "mxfp_w4a8": ("it is for chips that are not priced", "mxfp4_mxfp8"),
    "qoq": ("engines no longer serve it", "int4_int8"),
}
"""Names of engines that have no price: the reason, and the nearest name that has one."""

DESCRIBED = ("fp8", "int8", "int4_wo", "nvfp4")
"""Formats to choose from where a name leaves the format to the checkpoint."""


def meaning_of(name: str) -> Meaning | None:
    """Returns the meaning of an engine's name; None for a format of ours that is no engine's name.

    Raises ValueError for a name that has no price, and for one that is neither, with the nearest.
    """
    if name in REFUSED:
        reason, nearest = REFUSED[name]
        raise ValueError(f"weights={name}: cannot be priced, since {reason}; nearest: {nearest}")
    return ENGINE_NAMES.get(name)


def nearest_to(name: str) -> str:
    """Returns "; nearest: NAME" for a name that is not known, or nothing if none is like it."""
    found = difflib.get_close_matches(
        name.lower().replace("-", "_"), [*ENGINE_NAMES, *WEIGHT_FORMATS], 1, 0.5
    )
    return f"; nearest: {found[0]}" if found else ""


# DOC of hwmodels.hf.quantization: The formats that a user asks for, on top of those of the checkpoint.
#
# A format of weights (`WEIGHT_FORMATS`) is taken as it is, except where the checkpoint is already stored in it:
# then its own one counts, with the modules that it leaves in 16 bits. An engine's name (`ENGINE_NAMES`) means
# what the engine would do with the checkpoint; what it would refuse is refused.
#
# Names of engines for quantised weights (vLLM's --quantization): an engine loads a checkpoint that is quantised
# in the way that the name says, or quantises one of 16 bits while it loads it ("online"), or refuses. The names
# are those of vLLM 0.32, SGLang 0.5 and TensorRT-LLM, and those of earlier versions that posted commands still
# have.
#
