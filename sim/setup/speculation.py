"""Checks that a proposer, its draft, the model, the engine and the cache go together; what they change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import cast

from hwmodels.devices.host import HostOverhead
from hwmodels.iterations.iteration import IterationModel
from hwmodels.iterations.layout import ParallelLayout
from hwmodels.levels.rooflines import LatencyLevel, Replica
from hwmodels.levels.speculative import Speculative
from hwmodels.model.model_spec import ModelSpec
from hwmodels.speculation.draft import Draft, HeadDraft, LayerDraft
from hwmodels.speculation.model import SpeculativeModel
from policies.adapters import AdapterServing
from policies.adapters.unified_paging import UnifiedPaging
from policies.batching import Batching
from policies.batching.splitfuse import SplitFuse
from policies.caching.eviction.future import FutureUses
from policies.caching.pool import BlockPool
from policies.caching.settings import Caching, KvMemory, pool_of
from policies.core.engine import EngineCore
from policies.core.policy_names import name_of
from policies.speculation import DraftLength, Proposer, num_places
from sim.speculation.acceptance import Acceptance

KEY = "speculation"
ASSUMED = ("iid", "beta")
"""Acceptance models whose rates have a default, which is of no model and workload in particular."""
BUDGETS = ("max_num_scheduled_tokens", "max_prefill_tokens", "max_batch_prefill_tokens", "n_batch")
"""Further limits of batching policies on the tokens of an iteration."""
CARRYING_CACHES = "paged, prefix, radix or tiered"
"""Caches that give a sequence the blocks that its tokens need, and so can keep those of draft tokens."""


def draft_of(proposer: Proposer) -> Draft:
    """Returns the cost and the memory of a proposer's draft. Raises ValueError if it states none."""
    draft = proposer.draft
    if not callable(getattr(draft, "weight_bytes", None)):
        raise ValueError(
            f"{KEY}.draft={draft}: must be what a draft costs, such as hwmodels.speculation.draft.ModelDraft"
        )
    return cast("Draft", draft)


def host_of(host: HostOverhead, proposer: Proposer | None) -> HostOverhead:
    """Returns the host overhead with a proposer: synchronous if drafts need the tokens on the host first."""
    if proposer is None or proposer.rules.overlaps or not host.overlapped:
        return host
    return replace(host, overlapped=False)


def check_proposer(
    proposer: Proposer, model: ModelSpec, layout: ParallelLayout, latency: LatencyLevel
) -> None:
    """Raises ValueError, with the key of the setting, if a model on some devices cannot have a draft."""
    draft = draft_of(proposer)
    if isinstance(latency, Speculative):
        raise ValueError(
            f"{KEY}={proposer.method}, latency=speculative: this level models drafts itself, as an average; "
            "choose latency=calibrated, or speculation=none"
        )
    try:
        draft.check(model, layout)
    except ValueError as error:
        raise ValueError(f"{KEY}.draft.{error}") from None
    _check_places(proposer, draft)
    if isinstance(draft, LayerDraft) and draft.kind == "mtp":
        _check_modules(draft, model)
    if isinstance(draft, LayerDraft) and (draft.vocab_size or 0) > model.vocab_size:
        raise ValueError(
            f"{KEY}.draft.vocab_size={draft.vocab_size}: must be <= {model.vocab_size}, the vocabulary of "
            f"{model.name}"
        )


def _check_places(proposer: Proposer, draft: Draft) -> None:
    """Raises ValueError if a proposer drafts for more places than there are heads."""
    places = num_places(proposer)
    if isinstance(draft, HeadDraft) and places > draft.num_heads:
        setting = f"num_speculative_tokens={places}" if proposer.tree is None else f"tree: its depth {places}"
        raise ValueError(
            f"{KEY}.{setting}: must be <= {KEY}.draft.num_heads={draft.num_heads}, as each head predicts one "
            "place"
        )


def _check_modules(draft: LayerDraft, model: ModelSpec) -> None:
    """Raises ValueError unless a model has as many modules for multi-token prediction as are used."""
    modules = model.num_mtp_modules
    if not modules:
        raise ValueError(
            f"{KEY}=mtp: {model.name} has no layers for multi-token prediction; choose another proposer, "
            "such as speculation=eagle3 or draft_model, or a model with them, such as deepseek_r1"
        )
    if draft.num_modules > modules:
        raise ValueError(
            f"{KEY}.num_nextn_predict_layers={draft.num_modules}: must be <= {modules}, the modules of "
            f"{model.name}"
        )


def check_cache(proposer: Proposer, caching: Caching) -> None:
    """Raises ValueError for a cache that does not give a sequence the blocks that its tokens need."""
    memory = KvMemory(num_blocks=2**20, bytes_per_token=1.0, max_model_len=2**12, future=FutureUses(()))
    if type(pool_of(caching, memory)).growth is not BlockPool.growth:
        raise ValueError(
            f"{KEY}={proposer.method}, caching={name_of(caching)}: cannot keep the KV of draft tokens behind "
            f"a sequence; choose caching={CARRYING_CACHES}, or speculation=none"
        )


