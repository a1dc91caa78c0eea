"""Seconds by kind of iteration and component: exact or from a sample, however a run was divided."""

import numpy as np
import pytest
from sim.metrics.folds import times
from sim.metrics.folds.times import TimesFold

from sim import simulate
from sim.metrics.utilisation import KINDS, iteration_kind, seconds_by_kind

NUM_PARTS = 7


@pytest.fixture(scope="module")
def run():
    return simulate(workload="azure_conv_like", workload__num_requests=400, replicas=2).run


def fold_of(run, *parts):
    fold, durations_s = TimesFold(1), run.records.iterations["duration_s"].to_numpy()
    for rows in parts:
        fold.add(0, run.records.iterations.iloc[rows], durations_s[rows], run.models[0])
    return fold


def test_iterations_of_a_small_run_have_their_seconds(run, monkeypatch):
    monkeypatch.setattr(times, "MAX_SAMPLE", len(run.records.iterations))
    iterations = run.records.iterations
    expected = seconds_by_kind(run.records, iterations["duration_s"].to_numpy(), run.models)
    fold = fold_of(run, np.arange(len(iterations)))
    assert fold.busy_s == pytest.approx(iterations["duration_s"].sum(), rel=1e-6)
    found = fold.seconds()
    for kind in KINDS:
        assert found[kind].keys() == expected[kind].keys()
        for component, seconds in expected[kind].items():
            assert found[kind][component] == pytest.approx(seconds, rel=1e-4, abs=1e-5)


def test_samples_of_parts_are_those_of_the_whole(run, monkeypatch):
    monkeypatch.setattr(times, "MAX_SAMPLE", 400)
    iterations = run.records.iterations
    rng = np.random.default_rng(3)
    whole = fold_of(run, np.arange(len(iterations)))
    parts = np.array_split(rng.permutation(len(iterations)), NUM_PARTS)
    one, other = fold_of(run, *parts[:3]), fold_of(run, *parts[3:])
    one.merge(other)
    assert one.seconds() == whole.seconds()
    assert one.busy_s == whole.busy_s
    assert whole.is_sample
    expected = seconds_by_kind(run.records, iterations["duration_s"].to_numpy(), run.models)
    for kind in range(len(KINDS)):
        found, exact = whole.seconds()[KINDS[kind]], expected[KINDS[kind]]
        assert sum(found.values()) == pytest.approx(sum(exact.values()), rel=1e-6)
        for component, seconds in exact.items():
            assert found[component] == pytest.approx(seconds, abs=0.05 * sum(exact.values()))
        num = int((iteration_kind(iterations) == kind).sum())
        sampled = int((whole._pools[0].counts * whole._pools[0].in_sample)[kind].sum())
        assert min(num, 200 * 0.8) <= sampled <= 400
