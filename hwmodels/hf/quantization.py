"""Storage formats of weights: a checkpoint's description, and the user's requests.

The description is the quantization_config of the config.json or, without one, a file next to it. Readers of
the descriptions are in `quantizers.py`. Checkpoints name modules that are unquantised or in another format by
transformers' module names (`model.layers.3.self_attn.q_proj`), parts of such names, wildcards, or regular
expressions. Names differ between families; a `Matrix` has all of them. A weight format (`WEIGHT_FORMATS`) is
used unchanged, unless the checkpoint is already stored in it: then the checkpoint's own format is used,
including the modules that it leaves in 16 bits. An engine's name (`ENGINE_NAMES`) means the engine's
treatment of the checkpoint; combinations that the engine rejects are rejected. Engines' names for quantised
weights (vLLM's --quantization): an engine loads a checkpoint quantised in this way, or quantises a 16-bit
checkpoint while loading it ("online"), or rejects it. The names come from vLLM 0.32, SGLang 0.5 and
TensorRT-LLM, and from earlier versions that are still found in published commands.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from hwmodels.checks import is_whole
from hwmodels.hf.fields import load_json_object, shown, wrong
from hwmodels.model import ModelSpec
from hwmodels.model.weights import WEIGHT_FORMATS, Role, kind_of, weight_format

WHERE = "quantization_config"
KEYS = (WHERE, "compression_config")
"""Keys of a config.json under which a quantiser describes the checkpoint."""

MODELOPT_FILE = "hf_quant_config.json"
LAYERS_FILE = "quant_cfg.json"
"""TensorRT-LLM's additional file, which names the format of each layer of a mixed checkpoint."""
FILES = {
    MODELOPT_FILE: "modelopt",
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "quantization_config.json": None,
}
"""Files next to a config.json that describe the checkpoint, and the quantiser whose name they omit."""

EXPERTS_BESIDE_MLP = "Gemma4"
"""Prefix of the architectures whose layers have experts next to a dense MLP."""


class StoredWeights(NamedTuple):
    """Storage formats of a checkpoint's matrices, and of its model's keys and values.

    `weights` None: not quantised. `moe_weights` None: as `weights`.
    """

    weights: str | None = None
    moe_weights: str | None = None
    lm_head_weights: str | None = None
    kv_cache_dtype: str = "auto"
    """dtype of keys and values; auto: the model's compute dtype."""
    formats: tuple[tuple[tuple[str, str], ...], ...] = ()
    """For each layer: matrices stored in a different format, and their formats; empty: none."""
    notes: tuple[str, ...] = ()


LEFT_OUT = (
    "modules_to_not_convert",
    "ignore",
    "ignored_layers",
    "exclude_modules",
    "exclude",
    "exclude_layers",
    "llm_int8_skip_modules",
    "linear_weights_not_to_quantize",
    "skip_modules",
)
"""Known keys for modules that stay unquantised."""


class Rule(NamedTuple):
    """Modules and the format of their weights; None: they are not quantised."""

    modules: Modules
    stored: str | None


class Plan(NamedTuple):
    """Formats of a checkpoint: from the first rule that names a module, else `others`."""

    others: str | None
    rules: tuple[Rule, ...] = ()
    kv_cache_dtype: str = "auto"
    """dtype of keys and values; auto: the model's compute dtype."""
    notes: tuple[str, ...] = ()


