"""Counts the weights of vision and audio towers by the fields of vision_config and audio_config.

A tower is a transformer over patches: L layers of width h and MLP width f hold L (4 h^2 + 2 h f) weights,
with a gate L (4 h^2 + 3 h f). The patch embedding, positions, and the projector to the language model are
added. Norms and biases are not: under 0.2 %. Engines load towers in the model's dtype, as quantisers leave
them out.
Qwen3-VL-2B: 24 (4 x 1,024^2 + 2 x 1,024 x 4,096) = 302e6, and 0.1e9 in projectors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from hwmodels.checks import is_whole
from hwmodels.model.model_spec import OtherWeights

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
"""Fields with the width, the first of which counts: Qwen2-VL's hidden_size is that of the language model."""
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
    """Returns the towers beside a language model of that hidden size.

    language_model_only: whether the engine loads no towers (vLLM: --language-model-only).
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
    """Returns the model_type of a tower, without the ending that says that it sees."""
    kind = str(tower.get("model_type"))
    return next((kind.removesuffix(ending) for ending in OF_VISION if kind.endswith(ending)), kind)


def heads_width(tower: Mapping[str, Any], width: int) -> int:
    """Returns the width of all heads together, where head_dim is given; else the tower's."""
    heads, dim = first(tower, ("num_attention_heads", "num_heads")), first(tower, ("head_dim",))
    return heads * dim if heads and dim else width


def kv_width(tower: Mapping[str, Any], attention: int) -> int:
    """Returns the width of all key heads together: that of the queries, unless there are fewer of them."""
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

    Layers that are fed into the language model early (deepstack) have a projector of their own.
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
    """Returns the first field among the names that is a whole number >= 1."""
    for name in names:
        value = config.get(name)
        if is_whole(value) and value is not None and value >= 1:
            return int(value)
    return None
