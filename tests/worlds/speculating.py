"""Worlds that speculate, made from any other world."""

from dataclasses import dataclass, fields

from hypothesis import assume
from hypothesis import strategies as st

from experiments.conformance.speculating import SpeculatingWorld, ToyProposer
from policies.caching.paged import Paged
from policies.caching.prefix import PrefixCaching
from policies.speculation import SlotRules
from policies.speculation.fixed import Fixed
from policies.speculation.tree import TokenTree
from sim.speculation.acceptance.iid import Iid
from tests.worlds.clusters import Cluster


@dataclass(frozen=True, kw_only=True)
class SpeculatingCluster(SpeculatingWorld, Cluster):
    """A `Cluster` in which every replica speculates."""


def speculating(world, kind=SpeculatingWorld, **settings):
    """Returns a world in which the replicas of another one speculate. kind: its class."""
    given = {each.name: getattr(world, each.name) for each in fields(kind) if hasattr(world, each.name)}
    del given["engine"]
    return kind(**(given | settings))


@st.composite
def proposers(draw):
    tree = draw(st.sampled_from([None, None, TokenTree.of_widths([2, 1]), TokenTree.of_widths([3, 2])]))
    num_tokens = draw(st.integers(1, 6)) if tree is None else tree.num_nodes
    rules = SlotRules(draw(st.booleans()), draw(st.integers(0, 1)), draw(st.booleans()))
    return ToyProposer(num_speculative_tokens=num_tokens, tree=tree, rules=rules)


@st.composite
def draw_speculating(draw, worlds, kind=SpeculatingWorld, more_blocks=0):
    """Returns a strategy for worlds that speculate, from one for other worlds.

    kind: their class. more_blocks: further KV blocks, for the slots behind sequences.
    """
    world = draw(worlds)
    proposer = draw(proposers())
    budgets = ("max_num_batched_tokens", "max_num_scheduled_tokens")
    limits = [getattr(world.batching, name, None) or 99 for name in budgets]
    assume(min(limits) > proposer.num_speculative_tokens + 1)  # configurations with less are refused
    caching = draw(st.sampled_from([Paged(block_size=1), Paged(block_size=4), PrefixCaching(block_size=4)]))
    return speculating(
        world,
        kind,
        num_blocks=world.num_blocks + more_blocks,
        proposer=proposer,
        caching=caching,
        acceptance=Iid(rate=draw(st.sampled_from([0.0, 0.5, 0.8, 1.0]))),
        draft_length=Fixed(num_tokens=draw(st.sampled_from([None, 0, 2]))),
    )
