"""Cache hits, preemptions and waits of a run, from events written down by hand."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from sim.metrics.definitions import Window
from sim.records.event_rows import WAIT_COLUMNS, Event, logged_events
from sim.records.run import PoolRecord
from tests.sim.metrics.figures_of import cache_use, preemption_use, waiting_use

WHOLE = Window(0.0, 10.0)


def records(*rows, num_evicted_blocks=0):
    """Returns records of events (time, event, tokens, of_tokens, recomputed_tokens, tier)."""
    events = pd.DataFrame(
        rows, columns=["time_s", "event", "tokens", "of_tokens", "recomputed_tokens", "tier"]
    ).astype({"time_s": np.float64})
    events["event"] = events["event"].astype(np.int64)
    events["replica"] = 0
    return of_events(events, num_evicted_blocks, 100.0)


def of_events(events, num_evicted_blocks, kv_bytes_per_token):
    return SimpleNamespace(
        events=events,
        num_evicted_blocks=num_evicted_blocks,
        pools=(PoolRecord(10, 16, kv_bytes_per_token),),
        pool_by_replica=np.zeros(1, np.int64),
    )


PREEMPTED = records(
    (0.0, Event.admit, 64, 100, 0, 0),
    (1.0, Event.preempt, 110, 111, 0, 0),
    (2.0, Event.resume, 96, 120, 14, 0),
    (3.0, Event.preempt_swap, 130, 131, 0, 0),
    (3.0, Event.store, 130, 0, 0, 2),
    (3.5, Event.store, 7, 0, 0, 2),
    (3.5, Event.store, 5, 0, 0, 3),
    (4.0, Event.swap_in, 130, 131, 0, 2),
    (5.0, Event.resume_swapped, 130, 131, 0, 0),
    (6.0, Event.load, 11, 20, 0, 3),
    num_evicted_blocks=3,
)


def test_hits_with_and_without_resumptions():
    use = cache_use(PREEMPTED, WHOLE)
    assert (use["found_tokens"], use["looked_up_tokens"], use["hit_share"]) == (64, 100, 0.64)
    assert use["with_resumptions"]["hit_share"] == pytest.approx(160 / 220)
    assert use["evicted_blocks"] == 3


def test_stores_and_loads_leave_out_what_was_swapped():
    use = cache_use(PREEMPTED, WHOLE)
    assert use["stored_tokens"] == {"host": 7, "disk": 5}
    assert use["loaded_tokens"] == {"host": 0, "disk": 11}
    assert use["loaded_bytes"] == {"host": 0.0, "disk": 1100.0}


def test_preemptions_by_kind_and_what_they_cost():
    assert preemption_use(PREEMPTED, WHOLE) == {
        "recompute": 1,
        "swap": 1,
        "recomputed_tokens": 14,
        "swapped_out_tokens": 130,
        "swapped_in_tokens": 130,
        "swapped_out_bytes": 13_000.0,
        "swapped_in_bytes": 13_000.0,
    }


def test_only_what_happened_in_the_window_counts():
    use = preemption_use(PREEMPTED, Window(2.5, 10.0))
    assert (use["recompute"], use["swap"], use["recomputed_tokens"]) == (0, 1, 0)


def test_nothing_happened_nothing_found():
    nothing = of_events(logged_events([]), 0, 0.0)
    use = cache_use(nothing, WHOLE)
    assert use["found_tokens"] == 0
    assert np.isnan(use["hit_share"])
    assert set(preemption_use(nothing, WHOLE).values()) == {0}


def test_mean_waits_leave_out_the_rejected():
    table = pd.DataFrame({name: [0.0, 0.0, 0.0] for name in ("wait_gateway_s", *WAIT_COLUMNS)})
    table["wait_slot_s"], table["wait_memory_s"] = [1.0, 3.0, 0.0], [0.0, 2.0, 0.0]
    table["status"] = ["finished", "aborted", "rejected"]
    use = waiting_use(table, SimpleNamespace(requests=table))
    assert use["mean_s"] == 3.0
    assert (use["by_cause_s"]["slot"], use["by_cause_s"]["memory"]) == (2.0, 1.0)


def test_requests_held_back_are_those_that_waited_for_a_slot_or_memory():
    table = pd.DataFrame({name: [0.0] * 5 for name in ("wait_gateway_s", *WAIT_COLUMNS)})
    table["wait_slot_s"], table["wait_memory_s"] = [0.1, 0.0, 0.2, 0.0, 0.3], [0.0, 0.4, 0.5, 0.0, 0.0]
    table["wait_iteration_s"], table["wait_budget_s"] = 0.01, 0.02
    table["status"] = ["finished", "finished", "finished", "finished", "rejected"]
    assert waiting_use(table, SimpleNamespace(requests=table))["held_back_share"] == 0.75
