"""Every wait has its cause and its length: by schedules on paper, and by counting plan after plan."""

from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.batching.chunked import Chunked
from policies.batching.static import Static
from policies.caching.paged import Paged
from policies.caching.prefix import PrefixCaching
from policies.core.engine import EngineCore
from policies.core.plan import Cause
from policies.scheduling.fcfs import Fcfs
from sim.engine.replica_pool import Links
from sim.records.event_rows import WAIT_COLUMNS, WAITS
from sim.records.run import events_table

TICK_S = 0.125


def waits_of(records, request_id):
    """Returns the ticks that a request waited, by cause, without causes of no time."""
    row = records.requests.set_index("request_id").loc[request_id]
    ticks = {cause: row[f"wait_{cause}_s"] / TICK_S for cause in WAITS}
    return {cause: num for cause, num in ticks.items() if num}


def story_of(records, request_id):
    """Returns the events of a request as (tick, event)."""
    events = events_table(records).to_pandas()
    mine = events[events["request_id"] == request_id]
    return list(zip((mine["time_s"] / TICK_S).tolist(), mine["event"].tolist(), strict=True))


@pytest.fixture(params=[True, False], ids=["leap", "step"])
def run_world(request):
    """Returns a function that runs a world, leaping or stepping, and returns its records."""
    return lambda world: world.simulate(leap=request.param).records


def test_waits_for_budget_and_memory_on_paper(run_world, make_world, ask):
    """The schedule of tests/sim/records/test_records.py: C waits two iterations for budget; at 4 A takes the
    last block from C, and then that of B. Both wait for memory, until at 6 B comes back and eats the
    budget.
    """
    records = run_world(
        make_world(
            *[ask(0.0, 5, 6), ask(0.0, 6, 4), ask(0.0, 3, 3)],
            batching=Chunked(max_num_batched_tokens=6),
            caching=Paged(block_size=4),
            num_blocks=5,
        )
    )
    assert waits_of(records, 0) == {}
    assert waits_of(records, 1) == {"memory": 2}
    assert waits_of(records, 2) == {"memory": 2, "budget": 3}
    assert story_of(records, 2) == [
        *[(0, "arrive"), (2, "admit"), (3, "first_token"), (4, "preempt"), (7, "resume")],
        *[(9, "prefilled"), (9, "end")],
    ]
    events = events_table(records).to_pandas().set_index(["request_id", "event"])
    assert events.loc[(2, "preempt"), "by"].item() == 0
    assert events.loc[(2, "preempt"), "tokens"].item() == 4
    assert events.loc[(2, "resume"), "recomputed_tokens"].item() == 4
    assert records.requests["prefill_iterations"].tolist() == [1, 4, 3]


def test_a_wait_for_a_slot_begins_behind_the_iteration_under_way(run_world, make_world, ask):
    world = make_world(ask(0.0, 4, 10), ask(2.5 * TICK_S, 4, 2), max_num_seqs=1)
    assert waits_of(run_world(world), 1) == {"iteration": 0.5, "slot": 7}


def test_a_request_that_waits_for_a_static_batch_waits_for_the_policy(run_world, make_world, ask):
    world = make_world(ask(0.0, 4, 10), ask(2.5 * TICK_S, 4, 2), batching=Static(batch_size=1))
    assert waits_of(run_world(world), 1) == {"iteration": 0.5, "policy": 7}


def test_the_way_to_the_engine_is_a_cause_of_its_own(run_world, make_world, ask):
    """The first is known at 2. The second, sent at 3.75, is known at 5.75, in the iteration up to 6, with the
    one up to 7 planned.
    """
    world = make_world(ask(0.0, 4, 30), ask(3.75 * TICK_S, 4, 2), frontend_s=2 * TICK_S, plans_ahead=True)
    records = run_world(world)
    assert waits_of(records, 0) == {"frontend": 2}
    assert waits_of(records, 1) == {"frontend": 2, "iteration": 1.25}


