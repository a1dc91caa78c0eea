"""Settings of speculative decoding on an engine, and vLLM's names for them."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple, get_args, get_type_hints

from policies.batching import Batching
from policies.caching.pool import Caching
from policies.speculation import DraftLength, PassSeconds, Proposer, TokenTree
from policies.speculation.checks import check_policies
from policies.speculation.draft_lengths import ByBatchSize, Fixed
from policies.speculation.proposers import (
    DraftModel,
    Eagle,
    Eagle3,
    Lookahead,
    Medusa,
    Mtp,
    Ngram,
    SelfSpeculative,
    SpecinferTree,
    Suffix,
)
from realengine.model.architecture import Architecture
from realengine.serving.sampling_params import are_whole, is_number, is_whole
from realengine.speculation.host import HostDrafter

PROPOSERS: dict[str, Callable[..., Proposer]] = {
    each.method: each
    for each in (
        DraftModel, Eagle, Eagle3, Lookahead, Medusa, Mtp, Ngram, SelfSpeculative, SpecinferTree, Suffix,
    )
}  # fmt: skip
OTHER_KEYS = (
    "method", "model", "num_speculative_tokens_per_batch_size", "draft_length", "draft_sample_method",
    "skipped_layers", "tpot_s", "host", "host_timeout_s",
)  # fmt: skip
OTHER_TYPES = {"skipped_layers": tuple[int, ...] | None, "tpot_s": float | None, "host_timeout_s": float}
EXAMPLES = {"num_speculative_tokens": "4", "widths": "[2, 2]"}
"""Of the settings that must be given."""
VALUES: dict[Any, tuple[Callable[[Any], bool], str]] = {
    int: (is_whole, "a whole number"),
    float: (is_number, "a number"),
    bool: (lambda value: isinstance(value, bool), "true or false"),
    tuple[int, ...]: (are_whole, "a list of whole numbers"),
}
"""Of each type of a setting: what a value must be."""
DRAFT_SAMPLE_METHODS = ("greedy", "probabilistic")
NEEDS_MODEL = (DraftModel, SpecinferTree, Eagle, Eagle3, Medusa)
MAY_NEED_MODEL = (*NEEDS_MODEL, Mtp)
"""Mtp needs none if its modules are beside the target's weights."""
MAY_DRAW = (DraftModel, SelfSpeculative)

DraftSource = str | Path | Architecture
"""A folder or file with weights, or an architecture, which gets random weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeculationSettings:
    """Settings of an engine that speculates; the proposer and the draft length are those of the simulator."""

    proposer: Proposer
    """Its `draft`, the cost of a draft, is read by simulations only."""
    draft_length: DraftLength = field(default_factory=Fixed)
    models: tuple[DraftSource, ...] = ()
    """The models, heads or layers that draft: several only for specinfer_tree; none for mtp: the target's."""
    draft_sample_method: str = "greedy"
    """greedy: a draft model drafts its likeliest token; probabilistic: it draws from its distribution."""
    skipped_layers: tuple[int, ...] | None = None
    """Layers of the target that self_speculative leaves out; None: every second one of the middle half."""
    host: HostDrafter | None = None
    """A drafter of yours on the host, which drafts in place of the proposer; None: the proposer drafts."""
    host_timeout_s: float = 10.0
    """Seconds after which a call of `host` is abandoned, and its request ends with an error."""
    estimate: PassSeconds | None = None
    """Estimate of the seconds of a pass, for policies that need one; None: the engine measures its passes."""
    tpot_s: float | None = None
    """Time per output token that the SLO allows, s; for policies that read it."""

    def __post_init__(self) -> None:
        method = self.proposer.method
        if self.draft_sample_method not in DRAFT_SAMPLE_METHODS:
            raise ValueError(
                f"draft_sample_method={self.draft_sample_method}: must be one of "
                f"{', '.join(DRAFT_SAMPLE_METHODS)}"
            )
        if self.draws and not isinstance(self.proposer, MAY_DRAW):
            raise ValueError(
                f"draft_sample_method=probabilistic: method={method} drafts the likeliest tokens only; "
                "remove it, or choose method=draft_model or self_speculative"
            )
        if not self.host_timeout_s > 0:
            raise ValueError(f"host_timeout_s={self.host_timeout_s}: must be > 0 seconds")
        if self.tpot_s is not None and not self.tpot_s > 0:
            raise ValueError(f"tpot_s={self.tpot_s}: must be > 0 seconds, or None")
        if self.host is not None and self.proposer.tree is not None:
            raise ValueError(f"host: drafts chains, and method={method} drafts a tree; choose method=ngram")
        if isinstance(self.proposer, NEEDS_MODEL) and self.host is None and not self.models:
            raise ValueError(f"model: method={method} needs the folder of its weights; set model")
        if not isinstance(self.proposer, MAY_NEED_MODEL) and self.models:
            raise ValueError(f"model={self.models[0]}: method={method} drafts without a model; remove it")
        if len(self.models) > 1 and not isinstance(self.proposer, SpecinferTree):
            raise ValueError(f"model: method={method} drafts with one model, not {len(self.models)}")
        if self.skipped_layers is not None and not isinstance(self.proposer, SelfSpeculative):
            raise ValueError(
                f"skipped_layers={list(self.skipped_layers)}: only method=self_speculative skips layers"
            )

    def check(self, batching: Batching, caching: Caching, max_num_batched_tokens: int | None) -> None:
        """Raises ValueError for policies that the proposer cannot be served with; see `check_policies`."""
        try:
            check_policies(self.proposer, self.draft_length, batching, caching, max_num_batched_tokens)
        except ValueError as error:
            raise ValueError(f"speculative_config: {error}") from error

    @property
    def draws(self) -> bool:
        """True if a draft model draws its tokens."""
        return self.draft_sample_method == "probabilistic"

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> SpeculationSettings:
        """Returns the settings of a `speculative_config` with vLLM's keys. Raises ValueError for others."""
        method = config.get("method", "draft_model" if "model" in config else None)
        name = "mtp" if isinstance(method, str) and method.endswith("_mtp") else method
        if not isinstance(name, str) or name not in PROPOSERS:
            where = "is vLLM's, and this engine has it not" if name in OTHER_METHODS else "is not known"
            raise ValueError(
                f"speculative_config: method={method} {where}; must be one of {', '.join(PROPOSERS)}"
            )
        config = without_defaults(config)
        proposer_class = PROPOSERS[name]
        types = {each.name: each for each in fields(proposer_class) if each.init}  # type: ignore[arg-type]
        own = [key for key in types if key not in ("draft", "model", "tree")]
        allowed = (*own, *OTHER_KEYS, *(["speculative_token_tree"] if "tree" in types else []))
        for key in config:
            if key not in allowed:
                raise ValueError(
                    f"speculative_config: {key} is not a setting of method={name}; allowed are "
                    f"{', '.join(sorted(allowed))}"
                )
        hints = get_type_hints(proposer_class)
        given = {key: _checked(key, config[key], hints[key]) for key in own if key in config}
        given = defaults_of(name, given) | given
        others = {key: _checked(key, config[key], hint) for key, hint in OTHER_TYPES.items() if key in config}
        tree = config.get("speculative_token_tree")
        if tree is not None:
            given["tree"] = parsed = _tree(tree)
            given.setdefault("num_speculative_tokens", parsed.num_nodes)
        for key in own:
            if key in EXAMPLES and key not in given:
                raise ValueError(
                    f"speculative_config: {key} is missing; set it, for example to {EXAMPLES[key]}"
                )
        return cls(
            proposer=proposer_class(draft=None, **given),
            draft_length=_draft_length(config),
            models=_models(config.get("model")),
            draft_sample_method=config.get("draft_sample_method", "greedy"),
            host=_host(config.get("host")),
            **others,
        )


