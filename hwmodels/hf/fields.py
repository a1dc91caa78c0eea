"""The fields of a config.json, checked when they are read, and other JSON files of a checkpoint.

Unread fields are listed. Of files with weights only the size is read.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hwmodels.checks import UnreadableFileError, is_finite, is_whole, read_text
from hwmodels.model import ModelSpec

IRRELEVANT = re.compile(
    "|".join(
        (
            # Names, versions, files, and how transformers runs a model.
            r"_.*|.*version|model_type|model_name|auto_map|tokenizer_.*|.*tokenizer.*|transformers.*|unsloth.*",
            r"torchscript|return_dict.*|use_cache|cache_implementation|is_(en|de)coder.*|is_llama_config|pruned_heads",
            r"output_.*|id2label|label2id|tf_.*|use_bfloat16|chunk_size_feed_forward|problem_type|prefix|ep_size",
            r"for_llm_compressor|pretraining_tp|aux_loss_alpha|seq_aux|router_(aux|z|jitter).*|default_theta",
            r"attn_implementation|use_flash_attn|use_flash_attention.*|max_batch_size|save_model_dtype|.*loss.*",
            r"gradient_checkpointing|finetuning_task|task_specific_params|language|architecture|organization",
            r"fuse_.*|fp32_residual|residual_in_fp32|rescale_.*|bos|eos|pad|torch_dtype_str|exponential_decay.*",
            # Tokens and sampling.
            r".*_token(_ids?|_index)?|.*_tokens?_(ids?|index)|max_(sequence_)?length|min_length|do_sample|num_beam.*",
            r"num_image_tokens|temperature|top_[kp]|typical_p|.*_penalty|early_stopping|num_return_sequences|suppress_tokens",
            # Positions: the same kernel rotates by any angles.
            r"rope_.*|.*rope_(theta|interleave)|rotary_.*|partial_rotary_factor|use_mrope|mrope_.*|no_rope_layer_interval",
            r"original_max_position_embeddings|initial_context_length|interpolate_factor|full_attn_mod|attn_temperature_.*",
            r"attn_scale|floor_scale|rope_local_base_freq|.*rope_local.*|indexer_rope.*|.*rope_theta.*|rotary.*",
            r"position_embedding_type|.*_rope(_.*)?|no_rope_layers?|alibi.*|use_alibi|use_rotary.*|use_pos.*|nope_.*",
            r"llama_4_scaling.*|scale_fmt|seq_length_max|long_factor|short_factor|apply_yarn.*|yarn_.*",
            # Norms, activations, training.
            r".*_eps|.*dropout.*|.*_pdrop|(.*_)?init(ializer)?_.*|hidden_act(ivation)?|layernorm_.*_beta|.*softcap(ping)?",
            r"query_pre_attn_scalar|swiglu_.*|mlp_activation|use_bidirectional_attention|.*layer_?norm_epsilon",
            r".*_multipliers?|logit_scale|logits_scaling|scale_emb|scale_depth|dim_model_base|.*_act(_fn)?|act_.*",
            r"activation_.*(beta|limit|alpha)|.*norm_(type|eps|epsilon|order)|use_rms_?norm|rms_?norm|.*norm_cast.*",
            r"use_(gemma_)?norm|norm_(head|after_rope|before_.*)|(pre|post)_(norm|layernorm)|clip_qkv|qkv_clip",
            r".*embedding_multiplier_scale|output_multiplier_scale|attn_output_multiplier|time_step_.*|std",
            r"mamba_hidden_act|use_mamba_kernels|num_logits_to_keep|logits_to_keep|.*residual_.*|apply_residual.*|post_layer_norm|embed_norm",
            r"(use_)?parallel_(attn|residual)|do_layer_norm_before|layer_norm_elementwise_affine|.*_affine",
            r"scale_attn.*|reorder_and_upcast_attn|summary_.*|attention_softmax_in_fp32|use_moe_router_.*",
            r"apply_query_key_layer_scaling|.*softmax_in_fp32|max_attn_value|attn_rotary_emb|.*_factors|learned_pos_emb",
            r"use_(logn_attn|dynamic_ntk|embedding_sharing|gated_activation|parallel_\w+)|mlp_type|attn_impl.*",
            r"order_of_interleaved_layers|bias_dropout_fusion|masked_softmax_fusion|skip_bias_add.*|slow_but_exact",
            r"fp32_residual_connection|quantization_bit|pre_seq_len|prefix_projection|original_rope|pool_type",
            r"embedding_scale.*|scale_embedding|emb_scale|gate_lower_bound|mup_.*|use_mup.*|mlp_hidden_act",
            # Conversion of the scores of experts to weights.
            r"norm_topk_prob|scoring_func|topk_method|topk_group|n_group|routed_scaling_factor|num_expert_group",
            r".*router.*(dtype|bias|scal\w*|score\w*|act\w*|coef|fp32|jitter|logits?|normali\w*|enable\w*)(_.*)?",
            r"moe_(renormalize|softmax|use_aux.*|aux.*|gate|norm.*|z_loss.*|score.*|capacity.*|use_aux_free)",
            r"norm_expert_weight|need_fp32_gate|use_grouped_topk|route_(norm|scale)|num_limited_groups|gate_type",
            r"capacity_factor|score_(function|func|before_experts).*|use_expert_bias|use_routing_bias|moe_type",
        )
    )
)
"""Pattern of fields that change neither bytes nor FLOPs."""

MAY_CHANGE_PRICE = re.compile(
    r"(^|_)(windows?|windowed|sparse|sparsity|sparsify|index|indexer|indices|mtp|nextn|compress\w*|states?|ssm"
    r"|mamba\d?|rwkv|conv\w*|linear|lora|rank|latent|experts?|moe|heads?|layers?|kv|cache|hybrid|memory|mem"
    r"|blocks?|chunk\w*|size|dim|dims|width|depth|num|n|shared?|sharing|recurrent|recursion|loops?|ut|steps?"
    r"|groups?|topk|k|stride|pool\w*|ratio|ratios|freq|frequency|interval|every|skip|reuse|gates?|gated|delta"
    r"|kda|gdn|mla|mqa|gqa|swa|cla|multi|query|hc|hyper|laurel|altup|ple|per|ffn|mlp|proj\w*|towers?|adapter|prune\w*"
    r"|quant\w*|bits|dual|double|extra|lightning|retention|attention|attn|cross|type|types|pattern|config)(_|$)",
    re.IGNORECASE,
)
"""Matches names of unknown fields that may change bytes or FLOPs."""


MAX_LAYERS = 10_000
MAX_NUMBER = 2**31 - 1
"""Largest value of the other integers of a config.json."""


class Fields:
    """The fields of a config.json. Every method that reads one raises ValueError: field=value: rule.

    defaults: values of the architecture's configuration class for fields missing in the file.
    """

    def __init__(self, config: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> None:
        self.config = {**(defaults or {}), **config}
        self.names_read: set[str] = set()

    def value(self, name: str) -> Any:
        """Returns the raw field, None if it is missing."""
        self.names_read.add(name)
        return self.config.get(name)

    def whole(self, name: str, *, default: int | None = None) -> int:
        """Returns an integer >= 1, or `default`, if given, for a missing or null field."""
        given = self.value(name)
        value: Any = default if given is None else given
        if not is_whole(value) or value < 1:
            raise wrong(name, value, "must be a whole number >= 1")
        most = MAX_LAYERS if name == "num_hidden_layers" else MAX_NUMBER
        if value > most:
            raise wrong(name, value, f"must be a whole number from 1 to {most:,}")
        return int(value)

    def whole_or_none(self, name: str) -> int | None:
        return None if self.value(name) is None else self.whole(name)

    def count(self, name: str) -> int:
        """Returns an integer >= 0; 0 if the field is missing or null."""
        return self.whole(name) if self.value(name) else 0

    def flag(self, name: str, *, default: bool) -> bool:
        """Returns a bool, or `default` if the field is missing or null."""
        value = self.value(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise wrong(name, value, "must be true or false")
        return value

    def text(self, name: str) -> str | None:
        """Returns a text; None if the field is missing or null."""
        value = self.value(name)
        if value is not None and not isinstance(value, str):
            raise wrong(name, value, "must be a text")
        return value

    def number(self, name: str, *, default: float | None = None) -> float:
        """Returns a finite number > 0, or `default`, if given, for a missing or null field."""
        given = self.value(name)
        value: Any = default if given is None else given
        if not (is_finite(value) and value > 0):
            raise wrong(name, given, "must be a number > 0")
        return float(value)

    def part(self, name: str) -> Fields:
        """Returns the fields of an object inside the file; empty if it is missing or null."""
        value = self.value(name)
        if value is not None and not isinstance(value, Mapping):
            raise wrong(name, value, "must be an object")
        return Fields(value or {})

    def names(self, name: str, allowed: Sequence[str], length: int) -> list[str] | None:
        """Returns a list with one of the allowed names for each of `length` layers; None if it is missing."""
        given = self.value(name)
        if given is None:
            return None
        if not (isinstance(given, list) and all(item in allowed for item in given)):
            raise wrong(name, given, f"must be a list of {' and '.join(allowed)}")
        if len(given) != length:
            raise wrong(name, given, f"must name {length} layers, names {len(given)}; or leave it out")
        return given

    def wholes(self, name: str) -> list[int]:
        """Returns a list of integers >= 0; empty if the field is missing."""
        given = self.value(name)
        if given is None:
            return []
        if not (isinstance(given, list) and all(is_whole(item) and item >= 0 for item in given)):
            raise wrong(name, given, "must be a list of whole numbers >= 0")
        return given

    def ignore(self, *names: str) -> None:
        """Marks the architecture's fields that change neither bytes nor FLOPs as read."""
        self.names_read.update(names)

    def never_read(self) -> dict[str, Any]:
        """Returns the unread fields, by name, that enable something and may be relevant."""
        left = sorted(self.config.keys() - self.names_read)
        return {
            name: self.config[name] for name in left if self.config[name] and not IRRELEVANT.fullmatch(name)
        }

    def not_understood(self) -> dict[str, Any]:
        """Returns the fields of `never_read` whose names suggest that they may change a price."""
        return {name: value for name, value in self.never_read().items() if MAY_CHANGE_PRICE.search(name)}

    def taken_as_without_effect(self) -> list[str]:
        """Returns the names of the other fields of `never_read`."""
        return [name for name in self.never_read() if not MAY_CHANGE_PRICE.search(name)]