class Description(NamedTuple):
    """A quantiser's fields, and their location for error messages."""

    where: str
    fields: Mapping[str, Any]
    experts_dtype: str | None = None
    """`expert_dtype` of the config.json: fp4 experts beside fp8 (DeepSeek-V4)."""

    def at(self, key: str) -> str:
        """Returns the name of a key for messages: quantization_config.bits, or quant_config.json: w_bit."""
        return f"{self.where}{': ' if self.where.endswith('.json') else '.'}{key}"

    def wrong(self, key: str, rule: str) -> ValueError:
        return wrong(self.at(key), self.fields.get(key), rule)

    def first(self, *keys: str, default: Any = None) -> Any:
        """Returns the value of the first of these keys that has one."""
        return next((self.fields[key] for key in keys if self.fields.get(key) is not None), default)

    def inside(self, *keys: str) -> Mapping[str, Any]:
        """Returns the object of the first of these keys that is set, else an empty one. Raises ValueError."""
        for key in keys:
            value = self.fields.get(key)
            if value is not None:
                if not isinstance(value, Mapping):
                    raise self.wrong(key, "must be an object")
                return value
        return {}

    def group_size(self, *keys: str, default: int | None = None) -> int | None:
        """Returns the weights of a group; None: a scale per row (-1, 0 or null). Raises ValueError."""
        for key in keys or ("group_size",):
            given = self.fields.get(key)
            if given is not None:
                if not is_whole(given) or not (-1 <= given <= 1 << 16):
                    raise self.wrong(key, "must be a whole number of weights, or -1 for a scale per row")
                return int(given) if given > 0 else None
        return default

    def left_out(self) -> Rule:
        """Returns the rule of the modules that stay unquantised, under any known key."""
        names = [name for key in LEFT_OUT for name in listed(self.at(key), self.fields.get(key))]
        return Rule(modules(self.at(LEFT_OUT[0]), names), None)

    def of(self, key: str, fields: Any) -> Description:
        """Returns the description inside this one. Raises ValueError if it is not an object."""
        if not isinstance(fields, Mapping):
            raise wrong(self.at(key), fields, "must be an object")
        return Description(self.at(key), fields)


def description_of(config: Mapping[str, Any], folder: Path | None = None) -> Description | None:
    """Returns the checkpoint's description of its formats; None if there is none.

    Raises ValueError. folder: the config.json's folder, whose other files may describe the formats; None: no
    folder.
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


def method_of(fields: Mapping[str, Any]) -> str | None:
    """Returns quant_method, or the method implied by other fields; None if there is none.

    ModelOpt's descriptions have producer or quant_algo, AutoAWQ's file w_bit, AutoGPTQ's file desc_act.
    """
    method = fields.get("quant_method")
    if isinstance(method, str) and method:
        return method.lower().replace("compressed_tensors", "compressed-tensors")
    producer, inside = fields.get("producer"), fields.get("quantization")
    if (
        (isinstance(producer, Mapping) and producer.get("name") == "modelopt")
        or "quant_algo" in fields
        or (isinstance(inside, Mapping) and "quant_algo" in inside)
    ):
        return "modelopt"
    signs = (
        (("config_groups",), "compressed-tensors"),
        (("global_quant_config",), "quark"),
        (("w_bit",), "awq"),
        (("q_group_size",), "awq"),
        (("bits", "desc_act"), "gptq"),
        (("bits", "group_size", "sym"), "gptq"),
        (("bits", "group_size", "zero_point"), "awq"),
        (("load_in_4bit",), "bitsandbytes"),
        (("load_in_8bit",), "bitsandbytes"),
        (("weight_block_size",), "fp8"),
    )
    return next((name for keys, name in signs if all(key in fields for key in keys)), None)


# Modules of a layer under the names of checkpoints, and patterns that name some of them.

PREFIXES = (
    "model.",
    "model.language_model.",
    "language_model.model.",
    "language_model.",
    "model.decoder.",
    "transformer.",
    "backbone.",
    "",
)
"""Prefixes of the names of a language model's layers, the usual one first."""

ATTENTION = ("self_attn", "linear_attn", "attn", "attention", "mixer")
DENSE = ("mlp", "ffn", "feed_forward", "mixer", "block_sparse_moe")
EXPERTS = tuple(
    f"{inside}experts"
    for inside in ("mlp.", "ffn.", "feed_forward.", "block_sparse_moe.", "mixer.", "moe.", "")
)
SHARED = tuple(
    f"{inside}{name}"
    for inside in ("mlp.", "ffn.", "feed_forward.", "block_sparse_moe.", "mixer.", "moe.", "")
    for name in ("shared_experts", "shared_expert", "share_expert", "shared_mlp")
)

