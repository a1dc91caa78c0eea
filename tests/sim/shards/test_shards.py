"""Shards: a run that is divided has the tables and the summary of one that is not, to the last bit."""

import json
from dataclasses import replace
from functools import cache
from io import BytesIO

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from experiments.app.settings.hydra_errors import composed
from policies.routing.adapter_aware import Dedicated
from policies.routing.load_balancing import Random, RoundRobin, Weighted
from policies.routing.session_affinity import SessionAffinity
from policies.user_code import WrongDecisionError
from sim.cluster.settings import SimSettings
from sim.records.run import events_table
from sim.settings.errors import ConfigError
from sim.settings.scenario import build_scenario
from sim.shards.assignment import assign
from sim.shards.merge import merged
from sim.shards.shard_file import DamagedShardError, ShardFile, shard_bytes
from sim.shards.traffic import ShardTraffic
from sim.shards.whole_run import run_shard, shard_bounds
from tests.examples import examples
from tests.tables import assert_equal_tables

SOURCE = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR])
SMALL = ("model=smollm2_135m", "hardware=l4")
FEW = ("workload=synthetic", "workload.num_requests=80", "load=4")
WORLDS = {
    "plain": FEW,
    "poisson": ("workload=poisson", "workload.num_requests=60"),
    "priorities and patience": (
        *FEW, "workload.priority_shares=[0.5,0.5]", "scheduling=priority", "workload.patience_s=0.4",
    ),
    "little memory": (*FEW, "engine.num_kv_blocks=150", "engine.max_num_seqs=8"),
    "reserved ahead": (*FEW, "caching=contiguous_pow2", "workload.max_tokens=512"),
    "refusals": (*FEW, "engine.num_kv_blocks=20"),
    "samples": (*FEW, "workload.branching.width=3"),
    "beam search": (*FEW, "workload.branching.width=3", "workload.branching.every=4"),
    "sessions": ("workload=mooncake_like", "workload.duration_s=20", "caching=radix"),
    "adapters": ("workload=lora", "workload.of.num_requests=60", "workload.num=7", "adapters=fixed_slots"),
    "speculation": (*FEW, "speculation=ngram", "draft_length=adaptive"),
    "jitter": (*FEW, "latency/jitter=lognormal"),
    "timeouts": (*FEW, "retries.timeout_s=0.5"),
    "a limit of time": (*FEW, "sim.until_s=1.5"),
    "predictions": (*FEW, "scheduling=shortest_job_first", "prediction=histogram"),
    "load": (*FEW, "prompt_scale=2", "output_scale=0.5"),
    "prompts cut to the context": (
        *FEW, "prompt_scale=2", "engine.max_model_len=512", "sim.until_s=1.5",
    ),
    "two models": (
        "++pools={a: {replicas: 3}, b: {model: llama3_2_1b, replicas: 2, hardware: l40s}}",
        "workload=callers", "++workload.models={smollm2-135m: 2, llama-3.2-1b: 1}",
        "++workload.tenants={x: 1, y: 2}", "workload.of.duration_s=15",
    ),
    "a mix": ("workload=multi_tenant_day", "~workload.parts.chat", "sim.until_s=60"),
    "held back by a limit": (
        "workload=throttled", "workload.of.num_requests=60", "workload.requests_per_minute=30",
    ),
}  # fmt: skip
ROUTERS = {
    "round robin": RoundRobin(),
    "random": Random(seed=3),
    "weighted": Weighted(weights=(1.0, 2.0, 0.5, 3.0, 1.0)),
    "sessions": SessionAffinity(max_load=float("inf")),
    "dedicated": Dedicated(),
}


@cache
def scenario_of(*overrides):
    replicas = [] if any("pools=" in override for override in overrides) else ["replicas=5"]
    return build_scenario(composed(SOURCE, [*SMALL, *replicas, *overrides]))


def assert_equal(one, other):
    """Asserts that two results have the same tables and summary to the last bit."""
    for name in ("requests", "iterations", "own_gaps", "events"):
        assert_equal_tables(getattr(one.records, name), getattr(other.records, name), check_exact=True)
    for name in ("gap_s", "gap_count", "gap_end_s"):
        np.testing.assert_array_equal(getattr(one.records, name), getattr(other.records, name))
    assert_equal_tables(one.requests, other.requests, check_exact=True)
    assert_equal_tables(one.replicas, other.replicas, check_exact=True)
    assert_equal_tables(events_table(one.records), events_table(other.records), check_exact=True)
    if one.records.bursts is not None:
        assert_equal_tables(one.records.bursts, other.records.bursts, check_exact=True)
        one_acceptance, acceptance = one.records.speculation.acceptance, other.records.speculation.acceptance
        assert_equal_tables(one_acceptance, acceptance, check_exact=True)
    assert one.records.replicas == other.records.replicas
    assert json.dumps(one.summary) == json.dumps(other.summary)