def wrong(name: str, value: Any, rule: str) -> ValueError:
    """Returns the error "NAME=VALUE: RULE"."""
    return ValueError(f"{name}={shown(value)}: {rule}")


def shown(value: Any) -> str:
    """Returns the value as written in the file, shortened to 60 characters."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


MAX_JSON_BYTES = 1 << 28
"""Maximum size of a JSON file; the index of a checkpoint with a million tensors has half of it."""


def load_json_object(file: Path) -> dict[str, Any]:
    """Reads a JSON object of at most MAX_JSON_BYTES; raises ValueError that names file, line and column."""
    try:
        config = json.loads(read_text(file, MAX_JSON_BYTES))
    except OSError as error:
        raise ValueError(f"{file}: cannot be read: {error.strerror}") from None
    except UnreadableFileError as error:
        raise ValueError(f"{file}: {error}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: not UTF-8 at byte {error.start}: {error.reason}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{file}:{error.lineno}:{error.colno}: not JSON: {error.msg}") from None
    except RecursionError:
        raise ValueError(f"{file}: nests values too deeply to be read") from None
    if not isinstance(config, dict):
        raise ValueError(f"{file}: must hold one JSON object, holds a {type(config).__name__}")
    return config


INDEX = "model.safetensors.index.json"
TOLERANCE = 0.03
"""Relative difference of the count that causes no note: scales, positions and buffers are not counted."""
HEADER_LENGTH = 8
"""Number of bytes of the header length at the beginning of a safetensors file."""


class StoredSize(NamedTuple):
    """Bytes of a checkpoint's tensors, and the file or files that state them."""

    size: int
    source: str


