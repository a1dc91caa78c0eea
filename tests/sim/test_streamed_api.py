"""`sim.simulate_streamed`: the figures of `simulate`, with tables in a folder."""

import pandas as pd
import pytest

from sim import ConfigError, simulate, simulate_streamed

SETTINGS = {"model": "llama3_1_8b", "workload": "poisson", "workload__num_requests": 80, "replicas": 2}


def test_figures_and_rows_are_those_of_simulate(tmp_path):
    streamed, whole = simulate_streamed(tmp_path, **SETTINGS), simulate(**SETTINGS)
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "requests.parquet"), whole.requests)
    pd.testing.assert_frame_equal(streamed.replicas, whole.replicas)
    pd.testing.assert_frame_equal(streamed.latencies, whole.latencies, rtol=1e-3)
    assert streamed.series["arrivals"].sum() == 80
    assert str(streamed).startswith("SLO chat attained")
    assert (tmp_path / "summary.json").exists()
    with pytest.raises(AttributeError, match=r"result.iterations: a run of simulate_streamed"):
        _ = streamed.iterations


def test_rejects_what_needs_whole_tables_before_the_run(tmp_path):
    with pytest.raises(ConfigError, match=r"sim.stop_overloaded=true: needs the rows"):
        simulate_streamed(tmp_path / "new", sim__stop_overloaded=True, **SETTINGS)
    assert not (tmp_path / "new").exists()


def test_exact_percentiles_are_those_of_whole_tables(tmp_path):
    settings = ("workload.num_requests=300", "metrics.warmup_s=5", "replicas=2", "load=3")
    whole = simulate(*settings).summary
    exact = simulate_streamed(tmp_path / "exact", *settings, "metrics.percentiles=exact").summary
    estimated = simulate_streamed(tmp_path / "estimated", *settings).summary
    for name in ("ttft", "tpot", "e2e", "queue"):
        for q in (50, 90, 95, 99):
            assert exact[name][f"p{q}_s"] == whole[name][f"p{q}_s"]
    assert exact["per_user"] == whole["per_user"]
    assert exact["ttft"] != estimated["ttft"]
    assert exact["itl"] == estimated["itl"]
    assert exact["exact_percentiles"] == ["ttft", "tpot", "e2e", "queue", "per_user"]