def _checked(key: str, value: Any, hint: Any) -> Any:
    """Returns a value of a setting, a list as a tuple. Raises ValueError if it is not of the hint's type."""
    if value is None and NoneType in get_args(hint):
        return None
    known = hint if hint in VALUES else next(each for each in get_args(hint) if each in VALUES)
    holds, allowed = VALUES[known]
    if not holds(value):
        raise ValueError(f"speculative_config: {key}={value!r}: must be {allowed}")
    return tuple(value) if isinstance(value, list) else value


def _tree(given: Any) -> TokenTree:
    """Returns the tree of vLLM's speculative_token_tree: a list of paths of ranks, or its text."""
    try:
        paths = ast.literal_eval(given) if isinstance(given, str) else given
        return TokenTree.of_paths([list(path) for path in paths])
    except (SyntaxError, TypeError, ValueError) as error:
        raise ValueError(
            f"speculative_config: speculative_token_tree={given} is no tree: {error}; it must be a list of "
            "paths of ranks, such as [(0,), (1,), (0, 0)]"
        ) from error


def _draft_length(config: Mapping[str, Any]) -> DraftLength:
    key = "num_speculative_tokens_per_batch_size"
    ranges, chosen = config.get(key), config.get("draft_length")
    if chosen is not None and not isinstance(chosen, DraftLength):
        raise ValueError(
            f"speculative_config: draft_length={chosen!r}: must be a policy, such as "
            "policies.speculation.draft_lengths.Fixed(num_tokens=2)"
        )
    if ranges is None:
        return chosen or Fixed()
    if chosen is not None:
        raise ValueError(f"speculative_config: {key} is a draft_length of its own; remove one of them")
    if not isinstance(ranges, list | tuple) or not all(are_whole(each) and len(each) == 3 for each in ranges):
        raise ValueError(
            f"speculative_config: {key}={ranges!r}: must be a list of (smallest, largest number of requests, "
            "draft tokens), such as [(1, 16, 4), (17, 256, 1)]"
        )
    return ByBatchSize(num_speculative_tokens_per_batch_size=tuple(tuple(each) for each in ranges))


def _host(given: Any) -> HostDrafter | None:
    if given is not None and not isinstance(given, HostDrafter):
        raise ValueError(f"speculative_config: host={given!r}: must have the methods draft and forget")
    return given


def _models(given: Any) -> tuple[DraftSource, ...]:
    models = given if isinstance(given, list | tuple) else [] if given is None else [given]
    for model in models:
        if not isinstance(model, str | Path | Architecture):
            raise ValueError(
                f"speculative_config: model={model!r}: must be a path, or an Architecture for random weights"
            )
    return tuple(models)


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
