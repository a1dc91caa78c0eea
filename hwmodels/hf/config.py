"""Reads a Hugging Face config.json: from its fields to a `ModelSpec`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from hwmodels.checks import is_finite, is_whole
from hwmodels.hf.architectures import ARCHITECTURES, REQUIRED, UNKNOWN, WRAPPERS, Architecture
from hwmodels.hf.fields import MAX_NUMBER, Fields, load_json_object, shown, size_notes, stored_size, wrong
from hwmodels.hf.quantization import (
    EXPERTS_BESIDE_MLP,
    StoredWeights,
    as_asked,
    description_of,
    method_of,
)
from hwmodels.hf.usual import SYNONYMS, learned_positions
from hwmodels.model import (
    Block,
    DenseMlp,
    MixtureOfExperts,
    Mlp,
    ModelSpec,
    NoMlp,
    OtherWeights,
    Transform,
)
from hwmodels.model.attention import Attention, GroupedQueryAttention, NoAttention

TOWERS = {
    "vision_config": "vision",
    "visual": "vision",
    "vit_config": "vision",
    "vision_tower": "vision",
    "audio_config": "audio",
    "audio_encoder_config": "audio",
    "sound_config": "audio",
}
"""Fields that describe a tower, and its kind."""
WIDTH = ("embed_dim", "hidden_size", "width", "vt_hidden_size", "d_model", "encoder_hidden_size")
"""Fields with the width; the first one present is used: Qwen2-VL's hidden_size is the language model's."""
LAYERS = (
    "num_hidden_layers",
    "depth",
    "layers",
    "vt_num_hidden_layers",
    "encoder_layers",
    "conf_num_hidden_layers",
)
MLP = ("intermediate_size", "vt_intermediate_size", "encoder_ffn_dim", "mlp_dim", "ffn_dim")
GATED = {"silu", "swiglu", "swish"}
GATED_TYPES = (
    "gemma4",
    "pixtral",
    "qwen2_5_vl",
    "qwen2_5_omni",
    "glm4v",
    "glm4v_moe",
    "aimv2",
)
MERGER_OF_MLP = ("glm4v", "glm4v_moe")
"""model_type of towers in which intermediate_size is the width of the projector's MLP, not of the layers'."""
CONFORMERS = ("gemma3n_audio", "gemma4_audio", "phi4mm_audio", "granite_speech_encoder", "parakeet")
"""model_type of towers of Conformer layers: two MLPs, and a convolution between them."""
OF_VISION = ("_vision_encoder", "_vision_model", "_vision")
"""Endings that transformers 5 adds to the model_type of a tower."""


class Towers(NamedTuple):
    """Weights of all towers of a checkpoint, and notes on them."""

    weights: tuple[OtherWeights, ...]
    notes: tuple[str, ...]


def towers_of(config: Mapping[str, Any], hidden_size: int, *, language_model_only: bool) -> Towers:
    """Returns the towers of a language model with this hidden size.

    language_model_only: whether the engine loads no towers (vLLM: --language-model-only).

    A tower is a transformer over patches: L layers of width h and MLP width f hold L (4 h^2 + 2 h f) weights,
    with a gate L (4 h^2 + 3 h f). The patch embedding, positions, and the projector to the language model are
    added. Norms and biases (under 0.2 %) are not. Engines load towers in the model's dtype, because
    quantisers skip them. Qwen3-VL-2B: 24 (4 x 1,024^2 + 2 x 1,024 x 4,096) = 302e6, and 0.1e9 in projectors.
    """
    weights: list[OtherWeights] = []
    notes: list[str] = []
    nested = config.get("thinker_config")  # Qwen-Omni; its talker is not loaded for text
    parts = {**(nested if isinstance(nested, Mapping) else {}), **config}
    for key, kind in TOWERS.items():
        tower = parts.get(key)
        if not isinstance(tower, Mapping) or not tower:
            continue
        if language_model_only:
            notes.append(f"{kind} tower not loaded (model.language_model_only=true): text in, text out")
            continue
        elements = elements_of(tower, hidden_size, config)
        if elements is None:
            notes.append(f"{kind} tower not counted, as {key} does not state its layers and widths: text in")
            continue
        weights.append(OtherWeights(name=f"{kind} tower", elements=elements))
        notes.append(
            f"{kind} tower of {elements / 1e9:.3g} B parameters by {key} counted in memory, not in time: "
            "text in, text out"
        )
    return Towers(tuple(weights), tuple(notes))


def elements_of(tower: Mapping[str, Any], hidden_size: int, config: Mapping[str, Any]) -> int | None:
    """Returns the number of weights of a tower and its projector; None if a size is missing."""
    width, layers = first(tower, WIDTH), first(tower, LAYERS)
    if width is None or layers is None:
        return None
    kind = kind_of(tower)
    ratio = tower.get("mlp_ratio")
    mlp = first(tower, MLP) or (int(width * ratio) if isinstance(ratio, int | float) else 4 * width)
    act = tower.get("hidden_act") or tower.get("hidden_activation")
    gated = str(act) in GATED or kind in GATED_TYPES or tower.get("use_swiglu_ffn") is True
    attention = first(tower, ("qkv_hidden_size",)) or heads_width(tower, width)
    if kind in MERGER_OF_MLP:
        mlp = first(tower, ("out_hidden_size",)) or hidden_size
    layer = width * (2 * attention + 2 * kv_width(tower, attention)) + (3 if gated else 2) * width * mlp
    if kind in CONFORMERS:
        layer = 4 * width**2 + 4 * width * 4 * width + 4 * width**2
    return layers * layer + patches(tower, width) + projector(tower, width, hidden_size, config)


def kind_of(tower: Mapping[str, Any]) -> str:
    """Returns the model_type of a tower, without the suffix for vision."""
    kind = str(tower.get("model_type"))
    return next((kind.removesuffix(ending) for ending in OF_VISION if kind.endswith(ending)), kind)


def heads_width(tower: Mapping[str, Any], width: int) -> int:
    """Returns the total width of all heads if head_dim is given; else the tower's."""
    heads, dim = first(tower, ("num_attention_heads", "num_heads")), first(tower, ("head_dim",))
    return heads * dim if heads and dim else width


