"""The summary in words: verdict, caveats, and figures that fit the terminal."""

from io import StringIO

import pytest
from rich.console import Console

from experiments.app.terminal import print_summary
from sim.report import numbers, wording
from sim.report.lines import pressure_lines

GOODPUT = {
    "requests_per_s": 5.1,
    "share": 0.931,
    "target": 0.9,
    "attained": True,
    "term_shares": {"ttft": 0.95, "tpot": 0.97},
    "slo": {"name": "chat", "ttft_ms": 500, "tpot_ms": 50},
}
LATENCY = {
    "count": 19_366,
    "mean_s": 0.1,
    "p50_s": 0.09,
    "p90_s": 0.2,
    "p95_s": 0.3,
    "p99_s": 1.5,
    "min_s": 0.01,
    "max_s": 123.4,
}


def summary(**changed):
    return {
        "simulated_s": 3600.0,
        "interrupted": False,
        "requests": {"arrived": 19_366, "finished": 19_366, "rejected": 0, "aborted": 0, "unfinished": 0},
        "trimmed": {"warmup_s": 0, "cooldown_s": 0, "start_s": 0, "end_s": 3600.0, "requests_left_out": 0},
        **dict.fromkeys(("ttft", "tpot", "itl", "e2e", "queue"), LATENCY),
        "throughput": {"requests_per_s": 5.38, "output_tokens_per_s": 1135.0, "input_tokens_per_s": 6210.0},
        "goodput": GOODPUT,
        "gpu_busy": 0.87,
        "mfu": 0.2,
        "mbu": 0.5,
        "kv": {"mean_use_share": 0.1, "peak_use_share": 0.9, "internal_waste_share": 0.01},
        "iterations": {"count": 1, "mean_s": 0.01, "mean_batch_seqs": 20.5, "max_batch_seqs": 256},
        "preemptions": 12_345,
        "cost": {
            "usd": 2.7,
            "usd_per_million_output_tokens": 0.66,
            "usd_per_1000_requests": 0.14,
            "split": {"usd_per_million_input_tokens": 0.05, "usd_per_million_output_tokens": 0.4},
        },
        **changed,
    }


def printed(what, width=100):
    console = Console(file=StringIO(), width=width)
    print_summary(what, console)
    return console.file.getvalue()


def test_verdict_says_how_many_met_the_objective():
    assert wording.verdict(summary()) == "SLO chat attained: 93.1 % of 19,366 requests met it (target 90 %)"


def test_a_near_miss_does_not_read_like_the_target():
    missed = {**GOODPUT, "share": 0.89996, "attained": False}
    assert "missed: 89.9 % of" in wording.verdict(summary(goodput=missed))


def test_verdict_without_an_objective_or_without_requests():
    assert wording.verdict(summary(goodput=None)) == "19,366 of 19,366 requests finished; no SLO was given."
    none = dict.fromkeys(("arrived", "finished", "rejected", "aborted", "unfinished"), 0)
    assert wording.verdict(summary(requests=none)) == "No request arrived in the measurement window."


def test_caveats_come_only_when_there_are_any():
    assert wording.caveats(summary()) == []
    requests = {"arrived": 10, "finished": 7, "rejected": 2, "aborted": 0, "unfinished": 1}
    trimmed = {"warmup_s": 60, "cooldown_s": 0, "start_s": 60.0, "end_s": 3600.0, "requests_left_out": 3}
    assert wording.caveats(summary(requests=requests, trimmed=trimmed, interrupted=True)) == [
        "Interrupted at 60.0 min of simulated time; the figures are of this part.",
        "Measured from 60.0 s to 60.0 min; 3 requests outside this window are not counted.",
        "2 of 10 requests were rejected.",
        "1 of 10 requests was still running or waiting at the interruption and counts as missed.",
    ]


def test_a_time_limit_explains_the_requests_that_it_cut_off():
    requests = {"arrived": 100, "finished": 88, "rejected": 0, "aborted": 0, "unfinished": 12}
    text = "12 of 100 requests were still running or waiting at the time limit"
    assert wording.caveats(summary(requests=requests)) == [f"{text} and count as missed."]
    assert wording.caveats(summary(requests=requests, goodput=None)) == [f"{text}."]


