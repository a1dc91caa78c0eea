"""A policy preempts only for a sequence that can then be admitted, with all adapters; all requests end."""

from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from random import Random

import pytest
import yaml

import policies.scheduling as family
from experiments.conformance.same_run import assert_same_table
from experiments.conformance.toys import TICK_S
from experiments.conformance.worlds import Ask, World
from policies.adapters.exchange import Exchange
from policies.adapters.fixed_slots import FixedSlots
from policies.adapters.merged import Merged
from policies.adapters.serving import Adapter
from policies.adapters.unified_paging import UnifiedPaging
from policies.batching.chunked import Chunked
from policies.caching.paged import Paged
from policies.core.request import Branching
from policies.prediction.oracles import OracleWithNoise
from policies.scheduling.deadlines import LeastSlack
from policies.scheduling.mlfq import Mlfq
from policies.scheduling.priority import OnlineBatch
from policies.scheduling.shortest_job import ShortestRemaining
from sim.engine.replica_pool import Links

NAMES = "abcdef"
SHORT_MLFQ = Mlfq(quantum_tokens=4, num_levels=4, starvation_s=40 * TICK_S)
SCHEDULING = {
    "mlfq": SHORT_MLFQ,
    "mlfq, some active": replace(SHORT_MLFQ, max_active=2),
    "mlfq, swap": replace(SHORT_MLFQ, preemption_mode="swap"),
    "least_slack": LeastSlack(
        ttft_s=(10 * TICK_S, 30 * TICK_S),
        tpot_s=(2 * TICK_S,),
        prefill_tokens_per_s=4 / TICK_S,
        margin_s=5 * TICK_S,
    ),
    "shortest_remaining": ShortestRemaining(min_gain_tokens=2),
    "online_batch": OnlineBatch(promote_before_s=20 * TICK_S),
}
ADAPTERS = {
    "none": None,
    "exchange": Exchange(max_loras=3, max_active_adapters=2, cycle_time_s=20 * TICK_S),
    "fixed_slots": FixedSlots(max_loras=2),
    "fixed_slots, prefetch": FixedSlots(max_loras=2, prefetch=2),
    "merged": Merged(max_serve_s=20 * TICK_S),
    "unified_paging": UnifiedPaging(prefetch=2),
}
PREEMPTING = [
    module
    for module in (
        import_module(f"policies.scheduling.{info.name}") for info in iter_modules(family.__path__)
    )
    if hasattr(module, "displace") and not module.__name__.endswith(".displacement")
]


def world_of(scheduling, adapters, seed, *, num_blocks, watermark):
    """Returns a world of 24 requests, in four slots, for more adapters than fit on the GPU."""
    rng = Random(seed)
    asks = tuple(
        Ask(
            arrival_s=rng.randrange(60) * TICK_S,
            num_prompt_tokens=rng.randint(1, 12),
            num_output_tokens=rng.choice([2, 5, 40]),
            priority=rng.randrange(2),
            branching=Branching(2) if rng.random() < 0.1 else None,
            adapter=None if adapters is None else rng.choice(NAMES),
        )
        for _ in range(24)
    )
    return World(
        asks=asks,
        batching=Chunked(max_num_batched_tokens=32),
        scheduling=scheduling,
        prediction=OracleWithNoise(error=0.5),
        caching=Paged(block_size=4, watermark=watermark),
        num_blocks=num_blocks,
        num_swap_blocks=20,
        max_num_seqs=4,
        adapters=adapters,
        served=tuple(Adapter(name=name, rank=8) for name in NAMES),
        links=partial(
            Links,
            bytes_per_token=1.0,
            host_bytes_per_s=16 / TICK_S,
            disk_bytes_per_s=16 / TICK_S,
            merge_s=TICK_S,
        ),
    )


@pytest.fixture
def displacements(monkeypatch):
    """Returns a list to which each preemption for a waiting sequence adds whether that one then has room."""
    found = []
    for module in PREEMPTING:
        displace = module.displace

        def noted(view, step, head, victims, displace=displace):
            num_before = view.num_running
            displace(view, step, head, victims)
            if view.num_running < num_before:
                found.append(view.has_room(head))

        monkeypatch.setattr(module, "displace", noted)
    return found


@pytest.mark.sampled(fast=2, slow=4)
@pytest.mark.parametrize("name", SCHEDULING)
def test_preemptions_make_room_for_a_sequence_that_can_start_and_all_requests_end(name, displacements):
    for adapters in ADAPTERS.values():
        for seed, num_blocks, watermark in ((0, 200, 0.0), (1, 40, 0.2), (2, 24, 0.3)):
            world = world_of(SCHEDULING[name], adapters, seed, num_blocks=num_blocks, watermark=watermark)
            records = world.simulate().records
            assert_same_table(records.requests, world.simulate(leap=False).records.requests)
            assert (records.requests["status"] == "finished").all(), adapters
            assert all(displacements), f"{adapters}: a sequence was preempted in vain"
    assert displacements, "no sequence was preempted for a waiting one"


def test_all_preempting_policies_and_all_adapters_policies_are_tested():
    tested = {type(policy).__module__ for policy in SCHEDULING.values()}
    assert tested == {module.__name__ for module in PREEMPTING}
    configs = Path(__file__).parents[3].glob("configs/adapters/*.yaml")
    settings = [yaml.safe_load(path.read_text(encoding="utf-8")) or {} for path in configs]
    targets = {each.get("_target_") for each in settings}
    assert targets == {
        policy and f"{type(policy).__module__}.{type(policy).__name__}" for policy in ADAPTERS.values()
    }


@pytest.mark.parametrize("chunk", [4, 9, 13])
def test_least_slack_does_not_alternate_between_two_prompts_that_do_not_fit_together(chunk):
    """Three requests compete for 48 tokens of KV; a chunk takes longer than their arrivals are apart."""
    world = World(
        asks=(Ask(0.0, 36, 5), Ask(0.0, 35, 5), Ask(0.1, 30, 20)),
        batching=Chunked(
            max_num_batched_tokens=2 * chunk,
            long_prefill_token_threshold=chunk,
            scheduler_reserve_full_isl=False,
        ),
        scheduling=LeastSlack(ttft_s=(1.5,), tpot_s=(2.5,), prefill_tokens_per_s=4.0, margin_s=0.7),
        caching=Paged(block_size=8),
        num_blocks=6,
    )
    requests = world.simulate().records.requests
    assert requests.status.tolist() == ["finished"] * 3
    assert requests.preemptions.sum() <= requests.output_tokens.sum(), (
        "each preemption is paid for by a token"
    )