def kv_width(tower: Mapping[str, Any], attention: int) -> int:
    """Returns the total width of all key heads: the queries' width, unless there are fewer key heads."""
    heads, kv_heads = (
        first(tower, ("num_attention_heads", "num_heads")),
        first(tower, ("num_key_value_heads",)),
    )
    return attention * kv_heads // heads if heads and kv_heads else attention


def patches(tower: Mapping[str, Any], width: int) -> int:
    """Returns the weights of the embedding of patches and of the table of positions."""
    size = first(tower, ("patch_size", "vt_patch_size"))
    if size is None:  # an audio tower: two convolutions over mel bins
        bins = first(tower, ("num_mel_bins", "input_feat_size")) or 80
        return 3 * bins * width + 3 * width * width
    channels = first(tower, ("in_channels", "num_channels", "in_chans")) or 3
    frames = first(tower, ("temporal_patch_size",)) or 1
    image = first(tower, ("image_size",)) or 0
    table = first(tower, ("num_position_embeddings",)) or (image // size) ** 2
    if first(tower, ("position_embedding_size",)):
        table = 2 * (first(tower, ("position_embedding_size",)) or 0)
    if first(tower, ("init_pos_emb_height",)):
        table = (first(tower, ("init_pos_emb_height",)) or 0) * (first(tower, ("init_pos_emb_width",)) or 0)
    if kind_of(tower) in ("pixtral",) or tower.get("position_embedding_type") == "rope":
        table = 0
    return channels * frames * size**2 * width + table * width


def projector(tower: Mapping[str, Any], width: int, hidden_size: int, config: Mapping[str, Any]) -> int:
    """Returns the weights of the projector to the language model: an MLP of the width of merged patches.

    Layers that are fed into the language model early (deepstack) have their own projector.
    """
    merge = first(tower, ("spatial_merge_size",)) or first(config, ("spatial_merge_size",)) or 1
    kernel = tower.get("merge_kernel_size")
    if isinstance(kernel, list | tuple) and kernel and is_whole(kernel[0]):
        merge = int(kernel[0])
    if isinstance(config.get("downsample_ratio"), float):  # InternVL: 0.5 in each direction
        merge = round(1 / config["downsample_ratio"])
    merged = merge**2 * width
    out = first(tower, ("out_hidden_size",)) or hidden_size
    if kind_of(tower) in MERGER_OF_MLP:
        return merge**2 * width * out + out * out + 3 * out * (first(tower, MLP) or out)
    deep = tower.get("deepstack_visual_indexes")
    num = 1 + (len(deep) if isinstance(deep, list) else 0)
    if merge > 1:
        return num * (merged * merged + merged * out)
    return width * out + (out * out if first(config, ("projector_hidden_size",)) else 0)


def first(config: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    """Returns the first field among the names that is an integer >= 1."""
    for name in names:
        value = config.get(name)
        if is_whole(value) and value is not None and value >= 1:
            return int(value)
    return None


DTYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "bf16"}

OF_THE_WHOLE_MODEL = (
    "dtype",
    "torch_dtype",
    "tie_word_embeddings",
    "quantization_config",
    "compression_config",
    "expert_dtype",
)
"""Fields that a multimodal model may have next to its text_config instead of in it."""

INNER = ("text_config", "llm_config", "language_config", "language_model_config", "thinker_config", "llm")
"""Fields in which multimodal models keep their language model's configuration."""

WITHOUT_KV = re.compile(r"^(Falcon)?Mamba\d?For|Rwkv|RWKV|xLSTM|Hyena")
"""Matches names of architectures without any attention."""

NESTED_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "LlamaForCausalLM": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "vocab_size": 32000,
    },
}
"""Values of a language model's configuration class that multimodal models omit (LLaVA)."""

