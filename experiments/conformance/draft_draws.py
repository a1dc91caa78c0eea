"""Strategies of hypothesis that draw draft-length policies, and worlds whose engines speculate."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from experiments.conformance.draws import draw_worlds
from experiments.conformance.speculating import SpeculatingWorld, ToyProposer
from experiments.conformance.worlds import World
from policies.batching.chunked import Chunked
from policies.batching.sglang import Sglang
from policies.batching.splitfuse import SplitFuse
from policies.caching.paged import Paged
from policies.caching.prefix import PrefixCaching
from policies.caching.radix import Radix
from policies.caching.tiered import Tiered
from policies.core.request import Request
from policies.prediction.histogram import RunningHistogram
from policies.speculation import Proposer, SlotRules, TokenTree, num_places
from policies.speculation.draft_lengths import Adaptive, Backoff, ByBatchSize, Fixed, NoDrafts, SloAware
from sim.speculation import Verdicts
from sim.speculation.acceptance.iid import Iid
from sim.workload.distributions import stream

CARRYING = (Paged, PrefixCaching, Radix, Tiered)
"""Caches that can hold draft tokens."""
LIMITS = ("max_num_batched_tokens", "max_batch_prefill_tokens", "long_prefill_token_threshold")
"""Settings of batching policies that limit the tokens of a step or of a prompt's chunk."""
RATES = st.sampled_from([0.0, 0.5, 0.8, 1.0])


@dataclass(frozen=True, kw_only=True)
class PartlyFound:
    """Acceptance of a proposer that finds any number of draft tokens, as n-grams do."""

    rate: float

    def check(self, proposer: Proposer) -> None:
        """Raises no error: it can judge the drafts of every proposer."""

    def verdicts(self, request: Request, seed: int, num_positions: int, proposer: Proposer) -> Verdicts:
        """Returns verdicts of which none depends on the number of positions."""
        places = num_places(proposer)
        draws = stream(seed, "found", request.request_id).random((num_positions, places + 1))
        proposed = (draws[:, 0] * (places + 1)).astype(np.uint8)
        accepted = np.cumprod(draws[:, 1:] < self.rate, axis=1).sum(axis=1).astype(np.uint8)
        return Verdicts(np.minimum(accepted, proposed), proposed)


def draw_draft_length(tick_s: float) -> st.SearchStrategy[Any]:
    """Draws a draft-length policy, with settings that matter to a few requests."""
    length = st.none() | st.integers(1, 6)
    ranges = st.sampled_from([((1, 2, 5), (4, 6, 1)), ((1, 1, 0), (2, 9, 3)), ((1, 3, 2), (4, 4, 0))])
    return (
        st.builds(Fixed, num_tokens=st.none() | st.integers(0, 6))
        | st.just(NoDrafts())
        | st.builds(ByBatchSize, num_speculative_tokens_per_batch_size=ranges)
        | st.builds(
            Adaptive,
            interval=st.integers(1, 9),
            window=st.sampled_from([5, 50]),
            prior_rate=st.sampled_from([0.0, 0.5, 1.0]),
            probe_share=st.sampled_from([0.1, 1.0]),
            probe_sequences=st.integers(1, 2),
        )
        | st.builds(
            SloAware,
            tpot_s=st.none() | st.integers(1, 8).map(lambda n: n * tick_s / 4),
            margin=st.sampled_from([0.0, 0.4]),
            num_tokens=length,
        )
        | st.builds(
            Backoff,
            max_misses=st.integers(1, 3),
            retry_interval=st.sampled_from([1, 2]),
            max_interval=st.sampled_from([2, 8]),
            num_tokens=length,
        )
    )


@st.composite
def draw_proposer(draw: st.DrawFn) -> ToyProposer:
    """Draws a proposer of a chain or a tree, with the rules of any method."""
    tree = draw(st.sampled_from([None, None, TokenTree.of_widths([2, 2]), TokenTree.of_widths([3, 1, 1])]))
    num_tokens = draw(st.integers(1, 6)) if tree is None else tree.num_nodes
    rules = SlotRules(
        keeps_lookahead=draw(st.booleans()),
        num_input_slots=draw(st.integers(0, 1)),
        drops_last_block=draw(st.booleans()),
        prefill_lookahead=draw(st.sampled_from([0, 0, num_tokens])),
    )
    return ToyProposer(num_speculative_tokens=num_tokens, tree=tree, rules=rules)


def with_room(batching: Any, proposer: ToyProposer, max_num_seqs: int) -> Any:
    """Returns a batching policy as `sim.setup` allows: its limits hold the pass of a sequence.

    Those of `Sglang`, which limit prompts only, hold the passes of all sequences.
    """
    if isinstance(batching, SplitFuse):
        return Chunked(max_num_batched_tokens=batching.max_num_batched_tokens + 8)
    num_rows = 1 + proposer.num_speculative_tokens
    needed = num_rows + proposer.rules.num_input_slots
    if isinstance(batching, Sglang):
        needed *= max_num_seqs
    given = {name: getattr(batching, name, None) for name in LIMITS}
    raised = {name: value + needed for name, value in given.items() if value and value < needed}
    return replace(batching, **raised)


@st.composite
def draw_speculating_worlds(draw: st.DrawFn, draft_length: Any = None) -> SpeculatingWorld:
    """Draws a world whose engines verify draft tokens.

    draft_length: the policy, in a world that runs until all requests have ended; None: any policy, and the
    world may end earlier.
    """
    world = draw(draw_worlds())
    tick_s = world.model.tick_s
    if draft_length is not None:
        histogram = RunningHistogram(min_observations=1, initial_tokens=8)
        world = replace(world, until_s=None, prediction=histogram)
    if not isinstance(world.caching, CARRYING):
        world = replace(world, caching=Paged(block_size=world.caching.block_size))
    proposer = draw(draw_proposer())
    plain = {each.name: getattr(world, each.name) for each in fields(World) if each.name != "engine"}
    return SpeculatingWorld(
        **plain | {"batching": with_room(world.batching, proposer, world.max_num_seqs)},
        draft_length=draw(draw_draft_length(tick_s)) if draft_length is None else draft_length,
        proposer=proposer,
        acceptance=draw(st.builds(Iid, rate=RATES) | st.builds(PartlyFound, rate=RATES)),
        tpot_s=draw(st.sampled_from([0.5, 1.0, 2.0])) * tick_s,
    )
