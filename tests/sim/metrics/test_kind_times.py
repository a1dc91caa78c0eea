"""Seconds by kind of iteration and component: exact or from a sample, however a run was divided."""

import numpy as np
import pytest

from sim import simulate
from sim.metrics.figure import KINDS, component_seconds, iteration_kind
from sim.metrics.plots import KindTimes

NUM_PARTS = 7


@pytest.fixture(scope="module")
def run():
    return simulate(workload="azure_conv_like", workload__num_requests=400, replicas=2).run.in_pandas()


def times_of(run, max_sample, *parts):
    times, durations_s = KindTimes(1, max_sample), run.records.iterations["duration_s"].to_numpy()
    for rows in parts:
        times.add(0, run.records.iterations.iloc[rows], durations_s[rows], run.models[0])
    return times


def one_by_one(run):
    """Returns the seconds by kind and component of all iterations."""
    iterations = run.records.iterations
    kind, durations_s = iteration_kind(iterations), iterations["duration_s"].to_numpy()
    every = dict(component_seconds(iterations, durations_s, run.models[0]))
    return {
        name: {component: part_s[kind == index].sum() for component, part_s in every.items()}
        for index, name in enumerate(KINDS)
    }


def test_iterations_of_a_small_run_have_their_seconds(run):
    iterations = run.records.iterations
    expected = one_by_one(run)
    times = times_of(run, len(iterations), np.arange(len(iterations)))
    assert times.busy_s == pytest.approx(iterations["duration_s"].sum(), rel=1e-6)
    found = times.seconds()
    for kind in KINDS:
        assert found[kind].keys() == expected[kind].keys()
        for component, seconds in expected[kind].items():
            assert found[kind][component] == pytest.approx(seconds, rel=1e-4, abs=1e-5)


def test_samples_of_parts_are_those_of_the_whole(run):
    iterations = run.records.iterations
    rng = np.random.default_rng(3)
    whole = times_of(run, 400, np.arange(len(iterations)))
    parts = np.array_split(rng.permutation(len(iterations)), NUM_PARTS)
    one, other = times_of(run, 400, *parts[:3]), times_of(run, 400, *parts[3:])
    one.merge(other)
    assert one.seconds() == whole.seconds()
    assert one.busy_s == whole.busy_s
    assert whole.is_sample
    expected = one_by_one(run)
    for kind in range(len(KINDS)):
        found, exact = whole.seconds()[KINDS[kind]], expected[KINDS[kind]]
        assert sum(found.values()) == pytest.approx(sum(exact.values()), rel=1e-6)
        for component, seconds in exact.items():
            assert found[component] == pytest.approx(seconds, abs=0.05 * sum(exact.values()))
        num = int((iteration_kind(iterations) == kind).sum())
        sampled = int((whole._pools[0].counts * whole._pools[0].in_sample)[kind].sum())
        assert min(num, 200 * 0.8) <= sampled <= 400
