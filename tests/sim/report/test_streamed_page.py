"""report.html of a run without whole tables: the curves are those of the whole run, what lacks is named."""

import numpy as np
import pytest

from sim import simulate
from sim.metrics.figure import FigureSetting, PoolHardware
from sim.metrics.plots import PlotFigures
from sim.metrics.sketches import PERCENTILE_ERROR, SKETCHED
from sim.metrics.summary import RunFigures
from sim.report.page import report_sections, write_report
from sim.report.plots import latency_cdfs
from sim.shards.accumulators import accumulator_bytes, read_accumulator
from tests.worlds.chunks import chunks_of


@pytest.fixture(scope="module")
def run():
    return simulate(workload="azure_conv_like", workload__num_requests=500).run


@pytest.fixture(scope="module")
def added(run):
    pools = [PoolHardware(model=run.models[0])]
    added = RunFigures(FigureSetting(pools=pools, pool_records=run.records.pools, slo=run.slo, kept=SKETCHED))
    for chunk in chunks_of(run.records, [run.records.end_s / 2], group_rows=100):
        added.add(chunk)
    return added


def marked_ms(chart):
    points = [trace for trace in chart.figure().data if trace.mode == "markers"]
    return np.concatenate([np.asarray(trace.x, float) for trace in points])


def sections_of(added, run):
    found = report_sections(added.plots(run.records), run.records, added.summary(run.records), run.slo)
    return {section.title: section for section in found}


def whole_sections(run):
    found = report_sections(run.plots(), run.records, run.summary, run.slo)
    return {section.title: section for section in found}


def traces(section):
    return {trace.name: trace for trace in section.figure.figure().data if trace.name}


def test_sections_are_those_of_the_whole_run(run, added):
    assert list(sections_of(added, run)) == list(whole_sections(run))
    ours, whole = (one["Latency"].caption for one in (sections_of(added, run), whole_sections(run)))
    assert ours == whole


def test_curves_are_those_of_the_whole_run(run, added):
    latency = sections_of(added, run)["Latency"]
    expected = latency_cdfs(run.plots(), run.slo)
    assert marked_ms(latency.figure) == pytest.approx(marked_ms(expected), rel=PERCENTILE_ERROR)


def test_states_and_rates_have_the_integrals_of_the_whole_run(run, added):
    ours, whole = (traces(one["Over time"]) for one in (sections_of(added, run), whole_sections(run)))
    assert ours.keys() == whole.keys()
    added = [one["Over time"].figure.figure().data for one in (sections_of(added, run), whole_sections(run))]
    for mine, theirs in zip(*added, strict=True):
        assert mine.name == theirs.name
        y, expected = (np.asarray(trace.y, float) for trace in (mine, theirs))
        if "maximum" in mine.name:
            assert y.max() == pytest.approx(expected.max(), rel=1e-6)
        else:  # the last intervals of both differ in length
            assert y.mean() == pytest.approx(expected.mean(), rel=0.05)


def test_requests_and_attainment_are_those_of_the_whole_run(run, added):
    ours, whole = (
        one["TTFT against prompt length"] for one in (sections_of(added, run), whole_sections(run))
    )
    for name in ("median", "p99"):
        both = [np.asarray(traces(one)[name].y, float) for one in (ours, whole)]
        assert both[0] == pytest.approx(both[1], rel=2 * PERCENTILE_ERROR)
    points = [np.sort(np.asarray(traces(one)["request"].y, float)) for one in (ours, whole)]
    assert points[0] == pytest.approx(points[1])
    bars = [
        next(trace for trace in one["SLO attainment"].figure.figure().data if trace.type == "bar")
        for one in (sections_of(added, run), whole_sections(run))
    ]
    assert list(bars[0].y) == pytest.approx(list(bars[1].y))


def heights(section):
    """Returns the values of each trace of a plot, by name and number."""
    data = section.figure.figure().data
    axis = {"Where the time went": "x"}.get(section.title, "y")
    return {f"{i} {trace.name}": np.asarray(trace[axis], float) for i, trace in enumerate(data)}


def assert_same_time(ours, whole):
    ours, whole = (heights(sections["Where the time went"]) for sections in (ours, whole))
    assert ours.keys() == whole.keys()
    for name, shares in whole.items():
        assert ours[name] == pytest.approx(shares, abs=0.05)
    assert sum(share.sum() for share in ours.values()) == pytest.approx(100, abs=1e-3)


def test_the_time_goes_where_it_goes_in_the_whole_run(run, added):
    assert_same_time(sections_of(added, run), whole_sections(run))


@pytest.fixture(scope="module")
def drafting():
    return simulate(
        model="llama3_1_8b", workload="poisson", workload__num_requests=200, speculation="eagle3", replicas=2
    ).run


def test_speculation_is_that_of_the_whole_run(drafting):
    pools = [PoolHardware(model=drafting.models[0])]
    setting = FigureSetting(pools=pools, pool_records=drafting.records.pools, slo=drafting.slo, kept=SKETCHED)
    every = []
    for chunk in chunks_of(drafting.records, [drafting.records.end_s / 3], group_rows=10):
        every.append(RunFigures(setting))
        every[-1].add(chunk)
    every[0].merge(read_accumulator(accumulator_bytes(every[1]), RunFigures))
    ours, whole = sections_of(every[0], drafting), whole_sections(drafting)
    assert list(ours) == list(whole)
    assert_same_time(ours, whole)
    mine, theirs = (heights(sections["Speculation"]) for sections in (ours, whole))
    assert mine.keys() == theirs.keys()
    for name, values in theirs.items():
        if name.endswith("None"):  # over time, in intervals of other lengths
            assert 20 < len(mine[name]) <= 110
            assert np.nanmean(mine[name]) == pytest.approx(np.nanmean(values), rel=0.02)
        else:
            assert mine[name] == pytest.approx(values, rel=1e-12)


def test_a_run_without_a_page_adds_up_nothing_for_it(drafting):
    pools = [PoolHardware(model=drafting.models[0])]
    setting = FigureSetting(pools=pools, pool_records=drafting.records.pools, plots=False, kept=SKETCHED)
    added = RunFigures(setting)
    assert PlotFigures.name not in added.figures


def test_the_page_shows_the_error_of_percentiles(run, added, tmp_path):
    summary = added.summary(run.records)
    write_report(tmp_path / "report.html", added.plots(run.records), run.records, summary, {}, run.slo)
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Percentiles are estimates, within 0.049 % of the value" in text


def test_nothing_is_drawn_where_nothing_was_served(added, run):
    nothing = RunFigures(added.setting)
    assert report_sections(nothing.plots(run.records), run.records, {}, None) == []