@pytest.mark.parametrize(
    ("until_ticks", "waits"),
    [
        (3.0, {"frontend": 0.5}),
        (4.75, {"frontend": 2, "iteration": 0.25}),
        (6.0, {"frontend": 2, "iteration": 0.5, "slot": 1}),
    ],
)
def test_a_request_cut_off_by_the_time_limit_has_waited_until_then(
    run_world, make_world, ask, until_ticks, waits
):
    world = make_world(
        ask(0.0, 4, 30),
        ask(2.5 * TICK_S, 4, 2),
        frontend_s=2 * TICK_S,
        max_num_seqs=1,
        until_s=until_ticks * TICK_S,
    )
    records = run_world(world)
    assert waits_of(records, 1) == waits
    assert story_of(records, 1) == [(2.5, "arrive"), (until_ticks, "unserved")]


def test_a_request_that_gives_up_in_the_queue_has_waited_until_then(run_world, make_world, ask):
    world = make_world(ask(0.0, 4, 30), ask(0.0, 4, 2), max_num_seqs=1, patience_s=3.5 * TICK_S)
    records = run_world(world)
    assert waits_of(records, 1) == {"slot": 4}
    assert story_of(records, 1) == [(0, "arrive"), (4, "unserved"), (4, "end")]


def test_a_rejected_request_waits_for_nothing(run_world, make_world, ask):
    records = run_world(make_world(ask(0.0, 99, 5), num_blocks=20))
    assert waits_of(records, 0) == {}
    assert story_of(records, 0) == [(0, "arrive"), (0, "end")]


def test_a_swapped_sequence_waits_for_memory_and_then_for_its_kv(run_world, make_world, ask):
    """Two prompts of a block; at 5 tokens both need a second one and there is one. B goes to host memory with
    4 tokens and comes back when A has ended, at 6 ticks; 4 tokens of 1 byte take 4 s / 16 = 2 ticks.
    """
    records = run_world(
        make_world(
            ask(0.0, 4, 6),
            ask(0.0, 4, 3),
            scheduling=Fcfs(preemption_mode="swap"),
            num_blocks=3,
            num_swap_blocks=9,
            links=lambda: Links(bytes_per_token=1.0, host_bytes_per_s=16.0),
        )
    )
    assert story_of(records, 1) == [
        *[(0, "arrive"), (0, "admit"), (1, "first_token"), (1, "preempt_swap")],
        *[(6, "swap_in"), (8, "loaded"), (8, "resume_swapped"), (10, "end")],
    ]
    assert waits_of(records, 1) == {"memory": 5, "load": 2}
    assert records.pools[0].kv_bytes_per_token == 1.0
    resumed = events_table(records).to_pandas().set_index("event").loc["resume_swapped"]
    assert (resumed["tokens"], resumed["of_tokens"], resumed["recomputed_tokens"]) == (4, 5, 0)


class PauseTheSecond:
    """Pauses request 1 from the third iteration to the fifth."""

    def fill(self, view, step, now):
        for seq in list(view.decoding):
            if seq.request_id == 1 and view.num_iterations in (2, 3):
                step.pause(seq)
        for seq in list(view.paused):
            if view.num_iterations == 4:
                step.resume(seq)
        step.decode_all()
        for seq in view.waiting:
            step.admit(seq, 99)


def test_pauses_are_logged(run_world, make_world, ask):
    records = run_world(make_world(ask(0.0, 4, 9), ask(0.0, 4, 9), batching=PauseTheSecond()))
    pauses = [event for event in story_of(records, 1) if "pause" in event[1]]
    assert pauses == [(2, "pause"), (4, "unpause")]


def test_an_admission_says_how_much_the_cache_held(run_world, make_world, ask):
    """Prompts of 13 tokens in blocks of 4: the second finds three blocks of the first."""
    records = run_world(
        make_world(
            ask(0.0, 13, 1, contents=((7, 13),)),
            ask(3 * TICK_S, 13, 1, contents=((7, 13),)),
            caching=PrefixCaching(block_size=4),
        )
    )
    admitted = events_table(records).to_pandas().query("event == 'admit'")
    assert admitted[["tokens", "of_tokens"]].to_numpy().tolist() == [[0, 13], [12, 13]]