UP, GATE, DOWN = ("up_proj", "gate_up_proj", "w3"), ("gate_proj", "gate_up_proj", "w1"), ("down_proj", "w2")
OF_ATTENTION = {
    "qkv_proj": (("q_proj", "qkv_proj", "wq"), ("k_proj", "qkv_proj", "wk"), ("v_proj", "qkv_proj", "wv")),
    "o_proj": (("o_proj", "out_proj", "wo"),),
    "qkv_a_proj": (("q_a_proj", "wq_a"), ("kv_a_proj_with_mqa", "wkv_a", "wkv")),
    "kv_a_proj": (("kv_a_proj_with_mqa", "wkv_a", "wkv"),),
    "q_b_proj": (("q_b_proj", "wq_b"),),
    "kv_b_proj": (("kv_b_proj", "wkv_b"),),
    "index_q_proj": (("indexer.wq_b",),),
    "index_k_proj": (("indexer.wk",),),
    "index_qk_proj": (("index_q_proj",), ("index_k_proj",)),
    "compressor_proj": (("compressor.wkv",), ("compressor.wgate",)),
    "o_a_proj": (("o_a_proj", "wo_a"),),
    "o_b_proj": (("o_b_proj", "wo_b"),),
    "in_proj_qkv": (("q_proj",), ("k_proj",), ("v_proj",)),
    "latent_down_proj": (("fc1_latent_proj", "routed_expert_down_proj"),),
    "latent_up_proj": (("fc2_latent_proj", "routed_expert_up_proj"),),
    "in_proj_qkvz": (("in_proj_qkv", "in_proj_qkvz"), ("in_proj_z", "in_proj_qkvz")),
}
"""Name of a `Matrix` -> for each matrix that it joins: its names in checkpoints."""

OF_MLP = {"gate_up_proj": (GATE, UP), "up_proj": (UP,), "down_proj": (DOWN,)}

HEAD = ("lm_head", "language_model.lm_head", "model.lm_head", "head")

MOST_REGEXES = 2_000
MOST_REPETITIONS = 6
"""Maximum number of unbounded repetitions in one regular expression; more could take forever on a name that
does not match.
"""

_STRIPPED = re.compile("|".join(re.escape(prefix) for prefix in sorted(PREFIXES, key=len, reverse=True)))
_REGEX = re.compile(r"^\.\*|[\\^$(|+]")
"""Finds syntax that only regular expressions have; model.layers.1.* is a wildcard of layer 1, not of layer
10.
"""
_NESTED = re.compile(r"\([^()]*[*+{][^()]*\)\s*[*+{]")


class Names(NamedTuple):
    """Names of the modules in layers: the containers in which attention, MLPs and experts may lie."""

    attention: tuple[str, ...]
    dense: tuple[str, ...]
    experts: tuple[str, ...]
    shared: tuple[str, ...]

    def parts(self, layer: int, matrix: str) -> list[list[str]]:
        """Returns the full names of each matrix joined in a `Matrix`."""
        places = list[tuple[tuple[str, ...], tuple[str, ...]]]()
        for start, containers in (("expert_", self.experts), ("shared_", self.shared), ("", self.dense)):
            of_mlp = OF_MLP.get(matrix.removeprefix(start)) if matrix.startswith(start) else None
            if of_mlp is not None:
                numbered = start == "expert_"
                places = [
                    (containers, (*(f"0.{leaf}" for leaf in leaves if numbered), *leaves))
                    for leaves in of_mlp
                ]
                break
        else:
            places = [(self.attention, leaves) for leaves in OF_ATTENTION.get(matrix, ((matrix,),))]
        return [
            [f"layers.{layer}.{inside}.{leaf}" for inside in containers for leaf in leaves]
            for containers, leaves in places
        ]


