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
from sim.report.streamed_page import LEFT_OUT, rates_over_time, streamed_sections, write_streamed_report
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


def test_curves_are_those_of_the_whole_run(run, fold):
    latency, rates = streamed_sections(fold.measured, fold.summary(run.records), run.slo)
    whole = Window(0.0, run.records.end_s)
    expected = latency_cdfs(run.records, run.requests, whole, run.slo)
    assert marked_ms(latency.figure) == pytest.approx(marked_ms(expected), rel=PERCENTILE_ERROR)
    assert LEFT_OUT in latency.caption
    tokens, finished = rates.figure.figure().data
    width_s = fold.measured.rates.width_s
    assert np.sum(np.asarray(finished.y, float)) * width_s == pytest.approx(500, abs=10)
    assert np.sum(np.asarray(tokens.y, float)) * width_s == pytest.approx(
        run.requests["output_tokens"].sum(), rel=0.02
    )


def test_the_page_shows_the_error_of_percentiles(run, fold, tmp_path):
    summary = fold.summary(run.records)
    write_streamed_report(tmp_path / "report.html", fold.measured, summary, {}, run.slo)
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Percentiles are estimates, within 0.049 % of the value" in text
    assert LEFT_OUT in text


def test_nothing_is_drawn_where_nothing_was_served(fold):
    nothing = type(fold.measured)(1, 0.0)
    assert streamed_sections(nothing, {}, None) == []
    assert rates_over_time(nothing, Window(0.0, 0.0)) is None
