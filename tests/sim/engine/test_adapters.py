"""LoRA adapters in simulated time: their arrival, their cost, and what a run reports about them."""

from dataclasses import replace
from functools import partial

import pytest

from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from hwmodels.assembly.site import Kernels
from hwmodels.model.weights import Lora
from hwmodels.operators.lora_kernels import LoraKernels
from policies.adapters.fixed_slots import FixedSlots
from policies.adapters.merged import Merged
from policies.adapters.serving import Adapter
from policies.adapters.unified_paging import UnifiedPaging
from policies.batching.chunked import Chunked
from policies.batching.tgi import Tgi
from policies.caching.paged import Paged
from policies.routing.adapter_aware import AdapterAffinity, Dedicated
from policies.routing.load_balancing import RoundRobin
from sim.engine.replica_pool import Links
from sim.records.run import events_table
from sim.settings.scenario import build_scenario

TICK_S = 0.125  # one iteration of the flat toy model
SERVED = (Adapter(name="a", rank=8), Adapter(name="b", rank=4))  # of 8 and 4 bytes


def links(**more):
    """Returns a maker of links: a byte takes one tick from host memory, and two from disk."""
    given = {"bytes_per_token": 1.0, "host_bytes_per_s": 1 / TICK_S, "disk_bytes_per_s": 0.5 / TICK_S}
    return partial(Links, **given | more)


def run_world(make_world, *asks, serving=None, leap=True, **changes):
    given = {"adapters": serving or FixedSlots(max_loras=2), "served": SERVED, "links": links()}
    return make_world(*asks, **given | changes).simulate(leap=leap)


def ticks(times_s):
    return (times_s / TICK_S).tolist()


def named(ask, adapter, at=0.0, num_prompt=4, num_output=2):
    return ask(at * TICK_S, num_prompt, num_output)._replace(adapter=adapter)


def test_the_first_request_of_an_adapter_waits_for_it_the_next_does_not(make_world, ask):
    """8 bytes from disk take 16 ticks; then prompt and answer one tick each."""
    run = run_world(make_world, named(ask, "a"), named(ask, "a", at=30))
    assert ticks(run.records.requests.finished_s) == [18, 32]
    waits = run.records.requests.wait_load_s
    assert ticks(waits) == [16, 0]
    events = events_table(run.records).to_pandas()
    mine = events[events.request_id == 0].event.tolist()
    assert mine == ["arrive", "load", "loaded", "admit", "first_token", "end"]


def test_one_copy_serves_all_that_wait_for_it_and_others_go_on_meanwhile(make_world, ask):
    asks = named(ask, "a"), named(ask, "a", at=5), named(ask, None, num_output=10)
    run = run_world(make_world, *asks)
    assert ticks(run.records.requests.finished_s) == [18, 10, 18]  # by time of arrival
    (core,) = run.cores
    assert (core.residents.counts.num_loads, core.residents.counts.num_starts) == (1, 2)


def test_adapters_come_one_after_the_other_on_the_same_way(make_world, ask):
    run = run_world(make_world, named(ask, "a"), named(ask, "b"))
    assert ticks(run.records.requests.finished_s) == [18, 26]


def test_from_host_memory_an_adapter_comes_faster(make_world, ask):
    """One slot: a from disk, b from disk, a again from host memory."""
    asks = named(ask, "a"), named(ask, "b", at=40), named(ask, "a", at=80)
    run = run_world(make_world, *asks, serving=FixedSlots(max_loras=1))
    assert ticks(run.records.requests.finished_s) == [18, 50, 90]


def test_a_switch_of_merged_weights_takes_the_copy_and_the_merge(make_world, ask):
    run = run_world(
        make_world,
        *(named(ask, "a"), named(ask, None, at=20), named(ask, "a", at=30)),
        serving=Merged(),
        links=links(merge_s=3 * TICK_S),
    )
    assert ticks(run.records.requests.finished_s) == [16 + 3 + 2, 21 + 3 + 2, 30 + 8 + 3 + 2]


