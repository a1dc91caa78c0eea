"""windtunnel capacity: its answer, its tables and its page are those of its runs."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.app.cli import main
from experiments.capacity import tables
from experiments.capacity.advice import Advice, advice_lines
from experiments.capacity.probe import Probe
from experiments.capacity.results import derived
from experiments.capacity.search import Status
from experiments.capacity.settings import CapacitySettings
from experiments.study.pareto import pareto
from tests.experiments.capacity.questions import SLO, TINY, question_of, run_with


def test_figures_follow_from_cost_devices_and_power():
    runs = [run_with(0.9, goodput_per_s=5.0, output_tokens_per_s=1000.0, tpot_p50_s=0.02, watts=500.0)]
    found = derived(runs, usd_per_hour=10.0, num_devices=4)
    assert found["good_requests_per_usd"] == [1800.0]
    assert found["goodput_per_s_and_gpu"] == [1.25]
    assert found["good_requests_per_kwh"] == [36_000.0]
    assert found["tokens_per_s_and_gpu"] == [250.0]
    assert found["tokens_per_s_and_user"] == [50.0]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1))
def test_the_front_is_not_dominated_and_dominates_all_others(points):
    front = {points[i] for i in pareto(points)}
    for x, y in points:
        beaten = any(a >= x and b >= y and (a, b) != (x, y) for a, b in points)
        assert ((x, y) in front) == (not beaten)


@pytest.mark.slow
def test_a_search_writes_its_answer_its_candidates_and_a_page(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    asked = ["capacity.seeds=[0,1]", "capacity.headroom=0.3", "capacity.spare=1"]
    asked += ["capacity.growth_per_month=0.5", "capacity.months=[0,3]"]
    assert main(["capacity", *TINY, *asked]) == 0
    printed = capsys.readouterr().out
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    assert printed.splitlines()[0] == summary["answer"][0]
    best = summary["ranked"][0]
    assert f"{best['replicas']} x {best['candidate']}" in summary["answer"][0]
    assert best["replicas"] == best["replicas_up"] + 1
    assert best["usd_per_hour"] == min(row["usd_per_hour"] for row in summary["ranked"])
    assert best["share_at_margin"]["mean"] >= 0.9
    first, later = summary["stages"]
    assert (first["load"], later["load"]) == (1.0, 1.5**3)
    assert later["usd_per_hour"] >= first["usd_per_hour"]
    assert later["grown_replicas"] is None or later["grown_replicas"] >= first["grown_replicas"]
    table = pd.read_parquet(tmp_path / "out/candidates.parquet")
    assert sorted(table.candidate) == ["l4 TP1", "l40s TP1"] or sorted(table.candidate) == ["l4", "l40s"]
    assert set(table.status) <= {status.name for status in Status}
    # place, given these rates, rents as many of them.
    name = f"{best['candidate'].split()[0]}"
    rate = best["kept_output_tokens_per_s_and_replica"]
    assert rate * best["replicas_up"] == pytest.approx(1.3 * best["figures"]["output_tokens_per_s"]["mean"])
    demand = rate * best["replicas_up"] * 0.999
    asked = [f"models=[{{name:smollm2_135m,demand:{demand}}}]", f"gpus=[{{name:{name},count:9}}]"]
    asked += ["objective=cost", "tensor_parallel_sizes=[1]", "measured=[out/summary.json]"]
    assert main(["place", *asked, "engine.max_num_seqs=8"]) == 0
    placed = json.loads((tmp_path / "placement.json").read_text())
    assert placed["gpus"][name] == best["replicas_up"]
    assert main(["place", *asked[:-1], "measured=[out/config.yaml]"]) == 2
    assert "measured[0]=out/config.yaml: is damaged or cut short" in capsys.readouterr().err
    assert "Page with the Pareto front: out/capacity.html" in printed
    assert any(line.startswith("Prices of a GPU for an hour: L4 $0.80 (AWS on") for line in summary["answer"])
    page = (tmp_path / "out/capacity.html").read_text()
    for heading in ("Answer", "Pareto front: speed per user against", "Forecast", "vLLM, each of"):
        assert heading in page
    # What is reported is true: simulate agrees at this number, and not with one less.
    own = [o for o in TINY if not o.startswith(("capacity", "hydra"))] + best["overrides"]
    share = {}
    for up in {best["replicas_up"], max(1, best["replicas_up"] - 1)}:
        overrides = [*own, f"replicas={up}", "load=1.3", "output.report=false", "output.tables=false"]
        for seed in (0, 1):
            assert main(["simulate", *overrides, f"seed={seed}", f"hydra.run.dir=run{up}{seed}"]) == 0
        share[up] = [
            json.loads((tmp_path / f"run{up}{seed}/summary.json").read_text())["goodput"]["share"]
            for seed in (0, 1)
        ]
    assert min(share[best["replicas_up"]]) >= 0.9
    if best["replicas_up"] > 1:
        assert min(share[best["replicas_up"] - 1]) < 0.9


@pytest.mark.slow
def test_without_an_answer_it_says_what_fails_and_what_would_do(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    asked = [o for o in TINY if not o.startswith("capacity.hardware")]
    asked += ["capacity.hardware=[t4]", "capacity.seeds=[0]", "capacity.max_replicas=2", "slo.tpot_ms=2.5"]
    assert main(["capacity", *asked]) == 3
    lines = capsys.readouterr().out.splitlines()
    advice = json.loads((tmp_path / "out/summary.json").read_text())["advice"]
    assert lines[0].startswith("No candidate meets the SLO. The closest is t4")
    assert any(line.startswith("TPOT: ") and "the limit of 2.50 ms" in line for line in lines)
    assert advice["missed_terms"]["tpot"]["needed_s"] > 0.0025
    assert any(line.startswith("Another GPU: ") for line in lines)
    looser = advice["looser_limits_s"].get("tpot")
    if looser is not None:  # true: with that limit it is kept
        own = [o for o in TINY if not o.startswith(("capacity", "hydra"))]
        overrides = [*own, "hardware=t4", f"replicas={advice['replicas']}", f"slo.tpot_ms={1e3 * looser}"]
        assert main(["simulate", *overrides, "hydra.run.dir=again"]) == 0
        assert json.loads((tmp_path / "again/summary.json").read_text())["goodput"]["attained"]


def test_advice_in_words():
    found = Advice(
        best="t4",
        replicas=2,
        share=0.4,
        terms={"tpot": (0.05, 0.08), "ttft": (0.5, math.inf)},
        looser={"tpot": 0.0812},
        load=0.25,
        rate_per_s=8.0,
        other=("l4", 3, 2.4),
        misses_idle=False,
    )
    assert advice_lines(found, SLO) == [
        "No candidate meets the SLO. The closest is t4 with 2 replicas: SLO attainment 40 %, target 90 %.",
        "TPOT: 90 % of the requests are within 80.0 ms, 1.60 times the limit of 50.0 ms.",
        "TTFT: exists for fewer than 90 % of the requests.",
        "A looser limit: slo.tpot_ms=82 would be met.",
        "A lower rate: it meets the SLO at 2.00 requests/s (0.25 times the traffic of 8.00 requests/s).",
        "Another GPU: 3 x l4 meet the SLO for $2.40/hour.",
    ]
    hopeless = advice_lines(replace(found, looser={}, load=None, misses_idle=True, other=None), SLO)
    assert hopeless[3:] == [
        "A looser limit: relaxing one limit alone is not enough.",
        "A lower rate: does not help, as the limit is missed even on idle replicas.",
        "Another GPU: no GPU of configs/hardware meets the SLO with these settings.",
    ]
    slow = advice_lines(replace(found, replicas=1, looser={"e2e": 1234.5674}, load=None), SLO, " in month 12")
    assert slow[0].startswith(
        "No candidate meets the SLO in month 12. The closest is t4 with 1 replica: SLO attainment 40 %"
    )
    assert slow[3] == "A looser limit: slo.e2e_ms=1234568 would be met."
    assert slow[4] == (
        "A lower rate: none down to 0.000244 requests/s (3.1e-05 times the traffic) meets the SLO; "
        "lower rates were not tried."
    )


def test_the_headline_names_growth_and_spans_have_units_that_fit():
    settings = CapacitySettings(months=(12,), growth_per_month=0.08)
    search = SimpleNamespace(load=1.0, states=[], status=None)
    found = SimpleNamespace(search=search, question=SimpleNamespace(settings=settings, refused=()))
    assert tables._growth(found) == ""
    search.load = settings.loads[12]
    assert tables._growth(found) == " in month 12 (2.52 times the traffic)"
    assert [tables._span(s) for s in (60, 570, 3600, 36000)] == ["60.0 s", "9.5 min", "60 min", "10.0 h"]


def test_a_fleet_is_compared_with_the_bill_of_an_api():
    """A fleet of $2 an hour, and a bill of $4 for the same traffic: cheaper from half of it on."""
    assert derived([run_with(1.0, bill_usd_per_hour=4.0)], 2.0, 1)["break_even_load"] == [0.5]
    assert math.isnan(derived([run_with(1.0, bill_usd_per_hour=math.nan)], 2.0, 1)["break_even_load"][0])
    scenario = question_of(*TINY, "tariff=batch", "slo.ttft_ms=5000").candidates[0].scenario
    one = Probe(
        name="", scenario=scenario, replicas=1, load=1.0, seeds=(0,), window_s=None, stop=False
    ).run()[0]
    summary = scenario.run().summary
    assert one.figures["bill_usd_per_hour"] == 3600 * summary["bill_usd"] / summary["simulated_s"]
    found = derived([one], scenario.price_usd_per_hour, 1)["break_even_load"]
    assert found == pytest.approx([summary["break_even_load"]])
