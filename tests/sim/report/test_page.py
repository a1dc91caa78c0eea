"""report.html: one file that needs no network, stays small, and is written for runs with few events, too."""

import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from hwmodels.iterations import COMPONENTS
from sim.metrics.definitions import Window
from sim.metrics.dialects import MetricsSettings
from sim.metrics.figure import PoolHardware
from sim.metrics.measured import request_metrics
from sim.metrics.plots import plots_of
from sim.metrics.slo import Slo
from sim.metrics.summary import summarise
from sim.records.event_rows import WAITS
from sim.records.run import PoolRecord, RunRecords, replicas_throughout
from sim.report.page import write_report
from sim.report.plots import timeline

MAX_BYTES = 6_000_000
CHAT = Slo(name="chat", ttft_ms=500, tpot_ms=50)


class EvenSplit:
    """A hardware model whose components take the same time each."""

    peak_flops_per_s = peak_bytes_per_s = 1e12

    def flops(self, shape):
        return 1e9 * (shape.decode_seqs + shape.prefill_tokens)

    def bytes_moved(self, shape):
        return 1e9

    def breakdown(self, shape):
        return dict.fromkeys(COMPONENTS, 0.001 * (shape.decode_seqs + shape.prefill_tokens))


def run_of(num_requests, *, iterations_per_replica=50, num_replicas=1, seed=0):
    """Draws requests of random lengths, one a second, with TTFT about 0.1 s, then a token every 20 ms.

    The iterations are made up: they keep the table's shape, not a schedule.
    """
    rng = np.random.default_rng(seed)
    arrival_s = np.arange(num_requests, dtype=np.float64)
    output_tokens = rng.integers(2, 50, num_requests)
    first_s = arrival_s + 0.1 * rng.lognormal(size=num_requests)
    last_s = first_s + 0.02 * (output_tokens - 1)
    requests = pd.DataFrame(
        {
            "request_id": np.arange(num_requests),
            "status": np.full(num_requests, "finished", dtype=object),
            "arrival_s": arrival_s,
            "scheduled_s": arrival_s,
            "first_token_s": first_s,
            "last_token_s": last_s,
            "finished_s": last_s,
            "prompt_tokens": rng.integers(1, 8000, num_requests),
            "output_tokens": output_tokens,
            "preemptions": np.zeros(num_requests, dtype=np.int32),
        }
    )
    end_s = float(last_s.max(initial=1.0))
    n = iterations_per_replica * num_replicas
    decodes, prefills = rng.integers(1, 200, n), rng.integers(0, 3, n) * 500
    starts_s = np.tile(
        np.arange(iterations_per_replica) * end_s / max(iterations_per_replica, 1), num_replicas
    )
    iterations = pd.DataFrame(
        {
            "replica": np.repeat(np.arange(num_replicas), iterations_per_replica),
            "iteration": np.tile(np.arange(iterations_per_replica), num_replicas),
            "start_s": starts_s,
            "duration_s": rng.uniform(0.1, 1, n) * end_s / max(iterations_per_replica, 1),
            "decode_seqs": decodes,
            "decode_context_tokens": decodes * 500,
            "prefill_seqs": (prefills > 0).astype(int),
            "prefill_tokens": prefills,
            "prefill_pairs": prefills**2,
            "prefill_context_tokens": prefills,
            "sampled_seqs": decodes,
            "running": decodes,
            "waiting": decodes // 2,
            "kv_blocks_used": decodes * 4,
            "kv_tokens_used": decodes * 50,
            "preempted": np.zeros(n, dtype=int),
            "waits_for_memory": np.zeros(n, dtype=int),
        }
    )
    return RunRecords(
        requests=requests,
        iterations=iterations,
        gap_s=np.full(num_requests, 0.02),
        gap_count=output_tokens - 1,
        gap_end_s=last_s,
        pools=(PoolRecord(1000, 16),),
        replicas=replicas_throughout(num_replicas, end_s),
        end_s=end_s,
    )


def report_of(records, path, *, slo=CHAT, config=None, **trim):
    """Writes the report; returns its text without plotly's own code."""
    model = EvenSplit()
    summary = summarise(
        records,
        pools=[PoolHardware(model=model, price_usd_per_hour=2.0)],
        slo=slo,
        metrics=MetricsSettings(**trim),
    )
    window = Window(summary["trimmed"]["start_s"], summary["trimmed"]["end_s"])
    plots = plots_of(records, request_metrics(records.requests, slo), window, [model], slo)
    write_report(path, plots, records, summary, config or {"seed": 1}, slo)
    text = path.read_text(encoding="utf-8")
    head, body = text.split("</head>", 1)
    return re.sub(r"<script>.*</script>", "", head, flags=re.DOTALL) + body


def test_loads_nothing_from_anywhere(tmp_path):
    page = report_of(run_of(50), tmp_path / "report.html")
    assert not re.search(r"<(script|link|img|iframe)[^>]*\s(src|href)\s*=", page)
    assert "@import" not in page
    assert (tmp_path / "report.html").read_text(encoding="utf-8").count("plotly.js v") == 1


def test_shows_every_section(tmp_path):
    page = report_of(run_of(50), tmp_path / "report.html")
    titles = re.findall(r"<h2>(.*?)</h2>", page)
    assert titles == [
        "SLO attainment",
        "Latency",
        "TTFT against prompt length",
        "Over time",
        "Where the time went",
        "Iterations",
    ]
    assert all(f'"{component}"' in page for component in COMPONENTS)


