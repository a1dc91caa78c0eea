"""The fields of a config.json, checked when they are read, and the list of fields that were never read."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from hwmodels.checks import is_whole

IRRELEVANT = re.compile(
    "|".join(
        (
            # Names, versions, files, and how transformers runs a model.
            r"_.*|.*version|model_type|model_name|auto_map|tokenizer_.*|.*tokenizer.*|transformers.*|unsloth.*",
            r"torchscript|return_dict.*|use_cache|cache_implementation|is_(en|de)coder.*|is_llama_config|pruned_heads",
            r"output_.*|id2label|label2id|tf_.*|use_bfloat16|chunk_size_feed_forward|problem_type|prefix|ep_size",
            r"for_llm_compressor|pretraining_tp|aux_loss_alpha|seq_aux|router_(aux|z|jitter).*|default_theta",
            # Tokens and sampling.
            r".*_token(_ids?|_index)?|.*_tokens?_(ids?|index)|max_(sequence_)?length|min_length|do_sample|num_beam.*",
            r"temperature|top_[kp]|typical_p|.*_penalty|early_stopping|num_return_sequences|suppress_tokens",
            # Positions: the same kernel rotates by any angles.
            r"rope_.*|.*rope_(theta|interleave)|rotary_.*|partial_rotary_factor|use_mrope|mrope_.*|no_rope_layer_interval",
            r"original_max_position_embeddings|initial_context_length|interpolate_factor|full_attn_mod|attn_temperature_.*",
            r"attn_scale|floor_scale|rope_local_base_freq|.*rope_local.*|indexer_rope.*",
            # Norms, activations, training.
            r".*_eps|.*dropout.*|.*_pdrop|init(ializer)?_.*|hidden_act(ivation)?|layernorm_.*_beta|.*softcap(ping)?",
            r"query_pre_attn_scalar|swiglu_limit|mlp_activation|use_bidirectional_attention",
            # Conversion of the scores of experts to weights.
            r"norm_topk_prob|scoring_func|topk_method|topk_group|n_group|routed_scaling_factor|num_expert_group",
        )
    )
)
"""Pattern of fields that change neither bytes nor FLOPs."""


MAX_LAYERS = 10_000
MAX_NUMBER = 2**31 - 1
"""Largest value of the other whole numbers of a config.json."""


class Fields:
    """The fields of a config.json. Every method that reads one raises ValueError: field=value: rule.

    defaults: values of the architecture's configuration class for fields that are not in the file.
    """

    def __init__(self, config: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> None:
        self.config = {**(defaults or {}), **config}
        self.names_read: set[str] = set()

    def value(self, name: str) -> Any:
        """Returns the raw field, None if it is missing."""
        self.names_read.add(name)
        return self.config.get(name)

    def whole(self, name: str, *, default: int | None = None) -> int:
        """Returns a whole number >= 1, or `default`, if given, for a missing or null field."""
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
        """Returns a whole number >= 0; 0 if the field is missing or null."""
        return self.whole(name) if self.value(name) else 0

    def flag(self, name: str, *, default: bool) -> bool:
        """Returns a bool, or `default` if the field is missing or null."""
        value = self.value(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise wrong(name, value, "must be true or false")
        return value

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
        """Returns a list of whole numbers >= 0; empty if the field is missing."""
        given = self.value(name)
        if given is None:
            return []
        if not (isinstance(given, list) and all(is_whole(item) and item >= 0 for item in given)):
            raise wrong(name, given, "must be a list of whole numbers >= 0")
        return given

    def ignore(self, *names: str) -> None:
        """Marks fields that the architecture has and that change neither bytes nor FLOPs in it as read."""
        self.names_read.update(names)

    def not_understood(self) -> dict[str, Any]:
        """Returns the fields, by name, that were never read and that switch something on."""
        left = sorted(self.config.keys() - self.names_read)
        return {
            name: self.config[name] for name in left if self.config[name] and not IRRELEVANT.fullmatch(name)
        }


def wrong(name: str, value: Any, rule: str) -> ValueError:
    """Returns the error "NAME=VALUE: RULE"."""
    return ValueError(f"{name}={shown(value)}: {rule}")


def shown(value: Any) -> str:
    """Returns the value as the file writes it, shortened to 60 characters."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
