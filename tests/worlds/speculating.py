"""Worlds whose engines speculate, of every kind that the other modules here draw, for hypothesis."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import numpy as np
from hypothesis import strategies as st

from experiments.conformance.speculating import SpeculatingWorld, ToyProposer
from experiments.conformance.worlds import World
from policies.adapters.fixed_slots import FixedSlots
from policies.adapters.unified_paging import UnifiedPaging
from policies.batching.chunked import Chunked
from policies.batching.inflight import InFlight
from policies.batching.splitfuse import SplitFuse
from policies.caching.paged import Paged
from policies.caching.pool import BlockPool, KvMemory
from policies.core.request import Request
from policies.speculation import Proposer, SlotRules, TokenTree
from policies.speculation.checks import BUDGETS
from policies.speculation.draft_lengths import Adaptive, Backoff, ByBatchSize, Fixed, NoDrafts, SloAware
from sim.speculation import Acceptance, Verdicts
from sim.speculation.acceptance.beta import Beta
from sim.speculation.acceptance.by_position import ByPosition
from sim.speculation.acceptance.iid import Iid
from tests.worlds.clusters import Cluster
from tests.worlds.services import Service

MAX_PLACES = 6
LIMITS = ("max_num_batched_tokens", *BUDGETS)


@dataclass(frozen=True, kw_only=True)
class SpeculatingCluster(SpeculatingWorld, Cluster):
    """A `Cluster` in which every replica speculates."""


@dataclass(frozen=True, kw_only=True)
class SpeculatingService(SpeculatingWorld, Service):
    """A `Service` in which every replica speculates."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Patchy:
    """Accepts as another model, but at some output positions fewer draft tokens are found than asked for."""

    of: Acceptance
    every: int = 3
    """One of so many positions has no draft, and the one after it a single token."""

    def check(self, proposer: Proposer) -> None:
        """Raises no error: it can judge the drafts of every proposer."""

    def verdicts(self, request: Request, seed: int, num_positions: int, proposer: Proposer) -> Verdicts:
        """Returns the verdicts of the other model, and how many draft tokens are found."""
        accepted, _ = self.of.verdicts(request, seed, num_positions, proposer)
        place = (np.arange(num_positions) + request.request_id) % self.every
        tree = proposer.tree
        one = 1 if tree is None else tree.num_nodes_to(1)
        found = np.where(place == 0, 0, np.where(place == 1, one, proposer.num_speculative_tokens))
        return Verdicts(accepted, found.astype(np.uint8))


W = TypeVar("W", bound=World)


def speculating(world: World, **settings: Any) -> SpeculatingWorld:
    """Returns a world in which the replicas of another one speculate."""
    made: type[SpeculatingWorld] = SpeculatingWorld
    if isinstance(world, Service):
        made = SpeculatingService
    elif isinstance(world, Cluster):
        made = SpeculatingCluster
    given = {each.name: getattr(world, each.name) for each in fields(world)}
    return made(**(given | settings))


@st.composite
def draw_proposers(draw: st.DrawFn) -> ToyProposer:
    """Draws a chain or a tree of draft tokens, with any rules for KV slots and budgets."""
    trees = [TokenTree.of_widths(widths) for widths in ([2, 1], [3, 2], [2, 2, 1])]
    tree = draw(st.sampled_from([None, None, None, *trees]))
    num_tokens = draw(st.integers(1, MAX_PLACES)) if tree is None else tree.num_nodes
    rules = SlotRules(
        keeps_lookahead=draw(st.booleans()),
        num_input_slots=draw(st.integers(0, 1)),
        drops_last_block=draw(st.booleans()),
        prefill_lookahead=draw(st.sampled_from([0, 0, num_tokens])) if tree is None else 0,
    )
    return ToyProposer(num_speculative_tokens=num_tokens, tree=tree, rules=rules)


def draw_acceptances() -> st.SearchStrategy[Any]:
    """Returns the strategy for any model of acceptance."""
    usual = (
        st.sampled_from([0.0, 0.5, 0.8, 1.0]).map(lambda rate: Iid(rate=rate))
        | st.just(ByPosition(rates=(0.9, 0.7, 0.5, 0.3, 0.2, 0.0, 0.0, 0.0, 0.0, 0.0)))
        | st.sampled_from([0.5, 8.0]).map(lambda concentration: Beta(mean=0.6, concentration=concentration))
    )
    return usual | usual | st.builds(Patchy, of=usual, every=st.integers(2, 4))


def draw_draft_lengths(tick_s: float) -> st.SearchStrategy[Any]:
    """Returns the strategy for any draft-length policy, with settings that matter within a few iterations."""
    return (
        st.builds(Fixed, num_tokens=st.sampled_from([None, None, 0, 1, 2]))
        | st.just(NoDrafts())
        | st.just(ByBatchSize(num_speculative_tokens_per_batch_size=((1, 1, 4), (2, 3, 2), (4, 9, 0))))
        | st.builds(
            Adaptive,
            interval=st.sampled_from([1, 3, 16]),
            window=st.sampled_from([5, 2000]),
            probe_share=st.sampled_from([0.005, 0.5]),
            probe_sequences=st.integers(1, 3),
        )
        | st.builds(SloAware, tpot_s=st.sampled_from([0.3, 0.7, 1.1]).map(lambda n: n * tick_s))
        | st.builds(
            Backoff,
            max_misses=st.integers(1, 3),
            retry_interval=st.just(2),
            max_interval=st.sampled_from([2, 8]),
        )
    )


@st.composite
def draw_speculating(draw: st.DrawFn, worlds: st.SearchStrategy[W], more_blocks: int = 0) -> SpeculatingWorld:
    """Draws a world and lets its replicas speculate.

    Policies that cannot carry drafts become others, and budgets have room for one pass at least.
    more_blocks: further KV blocks, for the slots behind sequences.
    """
    world = draw(worlds)
    proposer = draw(draw_proposers())
    least = 1 + proposer.num_speculative_tokens + proposer.rules.num_input_slots
    changes: dict[str, Any] = {"num_blocks": world.num_blocks + more_blocks}
    changes |= {
        name: _with_room(getattr(world, name), least)
        for name in ("batching", "prefill_batching", "decode_batching")
        if hasattr(world, name)
    }
    if isinstance(world.adapters, UnifiedPaging):
        changes["adapters"] = FixedSlots(max_loras=2)
    pool = world.caching.pool(KvMemory(world.num_blocks, 1.0, max_model_len=world.max_model_len))
    if type(pool).growth is not BlockPool.growth:
        changes["caching"] = Paged(block_size=world.caching.block_size)
    return speculating(
        replace(world, **changes),
        proposer=proposer,
        acceptance=draw(draw_acceptances()),
        draft_length=draw(draw_draft_lengths(world.model.tick_s)),
    )


def _with_room(batching: Any, least: int) -> Any:
    """Returns a batching policy whose iterations have tokens for the pass of one sequence."""
    if isinstance(batching, SplitFuse):
        batching = Chunked(max_num_batched_tokens=batching.max_num_batched_tokens)
    if isinstance(batching, InFlight):
        batching = replace(batching, enable_chunked_context=True)
    names = [f.name for f in fields(batching) if f.init]
    given = {name: getattr(batching, name) for name in LIMITS if name in names}
    raised = {name: max(limit, least) for name, limit in given.items() if limit is not None}
    threshold = getattr(batching, "long_prefill_token_threshold", 0)
    if 0 < threshold < least:
        raised["long_prefill_token_threshold"] = least
    return replace(batching, **raised)
