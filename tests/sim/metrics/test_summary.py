"""A run of three requests whose every figure is worked out on paper, and records that do not add up.

One replica, 10 KV blocks of 4 tokens, 4 s:

    iteration  time     work                            blocks  tokens
    0          0 - 1 s  prompt of request 0, 8 tokens     2       8
    1          1 - 2 s  0 decodes; prompt of 1, 4 tokens  4      13
    2          2 - 3 s  0 decodes                         3      10
                3 - 4 s  idle

Request 0 arrives at 0 s, its 3 tokens come at 1, 2, 3 s. Request 1 arrives at 0.5 s, its only token comes
at 2 s. Request 2 arrives at 2.5 s and is rejected.
"""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from sim.metrics.dialects import MetricsSettings
from sim.metrics.figure import PoolHardware
from sim.metrics.measured import request_metrics
from sim.metrics.output import check_conservation
from sim.metrics.slo import Slo
from sim.metrics.summary import summarise
from sim.records.run import replicas_throughout
from tests.sim.metrics.small_runs import run_of_three_iterations

NAN = float("nan")
NO_TIMES = np.zeros(0)
NO_COUNTS = np.zeros(0, dtype=np.int64)


class TenFlopsAToken:
    """10 FLOPs a token at a peak of 100 FLOP/s; 50 bytes an iteration at a peak of 100 bytes/s."""

    peak_flops_per_s = peak_bytes_per_s = 100.0

    def flops(self, shape):
        return 10.0 * (shape.decode_seqs + shape.prefill_tokens)

    def bytes_moved(self, shape):
        return 50.0


def three_requests():
    requests = pd.DataFrame(
        {
            "request_id": [0, 1, 2],
            "status": ["finished", "finished", "rejected"],
            "arrival_s": [0.0, 0.5, 2.5],
            "scheduled_s": [0.0, 1.0, NAN],
            "first_token_s": [1.0, 2.0, NAN],
            "last_token_s": [3.0, 2.0, NAN],
            "finished_s": [3.0, 2.0, 2.5],
            "prompt_tokens": [8, 4, 100],
            "output_tokens": [3, 1, 0],
            "preemptions": [0, 0, 0],
        }
    )
    return run_of_three_iterations(requests, preempted=(0, 0, 1))


def nothing_at_all():
    whole = three_requests()
    return replace(
        whole,
        requests=whole.requests.iloc[:0],
        iterations=whole.iterations.iloc[:0],
        gap_s=NO_TIMES,
        gap_count=NO_COUNTS,
        gap_end_s=NO_TIMES,
        end_s=0.0,
    )


def summary_of(records, *, slo=None, price_usd_per_hour=3.6, **trim):
    pool = PoolHardware(model=TenFlopsAToken(), price_usd_per_hour=price_usd_per_hour)
    return summarise(records, pools=[pool], slo=slo, metrics=MetricsSettings(**trim))


def with_request(row, **changed):
    records = three_requests()
    requests = records.requests.copy()
    for column, value in changed.items():
        requests.loc[row, column] = value
    return replace(records, requests=requests)


def test_columns_of_the_request_table():
    table = request_metrics(three_requests().requests, Slo(ttft_ms=1200, tpot_ms=1000))
    assert table["ttft_s"].tolist()[:2] == [1.0, 1.5]
    assert table["queue_s"].tolist()[:2] == [0.0, 0.5]
    assert table["e2e_s"].tolist()[:2] == [3.0, 1.5]
    assert table["tpot_s"].tolist()[0] == 1.0
    assert table["tpot_s"].isna().tolist() == [False, True, True]
    assert table.loc[2, ["ttft_s", "queue_s", "e2e_s"]].isna().all()
    assert table["slo_met"].tolist() == [True, False, False]


def test_without_an_slo_the_table_has_no_verdict():
    assert "slo_met" not in request_metrics(three_requests().requests, None)


def test_an_unfinished_request_has_a_ttft_but_neither_tpot_nor_e2e():
    table = request_metrics(with_request(0, status="unfinished").requests, None)
    assert table.loc[0, "ttft_s"] == 1.0
    assert table.loc[0, ["tpot_s", "e2e_s"]].isna().all()