def test_a_request_without_a_slot_for_its_adapter_is_reported_as_waiting_for_it(make_world, ask):
    """One slot: b waits until a has come (16 ticks) and answered (2), then for its own 4 bytes from disk. A
    request without an adapter passes it.
    """
    asks = named(ask, "a"), named(ask, "b"), named(ask, None, at=17, num_output=3)
    requests = run_world(make_world, *asks, serving=FixedSlots(max_loras=1)).records.requests
    assert ticks(requests.wait_adapter_s) == [0, 18, 0]
    assert ticks(requests.wait_load_s) == [16, 8, 0]
    assert requests.filter(regex="wait_(slot|budget|memory|policy)_s").to_numpy().sum() == 0


def test_whose_turn_it_is_not_waits_for_its_adapter_too(make_world, ask):
    """Merged weights: b until a, of 16 + 3 ticks, has answered in 2; then 8 + 3 and 2 of its own."""
    asks = named(ask, "a"), named(ask, "b")
    run = run_world(make_world, *asks, serving=Merged(), links=links(merge_s=3 * TICK_S))
    requests = run.records.requests
    assert ticks(requests.finished_s) == [21, 34]
    assert requests.wait_policy_s.sum() == 0
    assert ticks(requests.wait_adapter_s + requests.wait_load_s) == [19, 32]


@pytest.mark.parametrize("leap", [True, False])
def test_the_door_closes_when_only_others_wait_however_long_the_leap_is(make_world, ask, leap):
    """5 tokens of plain prompt, one a tick. From the first on only a waits, so it is before the plain one
    that comes at 2.5: from disk 16 ticks from 5 on, prompt and answer until 26. Then plain again, at once.
    """
    asks = named(ask, None, num_prompt=5, num_output=1), named(ask, "a"), named(ask, None, 2.5)
    few = Chunked(max_num_batched_tokens=1)
    run = run_world(make_world, *asks, serving=Merged(), leap=leap, batching=few)
    assert ticks(run.records.requests.finished_s) == [5, 26, 31]


def test_a_run_tells_what_its_adapters_did(make_world, ask):
    run = run_world(make_world, named(ask, "a"), named(ask, "b"), named(ask, None), named(ask, "a", at=30))
    iterations = run.records.iterations
    assert iterations.adapters.max() == 1
    with_a = iterations[iterations.adapter_ranks > 0]
    assert (with_a.adapter_ranks == 16).all()  # padded to the slots' rank
    assert with_a.adapter_tokens.tolist() == [4, 1, 4, 1, 4, 1]
    assert (with_a.adapter_rank_tokens == 16 * with_a.adapter_tokens).all()


def test_without_adapters_the_tables_have_no_columns_of_theirs(make_world, ask):
    assert not [
        name for name in make_world(ask(0.0, 4, 3)).simulate().records.iterations if "adapter" in name
    ]


