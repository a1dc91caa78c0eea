"""Time series: sums by interval, whatever the parts in which the rows come."""

import pandas as pd
import pytest

from sim import simulate
from sim.metrics.load_series import MAX_INTERVALS, LoadSeries


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
    pd.testing.assert_frame_equal(parts, whole, rtol=1e-12)


def test_intervals_get_longer_with_the_run(result):
    late = result.iterations.assign(start_s=result.iterations["start_s"] + 2.5 * MAX_INTERVALS)
    series = series_of((result.requests, result.iterations), (result.requests[:0], late))
    assert series.width_s == 4.0
    table = series.table()
    assert len(table) <= MAX_INTERVALS
    assert table["arrivals"].sum() == 80
    assert table["iterations"].sum() == 2 * len(late)
