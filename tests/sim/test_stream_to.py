"""`sim.simulate(stream_to=folder)`: the same figures, with tables in a folder."""

import pytest

from sim import ConfigError, simulate
from tests.tables import assert_equal_tables

SETTINGS = {"model": "llama3_1_8b", "workload": "poisson", "workload__num_requests": 80, "replicas": 2}


def test_figures_and_rows_are_those_of_simulate(tmp_path):
    streamed, whole = simulate(stream_to=tmp_path, **SETTINGS), simulate(**SETTINGS)
    assert_equal_tables(streamed.requests, whole.requests)
    assert_equal_tables(streamed.replicas, whole.replicas)
    assert_equal_tables(streamed.latencies, whole.latencies, rtol=1e-3)
    assert streamed.series["arrivals"].sum() == 80
    assert str(streamed).startswith("SLO chat attained")
    assert (tmp_path / "summary.json").exists()
    assert streamed.plot_latencies().data
    assert streamed.plot_timeline().data
    with pytest.raises(ValueError, match=r"result.iterations: .* without it; set iterations=True"):
        _ = streamed.iterations
    with pytest.raises(ValueError, match=r"result.dialects: needs whole tables, and this run has streamed"):
        _ = streamed.dialects
    with pytest.raises(ValueError, match=r"result.series: only a run with stream_to has it"):
        _ = whole.series


def test_iterations_are_streamed_if_they_are_asked_for(tmp_path):
    streamed, whole = simulate(stream_to=tmp_path, iterations=True, **SETTINGS), simulate(**SETTINGS)
    keys = ["replica", "iteration"]
    found = streamed.iterations.sort_values(keys, ignore_index=True)
    assert_equal_tables(found, whole.iterations.sort_values(keys, ignore_index=True))
    with pytest.raises(ConfigError, match=r"iterations=True: is about the tables of stream_to"):
        simulate(iterations=True, **SETTINGS)
    with pytest.raises(ConfigError, match=r"attach, stream_to: a run with processes of your own"):
        simulate(stream_to=tmp_path, attach=[lambda env, fleet, gateway: iter(())], **SETTINGS)


def test_rejects_what_needs_whole_tables_before_the_run(tmp_path):
    with pytest.raises(ConfigError, match=r"sim.stop_overloaded=true: needs the rows"):
        simulate(stream_to=tmp_path / "new", sim__stop_overloaded=True, **SETTINGS)
    assert not (tmp_path / "new").exists()


def test_exact_percentiles_are_those_of_whole_tables(tmp_path):
    settings = ("workload.num_requests=300", "metrics.warmup_s=5", "replicas=2", "load=3")
    whole = simulate(*settings).summary
    exact = simulate(*settings, "metrics.percentiles=exact", stream_to=tmp_path / "exact").summary
    estimated = simulate(*settings, stream_to=tmp_path / "estimated").summary
    for name in ("ttft", "tpot", "e2e", "queue"):
        for q in (50, 90, 95, 99):
            assert exact[name][f"p{q}_s"] == whole[name][f"p{q}_s"]
    assert exact["per_user"] == whole["per_user"]
    assert exact["ttft"] != estimated["ttft"]
    assert exact["itl"] == estimated["itl"]
    assert exact["exact_percentiles"] == ["ttft", "tpot", "e2e", "queue", "per_user"]
