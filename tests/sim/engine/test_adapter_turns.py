"""Adapters whose requests do not start at once: nothing waits for ever, and a leap equals steps."""

from functools import partial

import pytest

from experiments.conformance.same_run import assert_leap_equals_step
from experiments.conformance.worlds import Ask, World
from policies.adapters.merged import Merged
from policies.adapters.serving import Adapter
from policies.adapters.unified_paging import UnifiedPaging
from policies.batching.sglang import Sglang
from policies.caching.paged import Paged
from policies.prediction.oracles import OracleWithNoise
from policies.scheduling.s3 import S3
from sim.engine.replica_pool import Links
from tests.worlds.services import Service
from tests.worlds.speculating import speculating


def test_merged_adapters_change_where_the_policies_start_no_request_of_the_current_one():
    """The oldest waiting request, the only one that S3 considers here, needs another adapter."""
    names = ["a", "b", "c", "a", "b"]
    asks = tuple(Ask(0.1 * place, 4, 20, adapter=name) for place, name in enumerate(names))
    world = World(
        asks=asks,
        scheduling=S3(window=1),
        prediction=OracleWithNoise(error=0.0),
        adapters=Merged(max_serve_s=None),
        served=tuple(Adapter(name=name, rank=1) for name in "abc"),
        links=partial(Links, host_bytes_per_s=1.0, disk_bytes_per_s=1.0),
        num_blocks=8,
    )
    assert set(assert_leap_equals_step(world).records.requests.status) == {"finished"}


@pytest.mark.parametrize("of", [lambda service: service, speculating], ids=["plain", "speculating"])
def test_merged_adapters_change_in_a_service_whose_policies_would_wait_for_ever(of):
    """The batching of one role waits for any event, so that nothing else would tell that it is stuck."""
    service = Service(
        asks=tuple(Ask(0.1 * place, 4, 20, adapter=name) for place, name in enumerate("abcabacb")),
        scheduling=S3(window=1),
        prediction=OracleWithNoise(error=0.0),
        adapters=Merged(max_serve_s=None),
        served=tuple(Adapter(name=name, rank=1) for name in "abc"),
        links=partial(Links, bytes_per_token=1.0, host_bytes_per_s=1.0, disk_bytes_per_s=1.0),
        num_blocks=8,
    )
    assert set(assert_leap_equals_step(of(service)).records.requests.status) == {"finished"}


def test_merged_adapters_with_a_backlog_take_turns():
    """After its time an adapter goes behind all others, so that a third one is not overtaken for ever."""
    world = World(
        asks=tuple(Ask(0.0, 4, 8, adapter=name) for name in [*"ab" * 6, "c"]),
        max_num_seqs=1,
        adapters=Merged(max_serve_s=0.5),
        served=tuple(Adapter(name=name, rank=1) for name in "abc"),
        links=partial(Links, host_bytes_per_s=10.0, disk_bytes_per_s=10.0),
    )
    ends_s = assert_leap_equals_step(world).records.requests.finished_s
    assert ends_s[12] < ends_s[:12].max() / 2


def test_leap_equals_step_where_sglang_admits_by_tokens_but_the_adapter_lacks_blocks():
    """Whether a request waits for memory may change in every iteration of a leap."""
    asks = (
        Ask(1.75, 4, 46, adapter="a"),
        *(Ask(0.0, 1, 8) for _ in range(8)),
        Ask(2.125, 1, 8, adapter="b"),
    )
    world = World(
        asks=asks,
        batching=Sglang(max_num_batched_tokens=21, max_prefill_tokens=1, schedule_conservativeness=0.1),
        caching=Paged(block_size=3),
        adapters=UnifiedPaging(),
        served=(Adapter(name="a", rank=1), Adapter(name="b", rank=16)),
        links=partial(Links, bytes_per_token=1.0, host_bytes_per_s=8.0, disk_bytes_per_s=5.6),
        num_blocks=8,
        max_num_seqs=2,
    )
    waits_s = assert_leap_equals_step(world).records.requests.wait_memory_s
    assert waits_s[9] > 0