@given(data=st.data())
def test_leaping_and_stepping_leave_the_same_events(data, worlds):
    world = data.draw(worlds)
    leapt, stepped = (events_table(world.simulate(leap=leap).records).to_pandas() for leap in (True, False))
    assert leapt.equals(stepped)


@given(data=st.data())
def test_waits_are_what_a_count_of_plan_after_plan_gives(data, worlds):
    """Step by step, each plan's cause is charged to the queue behind it until the next plan."""
    world = data.draw(worlds)
    plans = {}
    original = EngineCore.plan

    def spy(core, now):
        plan = original(core, now)
        queue = {seq.request_id for seq in core.unfinished if seq.slot is None}
        plans.setdefault(id(core), []).append(
            (now, core.waits_for if plan is None else plan.waits_for, queue)
        )
        return plan

    with patch.object(EngineCore, "plan", spy):
        records = world.simulate(leap=False).records
    causes = [cause.name for cause in Cause if cause is not Cause.iteration]
    requests = records.requests.set_index("request_id")
    left_s = requests["finished_s"].fillna(records.end_s)
    expected = {cause: dict.fromkeys(requests.index, 0.0) for cause in causes}
    for listed in plans.values():
        ends_s = [now for now, _, _ in listed[1:]] + [records.end_s]
        for (now, cause, queue), end_s in zip(listed, ends_s, strict=True):
            for request_id in queue:
                assert cause is not None
                waited_s = min(end_s, left_s[request_id]) - now
                expected[cause.name][request_id] += max(waited_s, 0.0)
    for cause in causes:
        found = requests[f"wait_{cause}_s"].to_numpy()
        assert found == pytest.approx(np.array(list(expected[cause].values())), abs=1e-9), cause


@given(data=st.data())
def test_the_causes_add_up_to_the_time_without_work(data, worlds):
    """A first wait ends with the first work, or with the request; later ones begin with a preemption."""
    records = data.draw(worlds).simulate().records
    events = events_table(records).to_pandas()
    waited_s = records.requests.set_index("request_id")[list(WAIT_COLUMNS)].sum(axis=1)
    for request_id, rows in events[events["request_id"] >= 0].groupby("request_id"):
        total_s, since_s = 0.0, None
        for row in rows.itertuples():
            if row.event in ("arrive", "preempt", "preempt_swap"):
                since_s = row.time_s if since_s is None else since_s
            elif (
                row.event in ("admit", "resume", "resume_swapped", "unserved", "end") and since_s is not None
            ):
                total_s += row.time_s - since_s
                since_s = None
        assert waited_s[request_id] == pytest.approx(total_s, abs=1e-9)
    first = records.requests[records.requests["preemptions"] == 0].dropna(subset=["scheduled_s"])
    queue_s = first["scheduled_s"] - first["arrival_s"]
    assert first[list(WAIT_COLUMNS)].sum(axis=1).to_numpy() == pytest.approx(queue_s.to_numpy(), abs=1e-9)
    assert (records.requests[list(WAIT_COLUMNS)] >= 0).all(axis=None)


def test_a_request_that_gives_up_while_its_kv_comes_has_waited_until_then(run_world, make_world, ask):
    """The world of the swap above, but B gives up at 7.5 ticks, while its KV is on its way: at once."""
    records = run_world(
        make_world(
            ask(0.0, 4, 6),
            ask(0.0, 4, 3),
            scheduling=Fcfs(preemption_mode="swap"),
            num_blocks=3,
            num_swap_blocks=9,
            links=lambda: Links(bytes_per_token=1.0, host_bytes_per_s=16.0),
            patience_s=7.5 * TICK_S,
        )
    )
    assert story_of(records, 1)[-3:] == [(6, "swap_in"), (7.5, "unserved"), (7.5, "end")]
    assert waits_of(records, 1) == {"memory": 5, "load": 1.5}