@examples(10, 40)
@given(
    world=st.sampled_from(sorted(WORLDS)),
    router=st.sampled_from(sorted(ROUTERS)),
    shards=st.integers(1, 5),
    seed=st.integers(0, 100),
)
def test_a_divided_run_is_the_run(world, router, shards, seed):
    whole = replace(scenario_of(*WORLDS[world]), routing=ROUTERS[router], seed=seed)
    divided = replace(whole, sim=replace(whole.sim, shards=shards))
    assert_equal(divided.run(), whole.run())


@pytest.mark.parametrize("world", sorted(WORLDS))
def test_the_files_of_shards_give_the_run(world):
    whole = scenario_of(*WORLDS[world])
    source = whole.source()
    assignment = assign(source, whole.for_a_run().routing, whole.replica_pools(), whole.sim.until_s)
    read = []
    every, pools = shard_bounds(3, whole.num_replicas, None), whole.replica_pools()
    traffic = ShardTraffic(whole.source, assignment, every)
    for index, bounds in enumerate(every):
        shard = run_shard(traffic.source(index), assignment, pools, bounds, whole, whole.sim)
        read.append(ShardFile(BytesIO(shard_bytes(shard, assignment.notes))).records())
    records = merged([shard for shard, _ in read], whole.sim.until_s)
    assert_equal(whole.result(records, read[0][1]), whole.run())


def test_a_damaged_file_is_an_error():
    with pytest.raises(DamagedShardError):
        ShardFile(BytesIO(b"PK, but not an archive"))


REFUSED = {
    "routing=least_outstanding": "it reads the state of replicas, which shards do not share; choose routing=",
    "routing=session_affinity": "dedicated, or session_affinity with routing.max_load=inf",
    "routing=slo_aware": "it reads the state of replicas",
    "admission=queue_bound": "it admits by the load of all replicas; choose admission=none",
    "retries=immediate": "a retry is routed again",
    "failures=random_crashes": "the requests of a crashed replica go to others",
    "scaling=concurrency": "it counts the requests of all replicas; choose scaling=none",
    "encoders.replicas=1": "all replicas share them; set encoders.replicas=0",
    "sim.stop_overloaded=true": "set sim.stop_overloaded=false, or set sim.shards=null",
    "sim.shards=6": "must be <= 5, the number of replicas, or auto",
    "sim.shards=0": "must be >= 1, auto, or null",
}


@pytest.mark.parametrize("override", REFUSED)
def test_what_cannot_be_divided_is_refused(override):
    with pytest.raises(ConfigError, match=r"^sim\.shards=") as refused:
        scenario_of(*FEW, "sim.shards=2", override)
    assert REFUSED[override] in str(refused.value)


def test_requests_that_follow_others_are_refused():
    scenario = scenario_of("workload=closed_loop", "sim.shards=2")
    with pytest.raises(ValueError, match=r"^sim\.shards=2: the requests of this workload follow the ends"):
        scenario.run()


class ReadsInSecret:
    """A router with a false declaration."""

    reads_replicas = False

    def choose(self, request, replicas, now):
        return int(replicas[0].num_outstanding > 0)


def test_a_router_that_reads_replicas_in_secret_is_an_error():
    scenario = replace(scenario_of(*FEW), routing=ReadsInSecret(), sim=SimSettings(shards=2))
    with pytest.raises(WrongDecisionError, match="has read num_outstanding of a replica, although"):
        scenario.run()


def test_auto_divides_by_cores_replicas_and_requests():
    assert shard_bounds("auto", 10, 100, 2) == [(i * 10 // 8, (i + 1) * 10 // 8) for i in range(8)]
    assert len(shard_bounds("auto", 1000, 10_000_000, 2)) == 200
    assert len(shard_bounds("auto", 3, None, 2)) == 3
    bounds = shard_bounds(7, 100, None)
    assert [first for first, _ in bounds] == [0, *(end for _, end in bounds[:-1])]
    assert bounds[-1][1] == 100
