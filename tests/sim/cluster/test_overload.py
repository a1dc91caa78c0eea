"""A backlog that grows without bound ends a run; one that only fluctuates does not."""

import heapq

import numpy as np
import pytest

from sim.cluster.early_stop import FIRST_S, PARTS, Count, backlog_growth, overload_of


def counts_at(arrival_s, end_s, last_s):
    """Returns what the watch would have counted until last_s."""
    times = FIRST_S * 2 ** (np.arange(200) / PARTS)
    return [Count(0.0, 0, 0)] + [
        Count(at_s, int((arrival_s <= at_s).sum()), int((end_s <= at_s).sum()))
        for at_s in times[times < last_s]
    ]


def queue(seed, load, num_requests, num_servers=20):
    """Simulates M/M/k with mean service times of 1 s; returns arrivals and ends in seconds."""
    rng = np.random.default_rng(seed)
    arrival_s = np.cumsum(rng.exponential(size=num_requests)) / (load * num_servers)
    free, ends = [0.0] * num_servers, []
    for arrived, served in zip(arrival_s, rng.exponential(size=num_requests), strict=True):
        ends.append(max(arrived, heapq.heappop(free)) + served)
        heapq.heappush(free, ends[-1])
    return arrival_s, np.array(ends)


def found(seed, load):
    arrival_s, end_s = queue(seed, load, 4000)
    counts = counts_at(arrival_s, end_s, arrival_s[-1])
    return [
        at for i in range(len(counts)) if (at := backlog_growth(counts[: i + 1])) and at.at_s - at.since_s > 6
    ]


def test_a_queue_below_its_capacity_is_not_overloaded():
    assert sum(bool(found(seed, 0.9)) for seed in range(30)) <= 1


def test_a_queue_above_its_capacity_is_and_the_evidence_is_its_excess():
    """At 1.3 times its capacity of 20/s: 26 come, 20 end, 6 more are there every second."""
    evidence = [found(seed, 1.3)[-1] for seed in range(20)]
    assert all(0 < one.least_growth_per_s < one.growth_per_s for one in evidence)
    means = np.mean([(one.arrivals_per_s, one.ends_per_s, one.growth_per_s) for one in evidence], axis=0)
    assert means == pytest.approx([26, 20, 6], rel=0.05)


def test_nothing_is_said_before_enough_has_ended():
    steady = [Count(float(t), 10 * t, t) for t in range(13)]
    assert backlog_growth(steady) is None
    assert backlog_growth([Count(float(t), 10 * t, 5 * t) for t in range(14)]) is not None
    assert backlog_growth([Count(float(t), 10 * t, t) for t in range(14)]) is None  # 12 have ended


def test_a_run_that_was_not_ended_tells_whether_it_should_have_been():
    excess = []
    for seed in range(20):
        arrival_s, end_s = queue(seed, 1.3, 4000)
        evidence = overload_of(arrival_s, end_s - 1.0, end_s)
        assert evidence.outstanding == (end_s > evidence.at_s).sum() - (arrival_s > evidence.at_s).sum()
        excess.append(evidence.arrivals_per_s - evidence.ends_per_s)
    assert np.mean(excess) == pytest.approx(6, rel=0.1)
    calm_s, calm_end_s = queue(0, 0.9, 4000)
    assert overload_of(calm_s, calm_end_s - 1.0, calm_end_s) is None
    # A service that only fills: answers take longer than half of the traffic.
    assert overload_of(arrival_s, arrival_s, arrival_s + 100.0) is None
    assert overload_of(np.array([]), np.array([]), np.array([])) is None
