"""The queue by adapter against a search through all waiting sequences."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.adapters.exchange import Exchange
from policies.adapters.fixed_slots import FixedSlots
from policies.adapters.merged import Merged
from policies.adapters.serving import Adapter, AdapterMemory, Registry
from policies.adapters.unified_paging import UnifiedPaging
from policies.batching.chunked import Chunked
from policies.caching.paged import Paged
from policies.caching.pool import KvMemory
from policies.core.engine import EngineCore
from policies.core.plan import StepOutcome
from policies.core.request import Prompt, Request
from policies.core.waiting_queue import WaitingQueue
from policies.scheduling.priority import Priority
from tests.examples import examples

ADAPTERS = (None, "a", "b", "c", "d", "e")


class OneByOne(WaitingQueue):
    """A queue of its own kind, in which the engine asks about the adapter of every sequence."""


class SearchesAll(Priority):
    def queue(self):
        return OneByOne()


class Served:
    """An engine with adapters, and the loads that it waits for."""

    def __init__(self, serving, scheduling, num_blocks):
        pool = Paged(block_size=4).pool(KvMemory(num_blocks))
        adapters = [Adapter(name=name, rank=4) for name in ADAPTERS[1:]]
        registry = Registry(adapters, "base", AdapterMemory(bytes_per_rank=1.0, block_bytes=4.0))
        self.core = EngineCore(
            batching=Chunked(max_num_batched_tokens=16),
            scheduling=scheduling,
            block_pool=pool,
            max_num_seqs=4,
            max_model_len=60,
            residents=serving.residents(registry, pool),
        )
        self.loads = []

    def step(self, now, come):
        """Runs a step and returns what it decided."""
        core = self.core
        plan = core.plan(now)
        self.loads += core.take_adapter_loads()
        decided = [[load.name for load in self.loads], core.waits_for]
        if come:
            for load in self.loads:
                core.adapter_loaded(load.name)
            self.loads = []
        if plan is not None:
            decided += [plan.num_decodes, [chunk[1:] for chunk in plan.chunks], plan.horizon, plan.waits_for]
            decided += [[seq.request_id for seq in seqs] for seqs in (plan.admitted, plan.preempted)]
            core.commit(plan, StepOutcome(), now)
        core.check_integrity()
        return decided


requests = st.tuples(st.sampled_from(ADAPTERS), st.integers(1, 20), st.integers(1, 12), st.integers(0, 2))


@pytest.mark.parametrize(
    "serving",
    [
        Exchange(max_loras=3, max_active_adapters=2, cycle_time_s=3.0),
        FixedSlots(max_loras=2),
        FixedSlots(max_loras=3, pinned=("a",), prefetch=1, eviction="lfu"),
        Merged(max_serve_s=4.0),
        UnifiedPaging(),
    ],
    ids=["exchange", "slots", "pinned", "merged", "paged"],
)
@examples(10, 30)
@given(st.lists(requests, min_size=6, max_size=30), st.integers(20, 40), st.integers(1, 3), st.data())
def test_the_same_sequences_are_admitted(serving, requests, num_blocks, num_at_once, data):
    one = Served(serving, Priority(), num_blocks)
    other = Served(replace(serving), SearchesAll(), num_blocks)
    now, request_id = 0.0, 0
    while request_id < len(requests) or one.core.num_unfinished:
        for adapter, num_prompt, num_output, priority in requests[request_id : request_id + num_at_once]:
            for each in (one, other):
                request = Request(request_id, now, Prompt(num_prompt), adapter=adapter, priority=priority)
                each.core.add(request, num_output)
            request_id += 1
        now += 1.0
        come = now > 200 or data.draw(st.booleans())
        assert one.step(now, come) == other.step(now, come)