def test_prints_verdict_terms_latencies_and_figures():
    text = printed(summary())
    assert "TTFT ≤ 500 ms: 95.0 % of requests; TPOT ≤ 50 ms: 97.0 % of requests" in text
    assert ["TTFT", "100", "90.0", "200", "300", "1,500", "123,400", "19,366"] in [
        line.split() for line in text.splitlines()
    ]
    assert "1,135 tok/s" in text


@pytest.mark.parametrize("width", [60, 80, 95, 96, 100, 200])
def test_big_figures_fit_any_terminal_uncut(width):
    rates = {"requests_per_s": 4321.0, "output_tokens_per_s": 1_234_567.0, "input_tokens_per_s": 12_345_678.0}
    slow = {**LATENCY, "max_s": 123_456.7, "count": 1_234_567_890}
    text = printed(summary(throughput=rates, itl=slow), width)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    words = text.split()
    for figure in ("1,234,567", "12,345,678", "123,456,700", "1,234,567,890", "123,400", "12,345", "$0.660"):
        assert figure in words


def test_blocks_stand_side_by_side_from_96_columns_on():
    def headings(width):
        return [line.split() for line in printed(summary(), width).splitlines() if "Throughput" in line]

    assert headings(96) == headings(100) == [["Throughput", "Hardware", "Cost"]]
    assert headings(95) == headings(60) == [["Throughput"]]


def test_latencies_are_turned_where_their_rows_are_too_long():
    def first_cells(width):
        return [line.split()[:3] for line in printed(summary(), width).splitlines() if line.split()]

    assert ["ms", "mean", "p50"] in first_cells(80)
    assert ["ms", "TTFT", "TPOT"] in first_cells(50)
    assert ["p99", "1,500", "1,500"] in first_cells(50)


def test_figures_that_do_not_exist_are_dashes():
    nothing = {**dict.fromkeys(LATENCY), "count": 0}
    text = printed(summary(tpot=nothing, mfu=None))
    assert ["TPOT", *["–"] * 6, "0"] in [line.split() for line in text.splitlines()]
    assert "– / 50.0 %" in text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.01234, "0.0123"), (1.5, "1.50"), (12.345, "12.3"), (99.96, "100"), (1234.5, "1,234")],
)
def test_numbers_have_three_figures(value, text):
    assert numbers.number(value) == text


CACHE = {
    "found_tokens": 0,
    "looked_up_tokens": 1000,
    "hit_share": 0.0,
    "with_resumptions": {"found_tokens": 0, "looked_up_tokens": 1000, "hit_share": 0.0},
    "evicted_blocks": 0,
    **{
        f"{verb}_{unit}": {"host": 0, "disk": 0}
        for verb in ("loaded", "stored")
        for unit in ("tokens", "bytes")
    },
}
PREEMPTION = dict.fromkeys(
    ("recompute", "swap", "recomputed_tokens", "swapped_out_tokens", "swapped_in_tokens"), 0
) | {"swapped_out_bytes": 0.0, "swapped_in_bytes": 0.0}
WAITING = {"mean_s": 0.02, "by_cause_s": dict.fromkeys(wording.WAITS, 0.0) | {"iteration": 0.02}}


def pressure(**changed):
    return pressure_lines(summary(cache=CACHE, preemption=PREEMPTION, waiting=WAITING) | changed)


def test_a_run_without_pressure_says_nothing_about_it():
    assert pressure() == []


def test_what_the_cache_found_is_one_line():
    resumed = {"found_tokens": 500, "looked_up_tokens": 1100, "hit_share": 500 / 1100}
    cache = CACHE | {
        "found_tokens": 412,
        "hit_share": 0.412,
        "with_resumptions": resumed,
        "evicted_blocks": 12_345,
        "loaded_tokens": {"host": 9, "disk": 0},
        "loaded_bytes": {"host": 1.25e9, "disk": 0},
        "stored_tokens": {"host": 0, "disk": 70},
    }
    assert pressure(cache=cache) == [
        "Cache: hit rate 41.2 % of 1,000 prompt tokens, 45.5 % including resumed requests; "
        "12,345 blocks evicted; "
        "1.25 GB loaded from host; 70 tokens stored to disk"
    ]


def test_preemptions_are_one_line():
    figures = PREEMPTION | {"recompute": 120, "recomputed_tokens": 4321}
    assert pressure(preemption=figures) == ["Preemptions: 120 by recompute; 4,321 tokens recomputed"]
    figures |= {"swap": 3, "swapped_out_tokens": 9, "swapped_out_bytes": 2e9, "swapped_in_bytes": 1e9}
    assert pressure(preemption=figures) == [
        "Preemptions: 120 by recompute; 3 by swap (2.00 GB out, 1.00 GB in); 4,321 tokens recomputed"
    ]


