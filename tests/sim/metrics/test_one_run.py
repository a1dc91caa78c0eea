"""A run's own warm-up and intervals, on tables whose steady state is known."""

import numpy as np
import pandas as pd
import pytest

from sim.metrics.definitions import Window
from sim.metrics.dialects import MetricsSettings
from sim.metrics.figure import PoolHardware
from sim.metrics.measured import Intervals, Latencies, request_metrics
from sim.metrics.slo import Slo
from sim.metrics.steady import find_warm_up
from sim.metrics.summary import summarise
from sim.records.run import PoolRecord, RunRecords, replicas_throughout
from sim.report.lines import caveats, interval_lines
from tests.sim.metrics.figures_of import figure_of, part_of


def table_of(ttft_s, tpot_s, gap_s=1.0):
    """Returns requests that arrive one gap apart."""
    return pd.DataFrame(
        {"arrival_s": gap_s * np.arange(len(ttft_s)), "ttft_s": ttft_s, "tpot_s": tpot_s, "row": 1}
    )


class NothingDone:
    """A model without any figures."""

    peak_flops_per_s = peak_bytes_per_s = 1.0

    def flops(self, shape):
        return 0.0

    def bytes_moved(self, shape):
        return 0.0


def noise(seed, num_values=2000):
    return np.random.default_rng(seed).gamma(20, 0.005, num_values)


def run_of(ttft_s, e2e_s, gap_s=0.1):
    """Records of requests with one token each, gap_s apart; no iterations."""
    num = len(ttft_s)
    arrival_s = gap_s * np.arange(num)
    requests = pd.DataFrame(
        {
            "request_id": np.arange(num),
            "status": "finished",
            "arrival_s": arrival_s,
            "scheduled_s": arrival_s,
            "first_token_s": arrival_s + ttft_s,
            "last_token_s": arrival_s + ttft_s,
            "finished_s": arrival_s + e2e_s,
            "prompt_tokens": 1,
            "output_tokens": 1,
        }
    )
    return RunRecords(
        requests=requests,
        iterations=pd.DataFrame(),
        gap_s=np.zeros(0),
        gap_count=np.zeros(0, np.int64),
        gap_end_s=np.zeros(0),
        pools=(PoolRecord(10, 16),),
        replicas=replicas_throughout(1, float(requests["finished_s"].max())),
        end_s=float(requests["finished_s"].max()),
    )


def intervals_of(records, slo=None):
    gaps = {name: getattr(records, name) for name in ("gap_s", "gap_count", "gap_end_s")}
    table = request_metrics(records.requests, slo)
    part = part_of(Window(0.0, records.end_s), slo=slo, requests=table, **gaps)
    latencies = Latencies(part.setting)
    latencies.add(part)
    return figure_of(Intervals, part, records, latencies=latencies)


def test_the_later_of_the_two_series_says_where_the_warm_up_ends():
    ttft_s, tpot_s = noise(0), noise(1)
    ttft_s[:100] += 5.0
    tpot_s[:300] += 5.0
    found = find_warm_up(table_of(ttft_s, tpot_s, gap_s=2.0).sample(frac=1, random_state=0))
    assert found.warmup_s == 600.0  # in order of arrival, whatever the order of the rows
    assert found.evidence["settled"]
    assert found.evidence["requests"] == found.evidence["tpot"]["requests"] == 300
    assert found.evidence["ttft"]["requests"] == 100
    assert found.evidence["tpot"]["mean_before_s"] == pytest.approx(5.1, rel=0.02)
    assert found.evidence["tpot"]["mean_after_s"] == pytest.approx(0.1, rel=0.05)


def test_nothing_is_cut_where_one_series_never_settles():
    found = find_warm_up(table_of(np.arange(2000.0), noise(1)))
    assert found.warmup_s == 0.0
    assert not found.evidence["settled"]
    assert (found.evidence["ttft"]["settled"], found.evidence["tpot"]["settled"]) == (False, True)
    lines = caveats(summary_with(found.evidence))
    assert lines[0].startswith(
        "No steady state (MSER-5): TTFT did not settle within the first half of the 2,000"
    )


