"""Static batches that end as a whole: outputs are complete together, and memory is held until then."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.batching.static import Dynamic, Static
from policies.caching.paged import Paged
from policies.caching.pool import KvMemory
from policies.core.engine import EngineCore
from policies.core.plan import StepOutcome
from policies.core.request import Prompt, Request
from policies.scheduling.fcfs import Fcfs
from tests.policies.cores import batch_core


def make_engine(num_blocks=64, batching=None, kind=batch_core):
    return kind(
        batching=batching or Static(batch_size=3, until_last=True),
        scheduling=Fcfs(),
        block_pool=Paged(block_size=4).pool(KvMemory(num_blocks)),
        max_num_seqs=8,
        max_model_len=1000,
    )


def live(core, requests, leap=False):
    """Runs requests (prompt, output) to the end; returns (iteration, sequences, blocks) of every commit."""
    for request_id, (num_prompt, num_output) in enumerate(requests):
        core.add(Request(request_id, 0.0, Prompt(num_prompt)), stop_after=num_output)
    log = []
    while core.num_unfinished:
        plan = core.plan(0.0)
        num_iterations = plan.horizon if leap else 1
        _, finished = core.commit(plan, StepOutcome(num_iterations), 0.0)
        core.check_integrity()
        log.append((core.num_iterations, [seq.request_id for seq in finished], core.block_pool.num_used))
    assert core.block_pool.num_free == core.block_pool.num_blocks
    return log


def test_outputs_of_a_batch_are_complete_with_its_last_one():
    """Prompts of 4 tokens, blocks of 4: outputs 1, 3, 5; the ended ones hold 1 and 2 blocks to the end."""
    log = live(make_engine(), [(4, 1), (4, 3), (4, 5)])
    assert log == [(1, [], 3), (2, [], 5), (3, [], 5), (4, [], 5), (5, [0, 1, 2], 0)]


def test_without_the_option_they_are_complete_when_they_end():
    core = make_engine(batching=Static(batch_size=3), kind=EngineCore)
    log = live(core, [(4, 1), (4, 3), (4, 5)])
    assert [finished for _, finished, _ in log] == [[0], [], [1], [], [2]]


def test_the_next_batch_starts_when_the_last_member_has_ended():
    log = live(make_engine(), [(4, 2), (4, 2), (4, 5), (4, 1), (4, 1)])
    assert [(end, finished) for end, finished, _ in log if finished] == [(5, [0, 1, 2]), (6, [3, 4])]


def test_a_running_member_cannot_be_found_and_so_not_be_aborted():
    core = make_engine(batching=Static(batch_size=1, until_last=True))
    for request_id in (0, 1):
        core.add(Request(request_id, 0.0, Prompt(4)), stop_after=3)
    core.commit(core.plan(0.0), StepOutcome(), 0.0)
    assert core.find(0) is None
    assert core.find(1) is not None


@given(
    requests=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 20)), min_size=1, max_size=12),
    num_blocks=st.integers(8, 24),
    leap=st.booleans(),
    waits=st.booleans(),
)
def test_every_output_is_returned_once_however_little_memory_there_is(requests, num_blocks, leap, waits):
    """The cache is so small that members are preempted, also ended ones."""
    size = {"batch_size": 4, "until_last": True}
    core = make_engine(num_blocks, Dynamic(max_queue_delay_s=0, **size) if waits else Static(**size))
    returned = [request_id for _, finished, _ in live(core, requests, leap) for request_id in finished]
    assert sorted(returned) == list(range(len(requests)))


@given(requests=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 20)), min_size=1, max_size=8))
def test_a_leap_equals_its_steps(requests):
    by_step = [row for row in live(make_engine(), requests) if row[1]]
    assert [row for row in live(make_engine(), requests, leap=True) if row[1]] == by_step


@pytest.mark.parametrize("kind", [Static, Dynamic])
def test_outputs_are_not_held_back_by_default(kind):
    assert not kind().until_last