def names_in(text: str, *, experts_beside_mlp: bool = False) -> Names:
    """Returns the names that a checkpoint's patterns can distinguish: usual containers, and those in text.

    text: all patterns. experts_beside_mlp: the experts are next to a dense `mlp` instead of in it (Gemma 4).
    """

    def used(containers: Sequence[str]) -> tuple[str, ...]:
        return tuple(
            name
            for place, name in enumerate(containers)
            if place == 0 or all(word in text for word in name.split("."))
        )

    experts = ("experts",) if experts_beside_mlp else used(EXPERTS)
    return Names(used(ATTENTION), used(DENSE), experts, used(SHARED))


@dataclass(frozen=True)
class Modules:
    """Patterns of modules' names: a name or a part of one, wildcards (*), or a regular expression (re:)."""

    plain: frozenset[str] = frozenset()
    globs: re.Pattern[str] | None = None
    regexes: tuple[re.Pattern[str], ...] = ()
    prefixes: tuple[str, ...] = field(default=PREFIXES[:1])

    def match(self, names: Iterable[str]) -> bool:
        """Returns whether a pattern names one of these modules or a module that holds it."""
        return any(self._matches(name) for name in names)

    def _matches(self, name: str) -> bool:
        if self.plain:
            words = name.split(".")
            for start in range(len(words)):
                for end in range(start + 1, len(words) + 1):
                    if ".".join(words[start:end]) in self.plain:
                        return True
        for prefix in self.prefixes if self.globs or self.regexes else ():
            full = f"{prefix}{name}"
            if self.globs is not None and self.globs.match(full):
                return True
            if any(regex.match(full) for regex in self.regexes):
                return True
        return False


def modules(where: str, patterns: Iterable[str]) -> Modules:
    """Returns the modules that the patterns name. Raises ValueError that names the field `where`."""
    plain, globs, regexes, used = set[str](), list[str](), list[re.Pattern[str]](), {PREFIXES[0]}
    for pattern in patterns:
        used |= {prefix for prefix in PREFIXES if prefix and prefix in pattern}
        if pattern.startswith("re:"):
            regexes.append(regular_expression(where, pattern[3:]))
        elif "*" in pattern or "?" in pattern:
            if _REGEX.search(pattern):
                regexes += readable_as_regex(pattern)
            translated = fnmatch.translate(pattern).removesuffix(r"\Z")
            globs.append(rf"{translated}(?:\..*)?\Z")
        else:
            name = pattern.removesuffix(".weight").strip(".")
            plain.add(_STRIPPED.sub("", name, count=1) if _STRIPPED.match(name) else name)
    if len(regexes) > MOST_REGEXES:
        raise ValueError(
            f"{where}: holds {len(regexes):,} regular expressions; at most {MOST_REGEXES:,} are read"
        )
    joined = re.compile("|".join(f"(?:{one})" for one in dict.fromkeys(globs))) if globs else None
    # A pattern may begin with a name without a language model's prefix, as in layers.0.ffn.experts.
    prefixes = tuple(prefix for prefix in PREFIXES if prefix in used or not prefix)
    return Modules(frozenset(plain - {""}), joined, tuple(regexes), prefixes)


def regular_expression(where: str, text: str) -> re.Pattern[str]:
    """Compiles an expression of a checkpoint. Raises ValueError if it is invalid, or could take too long."""
    if (
        _NESTED.search(text)
        or len(re.findall(r"(?<!\\)[*+]|\{\d*,\}", text)) > MOST_REPETITIONS
        or len(text) > 2_000
    ):
        raise wrong(
            where, f"re:{text}", f"must have at most {MOST_REPETITIONS} repetitions (* or +), and none nested"
        )
    try:
        return re.compile(re.sub(r"(?:\.\*){2,}", ".*", text))
    except (re.error, RecursionError, OverflowError) as error:
        raise wrong(where, f"re:{text}", f"is no regular expression: {error}") from None


def readable_as_regex(pattern: str) -> list[re.Pattern[str]]:
    """Returns a wildcard pattern interpreted as a regular expression; none if it is not one."""
    try:
        return [regular_expression("", pattern)]
    except ValueError:
        return []


def listed(where: str, given: Any) -> list[str]:
    """Returns the patterns of a field: a list of texts, or one text. Raises ValueError."""
    if given is None:
        return []
    if isinstance(given, str):
        return [given]
    if not (isinstance(given, list) and all(isinstance(one, str) for one in given)):
        raise ValueError(f"{where}={shown(given)}: must be a list of names of modules")
    return given