def test_latencies_and_throughput():
    summary = summary_of(three_requests())
    assert summary["requests"] == {"arrived": 3, "finished": 2, "rejected": 1, "aborted": 0, "unfinished": 0}
    assert summary["ttft"]["mean_s"] == summary["ttft"]["p50_s"] == 1.25
    assert (summary["tpot"]["count"], summary["tpot"]["mean_s"]) == (1, 1.0)
    assert (summary["itl"]["count"], summary["itl"]["max_s"]) == (2, 1.0)
    assert summary["e2e"]["p90_s"] == pytest.approx(1.5 + 0.9 * 1.5)
    assert summary["throughput"] == {
        "requests_per_s": 0.5,
        "requests_per_minute": 30.0,
        "output_tokens_per_s": 1.0,
        "output_tokens_per_s_and_gpu": 1.0,
        "input_tokens_per_s": 3.0,
    }


def test_a_user_sees_a_token_per_tpot_and_without_hidden_tokens_the_first_one_is_published():
    summary = summary_of(three_requests())
    assert summary["per_user"] == {
        "count": 1,
        "mean_tokens_per_s": 1.0,
        "p50_tokens_per_s": 1.0,
        "p10_tokens_per_s": 1.0,
        "p1_tokens_per_s": 1.0,
    }
    assert summary["publish"] == summary["ttft"]


def test_goodput_is_a_rate_and_a_share_of_arrivals():
    goodput = summary_of(three_requests(), slo=Slo(name="x", ttft_ms=1200, tpot_ms=1000))["goodput"]
    assert goodput["requests_per_s"] == 0.25
    assert goodput["share"] == pytest.approx(1 / 3)
    assert goodput["term_shares"] == {"ttft": pytest.approx(1 / 3), "tpot": pytest.approx(2 / 3)}
    assert goodput["attained"] is False
    assert goodput["slo"] == {"name": "x", "ttft_ms": 1200, "tpot_ms": 1000}
    assert summary_of(three_requests())["goodput"] is None


def test_use_of_the_hardware():
    summary = summary_of(three_requests())
    assert summary["gpu_busy"] == 0.75
    assert summary["mfu"] == pytest.approx((80 + 50 + 10) / 400)
    assert summary["mbu"] == pytest.approx(150 / 400)
    assert summary["kv"]["mean_use_share"] == pytest.approx((2 + 4 + 3) / 40)
    assert summary["kv"]["peak_use_share"] == 0.4
    assert summary["kv"]["internal_waste_share"] == pytest.approx(1 - 31 / 36)
    assert summary["iterations"]["count"] == 3
    assert summary["iterations"]["mean_batch_seqs"] == pytest.approx(4 / 3)
    assert summary["iterations"]["mean_batch_tokens"] == pytest.approx(14 / 3)
    assert summary["preemptions"] == 1


def test_idle_replicas_count_against_every_share_of_the_hardware():
    one, two = (summary_of(replace(three_requests(), replicas=replicas_throughout(n, 4.0))) for n in (1, 2))
    for name in ("gpu_busy", "mfu", "mbu"):
        assert two[name] == one[name] / 2


def test_cost_of_a_rent_of_a_tenth_of_a_cent_a_second():
    cost = summary_of(three_requests())["cost"]
    assert cost["usd"] == pytest.approx(0.004)
    assert cost["usd_per_million_output_tokens"] == pytest.approx(1000)
    assert cost["usd_per_1000_requests"] == pytest.approx(2)
    # prompts took 1 s and 4 / 5 of the mixed second, of 3 busy seconds
    assert cost["split"]["prefill_time_share"] == pytest.approx(0.6)
    assert cost["split"]["usd_per_million_input_tokens"] == pytest.approx(200)
    assert cost["split"]["usd_per_million_output_tokens"] == pytest.approx(400)


def test_two_dollars_an_hour_at_100_tokens_a_second():
    records = three_requests()
    # 4 tokens in 0.04 s: times a hundredth of those on paper
    faster = replace(
        records,
        requests=records.requests.assign(
            **{name: records.requests[name] / 100 for name in records.requests.filter(like="_s")}
        ),
        iterations=records.iterations.assign(start_s=[0, 0.01, 0.02], duration_s=0.01),
        gap_end_s=records.gap_end_s / 100,
        end_s=0.04,
    )
    cost = summary_of(faster, price_usd_per_hour=2.0)["cost"]
    assert cost["usd_per_million_output_tokens"] == pytest.approx(5.556, abs=5e-4)