def test_answers_of_one_token_have_no_tpot_that_could_settle():
    ttft_s = noise(0)
    ttft_s[:100] += 5.0
    found = find_warm_up(table_of(ttft_s, np.full(2000, np.nan)))
    assert found.warmup_s == 100.0
    assert "tpot" not in found.evidence


def test_nothing_answered_is_no_steady_state():
    found = find_warm_up(table_of(np.full(500, np.nan), np.full(500, np.nan)))
    assert (found.warmup_s, found.evidence["settled"]) == (0.0, False)
    assert caveats(summary_with(found.evidence))[0].startswith(
        "No steady state: none of the 500 requests finished"
    )
    assert find_warm_up(table_of([], [])).warmup_s == 0.0


def summary_with(evidence):
    return {
        "warmup": evidence,
        "trimmed": {"warmup_s": 0.0, "cooldown_s": 0.0},
        "requests": {"rejected": 0, "aborted": 0, "unfinished": 0},
        "interrupted": False,
    }


def test_a_summary_with_warmup_auto_leaves_out_what_was_found():
    ttft_s = noise(0)
    ttft_s[:100] += 5.0
    records = run_of(ttft_s, ttft_s)
    found_automatically = summarise_latencies(records, "auto")
    by_hand = summarise_latencies(records, 10.0)
    assert found_automatically["trimmed"]["warmup_s"] == pytest.approx(10.0)
    assert (
        found_automatically["trimmed"]["requests_left_out"] == by_hand["trimmed"]["requests_left_out"] == 100
    )
    assert found_automatically["ttft"] == by_hand["ttft"]
    assert (by_hand["warmup"], found_automatically["warmup"]["requests"]) == (None, 100)


def summarise_latencies(records, warmup_s):
    """Computes the summary without the metrics that need iterations."""
    empty = pd.DataFrame(
        0,
        index=[],
        columns=[
            *("replica", "iteration", "start_s", "duration_s", "decode_seqs", "decode_context_tokens"),
            *("prefill_seqs", "prefill_tokens", "prefill_pairs", "prefill_context_tokens", "sampled_seqs"),
            *("running", "waiting", "kv_blocks_used", "kv_tokens_used", "preempted", "waits_for_memory"),
        ],
    )
    return summarise(
        RunRecords(**{**{n: getattr(records, n) for n in records.__slots__}, "iterations": empty}),
        pools=[PoolHardware(model=NothingDone(), price_usd_per_hour=1.0, power=None, num_devices=1)],
        slo=None,
        metrics=MetricsSettings(warmup_s=warmup_s),
    )


def test_intervals_hold_the_figures_and_the_rates():
    """A request every 0.1 s, each answered with one token: 10 tokens/s."""
    records = run_of(noise(2, 8000), noise(3, 8000) + 1.0)
    found = intervals_of(records, Slo(ttft_ms=110))
    table = request_metrics(records.requests, None)
    assert found["confidence"] == 0.95
    for section, key, value in (
        ("ttft", "mean_s", table["ttft_s"].mean()),
        ("ttft", "p99_s", table["ttft_s"].quantile(0.99)),
        ("e2e", "mean_s", table["e2e_s"].mean()),
        ("goodput", "share", (table["ttft_s"] <= 0.11).mean()),
        ("throughput", "requests_per_s", 8000 / records.end_s),
        ("throughput", "output_tokens_per_s", 8000 / records.end_s),
    ):
        one = found[section][key]
        assert one["lack"] is None, (section, key)
        assert one["low"] < value < one["high"]
        assert one["high"] - one["low"] < 0.2 * value
    assert found["tpot"]["mean_s"]["lack"] == "nothing was measured"
    assert "goodput" not in intervals_of(records)


