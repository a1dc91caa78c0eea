"""Time series: sums by interval, whatever the parts in which the rows come."""

import numpy as np
import pytest

from sim import simulate
from sim.metrics.series import MAX_INTERVALS, LoadSeries
from tests.tables import assert_equal_tables


@pytest.fixture(scope="module")
def result():
    return simulate(model="llama3_1_8b", workload="poisson", workload__num_requests=80, slo="chat")


def series_of(*parts):
    series = LoadSeries()
    for requests, iterations in parts:
        series.add(requests, iterations)
    return series


def test_sums_are_those_of_the_tables(result):
    table = series_of((result.requests, result.iterations)).table()
    assert table["arrivals"].sum() == table["first_tokens"].sum() == table["ends"].sum() == 80
    assert table["slo_met"].sum() == result.requests["slo_met"].sum()
    assert table["output_tokens"].sum() == result.requests["output_tokens"].sum()
    assert table["busy_s"].sum() == pytest.approx(result.iterations["duration_s"].sum())
    second = result.requests[result.requests["first_token_s"].between(3, 4, inclusive="left")]
    assert table["ttft_s"][3] == pytest.approx(second["ttft_s"].mean())
    begun = result.iterations[result.iterations["start_s"].between(3, 4, inclusive="left")]
    assert table["running"][3] == pytest.approx((begun["running"] * begun["duration_s"]).sum())


def test_parts_give_the_sums_of_the_whole(result):
    requests, iterations = result.requests, result.iterations
    whole = series_of((requests, iterations)).table()
    parts = series_of((requests[50:], iterations[:100]), (requests[:50], iterations[100:])).table()
    assert_equal_tables(parts, whole, check_exact=True)
    merged = series_of((requests[50:], iterations[:100]))
    merged.merge(series_of((requests[:50], iterations[100:])))
    assert_equal_tables(merged.table(), whole, check_exact=True)


def test_large_sums_are_exact_in_any_order(result):
    """The token-seconds of an interval are more than 2^53 steps."""
    iterations = result.iterations.assign(
        start_s=0.5, kv_tokens_used=3e10 + np.arange(len(result.iterations))
    )
    orders = iterations, iterations[::-1], iterations.sample(frac=1, random_state=1)
    tables = [series_of((result.requests, one)).table() for one in orders]
    steps = np.rint(iterations["kv_tokens_used"] * iterations["duration_s"] * 2**20)
    assert sum(map(int, steps)) > 2**53
    for table in tables:
        assert_equal_tables(table, tables[0], check_exact=True)
        assert table["kv_tokens"][0] == sum(map(int, steps)) / 2**20


def test_intervals_get_longer_with_the_run(result):
    late = result.iterations.assign(start_s=result.iterations["start_s"] + 2.5 * MAX_INTERVALS)
    series = series_of((result.requests, result.iterations), (result.requests[:0], late))
    assert set(np.diff(series.table()["start_s"])) == {4.0}
    table = series.table()
    assert len(table) <= MAX_INTERVALS
    assert table["arrivals"].sum() == 80
    assert table["iterations"].sum() == 2 * len(late)