# The formats requested by a user.

MODELOPT = {
    "FP8": "fp8",
    "FP8_PER_CHANNEL_PER_TOKEN": "fp8",
    "FP8_PB_WO": "fp8_block",
    "FP8_PB_REAL": "fp8_block",
    "FP8_BLOCK_SCALES": "fp8_block",
    "NVFP4": "nvfp4",
    "NVFP4_AWQ": "nvfp4",
    "NVFP4_AWQ_LITE": "nvfp4",
    "W4A16_NVFP4": "nvfp4_wo",
    "W4A8_NVFP4_FP8": "nvfp4_fp8",
    "MXFP8": "mxfp8",
    "MXFP4": "mxfp4_mxfp4",
    "W4A8_MXFP4_FP8": "mxfp4_mxfp8",
    "W4A8_MXFP4_MXFP8": "mxfp4_mxfp8",
    "W4A16_MXFP4": "mxfp4",
    "W4A16_AWQ": "int4_wo",
    "W4A16_GPTQ": "int4_wo",
    "W4A16": "int4_wo",
    "INT4_AWQ": "int4_wo",
    "W4A8_AWQ": "int4_fp8",
    "W8A16": "int8_wo",
    "W8A16_GPTQ": "int8_wo",
    "INT8": "int8",
    "INT8_SQ": "int8",
    "W8A8_SQ_PER_CHANNEL": "int8",
}
"""quant_algo of Model Optimizer and TensorRT-LLM -> weight format."""

IS_QUANTISED = "the checkpoint is quantised already"
"""Part of the message on a format that an engine would have to convert from another one."""


def as_asked(model: ModelSpec, asked: Mapping[str, str], method: str | None, *, is_given: bool) -> ModelSpec:
    """Returns the model in the formats requested by the user.

    Raises ValueError if it cannot be served. model: with the checkpoint's own formats. asked: setting ->
    format. method: the checkpoint's quantiser; None: it is not quantised. is_given: whether the checkpoint is
    the user's own; if not, it is a published model that may have checkpoints in other formats.
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
    """Returns the model whose checkpoint is quantised online, or replaced by one quantised in this way."""
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
    """Returns the kind of a format, without its groups and blocks: int4_wo_g32 is int4_wo."""
    kind = kind_of(name or "")
    return "fp8" if kind == "fp8_block" else kind


class Meaning(NamedTuple):
    """Meaning of an engine's name."""

    weights: str | None = None
    """Format of all weights; None: the checkpoint determines it."""
    moe_weights: str | None = None
    """Format of routed experts; None: as `weights`."""
    methods: tuple[str, ...] = ()
    """quant_method of the checkpoints in this format."""
    is_online: bool = False
    """Whether the engine quantises a 16-bit checkpoint in this way while loading it."""


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
"""Engine's name -> its meaning. Names that are also weight formats are treated as formats (`hf.asked`)."""

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
"""Engines' names without a price: the reason, and the nearest name with one."""

DESCRIBED = ("fp8", "int8", "int4_wo", "nvfp4")
"""Formats to choose from if a name leaves the format to the checkpoint."""


def meaning_of(name: str) -> Meaning | None:
    """Returns the meaning of an engine's name; None for a weight format that is not an engine's name.

    Raises ValueError for a name without a price, and for an unknown name, with the nearest one.
    """
    if name in REFUSED:
        reason, nearest = REFUSED[name]
        raise ValueError(f"weights={name}: cannot be priced, since {reason}; nearest: {nearest}")
    return ENGINE_NAMES.get(name)


def nearest_to(name: str) -> str:
    """Returns "; nearest: NAME" for an unknown name, or an empty text if none is similar."""
    found = difflib.get_close_matches(
        name.lower().replace("-", "_"), [*ENGINE_NAMES, *WEIGHT_FORMATS], 1, 0.5
    )
    return f"; nearest: {found[0]}" if found else ""
