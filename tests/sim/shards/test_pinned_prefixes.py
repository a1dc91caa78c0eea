"""Pinned prefixes are kept by each replica alone, until the end of the whole run."""

from dataclasses import dataclass, replace
from io import BytesIO

import pytest

from policies.caching.prefix import PrefixCaching
from policies.core.request import Prompt, Request, Segment
from policies.routing.load_balancing import Random
from sim.cluster.settings import SimSettings
from sim.shards.assignment import assign
from sim.shards.merge import merged
from sim.shards.shard import run_shard
from sim.shards.shard_file import ShardFile, shard_bytes
from sim.shards.traffic import ShardTraffic
from sim.shards.whole_run import shard_bounds
from sim.workload.base import Arrival, WorkloadNotes
from sim.workload.listed import ListedSource
from tests.sim.shards.test_shards import assert_equal, scenario_of

PIN_S = 1.5


@dataclass(frozen=True, kw_only=True, slots=True)
class PaidPrefixes:
    """A request every 0.2 s with one of three prefixes that its client pays to keep."""

    def source(self, *, seed, max_model_len):
        listed = []
        for n in range(30):
            segments = (Segment(n % 3, 320), Segment(100 + n, 40))
            request = Request(n, 0.2 * n, Prompt(360, segments, 320), session_id=n % 3)
            listed.append(Arrival(request, 20 + n))
        return ListedSource(listed, notes=WorkloadNotes())


def scenario_with(routing, shards=None, until_s=None):
    whole = scenario_of("tariff=cached_prompts", "tariff.usd_per_million_token_hours=4.5")
    caching = PrefixCaching(max_pinned_share=0.3, pin_s=PIN_S)
    sim = SimSettings(shards=shards, until_s=until_s)
    return replace(whole, caching=caching, routing=routing, workload=PaidPrefixes(), sim=sim)


@pytest.mark.parametrize("until_s", [None, 5.0])
def test_a_divided_run_keeps_prefixes_as_long_as_the_run(until_s):
    routing = Random(seed=1)
    whole = scenario_with(routing, until_s=until_s).run()
    assert whole.records.pinned_token_s > 0
    assert whole.records.requests["cached_tokens"].sum() > 0
    for shards in (1, 2, 5):
        divided = scenario_with(routing, shards, until_s).run()
        assert divided.records.pinned_token_s == whole.records.pinned_token_s
        assert_equal(divided, whole)


def test_the_files_of_shards_have_the_pins():
    whole = scenario_with(Random(seed=1))
    source, pools, every = whole.source(), whole.replica_pools(), shard_bounds(3, whole.num_replicas, None)
    assignment = assign(source, whole.for_a_run().routing, pools, None)
    traffic = ShardTraffic(whole.source, assignment, every)
    shards = [
        run_shard(traffic.source(index), assignment, pools, bounds, whole, whole.sim)
        for index, bounds in enumerate(every)
    ]
    read = [ShardFile(BytesIO(shard_bytes(shard, assignment.notes))).records()[0] for shard in shards]
    assert [shard.pinned for shard in read] == [shard.pinned for shard in shards]
    assert merged(read).pinned_token_s == whole.run().records.pinned_token_s
