"""Settings of speculative decoding on an engine, and vLLM's names for them."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from policies.speculation import DraftLength, Proposer
from policies.speculation.by_batch_size import ByBatchSize
from policies.speculation.fixed import Fixed
from policies.speculation.proposers.draft_model import DraftModel
from policies.speculation.proposers.eagle import Eagle
from policies.speculation.proposers.eagle3 import Eagle3
from policies.speculation.proposers.lookahead import Lookahead
from policies.speculation.proposers.medusa import Medusa
from policies.speculation.proposers.mtp import Mtp
from policies.speculation.proposers.ngram import Ngram
from policies.speculation.proposers.self_speculative import SelfSpeculative
from policies.speculation.proposers.specinfer_tree import SpecinferTree
from policies.speculation.proposers.suffix import Suffix
from policies.speculation.tree import TokenTree
from policies.speculation.view import PassSeconds
from realengine.model.architecture import Architecture
from realengine.speculation.host import HostDrafter

PROPOSERS: dict[str, Callable[..., Proposer]] = {
    each.method: each
    for each in (
        DraftModel, Eagle, Eagle3, Lookahead, Medusa, Mtp, Ngram, SelfSpeculative, SpecinferTree, Suffix,
    )
}  # fmt: skip
OTHER_KEYS = (
    "method", "model", "speculative_token_tree", "num_speculative_tokens_per_batch_size", "draft_length",
    "draft_sample_method", "skipped_layers", "tpot_s", "host", "host_timeout_s",
)  # fmt: skip
DRAFT_SAMPLE_METHODS = ("greedy", "probabilistic")
NEEDS_MODEL = (DraftModel, SpecinferTree, Eagle, Eagle3, Medusa, Mtp)

DraftSource = str | Path | Architecture
"""A folder or file with weights, or an architecture, which gets random weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeculationSettings:
    """Settings of an engine that speculates; the proposer and the draft length are those of the simulator."""

    proposer: Proposer
    """Its `draft`, the cost of a draft, is read by simulations only."""
    draft_length: DraftLength = field(default_factory=Fixed)
    models: tuple[DraftSource, ...] = ()
    """The models, heads or layers that draft: several only for specinfer_tree."""
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
        if not self.host_timeout_s > 0:
            raise ValueError(f"host_timeout_s={self.host_timeout_s}: must be > 0 seconds")
        if self.host is not None and self.proposer.tree is not None:
            raise ValueError(f"host: drafts chains, and method={method} drafts a tree; choose method=ngram")
        if isinstance(self.proposer, NEEDS_MODEL) and self.host is None and not self.models:
            raise ValueError(f"model: method={method} needs the folder of its weights; set model")
        if not isinstance(self.proposer, NEEDS_MODEL) and self.models:
            raise ValueError(f"model={self.models[0]}: method={method} drafts without a model; remove it")
        if self.skipped_layers is not None and not isinstance(self.proposer, SelfSpeculative):
            raise ValueError(
                f"skipped_layers={list(self.skipped_layers)}: only method=self_speculative skips layers"
            )

    @property
    def draws(self) -> bool:
        """True if a draft model draws its tokens."""
        return self.draft_sample_method == "probabilistic"

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> SpeculationSettings:
        """Returns the settings of a `speculative_config` with vLLM's keys. Raises ValueError for others."""
        method = config.get("method", "draft_model" if "model" in config else None)
        name = "mtp" if isinstance(method, str) and method.endswith("_mtp") else method
        if name not in PROPOSERS:
            raise ValueError(
                f"speculative_config: method={method} is not known; must be one of {', '.join(PROPOSERS)}"
            )
        proposer_class = PROPOSERS[name]
        own = [each.name for each in fields(proposer_class) if each.init]  # type: ignore[arg-type]
        own = [key for key in own if key not in ("draft", "model", "tree")]
        for key in config:
            if key not in (*own, *OTHER_KEYS):
                raise ValueError(
                    f"speculative_config: {key} is not a setting of method={name}; allowed are "
                    f"{', '.join(sorted((*own, *OTHER_KEYS)))}"
                )
        given: dict[str, Any] = {key: config[key] for key in own if key in config}
        tree = config.get("speculative_token_tree")
        if tree is not None:
            given["tree"] = parsed = _tree(tree)
            given.setdefault("num_speculative_tokens", parsed.num_nodes)
        if "num_speculative_tokens" in own and "num_speculative_tokens" not in given:
            raise ValueError(
                "speculative_config: num_speculative_tokens is missing; set it, for example to 4"
            )
        for key in ("widths", "reference"):
            if key in given:
                given[key] = tuple(given[key])
        return cls(
            proposer=proposer_class(draft=None, **given),
            draft_length=_draft_length(config),
            models=_models(config.get("model")),
            draft_sample_method=config.get("draft_sample_method", "greedy"),
            skipped_layers=None if (layers := config.get("skipped_layers")) is None else tuple(layers),
            tpot_s=config.get("tpot_s"),
            host=config.get("host"),
            host_timeout_s=config.get("host_timeout_s", 10.0),
        )


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
    ranges = config.get("num_speculative_tokens_per_batch_size")
    chosen: DraftLength | None = config.get("draft_length")
    if ranges is None:
        return chosen or Fixed()
    if chosen is not None:
        raise ValueError(
            "speculative_config: num_speculative_tokens_per_batch_size is a draft_length of its own; remove "
            "one of them"
        )
    return ByBatchSize(num_speculative_tokens_per_batch_size=tuple(tuple(each) for each in ranges))


def _models(
    given: DraftSource | list[DraftSource] | tuple[DraftSource, ...] | None,
) -> tuple[DraftSource, ...]:
    if given is None:
        return ()
    return (given,) if isinstance(given, str | Path | Architecture) else tuple(given)