def test_the_interval_of_a_rate_counts_every_token_of_every_sample():
    records = run_of(noise(2, 800), noise(3, 800) + 1.0)
    thrice = RunRecords(
        **{
            **{n: getattr(records, n) for n in records.__slots__},
            "requests": records.requests.assign(samples=2),
            "gap_s": np.full(800, 0.5),
            "gap_count": np.ones(800, np.int64),
            "gap_end_s": records.requests["first_token_s"].to_numpy() + 0.5,
        }
    )
    one = intervals_of(thrice)["throughput"]["output_tokens_per_s"]
    assert (one["low"] + one["high"]) / 2 == pytest.approx(3 * 800 / records.end_s, rel=0.01)


def test_figures_are_reported_with_their_intervals_and_others_with_the_reason():
    summary = {
        "ttft": {"mean_s": 0.2, "p99_s": 0.4},
        "tpot": {"mean_s": None, "p99_s": None},
        "e2e": {"mean_s": 2.0, "p99_s": 4.0},
        "throughput": {"output_tokens_per_s": 100.0, "requests_per_s": 0.0},
        "goodput": {"share": 0.97},
        "intervals": {
            "confidence": 0.95,
            "ttft": {
                "mean_s": interval_json(0.19, 0.21),
                "p99_s": interval_json(lack="the run is too short"),
            },
            "tpot": {"mean_s": interval_json(lack="nothing was measured")},
            "e2e": {"mean_s": interval_json(1.9, 2.1), "p99_s": interval_json(lack="the run is too short")},
            "throughput": {
                "output_tokens_per_s": interval_json(93.0, 107.0),
                "requests_per_s": interval_json(0.0, 0.0),
            },
            "goodput": {"share": interval_json(0.955, 0.985)},
        },
    }
    assert interval_lines(summary) == [
        "95 % confidence (single run): TTFT mean ± 5 %, E2E mean ± 5 %, output tok/s ± 7 %, requests/s ± 0, "
        "SLO attainment ± 1.5 points",
        "No confidence interval for TTFT p99, E2E p99: the run is too short",
    ]
    assert interval_lines({}) == []


@pytest.mark.parametrize(
    ("num", "met", "low", "high", "line"),
    [
        (100, True, 0.97, 1.0, "SLO attainment ≥ 97.0 %"),
        (20_000, True, 1 - 3 / 20_000, 1.0, "SLO attainment ≥ 99.98 %"),
        (1000, False, 0.0, 0.003, "SLO attainment ≤ 0.3 %"),
        (2, True, 0.0, 1.0, "SLO attainment ≥ 0.0 %"),
    ],
)
def test_a_share_of_all_or_none_is_bounded_on_one_side_by_the_rule_of_three(num, met, low, high, line):
    records = run_of(np.full(num, 0.1), np.full(num, 0.2))
    found = intervals_of(records, Slo(ttft_ms=200 if met else 50))["goodput"]["share"]
    assert (found["low"], found["high"]) == pytest.approx((low, high))
    assert (found["lack"], found["batches"]) == (None, 0)
    # Exactly: all of n meet it with a chance of 5 % where each does with 0.05^(1 / n).
    if num >= 100:
        assert abs(0.05 ** (1 / num) - (low if met else 1 - high)) < 5e-4
    summary = {
        "goodput": {"share": float(met)},
        "intervals": {"confidence": 0.95, "goodput": {"share": found}},
    }
    assert interval_lines(summary) == [f"95 % confidence (single run): {line}"]


def test_unequal_sides_are_both_reported():
    summary = {
        "ttft": {"p99_s": 0.4},
        "intervals": {"confidence": 0.95, "ttft": {"p99_s": interval_json(0.38, 0.44)}},
    }
    assert interval_lines(summary) == ["95 % confidence (single run): TTFT p99 -5 to +10 %"]


def interval_json(low=None, high=None, lack=None):
    return {"low": low, "high": high, "batches": 0 if lack else 8, "lack": lack}