@pytest.mark.parametrize("leap", [True, False])
def test_affinity_loads_each_adapter_once_where_turns_load_it_everywhere(make_world, ask, leap):
    asks = [named(ask, "ab"[i // 2 % 2], at=40 * i) for i in range(12)]
    loads = {}
    for routing in (RoundRobin(), AdapterAffinity(), Dedicated()):
        run = run_world(make_world, *asks, routing=routing, num_replicas=2, leap=leap)
        loads[type(routing).__name__] = [core.residents.counts.num_loads for core in run.cores]
    assert loads == {"RoundRobin": [2, 2], "AdapterAffinity": [2, 0], "Dedicated": [1, 1]}


# Scenarios.


@pytest.fixture(scope="module")
def scenario():
    overrides = ["model=llama2_7b", "hardware=a100_80gb_sxm", "workload=lora", "adapters=fixed_slots"]
    overrides += ["workload.of.num_requests=40", "workload.num=20", "slo=none"]
    return build_scenario(ConfigSource(config_name="simulate", dirs=[CONFIG_DIR]).compose(overrides))


def test_the_summary_has_loads_hits_and_bytes(scenario):
    summary = scenario.run().summary["adapters"]
    used = {arrival.request.adapter for arrival in scenario.source().arrivals()}
    assert summary["loads"] - summary["evictions"] <= 8
    assert summary["loads_from_disk"] == len(used) <= summary["loads"]
    assert 0 < summary["hit_share"] < 1
    assert 1 <= summary["batch_adapters"] <= 8
    assert replace(scenario, adapters=None, workload=scenario.workload.of).run().summary["adapters"] is None


def test_adapters_have_the_bytes_of_their_rank(scenario):
    """Llama-2-7B: 32 layers x (24,576 + 8,192 + 30,208 + 15,104) numbers of 2 bytes a rank."""
    memory = scenario.adapter_memory()
    assert memory.bytes_per_rank == 32 * (24576 + 8192 + 30208 + 15104) * 2
    assert memory.block_bytes == 16 * 32 * 2 * 4096 * 2
    paged = replace(scenario, adapters=UnifiedPaging())
    pool = paged.caching.pool(paged.kv_memory(1000))
    residents = paged.adapters.residents(paged.registry(paged.served_adapters), pool)
    assert [residents.check(f"adapter-{i}") for i in range(4)] == [5, 10, 20, 39]  # ranks 8, 16, 32, 64


def test_slots_take_memory_from_kv(scenario):
    """8 slots of rank 64: 8 x 64 x 5.0 MB = 2.56 GB of the 8.39 MB that a block has."""
    without = replace(scenario, adapters=UnifiedPaging()).plan_memory().num_blocks
    assert without - scenario.plan_memory().num_blocks == pytest.approx(8 * 64 * 4997120 / 8388608, abs=1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"adapters": None}, "adapters=none: requests of the workload name 20 LoRA adapters; choose"),
        ({"adapters": FixedSlots(max_lora_rank=32)}, "adapters.max_lora_rank=32: must be >= 64"),
        ({"base_model": "mistral-7b"}, "adapter-0 has base_model=mistral-7b: must be llama-2-7b"),
        ({"lora": True}, "the same adapters in every batch exclude adapters that requests name"),
        (
            {"latency": True},
            "latency=recorded: the level does not model LoRA adapters",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(scenario, changes, message):
    class Recorded:
        pass

    if "base_model" in changes:
        changes = {"workload": replace(scenario.workload, **changes)}
    stands_for = {"lora": Lora(rank=8), "latency": Recorded()}
    changes = {name: stands_for.get(name, value) for name, value in changes.items()}
    with pytest.raises(ValueError, match=message):
        replace(scenario, **changes)


def test_prefetched_adapters_leave_running_sequences_their_next_block(make_world, ask):
    """Ten blocks of a token: the first request, alone in its slot, will need all of them, and adapters that
    the others need come meanwhile. On its way in the last block, one would push the first out for ever.
    """
    run = run_world(
        make_world,
        ask(0.0, 9, 2),
        named(ask, "b", num_prompt=1, num_output=1),
        named(ask, "a", num_prompt=1, num_output=1),
        serving=UnifiedPaging(prefetch=3),
        batching=Tgi(max_batch_prefill_tokens=1, max_waiting_tokens=4),
        caching=Paged(block_size=1, watermark=0.0, presume_cached=True),
        served=(Adapter(name="a", rank=1), Adapter(name="b", rank=1)),
        links=links(host_bytes_per_s=29.6, disk_bytes_per_s=5.6),
        num_blocks=10,
        max_num_seqs=1,
    )
    assert run.records.requests.status.tolist() == ["finished"] * 3
    assert run.records.requests.preemptions.tolist() == [1, 0, 0]  # by those that came before it grew


def test_the_grid_of_the_kernels_has_the_slots_of_the_policy(scenario):
    assert scenario.kernels.lora.max_loras == scenario.adapters.max_loras
    assert replace(scenario, adapters=UnifiedPaging()).kernels is scenario.engine.kernels
    engine = replace(scenario.engine, kernels=Kernels(lora=LoraKernels(max_loras=3)))
    assert replace(scenario, engine=engine).kernels.lora.max_loras == 3, "that of the setting"


def test_a_rank_that_is_not_set_is_that_of_the_served_adapters(scenario):
    """The workload's ranks are 8 to 64, so slots are of 64; memory and kernels see the same."""
    free = replace(scenario, adapters=FixedSlots(max_loras=4))
    assert free.adapters == FixedSlots(max_loras=4, max_lora_rank=64)
    assert (
        free.plan_memory()
        == replace(scenario, adapters=FixedSlots(max_loras=4, max_lora_rank=64)).plan_memory()
    )
