"""The section on speculation, its slices in the timeline, and saved runs that are opened again."""

from __future__ import annotations

import json

import pandas as pd
import pytest
from numpy.testing import assert_allclose

from experiments.conformance.speculating import SpeculatingWorld
from experiments.conformance.worlds import Ask
from hwmodels.iterations import UnknownMachine
from sim import simulate
from sim.metrics.definitions import Window
from sim.metrics.measured import request_metrics
from sim.metrics.plots import plots_of
from sim.report.lines import speculation_lines
from sim.report.page import report_sections
from sim.report.perfetto import write_timeline
from sim.report.plots import speculation
from sim.report.run_files import read_records
from sim.speculation.acceptance.iid import Iid
from tests.tables import assert_equal_tables


@pytest.fixture(scope="module")
def ten_tokens():
    """Returns records of 10 tokens with 3 drafts that are always right: one alone, then 4, 4 and 1."""
    return SpeculatingWorld(asks=(Ask(0.0, 4, 10),), acceptance=Iid(rate=1.0)).simulate().records


@pytest.fixture(scope="module")
def run():
    return simulate(workload="poisson", workload__num_requests=20, speculation="eagle3")


def drawn(records, window):
    """Returns the section of a run of one pool."""
    plots = plots_of(records, request_metrics(records.requests, None), window, [UnknownMachine()], None)
    return speculation(plots, records, window)


def test_the_section_draws_places_lengths_and_batches(ten_tokens):
    chart = drawn(ten_tokens, Window(0.0, ten_tokens.end_s))
    bars, conditional, length, tokens, rows = chart.traces
    assert list(bars["x"]) == [1, 2, 3]
    assert list(bars["y"]) == list(conditional["y"]) == [100, 100, 100]
    assert list(length["y"]) == pytest.approx([4.0] * 3)
    assert (list(tokens["x"]), list(tokens["y"])) == ([1], [1 + 6 / 3])
    assert list(rows["y"]) == [1 + 9 / 3]


def test_a_run_in_which_nothing_was_verified_has_no_section(ten_tokens):
    assert drawn(ten_tokens, Window(0.0, 0.125)) is None


def test_the_page_has_the_section_and_the_terms(run, tmp_path):
    run.write(tmp_path)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<h2>Speculation</h2>" in page
    assert "<dt>mean accepted length</dt>" in page
    assert "Speculation: mean accepted length" in page


def test_a_run_that_drafts_nothing_is_saved(tmp_path):
    run = simulate(workload="poisson", workload__num_requests=3, speculation="eagle3", draft_length="none")
    run.write(tmp_path)
    assert pd.read_parquet(tmp_path / "acceptance.parquet").empty
    assert speculation_lines(run.summary) == ["Speculation: nothing was drafted"]


def test_a_page_without_speculation_does_not_mention_it(tmp_path):
    simulate(workload="poisson", workload__num_requests=3).write(tmp_path)
    page = (tmp_path / "report.html").read_text(encoding="utf-8").split("</head>")[1]
    assert "accepted length" not in page
    assert not (tmp_path / "bursts.parquet").exists()


def test_a_saved_run_is_opened_again(run, tmp_path):
    run.write(tmp_path)
    plain = json.loads((tmp_path / "records.json").read_text())
    records = read_records(lambda name: pd.read_parquet(tmp_path / name), plain)
    before = run.run.records
    assert_equal_tables(records.bursts, before.bursts)
    acceptance = records.speculation.acceptance
    assert_equal_tables(acceptance[list(before.speculation.acceptance)], before.speculation.acceptance)
    assert_allclose(acceptance["rate"], acceptance["accepted"] / acceptance["drafted"])
    plots = plots_of(records, run.requests, run.run.window, run.run.models, None)
    titles = [section.title for section in report_sections(plots, records, run.summary, None)]
    assert "Speculation" in titles


def test_slices_of_the_timeline_say_how_many_tokens_a_pass_brought(ten_tokens, tmp_path):
    write_timeline(tmp_path / "timeline.json", ten_tokens)
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    slices = [event["args"] for event in events if event.get("cat") == "iteration"]
    assert [args["kept_tokens"] for args in slices] == [0, 3, 3, 0]
    assert [args["tokens"] for args in slices] == [4, 4, 4, 4]


def test_lines_say_what_was_accepted_and_what_was_in_vain():
    use = {
        "drafts": 1000,
        "draft_tokens": 2000,
        "kept_tokens": 1390,
        "acceptance_rate": 0.7,
        "mean_accepted_length": 2.4,
        "tokens_per_pass": 2.39,
        "draft_tokens_per_draft": 2.0,
        "wasted_tokens": {"rejected": 600, "discarded": 10, "unused": 8},
        "flops": {"wasted_share": 0.125},
        "by_place": [{"rate": 0.8}, {"rate": 0.6}],
    }
    assert speculation_lines({"speculation": use}) == [
        "Speculation: mean accepted length 2.40 of 3.00, 2.39 tokens per pass; 1,000 drafts, acceptance rate "
        "70.0 %, by place 80.0 %, 60.0 %",
        "Draft tokens: 2,000 verified, 1,390 kept; in vain 600 rejected, 10 behind the end of an answer, "
        "8 unused, and 12.5 % of all FLOPs",
        "ITL is the gap between bursts, as the tokens of a pass come together: about TPOT times the tokens "
        "per pass.",
    ]
    assert speculation_lines({"speculation": {"drafts": 0}}) == ["Speculation: nothing was drafted"]
    assert speculation_lines({}) == []