NOT_GENERATING = re.compile(
    r"MaskedLM|Classification|QuestionAnswering|Whisper|T5|Bart|Bert|Encoder|Diffusion|CLIP"
)
"""Matches names of architectures that do not generate text from a decoder alone."""


MULTIPLIES = ("linear", "dynamic")
"""Kinds of scaled positions that multiply max_position_embeddings."""
KEEPS = (None, "default", "llama3", "longrope", "su", "mrope")
"""Kinds that do not change the range of positions."""
MAX_FACTOR = 1_000_000
MAX_KINDS = 200
"""Maximum number of kinds of layers in per_layer_config, each of which is read separately."""

MOST_OFF = 0.1
"""Allowed relative difference between the size of an unknown architecture's checkpoint and its count."""


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
    language_model_only: bool = False,
) -> ModelSpec:
    """Returns the model of a config.json (the file or its folder); other arguments as in `from_hf_fields`.

    An unknown architecture is rejected if the checkpoint's size contradicts its count.
    """
    file, config = read_hf_config(Path(path))
    asked = chosen(dtype, weights, moe_weights, kv_cache_dtype)
    try:
        read, method = model_settings(config, file.parent, asked)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    stored = ModelSpec(name=file.resolve().parent.name, source=str(file), **read)
    if stored.read_by_fields:
        check_size(stored, file, config)
    if language_model_only:
        read, method = model_settings(config, file.parent, asked, language_model_only=True)
    read["notes"] += size_notes(stored, file.parent, is_float32=is_float32(config))
    stored = ModelSpec(name=stored.name, source=stored.source, **read)
    return transformed(as_asked(stored, asked, method, is_given=True), transform)


def from_hf_fields(
    config: dict[str, Any],
    name: str,
    source: str = "",
    dtype: str = "auto",
    weights: str | None = None,
    moe_weights: str | None = None,
    kv_cache_dtype: str = "auto",
    transform: Transform | None = None,
    language_model_only: bool = False,
    quantization_config: Mapping[str, Any] | None = None,
) -> ModelSpec:
    """Returns the model that the fields of a Hugging Face config.json describe.

    dtype "auto" is the checkpoint's; fp32 and unnamed dtypes are served in bf16, as in vLLM. weights and
    moe_weights None, and kv_cache_dtype "auto", mean the formats of the checkpoint's quantization_config, if
    it has one; weights may also be an engine's name for quantised weights, such as awq_marlin (`hf.asked`).
    transform: compression applied to the model before it is served. language_model_only: whether vision and
    audio towers are not loaded (vLLM: --language-model-only). quantization_config: of a checkpoint of this
    model in other formats, used instead of the one in config.
    Raises ValueError for a missing or wrong field, for an unknown field that may change a price, and for an
    unknown quantisation method.
    """
    asked = chosen(dtype, weights, moe_weights, kv_cache_dtype)
    if quantization_config is not None:
        config = {**config, "quantization_config": quantization_config}
    try:
        read, method = model_settings(config, None, asked, language_model_only=language_model_only)
    except ValueError as error:
        raise ValueError(f"config.{error}") from None
    stored = ModelSpec(name=name, source=source, **read)
    return transformed(as_asked(stored, asked, method, is_given=False), transform)


