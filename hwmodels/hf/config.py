"""Reads a Hugging Face config.json: from its fields to a `ModelSpec`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hwmodels.hf.architectures import ARCHITECTURES, KNOWN, REQUIRED, WRAPPERS, Architecture
from hwmodels.hf.fields import Fields, shown, wrong
from hwmodels.hf.json_files import load_json_object
from hwmodels.hf.quantization import stored_weights
from hwmodels.hf.size_check import size_notes
from hwmodels.model.attention import Attention
from hwmodels.model.block import Block
from hwmodels.model.mlp import MixtureOfExperts, Mlp
from hwmodels.model.model_spec import ModelSpec, Transform

DTYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "bf16"}

OF_THE_WHOLE_MODEL = (
    "dtype",
    "torch_dtype",
    "tie_word_embeddings",
    "quantization_config",
    "compression_config",
)
"""Fields that a multimodal model may have beside its text_config instead of in it."""

OTHER_TOWERS = ("vision_config", "audio_config")


class TextConfig(NamedTuple):
    """The language model's part of a config.json."""

    architecture: str
    how: Architecture
    config: Mapping[str, Any]
    notes: tuple[str, ...]


def from_hf_config(
    path: str,
    dtype: str = "auto",
    weights: str | None = None,
    moe_weights: str | None = None,
    kv_cache_dtype: str = "auto",
    transform: Transform | None = None,
) -> ModelSpec:
    """Returns the model of a config.json (the file or its folder); other arguments as in `from_hf_fields`."""
    file, config = read_hf_config(Path(path))
    try:
        read = model_settings(config)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    stored = ModelSpec(name=file.resolve().parent.name, source=str(file), **read)
    read["notes"] += size_notes(stored, file.parent, is_float32=is_float32(config))
    read |= chosen(dtype, weights, moe_weights, kv_cache_dtype)
    return transformed(ModelSpec(name=stored.name, source=stored.source, **read), transform)


def from_hf_fields(
    config: dict[str, Any],
    name: str,
    source: str = "",
    dtype: str = "auto",
    weights: str | None = None,
    moe_weights: str | None = None,
    kv_cache_dtype: str = "auto",
    transform: Transform | None = None,
) -> ModelSpec:
    """Returns the model that the fields of a Hugging Face config.json describe.

    dtype "auto" is the checkpoint's; fp32 and unnamed dtypes are served in bf16, as vLLM does. weights and
    moe_weights None, and kv_cache_dtype "auto", mean the formats of the checkpoint's quantization_config, if
    it has one. transform: compression applied to the model before it is served.
    Raises ValueError for an unknown architecture, a field that is missing, wrong or not understood, or an
    unknown quantisation method.
    """
    try:
        read = model_settings(config)
    except ValueError as error:
        raise ValueError(f"config.{error}") from None
    read |= chosen(dtype, weights, moe_weights, kv_cache_dtype)
    return transformed(ModelSpec(name=name, source=source, **read), transform)


def transformed(model: ModelSpec, transform: Transform | None) -> ModelSpec:
    """Applies a transform to a model; None leaves it as it is."""
    return model if transform is None else transform.applied(model)


def chosen(dtype: str, weights: str | None, moe_weights: str | None, kv_cache_dtype: str) -> dict[str, str]:
    """Returns the settings in which the user overrides the checkpoint."""
    given = {
        "dtype": dtype,
        "weights": weights,
        "moe_weights": moe_weights,
        "kv_cache_dtype": kv_cache_dtype,
    }
    return {name: value for name, value in given.items() if value not in (None, "auto")}


def read_hf_config(path: Path) -> tuple[Path, dict[str, Any]]:
    """Returns the file and its fields, from a config.json or the folder that holds one. Raises ValueError."""
    file = path / "config.json" if path.is_dir() else path
    return file, load_json_object(file)