def stored_size(folder: Path) -> StoredSize | None:
    """Returns the size of the checkpoint in a folder; None if there are neither index nor weights.

    Raises ValueError for an index that is not JSON.

    The bytes are compared with those computed from a config.json. The size comes from the safetensors index
    next to the file, or from the safetensors files.
    """
    index = folder / INDEX
    if index.exists():
        metadata = load_json_object(index).get("metadata")
        total = metadata.get("total_size") if isinstance(metadata, dict) else None
        if isinstance(total, int) and is_whole(total) and total > 0:
            return StoredSize(total, INDEX)
    files = sorted(folder.glob("model*.safetensors")) or [
        # Mistral's own files hold the same weights a second time.
        file
        for file in sorted(folder.glob("*.safetensors"))
        if not file.name.startswith("consolidated")
    ]
    sizes = [tensor_bytes(file) for file in files]
    if not sizes or None in sizes:
        return None
    name = files[0].name if len(files) == 1 else f"{len(files)} safetensors files"
    return StoredSize(sum(size for size in sizes if size is not None), name)


def tensor_bytes(file: Path) -> int | None:
    """Returns the bytes behind the header; None for other files, such as a pointer of Git LFS."""
    if not file.is_file():
        return None
    try:
        with file.open("rb") as opened:
            start = opened.read(HEADER_LENGTH)
        size = file.stat().st_size
    except OSError:
        return None
    if len(start) < HEADER_LENGTH:
        return None
    header: int = struct.unpack("<Q", start)[0]
    return size - HEADER_LENGTH - header if 0 < header <= size - HEADER_LENGTH else None


def size_notes(model: ModelSpec, folder: Path, *, is_float32: bool = False) -> tuple[str, ...]:
    """Returns one line with both sizes if the checkpoint's differs by more than TOLERANCE; else none.

    model: with the checkpoint's own number formats. Modules for multi-token prediction may or may not be in
    the files. is_float32: the files hold 32 bits for numbers that are served in 16.
    """
    found = stored_size(folder)
    if found is None:
        return ()
    counted = model.weight_bytes_per_rank() * (2 if is_float32 and model.weights is None else 1)
    most = counted + mtp_bytes(model)
    if counted * (1 - TOLERANCE) <= found.size <= most * (1 + TOLERANCE):
        return ()
    nearest = counted if found.size < counted else most
    return (
        f"weights are counted as {nearest / 1e9:.4g} GB, but {found.size / 1e9:.4g} GB by {found.source} "
        f"({100 * (nearest / found.size - 1):+.3g} %): parts or formats of the checkpoint are not as counted",
    )


def mtp_bytes(model: ModelSpec) -> float:
    """Returns the maximum bytes of multi-token prediction modules: a layer, a projection, two tables each.

    Quantisers often leave them in 16 bits.
    """
    layer = sum(matrix.elements for matrix in model.blocks[-1].layer_matrices(model.hidden_size))
    others = 2 * model.hidden_size**2 + 2 * model.embedding_elements
    return model.num_mtp_modules * (layer + others) * model.element_bytes
