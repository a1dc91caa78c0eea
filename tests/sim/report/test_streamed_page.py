"""report.html of a run without whole tables: the curves are those of the whole run, what lacks is named."""

import numpy as np
import pytest

from sim import simulate
from sim.metrics.folds.run import RunFold
from sim.metrics.folds.setting import FoldSetting
from sim.metrics.folds.sketch import PERCENTILE_ERROR
from sim.metrics.utilisation import PoolHardware
from sim.metrics.window import Window
from sim.report.latency import latency_cdfs
from sim.report.page import report_sections
from sim.report.streamed_page import LEFT_OUT, streamed_sections, write_streamed_report
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
    found = streamed_sections(fold.plots, run.records, fold.summary(run.records), run.slo)
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
    missing = whole_sections(run).keys() - sections_of(fold, run).keys()
    assert missing == {"Where the time went"}
    assert LEFT_OUT in sections_of(fold, run)["Latency"].caption


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


def test_the_page_shows_the_error_of_percentiles(run, fold, tmp_path):
    summary = fold.summary(run.records)
    write_streamed_report(tmp_path / "report.html", fold.plots, run.records, summary, {}, run.slo)
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Percentiles are estimates, within 0.049 % of the value" in text
    assert LEFT_OUT in text


def test_nothing_is_drawn_where_nothing_was_served(fold, run):
    nothing = RunFold(fold.setting)
    assert streamed_sections(nothing.plots, run.records, {}, None) == []
