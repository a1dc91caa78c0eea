"""Flags of speculative decoding for vLLM and SGLang, and notes on what has no flag.

vLLM 0.32: `--speculative-config` with the fields of vllm/config/speculative.py; it drafts chains. SGLang 0.5:
docs.sglang.io, speculative decoding; a tree has --speculative-num-steps levels.
"""

from __future__ import annotations

import json
from typing import Any

from hwmodels.speculation.draft import ModelDraft
from policies.speculation import DraftLengthTraits, Proposer, num_places
from policies.speculation.draft_lengths import ByBatchSize, Fixed, NoDrafts
from policies.speculation.proposers import Ngram, Suffix
from policies.user_code import name_of, traits_of
from sim.setup.scenario import Scenario

VLLM_METHODS = ("draft_model", "ngram", "suffix", "medusa", "eagle", "eagle3", "mtp")
SGLANG_ALGORITHMS = {
    "draft_model": "STANDALONE",
    "eagle": "EAGLE",
    "eagle3": "EAGLE3",
    "mtp": "NEXTN",
    "ngram": "NGRAM",
}
"""Method -> the value of --speculative-algorithm."""
OWN_CHECKPOINT = ("draft_model", "medusa", "eagle", "eagle3")
"""Methods whose draft has a checkpoint of its own."""


def vllm_speculation(scenario: Scenario, notes: list[str]) -> list[str]:
    """Returns the flag of speculation, if there is one, and adds notes on what it cannot express."""
    proposer = scenario.speculation
    if proposer is None:
        return []
    if proposer.method not in VLLM_METHODS:
        notes.append(f"speculation={proposer.method}: vLLM does not have it")
        return []
    if (
        isinstance(scenario.draft_length, NoDrafts)
        or traits_of(scenario.draft_length, DraftLengthTraits).num_tokens == 0
    ):
        notes.append("draft_length: nothing is drafted, so there is no flag")
        return []
    if proposer.tree is not None:
        notes.append(
            "speculation.tree: vLLM has no flag for it; it drafts a chain as long as the tree is deep"
        )
    config: dict[str, Any] = {"method": proposer.method}
    if proposer.method in OWN_CHECKPOINT:
        config["model"] = _checkpoint(proposer, notes)
    config["num_speculative_tokens"] = num_places(proposer)
    config |= _own_fields(proposer) | _vllm_length(scenario, notes)
    return [f"--speculative-config '{json.dumps(config)}'"]


def sglang_speculation(scenario: Scenario, notes: list[str]) -> list[str]:
    """Returns the flags of speculation, and adds notes on what they cannot express."""
    proposer = scenario.speculation
    if proposer is None:
        return []
    algorithm = SGLANG_ALGORITHMS.get(proposer.method)
    if algorithm is None:
        notes.append(f"speculation={proposer.method}: SGLang does not have it")
        return []
    flags = [f"--speculative-algorithm {algorithm}"]
    if proposer.method in OWN_CHECKPOINT:
        flags.append(f"--speculative-draft-model-path {_checkpoint(proposer, notes)}")
    if proposer.method != "ngram":
        flags.append(
            f"--speculative-num-steps {num_places(proposer)} --speculative-eagle-topk {_widest(proposer)}"
        )
    flags.append(f"--speculative-num-draft-tokens {proposer.num_speculative_tokens + 1}")
    if not isinstance(scenario.draft_length, Fixed):
        notes.append(f"draft_length={name_of(scenario.draft_length)}: SGLang has no flag for it")
    return flags


def _widest(proposer: Proposer) -> int:
    """Returns the largest number of continuations of a node."""
    return 1 if proposer.tree is None else max(proposer.tree.ranks) + 1


def _checkpoint(proposer: Proposer, notes: list[str]) -> str:
    """Returns the name of the draft's checkpoint, or a placeholder with a note."""
    draft = proposer.draft
    found = draft.model.source if isinstance(draft, ModelDraft) else getattr(proposer, "model", None)
    if found:
        return str(found)
    notes.append(
        f"speculation={proposer.method}: no checkpoint of its draft is known for this model; replace "
        "DRAFT, or set speculation.model"
    )
    return "DRAFT"


def _own_fields(proposer: Proposer) -> dict[str, Any]:
    """Returns the fields that only this method has."""
    fields: dict[str, Any] = {}
    if isinstance(proposer, Ngram):
        fields = {"prompt_lookup_max": proposer.prompt_lookup_max, "prompt_lookup_min": proposer.min_ngram}
    elif isinstance(proposer, Suffix):
        fields = {
            name: getattr(proposer, name)
            for name in (
                "suffix_decoding_max_tree_depth",
                "suffix_decoding_max_cached_requests",
                "suffix_decoding_max_spec_factor",
                "suffix_decoding_min_token_prob",
            )
        }
    elif getattr(proposer, "disable_eagle_block_drop", False):
        fields = {"disable_eagle_block_drop": True}
    size = getattr(proposer.draft, "tensor_parallel_size", None)
    return fields if size is None else fields | {"draft_tensor_parallel_size": size}


def _vllm_length(scenario: Scenario, notes: list[str]) -> dict[str, Any]:
    """Returns the fields for the number of draft tokens, and adds a note for a policy without a field."""
    policy = scenario.draft_length
    if isinstance(policy, Fixed):
        return {} if policy.num_tokens is None else {"num_speculative_tokens": policy.num_tokens}
    if isinstance(policy, ByBatchSize):
        ranges = [list(each) for each in policy.num_speculative_tokens_per_batch_size]
        return {"num_speculative_tokens_per_batch_size": ranges}
    notes.append(
        f"draft_length={name_of(policy)}: vLLM has no flag for it; it always drafts as many tokens as it can"
    )
    return {}