def test_a_long_run_on_many_replicas_does_not_make_a_big_file(tmp_path):
    short, long = tmp_path / "short.html", tmp_path / "long.html"
    report_of(run_of(2_000), short)
    report_of(run_of(60_000, iterations_per_replica=20_000, num_replicas=6), long)
    assert long.stat().st_size < MAX_BYTES
    assert long.stat().st_size < short.stat().st_size + 200_000


def test_each_of_two_replicas_has_its_lines_and_more_share_them(tmp_path):
    two = report_of(run_of(50, num_replicas=2), tmp_path / "two.html")
    assert all(f"replica {i} mean" in two for i in range(2))
    three = report_of(run_of(50, num_replicas=3), tmp_path / "three.html")
    assert "all replicas mean" in three
    assert "all replicas maximum" in three
    assert "Mean of 3 replicas" in three
    assert "replica 0 mean" not in three


def test_output_and_input_tokens_have_axes_of_their_own():
    records = run_of(50)
    window = Window(0.0, records.end_s)
    plots = plots_of(records, request_metrics(records.requests, None), window, [EvenSplit()], None)
    chart = timeline(plots, records, window)
    axis_of = {trace["name"]: trace["yaxis"] for trace in chart.traces}
    panels = [axis_of[name] for name in ("output tokens", "input tokens", "arrivals")]
    assert len(set(panels)) == 3
    assert axis_of["arrivals"] == axis_of["finished"]


@pytest.mark.parametrize("num_requests", [0, 1])
@pytest.mark.parametrize("iterations_per_replica", [0, 1])
@pytest.mark.parametrize("slo", [CHAT, None])
def test_survives_a_run_in_which_little_happened(tmp_path, num_requests, iterations_per_replica, slo):
    records = run_of(num_requests, iterations_per_replica=iterations_per_replica)
    assert "Configuration" in report_of(records, tmp_path / "report.html", slo=slo)


def test_survives_a_run_in_which_nothing_finished(tmp_path):
    whole = run_of(20)
    unserved = whole.requests.assign(
        status="rejected", output_tokens=0, scheduled_s=np.nan, first_token_s=np.nan, last_token_s=np.nan
    )
    none = np.zeros(0)
    records = replace(whole, requests=unserved, gap_s=none, gap_count=none.astype(np.int64), gap_end_s=none)
    page = report_of(records, tmp_path / "report.html")
    assert "SLO chat missed: 0.0 % of 20 requests" in page
    assert "20 of 20 requests were rejected." in page


def test_survives_a_run_of_no_duration(tmp_path):
    records = replace(run_of(0, iterations_per_replica=0), end_s=0.0)
    assert "nothing to draw" in report_of(records, tmp_path / "report.html")


def test_says_what_was_trimmed(tmp_path):
    page = report_of(run_of(100), tmp_path / "report.html", warmup_s=20.5, cooldown_s=10.0)
    assert "Measured from 20.5 s to" in page
    assert "Shaded: warm-up" in page
    assert "Shaded: warm-up" not in report_of(run_of(100), tmp_path / "report.html")


def test_names_what_was_run_and_shows_its_configuration_as_text(tmp_path):
    config = {
        "model": {"name": "llama <8b>"},
        "hardware": {"name": "H100"},
        "note": "<script>alert(1)</script>",
    }
    page = report_of(run_of(5), tmp_path / "report.html", config=config)
    assert "<h1>llama &lt;8b&gt; · H100</h1>" in page
    assert "&lt;script&gt;alert(1)" in page
    assert "<script>alert(1)" not in page


@pytest.mark.parametrize("name", ["page_js\0", "$plotly", "${plotly}", "$title", "page_js\0" * 3])
def test_a_name_is_no_place_for_the_code_of_the_plots(tmp_path, name):
    page = report_of(run_of(5), tmp_path / "report.html", config={"model": {"name": name}})
    assert f"<h1>{name}</h1>" in page
    assert page.count("plotly.js v") == report_of(run_of(5), tmp_path / "plain.html").count("plotly.js v")


def test_says_why_requests_waited(tmp_path):
    whole = run_of(20)
    waits = {f"wait_{cause}_s": 1.0 if cause == "memory" else 0.0 for cause in ("gateway", *WAITS)}
    records = replace(whole, requests=whole.requests.assign(**waits), num_evicted_blocks=7)
    page = report_of(records, tmp_path / "report.html")
    assert "Waiting, ms per request: 1,000; no KV memory 1,000" in page
    assert "blocks evicted" not in page  # none was asked for again
    assert "Waiting, ms" not in report_of(whole, tmp_path / "report.html")


def test_classes_of_requests_have_a_table_where_there_are_several(tmp_path):
    records = run_of(60)
    tenants = np.where(np.arange(60) % 3 > 0, "<b>us</b>", "")
    classes = records.requests.assign(priority=np.arange(60) % 2, tenant=tenants)
    page = report_of(replace(records, requests=classes), tmp_path / "report.html")
    assert page.count("<table class=latencies>") == 3
    assert "<th>priority, ms</th>" in page
    assert "&lt;b&gt;us&lt;/b&gt;" in page
    assert "<b>us</b>" not in page
    assert report_of(records, tmp_path / "plain.html").count("<table class=latencies>") == 1