def check_size(model: ModelSpec, file: Path, config: Mapping[str, Any]) -> None:
    """Raises ValueError if the checkpoint next to the file does not have the size counted from its fields."""
    found = stored_size(file.parent)
    if found is None:
        return
    counted = model.weight_bytes_per_rank() * (2 if is_float32(config) and model.weights is None else 1)
    if abs(counted / found.size - 1) > MOST_OFF:
        raise ValueError(
            f"{file}: architectures={config['architectures'][0]}: is not known, and by the usual meanings of "
            f"its fields its weights take {counted / 1e9:.4g} GB, but {found.size / 1e9:.4g} GB by "
            f"{found.source}; "
            "choose the preset of a similar model, or give the fields of a known architecture"
        )


def transformed(model: ModelSpec, transform: Transform | None) -> ModelSpec:
    """Applies a transform to a model; None: no change."""
    return model if transform is None else transform.applied(model)


def chosen(dtype: str, weights: str | None, moe_weights: str | None, kv_cache_dtype: str) -> dict[str, str]:
    """Returns the settings with which the user overrides the checkpoint."""
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


def model_settings(
    config: Mapping[str, Any],
    folder: Path | None = None,
    asked: Mapping[str, str] | None = None,
    *,
    language_model_only: bool = False,
) -> tuple[dict[str, Any], str | None]:
    """Returns the fields as arguments of `ModelSpec`, with the checkpoint's own formats, and its quantiser.

    folder: its other files may describe the formats. asked: formats set by the user, which the checkpoint
    then need not define. language_model_only: whether the engine loads no vision and audio towers.
    Raises ValueError (field=value: rule). An unknown field is an error if its name suggests that it may
    change a price, unless it is null, false, zero or empty; other unknown fields are listed in a note.
    """
    architecture, how, text, notes = text_config(config)
    fields = Fields(how.renamed(text), how.defaults)
    needed = (*REQUIRED, *how.needs)
    if missing := [name for name in needed if fields.config.get(name) is None]:
        raise ValueError(f"{', '.join(missing)}: missing; {architecture} needs them")
    fields.ignore("architectures", *REQUIRED, *OF_THE_WHOLE_MODEL, *TOWERS, *how.no_effect)
    attention, mlps = attention_and_mlps(fields, how, text)
    layers = layers_of(attention, mlps, how.num_norms)
    if not any(layer.attention.kv_bytes_per_token("bf16") for layer in layers):
        raise ValueError(f"architectures={architecture}: no layer keeps KV, and such models have no price")
    hidden_size, dtype = fields.whole("hidden_size"), checkpoint_dtype(fields)
    towers = towers_of(config, hidden_size, language_model_only=language_model_only)
    settings: dict[str, Any] = {
        "hidden_size": hidden_size,
        "vocab_size": fields.whole("vocab_size"),
        "max_position_embeddings": context_of(fields, how),
        "tie_word_embeddings": fields.flag("tie_word_embeddings", default=False),
        "dtype": dtype,
        "num_mtp_modules": sum(fields.count(name) for name in how.mtp_layers),
        "mtp_block": mtp_block(how, attention, mlps),
        "other_weights": (*how.other_weights(fields), *towers.weights),
        "read_by_fields": how is UNKNOWN,
    }
    fields.ignore(*repeated(fields))
    notes += tuple(dict.fromkeys(note for name, note in how.left_out.items() if fields.value(name) and note))
    if unknown := fields.not_understood():
        given = ", ".join(f"{name}={shown(value)}" for name, value in unknown.items())
        raise ValueError(
            f"{given}: not understood, and may change what {architecture} computes or keeps; remove from the "
            "file the fields that do not"
        )
    if names := fields.taken_as_without_effect():
        notes += (f"fields taken to be without effect on time and memory: {', '.join(names)}",)
    description = description_of(text, folder)
    stored = StoredWeights()
    if description is not None:
        from hwmodels.hf.quantizers import stored_weights  # noqa: PLC0415 (most models are not quantised)

        stored = stored_weights(
            description,
            layers,
            dtype=dtype,
            folder=folder,
            asked=asked,
            experts_beside_mlp=architecture.startswith(EXPERTS_BESIDE_MLP),
        )
    settings |= {
        "blocks": blocks_of(layers, stored.formats),
        "weights": stored.weights,
        "moe_weights": stored.moe_weights,
        "lm_head_weights": stored.lm_head_weights,
        "kv_cache_dtype": stored.kv_cache_dtype,
        "notes": (*notes, *towers.notes, *stored.notes),
    }
    if how is UNKNOWN:
        settings["notes"] = (
            assumed(architecture, fields, ModelSpec(name="", **settings)),
            *settings["notes"],
        )
    is_quantised = stored.weights or stored.moe_weights or stored.lm_head_weights
    return settings, method_of(description.fields) if description is not None and is_quantised else None


