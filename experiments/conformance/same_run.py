"""Comparison of two runs that must be equal: records bit for bit, and decisions."""

from __future__ import annotations

import pandas as pd

from experiments.conformance.worlds import World, WorldRun
from sim.records.run import RunRecords
from sim.records.table import to_pandas


def gaps_of(records: RunRecords) -> list[tuple[float, float]]:
    """Returns every gap between two tokens of a sequence as (length, end), both in seconds, sorted."""
    gaps = zip(records.gap_s.tolist(), records.gap_end_s.tolist(), records.gap_count.tolist(), strict=True)
    return sorted((gap_s, end_s) for gap_s, end_s, count in gaps for _ in range(count))


def assert_same_records(one: RunRecords, other: RunRecords) -> None:
    """Asserts that all requests, iterations and gaps are equal bit for bit."""
    assert_same_table(to_pandas(one.requests), to_pandas(other.requests))
    assert_same_table(to_pandas(one.iterations), to_pandas(other.iterations))
    assert gaps_of(one) == gaps_of(other)
    assert one.end_s == other.end_s


def assert_leap_equals_step(world: World) -> WorldRun:
    """Asserts that the runs with and without leaps are equal; returns the run with leaps."""
    leapt, stepped = world.simulate(leap=True), world.simulate(leap=False)
    assert_same_records(leapt.records, stepped.records)
    assert_same_decisions(leapt, stepped)
    assert leapt.source.ends == stepped.source.ends
    for name in (
        "replicas",
        "num_lost_first_tokens",
        "links",
        "num_evicted_blocks",
        "num_discarded_tokens",
        "migrations",
    ):
        assert getattr(leapt.records, name) == getattr(stepped.records, name), f"{name} differ"
    return leapt


def assert_same_table(one: pd.DataFrame, other: pd.DataFrame) -> None:
    """Raises AssertionError with the rows and columns in which two tables differ."""
    if not one.equals(other):
        assert list(one.columns) == list(other.columns)
        assert one.dtypes.equals(other.dtypes)
        assert len(one) == len(other)
        differ = [name for name in one.columns if not one[name].equals(other[name])]
        raise AssertionError(f"{differ} differ:\n{one[differ].compare(other[differ])}")


def assert_same_decisions(leapt: WorldRun, stepped: WorldRun) -> None:
    """Asserts that each leap starts with the plan that stepping makes there, and repeats its tokens."""
    for leaping, stepping in zip(leapt.cores, stepped.cores, strict=True):
        steps = {decision.iteration: decision for decision in stepping.decisions}
        for decision in leaping.decisions:
            indices = range(decision.iteration, decision.iteration + decision.num_iterations)
            missing = [index for index in indices if index not in steps]
            assert not missing, f"the leap {decision} has iterations that stepping does not have: {missing}"
            first, *others = (steps.pop(index) for index in indices)
            same = first._replace(num_iterations=decision.num_iterations) == decision
            assert same, f"a leap begins with another plan than stepping:\n  leap {decision}\n  step {first}"
            for other in others:
                same = other.tokens_by_request == decision.tokens_by_request
                same = same and not other.admitted and not other.preempted
                assert same, f"stepping decides differently within a leap:\n  leap {decision}\n  step {other}"
        assert not steps, f"stepping has iterations that leaping does not have: {list(steps.values())}"
