"""Keys, methods and defaults of vLLM's speculative_config that the settings here do not have themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

OTHER_METHODS = ("custom_class", "dflash", "dspark", "extract_hidden_states", "mlp_speculator", "ngram_gpu")
"""Methods of vLLM that this engine does not have."""


class Neutral(NamedTuple):
    """A value of a key with which vLLM does what this engine does, and what this engine does."""

    value: object
    does: str


KEYS = {
    "attention_backend": Neutral(None, "a draft has the target's kernels"),
    "code_revision": Neutral(None, "no code of a checkpoint is run"),
    "disable_padded_drafter_batch": Neutral(False, "drafts of all sequences are equally long"),
    "draft_load_config": Neutral(None, "weights are read as the target's"),
    "draft_tensor_parallel_size": Neutral(None, "a draft is divided like the target if its sizes allow"),
    "dspark_draft_topk": Neutral(None, "there is no dspark"),
    "enable_adaptive_verification": Neutral(False, "draft_length decides how many tokens are drafted"),
    "enforce_eager": Neutral(None, "cudagraph_mode of the engine holds for drafts, too"),
    "index_share_for_mtp_iteration": Neutral(None, "there is no sparse attention"),
    "kv_cache_dtype": Neutral(None, "a draft's KV has the target's data type"),
    "max_model_len": Neutral(None, "a draft's context is as long as the target's"),
    "moe_backend": Neutral(None, "a draft has the target's kernels"),
    "parallel_drafting": Neutral(False, "tokens are drafted one after the other"),
    "quantization": Neutral(None, "a draft's weights stay as in its checkpoint"),
    "rejection_sample_method": Neutral("standard", "drafts are verified by rejection sampling"),
    "revision": Neutral(None, "a checkpoint is a folder"),
    "synthetic_acceptance_length": Neutral(None, "drafts are verified, and acceptance is never made up"),
    "synthetic_acceptance_rates": Neutral(None, "drafts are verified, and acceptance is never made up"),
    "tensor_parallel_size": Neutral(None, "a draft is divided like the target if its sizes allow"),
    "use_heterogeneous_vocab": Neutral(False, "a draft has the target's vocabulary"),
    "use_local_argmax_reduction": Neutral(False, "every rank has all logits"),
}
"""Keys of vLLM 0.32 that do not exist here."""


def without_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a config without keys of `KEYS` that ask for what this engine does.

    Raises ValueError for those that ask for something else.
    """
    for key, neutral in KEYS.items():
        if key in config and config[key] != neutral.value:
            raise ValueError(
                f"speculative_config: {key}={config[key]!r}: is vLLM's, and this engine has only "
                f"{neutral.value!r}: {neutral.does}; remove it"
            )
    return {key: value for key, value in config.items() if key not in KEYS}


def defaults_of(method: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns vLLM's defaults of settings that depend on others."""
    if method == "ngram" and given.get("prompt_lookup_min") is not None:
        return {"prompt_lookup_max": given["prompt_lookup_min"]}
    if method == "suffix":
        return {"num_speculative_tokens": given.get("suffix_decoding_max_tree_depth", 24)}
    if method == "mtp":
        return {"num_speculative_tokens": given.get("num_nextn_predict_layers", 1)}
    return {}