def context_of(fields: Fields, how: Architecture) -> int:
    """Returns the longest sequence in tokens: max_position_embeddings, or the range of scaled positions."""
    length = fields.whole("max_position_embeddings")
    if "gemma3" in str(fields.config.get("model_type")) or how.other_weights is learned_positions:
        return length  # it is already scaled, or a table has a vector for each position
    return scaled_context(length, fields.config)


def scaled_context(length: int, config: Mapping[str, Any]) -> int:
    """Returns the context given by rope_scaling or rope_parameters of a configuration, in tokens.

    Linear and dynamic scaling multiply `length`, the context without them, as in vLLM. YaRN reaches factor
    times its original_max_position_embeddings, which most files state as their context; vLLM before 0.33
    allows it even if they do not. Other kinds have no effect. Raises ValueError for a factor that is not a
    number.
    """
    reached = length
    outer = [config[name] for name in ("rope_scaling", "rope_parameters") if is_object(config.get(name))]
    for rope in (*outer, *(part for whole in outer for part in whole.values() if is_object(part))):
        kind, factor = rope.get("rope_type") or rope.get("type"), rope.get("factor")
        before = length if kind in MULTIPLIES else rope.get("original_max_position_embeddings")
        if factor is None or kind in KEEPS or not is_whole(before):
            continue
        if not is_finite(factor) or not 0 < factor <= MAX_FACTOR:
            raise wrong("rope_scaling.factor", factor, f"must be a number > 0 and <= {MAX_FACTOR:,}")
        reached = max(reached, int(before * factor))
    return min(reached, MAX_NUMBER)


def is_object(value: Any) -> bool:
    """Returns whether a value of a file is a JSON object."""
    return isinstance(value, Mapping)


def attention_and_mlps(
    fields: Fields, how: Architecture, text: Mapping[str, Any]
) -> tuple[list[Attention], list[Mlp]]:
    """Returns the attention and the MLP of each layer.

    per_layer_config (transformers 5): fields of single layers, by number, which replace those of the model.
    text: the fields under the file's names.
    """
    attention, mlps = how.attention(fields), how.mlp(fields)
    by_layer = fields.part("per_layer_config").config
    for number, changes in by_layer.items():
        known = re.fullmatch(r"\d{1,5}", str(number)) and int(number) < len(attention)
        if not known or not isinstance(changes, Mapping):
            rule = f"must have fields by the number of a layer below {len(attention)}"
            raise wrong("per_layer_config", {number: changes}, rule)
    kinds = unequal(by_layer.values())
    if len(kinds) > MAX_KINDS:
        raise ValueError(f"per_layer_config: has more than {MAX_KINDS} kinds of layers")
    for changes in kinds:
        if fixed := [name for name in REQUIRED if name in changes and name != "num_attention_heads"]:
            raise wrong("per_layer_config", changes, f"{', '.join(fixed)} must not differ between layers")
        own = Fields(how.renamed({**text, **changes}), how.defaults)
        own_attention, own_mlps = how.attention(own), how.mlp(own)
        fields.ignore(*(own.names_read - changes.keys()))
        if unknown := [name for name in changes if name not in own.names_read]:
            raise wrong("per_layer_config", changes, f"{', '.join(unknown)} must not differ between layers")
        for i in (int(number) for number, its in by_layer.items() if its == changes):
            attention[i], mlps[i] = own_attention[i], own_mlps[i]
    return attention, mlps


