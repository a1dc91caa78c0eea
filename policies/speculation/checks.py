"""Checks that a proposer is compatible with the other policies, for the simulator and the real engine."""

from __future__ import annotations

from policies.adapters import AdapterServing
from policies.adapters.unified_paging import UnifiedPaging
from policies.batching import Batching, BatchingTraits
from policies.batching.splitfuse import SplitFuse
from policies.caching.content import FutureUses
from policies.caching.pool import BlockPool, Caching, KvMemory, pool_of
from policies.speculation import DraftLength, DraftLengthTraits, Proposer, num_places
from policies.user_code import name_of, traits_of

KEY = "speculation"
BUDGETS = ("max_num_scheduled_tokens", "max_prefill_tokens", "max_batch_prefill_tokens", "n_batch")
"""Other limits of batching policies on the tokens of an iteration."""
CARRYING_CACHES = "paged, prefix, radix or tiered"
"""Caches that allocate blocks by a sequence's tokens, and can therefore hold draft tokens."""


def check_policies(
    proposer: Proposer,
    draft_length: DraftLength,
    batching: Batching,
    caching: Caching,
    max_num_batched_tokens: int | None,
) -> None:
    """Raises ValueError, with the key of the setting, for a policy that is incompatible with a proposer.

    max_num_batched_tokens: tokens of an iteration; None: batching has no limit.
    """
    _check_cache(proposer, caching)
    _check_batching(proposer, batching)
    if max_num_batched_tokens is not None:
        _check_budget(proposer, batching, max_num_batched_tokens)
    _check_length(proposer, draft_length)


def check_adapters(proposer: Proposer, adapters: AdapterServing | None) -> None:
    """Raises ValueError for adapters in KV blocks, which the slots after a sequence may need."""
    if isinstance(adapters, UnifiedPaging):
        raise ValueError(
            f"{KEY}={proposer.method}, adapters=unified_paging: adapters in KV blocks may leave no room for "
            "draft tokens; choose adapters=fixed_slots, exchange or merged, or speculation=none"
        )


def _check_cache(proposer: Proposer, caching: Caching) -> None:
    """Raises ValueError for a cache that does not allocate blocks by a sequence's tokens."""
    memory = KvMemory(num_blocks=2**20, bytes_per_token=1.0, max_model_len=2**12, future=FutureUses(()))
    if type(pool_of(caching, memory)).growth is not BlockPool.growth:
        raise ValueError(
            f"{KEY}={proposer.method}, caching={name_of(caching)}: cannot keep the KV of draft tokens behind "
            f"a sequence; choose caching={CARRYING_CACHES}, or speculation=none"
        )


def _check_batching(proposer: Proposer, batching: Batching) -> None:
    """Raises ValueError for a batching policy that does not count the blocks of draft tokens."""
    if isinstance(batching, SplitFuse):
        raise ValueError(
            f"{KEY}={proposer.method}, batching=splitfuse: pauses sequences by the blocks that one token "
            "needs, and draft tokens need more; choose batching=chunked or another one, or speculation=none"
        )


def _check_budget(proposer: Proposer, batching: Batching, max_num_batched_tokens: int) -> None:
    """Raises ValueError if an iteration has too few tokens for the pass of one sequence."""
    chosen = f"{KEY}={proposer.method}"
    num_rows = 1 + proposer.num_speculative_tokens
    needed = num_rows + proposer.rules.num_input_slots
    if max_num_batched_tokens < needed:
        raise ValueError(
            f"{chosen}, max_num_batched_tokens={max_num_batched_tokens}: must be >= {needed} for the pass of "
            f"one sequence; raise it, or lower {KEY}.num_speculative_tokens={proposer.num_speculative_tokens}"
        )
    traits = traits_of(batching, BatchingTraits)
    for name in BUDGETS:
        limit = getattr(traits, name)
        if limit is not None and limit < needed:
            raise ValueError(
                f"{chosen}, batching.{name}={limit}: must be >= {needed}, the tokens of a pass or of the end "
                f"of a prompt; raise it, or lower {KEY}.num_speculative_tokens"
            )
    threshold = traits.long_prefill_token_threshold
    if 0 < threshold < num_rows:
        raise ValueError(
            f"{chosen}, batching.long_prefill_token_threshold={threshold}: must be 0 or >= {num_rows}, the "
            "tokens of a pass, as it limits these too"
        )


def _check_length(proposer: Proposer, draft_length: DraftLength) -> None:
    """Raises ValueError for a policy that would draft more tokens than its proposer supports."""
    tree, length = proposer.tree, traits_of(draft_length, DraftLengthTraits).num_tokens
    places = num_places(proposer)
    if length is not None and length > places:
        which = "the levels of the tree" if tree is not None else f"{KEY}.num_speculative_tokens"
        raise ValueError(f"draft_length.num_tokens={length}: must be <= {places}, {which}, or null for all")
