"""report.html of a run without whole tables: the curves are those of the whole run, what lacks is named."""

import numpy as np
import pytest
from sim.metrics.folds.run import RunFold
from sim.metrics.folds.setting import FoldSetting
from sim.metrics.folds.sketch import PERCENTILE_ERROR

from sim import simulate
from sim.metrics.utilisation import PoolHardware
from sim.metrics.window import Window
from sim.report.latency import latency_cdfs
from sim.report.page import report_sections
from sim.report.streamed_page import streamed_sections, write_streamed_report
from sim.shards.accumulators import accumulator_bytes, read_accumulator
from tests.worlds.chunks import chunks_of


@pytest.fixture(scope="module")
def run():
    return simulate(workload="azure_conv_like", workload__num_requests=500).run


@pytest.fixture(scope="module")
def fold(run):
    pools = [PoolHardware(model=run.models[0])]
    fold = RunFold(FoldSetting(pools=pools, pool_records=run.records.pools, slo=run.slo))
    for chunk in chunks_of(run.records, [run.records.end_s / 2], group_rows=100):
        fold.add(chunk)
    return fold


def marked_ms(chart):
    points = [trace for trace in chart.figure().data if trace.mode == "markers"]
    return np.concatenate([np.asarray(trace.x, float) for trace in points])


def sections_of(fold, run):
    found = streamed_sections(fold.plots(run.records), run.records, fold.summary(run.records), run.slo)
    return {section.title: section for section in found}


def whole_sections(run):
    found = report_sections(
        records=run.records,
        request_table=run.requests,
        summary=run.summary,
        models=run.models,
        slo=run.slo,
    )
    return {section.title: section for section in found}


def traces(section):
    return {trace.name: trace for trace in section.figure.figure().data if trace.name}


def test_sections_are_those_of_the_whole_run(run, fold):
    assert list(sections_of(fold, run)) == list(whole_sections(run))
    ours, whole = (one["Latency"].caption for one in (sections_of(fold, run), whole_sections(run)))
    assert ours == whole


def test_curves_are_those_of_the_whole_run(run, fold):
    latency = sections_of(fold, run)["Latency"]
    whole = Window(0.0, run.records.end_s)
    expected = latency_cdfs(run.records, run.requests, whole, run.slo)
    assert marked_ms(latency.figure) == pytest.approx(marked_ms(expected), rel=PERCENTILE_ERROR)


def test_states_and_rates_have_the_integrals_of_the_whole_run(run, fold):
    ours, whole = (traces(one["Over time"]) for one in (sections_of(fold, run), whole_sections(run)))
    assert ours.keys() == whole.keys()
    figures = [one["Over time"].figure.figure().data for one in (sections_of(fold, run), whole_sections(run))]
    for mine, theirs in zip(*figures, strict=True):
        assert mine.name == theirs.name
        y, expected = (np.asarray(trace.y, float) for trace in (mine, theirs))
        if "maximum" in mine.name:
            assert y.max() == pytest.approx(expected.max(), rel=1e-6)
        else:  # the last intervals of both differ in length
            assert y.mean() == pytest.approx(expected.mean(), rel=0.05)


def test_requests_and_attainment_are_those_of_the_whole_run(run, fold):
    ours, whole = (one["TTFT against prompt length"] for one in (sections_of(fold, run), whole_sections(run)))
    for name in ("median", "p99"):
        both = [np.asarray(traces(one)[name].y, float) for one in (ours, whole)]
        assert both[0] == pytest.approx(both[1], rel=2 * PERCENTILE_ERROR)
    points = [np.sort(np.asarray(traces(one)["request"].y, float)) for one in (ours, whole)]
    assert points[0] == pytest.approx(points[1])
    bars = [
        next(trace for trace in one["SLO attainment"].figure.figure().data if trace.type == "bar")
        for one in (sections_of(fold, run), whole_sections(run))
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


def test_the_time_goes_where_it_goes_in_the_whole_run(run, fold):
    assert_same_time(sections_of(fold, run), whole_sections(run))


@pytest.fixture(scope="module")
def drafting():
    return simulate(
        model="llama3_1_8b", workload="poisson", workload__num_requests=200, speculation="eagle3", replicas=2
    ).run


def test_speculation_is_that_of_the_whole_run(drafting):
    pools = [PoolHardware(model=drafting.models[0])]
    setting = FoldSetting(pools=pools, pool_records=drafting.records.pools, slo=drafting.slo)
    folds = []
    for chunk in chunks_of(drafting.records, [drafting.records.end_s / 3], group_rows=10):
        folds.append(RunFold(setting))
        folds[-1].add(chunk)
    folds[0].merge(read_accumulator(accumulator_bytes(folds[1]), RunFold))
    ours, whole = sections_of(folds[0], drafting), whole_sections(drafting)
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
    setting = FoldSetting(pools=pools, pool_records=drafting.records.pools, plots=False)
    fold = RunFold(setting)
    assert fold.more_plots is None
    assert fold.measured.times is None


def test_the_page_shows_the_error_of_percentiles(run, fold, tmp_path):
    summary = fold.summary(run.records)
    write_streamed_report(
        tmp_path / "report.html", fold.plots(run.records), run.records, summary, {}, run.slo
    )
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Percentiles are estimates, within 0.049 % of the value" in text


def test_nothing_is_drawn_where_nothing_was_served(fold, run):
    nothing = RunFold(fold.setting)
    assert streamed_sections(nothing.plots(run.records), run.records, {}, None) == []