def test_trimming_counts_what_happened_inside_and_says_so():
    """1.5 to 3 s: half of iteration 1, all of 2; tokens at 2, 2 and 3 s; only request 2 arrives."""
    slo = Slo(ttft_ms=1e6)
    summary = summary_of(three_requests(), slo=slo, warmup_s=1.5, cooldown_s=1.0)
    trimmed = {"warmup_s": 1.5, "cooldown_s": 1.0, "start_s": 1.5, "end_s": 3.0, "requests_left_out": 2}
    assert summary["trimmed"] == trimmed
    assert summary["requests"]["arrived"] == 3
    assert summary["throughput"]["output_tokens_per_s"] == pytest.approx(3 / 1.5)
    assert summary["throughput"]["requests_per_s"] == pytest.approx(2 / 1.5)
    assert summary["goodput"]["requests_per_s"] == pytest.approx(2 / 1.5)
    assert summary["goodput"]["share"] == 0
    assert summary["gpu_busy"] == 1.0
    assert summary["mfu"] == pytest.approx((50 / 2 + 10) / 150)
    assert summary["ttft"]["count"] == 0


def test_rejects_a_negative_warm_up():
    with pytest.raises(ValueError, match="warmup_s=-1: must be a finite number >= 0 s"):
        summary_of(three_requests(), warmup_s=-1)


@pytest.mark.parametrize(
    "trim", [{"warmup_s": 3.0}, {"cooldown_s": 3.0}, {"warmup_s": 2.0, "cooldown_s": 1.0}]
)
def test_trimming_that_leaves_nothing_counts_nothing(trim):
    """A run that ends with a token, at 3 s: not even that one falls into the empty window."""
    summary = summary_of(replace(three_requests(), end_s=3.0), slo=Slo(ttft_ms=1), **trim)
    assert summary["trimmed"]["start_s"] == summary["trimmed"]["end_s"] == 3.0
    assert summary["trimmed"]["requests_left_out"] == 3
    assert [summary[name]["count"] for name in ("ttft", "itl", "e2e", "iterations")] == [0, 0, 0, 0]
    assert summary["goodput"]["attained"] is None


def test_a_whole_run_that_takes_no_time_is_measured():
    rejected = with_request(2, arrival_s=0.0, finished_s=0.0).requests.iloc[2:]
    summary = summary_of(replace(nothing_at_all(), requests=rejected), slo=Slo(ttft_ms=1))
    assert summary["trimmed"]["requests_left_out"] == 0
    assert summary["goodput"]["share"] == 0


@pytest.mark.parametrize(
    ("records", "trim"),
    [
        (nothing_at_all(), {}),
        (three_requests(), {"warmup_s": 100.0}),
        (three_requests(), {"cooldown_s": 3.9}),
    ],
    ids=["empty run", "all warm-up", "almost all cool-down"],
)
def test_figures_that_do_not_exist_are_null(records, trim):
    summary = summary_of(records, slo=Slo(ttft_ms=1), **trim)
    json.dumps(summary, allow_nan=False)
    assert summary["cost"]["usd_per_1000_requests"] is None


def test_conservation_counts_every_request():
    assert check_conservation(three_requests())["arrived"] == 3


@pytest.mark.parametrize(
    ("records", "message"),
    [
        (with_request(0, status="lost"), "3 requests arrived, but by status"),
        (with_request(1, request_id=0), "two rows for one request"),
        (with_request(0, output_tokens=4), "5 output tokens, but 2 first tokens"),
        (replace(three_requests(), gap_count=np.array([1, 2])), "4 output tokens, but 2 first tokens"),
        (with_request(1, scheduled_s=0.25), "scheduled_s is before arrival_s"),
        (with_request(0, last_token_s=0.5), "last_token_s is before first_token_s"),
    ],
    ids=[
        "lost request",
        "twice",
        "token too many",
        "gap too many",
        "served before it came",
        "order of tokens",
    ],
)
def test_conservation_rejects_records_that_do_not_add_up(records, message):
    with pytest.raises(AssertionError, match=message):
        summary_of(records)