def unequal(items: Iterable[Any]) -> list[Any]:
    """Returns the items without repetitions, at most one more than `MAX_KINDS`; dicts have no hash."""
    found: list[Any] = []
    for item in items:
        if item not in found and len(found) <= MAX_KINDS:
            found.append(item)
    return found


def assumed(architecture: str, fields: Fields, model: ModelSpec) -> str:
    """Returns the line on assumptions about an unknown architecture."""
    parts = [f"{model.num_layers} layers"]
    for block in model.blocks:
        layer = block.attention
        if isinstance(layer, GroupedQueryAttention):
            heads = f"{layer.num_heads} heads and {layer.num_kv_heads} KV heads of {layer.head_dim}"
            reach = f" within {layer.window:,} tokens" if layer.window else ""
            parts.append(f"attention of {heads}{reach} in {block.count}")
        else:
            parts.append(f"latent attention in {block.count}")
        mlp = block.mlp
        if isinstance(mlp, MixtureOfExperts):
            parts.append(f"{mlp.num_experts} experts of {mlp.intermediate_size}, {mlp.top_k} per token")
        elif isinstance(mlp, DenseMlp):
            parts.append(
                f"MLPs of {3 if mlp.gated else 2} matrices (hidden_act={fields.config.get('hidden_act')})"
            )
    tied = "one table" if model.tie_word_embeddings else "two tables"
    described = ", ".join(dict.fromkeys([*parts, f"{tied} of {model.vocab_size:,} tokens"]))
    return (
        f"architectures={architecture}: not known, read by the usual meanings of its fields: {described}; "
        f"{model.num_parameters / 1e9:.4g} B parameters. Errors may be larger than those of known ones"
    )


def repeated(fields: Fields) -> list[str]:
    """Returns the names of fields that repeat the value of a read field under another usual name."""
    return [
        name
        for usual, synonyms in SYNONYMS.items()
        for name in (usual, *synonyms)
        if any(
            other in fields.names_read and fields.config.get(other) == fields.config.get(name)
            for other in (usual, *synonyms)
            if other != name
        )
    ]


def mtp_block(how: Architecture, attention: Sequence[Attention], mlps: Sequence[Mlp]) -> Block | None:
    """Returns the layer of a multi-token prediction module, if it differs from the last block's."""
    if how.mtp_layer is None:
        return None
    mixer, mlp = how.mtp_layer(attention, mlps)
    return Block(count=1, attention=mixer, mlp=mlp, num_norms=max(2, how.num_norms))


def is_float32(config: Mapping[str, Any]) -> bool:
    """Returns whether the checkpoint's numbers have 32 bits, which are served in 16."""
    inner = config.get("text_config")
    parts = (config, inner if isinstance(inner, Mapping) else {})
    return "float32" in [part.get(name) for part in parts for name in ("dtype", "torch_dtype")]