def model_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields as arguments of `ModelSpec`.

    Raises ValueError (field=value: rule). A field that is not understood is an error, since times without it
    may be wrong, unless it is null, false, zero or empty.
    """
    architecture, how, text, notes = text_config(config)
    fields = Fields(text, how.defaults)
    needed = (*REQUIRED, *how.needs)
    if missing := [name for name in needed if fields.config.get(name) is None]:
        raise ValueError(f"{', '.join(missing)}: missing; {architecture} needs them")
    fields.ignore("architectures", *OF_THE_WHOLE_MODEL, *OTHER_TOWERS)
    blocks = blocks_of(how.attention(fields), how.mlp(fields), how.num_norms)
    settings = {
        "hidden_size": fields.whole("hidden_size"),
        "vocab_size": fields.whole("vocab_size"),
        "max_position_embeddings": fields.whole("max_position_embeddings"),
        "blocks": blocks,
        "tie_word_embeddings": fields.flag("tie_word_embeddings", default=False),
        "dtype": checkpoint_dtype(fields),
        "num_mtp_modules": sum(fields.count(name) for name in how.mtp_layers),
    }
    notes += tuple(dict.fromkeys(note for name, note in how.left_out.items() if fields.value(name) and note))
    if unknown := fields.not_understood():
        given = ", ".join(f"{name}={shown(value)}" for name, value in unknown.items())
        raise ValueError(
            f"{given}: not understood; remove from the file the fields that do not change what "
            f"{architecture} computes"
        )
    stored = stored_weights(
        text.get("quantization_config") or text.get("compression_config"),
        has_experts=any(isinstance(block.mlp, MixtureOfExperts) for block in blocks),
    )
    return {
        **settings,
        "weights": stored.weights,
        "moe_weights": stored.moe_weights,
        "kv_cache_dtype": stored.kv_cache_dtype,
        "notes": notes + stored.notes,
    }


def is_float32(config: Mapping[str, Any]) -> bool:
    """Returns whether the checkpoint's numbers are in 32 bits, which are served in 16."""
    inner = config.get("text_config")
    parts = (config, inner if isinstance(inner, Mapping) else {})
    return "float32" in [part.get(name) for part in parts for name in ("dtype", "torch_dtype")]


def text_config(config: Mapping[str, Any]) -> TextConfig:
    """Returns the language model of a config.json. Raises ValueError if the architecture is unknown."""
    names = config.get("architectures")
    if not (isinstance(names, list) and len(names) == 1 and isinstance(names[0], str)):
        raise wrong("architectures", names, f"must be a list of one name; known: {', '.join(KNOWN)}")
    name: str = names[0]
    if name in ARCHITECTURES:
        return TextConfig(name, ARCHITECTURES[name], config, ())
    if name not in WRAPPERS:
        raise ValueError(
            f"architectures={name}: unknown architecture; known: {', '.join(KNOWN)}; "
            f"fields not understood: {', '.join(unknown_to_all(config)) or 'none'}"
        )
    ignored = [tower.removesuffix("_config") for tower in OTHER_TOWERS if config.get(tower)]
    notes = tuple(f"{tower} tower ignored: text in, text out" for tower in ignored)
    inner = config.get("text_config")
    if inner is None:
        return TextConfig(name, WRAPPERS[name], config, notes)
    if not isinstance(inner, Mapping):
        raise wrong("text_config", inner, "must be an object")
    outer = {key: config[key] for key in OF_THE_WHOLE_MODEL if config.get(key) is not None}
    return TextConfig(name, WRAPPERS[name], {**outer, **inner}, notes)


def unknown_to_all(config: Mapping[str, Any]) -> list[str]:
    """Returns the fields that a reader of dense models with grouped-query attention does not understand."""
    fields = Fields(config)
    fields.ignore(*REQUIRED, *OF_THE_WHOLE_MODEL, "architectures", "intermediate_size", "num_key_value_heads")
    fields.ignore(
        "head_dim", "attention_bias", "mlp_bias", "sliding_window", "use_sliding_window", "layer_types"
    )
    return list(fields.not_understood())


def blocks_of(attention: Sequence[Attention], mlp: Sequence[Mlp], num_norms: int) -> tuple[Block, ...]:
    """Groups equal layers into one block each, in the order in which the kinds first occur."""
    counts: dict[tuple[Attention, Mlp], int] = {}
    for layer in zip(attention, mlp, strict=True):
        counts[layer] = counts.get(layer, 0) + 1
    return tuple(
        Block(count=count, attention=attention, mlp=mlp, num_norms=num_norms)
        for (attention, mlp), count in counts.items()
    )


def checkpoint_dtype(fields: Fields) -> str:
    """Returns `dtype` (recent versions of transformers) or `torch_dtype` (older ones), by default bf16."""
    for name in ("dtype", "torch_dtype"):
        value = fields.value(name)
        if value is not None:
            if not isinstance(value, str) or value not in DTYPES:
                raise wrong(name, value, f"must be one of {', '.join(DTYPES)}")
            return DTYPES[value]
    return "bf16"