def check_batching(proposer: Proposer, batching: Batching) -> None:
    """Raises ValueError for a batching policy that counts blocks without those of draft tokens."""
    if isinstance(batching, SplitFuse):
        raise ValueError(
            f"{KEY}={proposer.method}, batching=splitfuse: pauses sequences by the blocks that one token "
            "needs, and draft tokens need more; choose batching=chunked or another one, or speculation=none"
        )


def check_adapters(proposer: Proposer, adapters: AdapterServing | None) -> None:
    """Raises ValueError for adapters in KV blocks, which the slots behind a sequence may need."""
    if isinstance(adapters, UnifiedPaging):
        raise ValueError(
            f"{KEY}={proposer.method}, adapters=unified_paging: adapters in KV blocks may leave no room for "
            "draft tokens; choose adapters=fixed_slots, exchange or merged, or speculation=none"
        )


def check_budget(proposer: Proposer, batching: Batching, max_num_batched_tokens: int) -> None:
    """Raises ValueError if an iteration has too few tokens for the pass of one sequence."""
    chosen = f"{KEY}={proposer.method}"
    num_rows = 1 + proposer.num_speculative_tokens
    needed = num_rows + proposer.rules.num_input_slots
    if max_num_batched_tokens < needed:
        raise ValueError(
            f"{chosen}, max_num_batched_tokens={max_num_batched_tokens}: must be >= {needed} for the pass of "
            f"one sequence; raise it, or lower {KEY}.num_speculative_tokens={proposer.num_speculative_tokens}"
        )
    for name in BUDGETS:
        limit = getattr(batching, name, None)
        if limit is not None and limit < needed:
            raise ValueError(
                f"{chosen}, batching.{name}={limit}: must be >= {needed}, the tokens of a pass or of the end "
                f"of a prompt; raise it, or lower {KEY}.num_speculative_tokens"
            )
    threshold = getattr(batching, "long_prefill_token_threshold", 0)
    if 0 < threshold < num_rows:
        raise ValueError(
            f"{chosen}, batching.long_prefill_token_threshold={threshold}: must be 0 or >= {num_rows}, the "
            "tokens of a pass, as it limits these too"
        )


def check_length(proposer: Proposer, draft_length: DraftLength) -> None:
    """Raises ValueError for a policy that would draft more tokens than its proposer has places for."""
    tree, length = proposer.tree, getattr(draft_length, "num_tokens", None)
    places = num_places(proposer)
    if length is not None and length > places:
        which = "the levels of the tree" if tree is not None else f"{KEY}.num_speculative_tokens"
        raise ValueError(f"draft_length.num_tokens={length}: must be <= {places}, {which}, or null for all")


def max_tokens_per_pass(proposer: Proposer | None) -> int:
    """Returns the largest number of tokens that a sequence can get from a pass."""
    return 1 if proposer is None else 1 + num_places(proposer)


def with_drafts(base: IterationModel, proposer: Proposer, replica: Replica) -> IterationModel:
    """Returns the iteration model of a replica that speculates. Raises ValueError if it has no price."""
    tree = proposer.tree
    rows = 1 if tree is None else max(Counter(tree.depths).values())
    return SpeculativeModel(base, draft_of(proposer), replica, rows=rows)


def speculative_core(
    proposer: Proposer,
    draft_length: DraftLength,
    model: IterationModel,
    tpot_s: float | None,
    *,
    overlapped: bool,
) -> Callable[..., EngineCore]:
    """Returns the maker of an engine that speculates.

    model: for policies that ask for the price of a pass.
    """
    # Runs without speculation do not import these.
    from policies.speculation.engine.core import AsyncSpeculativeCore, SpeculativeCore  # noqa: PLC0415
    from policies.speculation.engine.drafts import Speculation  # noqa: PLC0415

    assert isinstance(model, SpeculativeModel)
    speculation = Speculation(
        proposer=proposer, draft_length=draft_length, estimate=model.pass_seconds, tpot_s=tpot_s
    )
    return partial(AsyncSpeculativeCore if overlapped else SpeculativeCore, speculation=speculation)


def stores_kv(proposer: Proposer | None, model: ModelSpec, layout: ParallelLayout) -> bool:
    """Returns whether drafts have KV of their own, which must be computed for the prompt too."""
    return proposer is not None and draft_of(proposer).kv_bytes_per_token(model, layout) > 0


def speculation_notes(proposer: Proposer, acceptance: Acceptance | None, host: HostOverhead) -> Iterator[str]:
    """Yields the notes on a pool whose sequences speculate. host: as set."""
    if name_of(acceptance) in ASSUMED:
        yield (
            f"acceptance={name_of(acceptance)}: how many draft tokens are accepted is assumed, not "
            "measured, and speed-ups depend on it; set it for your requests, or choose acceptance=table, "
            "text or spec_bench."
        )
    if host.overlapped and not proposer.rules.overlaps:
        yield (
            f"speculation={proposer.method}: is not run with asynchronous scheduling, so the engine "
            "schedules synchronously, although engine.host.overlapped=true."
        )