def test_waits_are_one_line_once_they_are_for_more_than_an_iteration():
    by_cause_s = WAITING["by_cause_s"] | {"memory": 0.5, "slot": 0.001}
    assert pressure(waiting={"mean_s": 0.521, "by_cause_s": by_cause_s}) == [
        "Waiting, ms per request: 521; no KV memory 500, current iteration 20.0, no sequence slot 1.00"
    ]
    by_cause_s = WAITING["by_cause_s"] | {"budget": 0.0015}
    assert pressure(waiting={"mean_s": 0.0215, "by_cause_s": by_cause_s}) == []


def test_lines_about_pressure_are_printed():
    text = printed(summary(cache=CACHE | {"evicted_blocks": 7}, preemption=PREEMPTION, waiting=WAITING))
    assert "blocks evicted" not in text  # none was asked for again


def classes(**goodput):
    requests = {"arrived": 2_000, "finished": 1_999, "rejected": 1, "aborted": 0, "unfinished": 0}
    return {
        "requests": requests,
        **dict.fromkeys(("ttft", "tpot", "e2e", "queue"), LATENCY),
        "goodput": {**GOODPUT, **goodput} if goodput else None,
    }


def test_classes_of_requests_have_a_line_each():
    text = printed(summary(by_priority={"0": classes(share=0.8), "7": classes()}))
    lines = [line.split() for line in text.splitlines()]
    figures = ["90.0", "1,500", "90.0", "1,500", "90.0", "1,500"]
    assert ["0", *figures, "80.0", "%", "1,999", "2,000"] in lines
    assert ["7", *figures, "–", "1,999", "2,000"] in lines
    assert "tenant" not in text
    assert "priority" not in printed(summary())


@pytest.mark.parametrize("width", [60, 80, 100])
def test_tables_of_classes_fit_any_terminal_uncut(width):
    tenants = {"": classes(share=0.5)} | {f"tenant-{i}": classes(share=i / 100) for i in range(19)}
    text = printed(summary(by_priority={"0": classes(), "1": classes()}, by_tenant=tenants), width)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    words = text.split()
    assert {"(none)", "50.0", *(f"tenant-{i}" for i in range(19)), "18.0"} <= set(words)
    assert words.count("1,999") == 22


def test_evictions_are_said_to_be_of_the_whole_run_where_it_was_trimmed():
    cache = {
        "found_tokens": 5,
        "looked_up_tokens": 10,
        "hit_share": 0.5,
        "with_resumptions": {"found_tokens": 5, "looked_up_tokens": 10, "hit_share": 0.5},
        "evicted_blocks": 1_234,
        "loaded_tokens": {},
        "stored_tokens": {},
    }
    trimmed = {"warmup_s": 60, "cooldown_s": 0, "start_s": 60.0, "end_s": 3600.0, "requests_left_out": 3}
    line = "Cache: hit rate 50.0 % of 10 prompt tokens; 1,234 blocks evicted"
    assert pressure_lines(summary(cache=cache)) == [line]
    assert pressure_lines(summary(cache=cache, trimmed=trimmed)) == [f"{line} in the whole run"]


def test_a_pipelines_bubbles_are_reported_by_cause():
    figures = {
        "stages": 4,
        "mean_micro_batches": 3.5,
        "bubble_share": 0.1,
        "unequal_stages_share": 0.06,
        "few_micro_batches_share": 0.04,
        "host_share": 0.02,
    }
    assert pressure(pipeline=figures)[-1] == (
        "Pipeline: 4 stages, 3.5 micro-batches in flight; bubbles take 10.0 % of the stages' time "
        "(6.0 % unequal stages, 4.0 % too few micro-batches); 2.0 % is spent waiting for the host"
    )
    assert not any("Pipeline" in line for line in pressure(pipeline=None))
    by_pool = {"prompts": {"pipeline": figures}, "answers": {"pipeline": None}}
    (line,) = (line for line in pressure(pipeline=None, by_pool=by_pool) if "Pipeline" in line)
    assert line.startswith("Pipeline of prompts: 4 stages, 3.5 micro-batches in flight; bubbles take 10.0 %")