def text_config(config: Mapping[str, Any]) -> TextConfig:
    """Returns the language model of a config.json, and how to read it.

    An unknown architecture is read like the architecture named by its inner configuration, or else by the
    usual meanings of its fields. Raises ValueError for models that do not generate from a decoder alone.
    """
    names = config.get("architectures")
    if not (isinstance(names, list) and len(names) == 1 and isinstance(names[0], str)):
        raise wrong("architectures", names, "must be a list of one name, such as LlamaForCausalLM")
    name: str = names[0]
    inner = inner_config(config)
    if name in ARCHITECTURES:
        return TextConfig(
            name, ARCHITECTURES[name], merged(config, inner) if is_nested(config) else config, ()
        )
    if name in WRAPPERS:
        return TextConfig(name, WRAPPERS[name], config if inner is None else merged(config, inner), ())
    if config.get("is_encoder_decoder") or NOT_GENERATING.search(name):
        raise ValueError(
            f"architectures={name}: is not a decoder that generates text, and has no price; choose a model "
            "for causal language modelling"
        )
    if WITHOUT_KV.search(name):
        raise ValueError(
            f"architectures={name}: has no attention and keeps no KV, and has no price; choose a model with "
            "attention in some of its layers"
        )
    text = config if inner is None else merged(config, inner)
    if known := known_inside(inner):
        note = f"architectures={name}: its language model is read as {known}, which it names"
        return TextConfig(name, ARCHITECTURES[known], {**NESTED_DEFAULTS.get(known, {}), **text}, (note,))
    return TextConfig(name, UNKNOWN, text, ())


def is_nested(config: Mapping[str, Any]) -> bool:
    """Returns whether the fields of the language model are only in an inner object."""
    return config.get("hidden_size") is None and inner_config(config) is not None


def inner_config(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns the language model's configuration inside a multimodal model's; None: there is none."""
    for key in INNER:
        inner = config.get(key)
        if inner is None:
            continue
        if not isinstance(inner, Mapping):
            raise wrong(key, inner, "must be an object")
        return inner_config(inner) or inner
    return None


def merged(config: Mapping[str, Any], inner: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns the inner configuration with those fields of the whole model that it lacks.

    The whole model decides whether the vocabulary tables are tied, as in transformers and vLLM.
    """
    outer = {key: config[key] for key in OF_THE_WHOLE_MODEL if config.get(key) is not None}
    tied = {key: outer[key] for key in ("tie_word_embeddings",) if key in outer}
    return {**outer, **(inner or {}), **tied}


def known_inside(inner: Mapping[str, Any] | None) -> str | None:
    """Returns the known architecture named by an inner configuration, directly or by its model_type."""
    if inner is None:
        return None
    names = inner.get("architectures")
    if isinstance(names, list) and names and str(names[0]) in ARCHITECTURES:
        return str(names[0])
    kind = inner.get("model_type")
    if not isinstance(kind, str):
        return None
    wanted = kind.removesuffix("_text").replace("_", "").replace("-", "").lower()
    plain = {
        name.removesuffix("ForCausalLM").replace("_", "").lower(): name
        for name in ARCHITECTURES
        if name.endswith("ForCausalLM")
    }
    return plain.get(wanted)


def layers_of(attention: Sequence[Attention], mlp: Sequence[Mlp], num_norms: int) -> list[Block]:
    """Returns one block for each layer."""
    return [
        Block(count=1, attention=own_attention, mlp=own_mlp, num_norms=num_norms)
        for own_attention, own_mlp in zip(attention, mlp, strict=True)
    ]


def blocks_of(layers: Sequence[Block], formats: Sequence[tuple[tuple[str, str], ...]]) -> tuple[Block, ...]:
    """Groups equal layers into one block each, in the order in which the kinds first occur.

    formats: of each layer, as in `Block.formats`; empty: no layer has any. Layers without any part (DeciLM)
    are omitted.
    """
    counts: dict[Block, int] = {}
    for number, layer in enumerate(layers):
        if isinstance(layer.attention, NoAttention) and isinstance(layer.mlp, NoMlp):
            continue
        kind = replace(layer, formats=formats[number]) if formats else layer
        counts[kind] = counts.get(kind, 0) + 1
    return tuple(replace(kind, count=count) for kind, count in counts.items())


def checkpoint_dtype(fields: Fields) -> str:
    """Returns `dtype` (recent versions of transformers) or `torch_dtype` (older ones), by default bf16."""
    for name in ("dtype", "torch_dtype"):
        value = fields.value(name)
        if value is not None:
            if not isinstance(value, str) or value not in DTYPES:
                raise wrong(name, value, f"must be one of {', '.join(DTYPES)}")
            return DTYPES[value]
    return "bf16"
