"""Four requests by each tool's own definitions, worked out by hand.

    request  sent   tokens at               n   TTFT  per token  E2E
    3        0.25   - (rejected)            0
    0        0.5    1, 2, 4                 3   0.5   1.5        3.5
    1        1      3                       1   2     -          2
    2        2      4, 4.5, 5, 5.5, 6       5   2     0.5        4

The run is over at 8 s. SLO: TTFT <= 2 s, TPOT <= 1 s: 0 is too slow, 1 has no TPOT, 2 is good.
"""

import json
import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.validate.foreign.bench_exports import read_vllm_bench
from experiments.validate.foreign.complete_prefix import Prefix
from sim.metrics.definitions import Window
from sim.metrics.dialects import (
    DIALECTS,
    Served,
    in_dialects,
    interpolated,
    latency,
    measured_value,
    next_value,
)
from sim.metrics.slo import Slo
from sim.metrics.token_times import TokenTimes
from sim.report.vllm_bench import as_vllm_bench, spec_decode_of, write_vllm_bench
from sim.report.wording import dialect_tables

NAN = math.nan
REQUESTS = pd.DataFrame(
    {
        "request_id": [0, 1, 2, 3],
        "status": ["finished", "finished", "finished", "rejected"],
        "reason": ["length", "length", "length", "queue full"],
        "arrival_s": [0.5, 1.0, 2.0, 0.25],
        "first_token_s": [1.0, 3.0, 4.0, NAN],
        "last_token_s": [4.0, 3.0, 6.0, NAN],
        "prompt_tokens": [10, 20, 30, 40],
        "output_tokens": [3, 1, 5, 0],
    }
)
TIMES = TokenTimes(np.array([1, 2, 4, 3, 4, 4.5, 5, 5.5, 6.0]), np.array([3, 1, 5, 0]))
WHOLE = Window(0.0, 8.0)
SLO = Slo(ttft_ms=2000, tpot_ms=1000)


def dialect_of(name, slo=SLO, window=WHOLE, times=TIMES):
    return in_dialects([name], REQUESTS, times, window, slo)[name]


def test_a_burst_is_one_chunk():
    """Request 2 has its second to fourth token at 5 s: gaps of 1 and 1 s, and still 5 tokens in 2 s."""
    times = TokenTimes(
        np.array([1, 2, 4, 3, 4, 5, 5, 5, 6.0]),
        np.array([3, 1, 5, 0]),
        np.array([1, 1, 1, 1, 1, 1, 0, 0, 1]) > 0,
    )
    assert dialect_of("vllm_bench", times=times)["gap"]["mean_s"] == pytest.approx((1 + 2 + 1 + 1) / 4)
    assert dialect_of("aiperf", times=times)["gap"]["mean_s"] == pytest.approx((1 + 2 + 1 + 1) / 4)
    for name in ("vllm_bench", "guidellm", "aiperf", "mlperf"):
        assert dialect_of(name, times=times)["per_token"] == dialect_of(name)["per_token"]


def figures(found, key):
    return [round(found[key][name], 6) for name in ("mean_s", "p50_s", "p90_s", "p99_s")]


def value(found, key):
    return found[key]["value"]


def test_vllm_bench():
    found = dialect_of("vllm_bench")
    assert (value(found, "answered"), value(found, "failed")) == (3, 1)
    assert figures(found, "ttft") == [1.5, 2.0, 2.0, 2.0]
    assert figures(found, "per_token") == [1.0, 1.0, 1.4, 1.49]  # of 0.5 and 1.5
    assert figures(found, "gap") == [round(5 / 6, 6), 0.5, 1.5, 1.95]  # of 1, 2, and 0.5 four times
    assert figures(found, "e2e")[:2] == [round(9.5 / 3, 6), 3.5]
    assert value(found, "duration_s") == 6.0  # from the start to the last answer
    assert value(found, "requests_per_s") == 3 / 6
    assert value(found, "output_tokens_per_s") == 9 / 6
    assert value(found, "goodput_per_s") == 2 / 6  # an answer of one token has a TPOT of 0
    assert "good_share" not in found


def test_guidellm():
    found = dialect_of("guidellm")
    assert found["per_token"]["name"] == "ITL"
    assert figures(found, "per_token") == [round(5 / 6, 6), 0.5, 1.5, 1.5]  # 1.5 weighs 2, 0.5 weighs 4
    assert found["per_token_with_first"]["name"] == "TPOT"
    # 3.5 / 3 weighs 3, 2 / 1 weighs 1, 4 / 5 weighs 5
    assert figures(found, "per_token_with_first") == [round(9.5 / 9, 6), 0.8, 2.0, 2.0]
    assert figures(found, "ttft") == [1.5, 2.0, 2.0, 2.0]
    assert figures(found, "e2e")[1:] == [3.5, 4.0, 4.0]
    assert value(found, "duration_s") == 5.75  # from the first request that was sent
    assert value(found, "requests_per_s") == 3 / 5.75
    assert value(found, "output_tokens_per_s") == 9 / 5  # from the first token to the last
    assert value(found, "goodput_per_s") == 1 / 5.75
    assert value(found, "good_share") == 1 / 2  # of those that have a TPOT
    assert "gap" not in found
    assert value(dialect_of("guidellm", Slo(ttft_ms=2000)), "good_share") == 1.0


def test_aiperf():
    found = dialect_of("aiperf")
    assert (found["per_token"]["name"], found["gap"]["name"]) == ("ITL", "ICL")
    assert figures(found, "per_token") == [1.0, 1.0, 1.4, 1.49]
    assert figures(found, "gap") == [round(5 / 6, 6), 0.5, 1.5, 1.95]
    assert value(found, "duration_s") == 5.5  # from the first request that was answered
    assert value(found, "requests_per_s") == 3 / 5.5
    assert value(found, "output_tokens_per_s") == 9 / 5.5
    assert value(found, "goodput_per_s") == 1 / 5.5
    assert value(found, "good_share") == 1 / 4  # of all that were sent


def test_mlperf():
    found = dialect_of("mlperf")
    assert figures(found, "ttft") == [1.5, 2.0, 2.0, 2.0]  # sorted[floor(3 q)] of 0.5, 2, 2
    assert figures(found, "per_token") == [1.0, 1.5, 1.5, 1.5]
    assert figures(found, "e2e") == [round(9.5 / 3, 6), 3.5, 4.0, 4.0]
    assert value(found, "duration_s") == 6.0
    assert value(found, "requests_per_s") == 2 / 6  # n - 1
    assert value(found, "output_tokens_per_s") == 9 / 6
    assert value(found, "valid") == 0.0
    assert "goodput_per_s" not in found
    loose = Slo(ttft_ms=2000, tpot_ms=1500)
    assert value(dialect_of("mlperf", loose), "valid") == 0.0  # one was never answered
    assert value(dialect_of("mlperf", loose, Window(0.4, 8.0)), "valid") == 1.0


def test_only_requests_that_arrived_in_the_window_count():
    found = dialect_of("vllm_bench", window=Window(0.75, 8.0))
    assert (value(found, "answered"), value(found, "failed")) == (2, 0)
    assert figures(found, "gap") == [0.5] * 4
    assert value(found, "duration_s") == 5.25


@pytest.mark.parametrize("name", DIALECTS)
def test_without_an_slo_nothing_is_good_and_without_an_answer_there_is_nothing(name):
    found = dialect_of(name, slo=None)
    assert not {"goodput_per_s", "good_share", "valid"} & found.keys()
    empty = dialect_of(name, window=Window(7.0, 8.0))
    assert value(empty, "answered") == 0
    assert math.isnan(value(empty, "requests_per_s")) or value(empty, "requests_per_s") == 0
    assert math.isnan(empty["ttft"]["p50_s"])


@pytest.mark.parametrize("name", DIALECTS)
def test_rates_count_all_answers_of_a_request_and_times_per_token_the_longest(name):
    """Each request has four answers: only the rate of tokens differs, four times as high."""
    branched = REQUESTS.assign(
        output_tokens=4 * REQUESTS["output_tokens"], longest_tokens=REQUESTS["output_tokens"]
    )
    one, four = (in_dialects([name], requests, None, WHOLE, SLO)[name] for requests in (REQUESTS, branched))
    assert value(four, "output_tokens_per_s") == pytest.approx(4 * value(one, "output_tokens_per_s"))
    del four["output_tokens_per_s"], one["output_tokens_per_s"]
    assert json.dumps(four) == json.dumps(one)


def test_percentiles_of_four_values():
    values = np.array([4.0, 2.0, 1.0, 3.0])
    assert [interpolated(values, None, q) for q in (50, 90)] == [2.5, 3.7]
    assert [measured_value(values, None, q) for q in (50, 90)] == [2.0, 4.0]
    assert [next_value(values, None, q) for q in (50, 75, 99)] == [3.0, 4.0, 4.0]
    assert measured_value(values, np.array([0.0, 1.0, 1.0, 8.0]), 50) == 3.0


@given(st.lists(st.floats(0, 100), min_size=1, max_size=50), st.sampled_from([50, 90, 99]))
def test_every_percentile_lies_within_its_values(values, q):
    values = np.array(values)
    for percentile in (interpolated, measured_value, next_value):
        assert values.min() <= percentile(values, None, q) <= values.max()
    share_at_most = np.mean(values <= measured_value(values, None, q))
    assert share_at_most >= q / 100 - 1e-9
    # Equal weights are no weights.
    assert measured_value(values, np.full(len(values), 3.0), q) == measured_value(values, None, q)
    assert latency("x", values, interpolated).mean_s == pytest.approx(values.mean())


@given(st.integers(0, 2**32 - 1), st.integers(1, 40))
def test_where_all_are_answered_the_tools_agree_on_what_they_share(seed, num):
    rng = np.random.default_rng(seed)
    arrival_s = np.sort(rng.uniform(0, 10, num))
    tokens = rng.integers(2, 9, num)
    gaps = [rng.uniform(0.01, 1, n - 1) for n in tokens]
    first_s = arrival_s + rng.uniform(0.01, 2, num)
    times = [np.concatenate([[f], f + np.cumsum(g)]) for f, g in zip(first_s, gaps, strict=True)]
    requests = pd.DataFrame(
        {
            "request_id": np.arange(num),
            "status": "finished",
            "arrival_s": arrival_s,
            "first_token_s": first_s,
            "last_token_s": [t[-1] for t in times],
            "prompt_tokens": 5,
            "output_tokens": tokens,
        }
    )
    found = in_dialects(
        DIALECTS, requests, TokenTimes(np.concatenate(times), tokens), Window(0.0, 99.0), Slo(ttft_ms=1000)
    )
    for key in ("ttft", "e2e"):
        assert len({round(one[key]["mean_s"], 9) for one in found.values()}) == 1
    assert (
        len({round(found[name]["per_token"]["mean_s"], 9) for name in ("vllm_bench", "aiperf", "mlperf")})
        == 1
    )
    # guidellm's weights make of its ITL the mean of all gaps.
    assert found["guidellm"]["per_token"]["mean_s"] == pytest.approx(found["vllm_bench"]["gap"]["mean_s"])
    assert found["guidellm"]["good_share"]["value"] == pytest.approx(found["aiperf"]["good_share"]["value"])


SUMMARY = {
    "trimmed": {"start_s": 0.0, "end_s": 8.0, "requests_left_out": 2},
    "requests": {"arrived": 6, "finished": 5},
    "goodput": {"requests_per_s": 0.25, "share": 0.5},
    "throughput": {"requests_per_s": 0.375, "output_tokens_per_s": None},
    **{
        name: {"count": 3, "mean_s": 1.0, "p50_s": 2.0, "p90_s": 3.0, "p99_s": None}
        for name in ("ttft", "tpot", "itl", "e2e")
    },
}


def test_tables_name_each_figure_as_its_tool_does():
    found = in_dialects(DIALECTS, REQUESTS, TIMES, WHOLE, SLO)
    (rows,) = dialect_tables({**SUMMARY, "dialects": found})
    by_label = {row[0]: row[1:] for row in rows}
    assert by_label[""] == ["ours", "vLLM bench", "guidellm", "AIPerf", "MLPerf"]
    assert by_label["per token after the first"] == ["TPOT", "TPOT", "ITL", "ITL", "Output Token"]
    assert by_label["successful"] == ["3"] * 5
    assert by_label["failed"] == ["1"] * 5
    assert by_label["SLO attainment"] == ["50.0 %", "–", "50.0 %", "25.0 %", "–"]
    assert by_label["valid"] == ["–", "–", "–", "–", "no"]
    assert by_label["output tok/s"] == ["–", "1.50", "1.80", "1.64", "1.50"]
    assert {len(row) for row in rows} == {6}
    latencies, others = dialect_tables({**SUMMARY, "dialects": {"guidellm": found["guidellm"]}})
    assert [row[0] for row in latencies] == ["guidellm, ms", "TTFT", "ITL", "TPOT", "Req Latency"]
    assert ["output_tokens_per_second", "1.80"] in others
    assert dialect_tables(SUMMARY) == []


def test_the_export_has_vllms_layout_and_its_figures():
    found = as_vllm_bench(REQUESTS, TIMES, WHOLE, SLO, "toy")
    assert (found["num_prompts"], found["completed"], found["failed"], found["duration"]) == (4, 3, 1, 6.0)
    assert found["input_lens"] == [40, 10, 20, 30]  # in order of arrival
    assert found["output_lens"] == [0, 3, 1, 5]
    assert found["ttfts"] == [0.0, 0.5, 2.0, 2.0]
    assert found["latencies"] == [0.0, 3.5, 2.0, 4.0]
    assert found["itls"] == [[], [1.0, 2.0], [], [0.5] * 4]
    assert found["errors"] == ["rejected: queue full", "", "", ""]
    assert found["start_times"] == [0.25, 0.5, 1.0, 2.0]
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (60, 9)
    assert found["total_token_throughput"] == 69 / 6
    assert found["request_goodput"] == 2 / 6
    assert as_vllm_bench(REQUESTS, TIMES, WHOLE, None, "toy")["request_goodput"] is None
    assert found["mean_tpot_ms"] == 1000
    assert found["std_tpot_ms"] == 500
    assert found["p99_itl_ms"] == pytest.approx(1950)
    assert found["median_e2el_ms"] == 3500
    assert found["max_output_tokens_per_s"] == 2  # of the seconds from 3.5 on: 4 and 4, 4.5 and 5, 5.5 and 6
    assert found["max_concurrent_requests"] == 3


def test_the_export_has_vllms_figures_of_draft_tokens(tmp_path):
    """Of 10 drafts, 4 end after one token; vLLM divides by all of them at every position."""
    places = [{"place": 1, "drafted": 10, "accepted": 8}, {"place": 2, "drafted": 6, "accepted": 5}]
    counts = {"drafts": 10, "draft_tokens": 16, "accepted_tokens": 13}
    rates = {"acceptance_rate": 13 / 16, "mean_accepted_length": 2.3, "by_place": places}
    wanted = {
        "spec_decode_acceptance_rate": 81.25,
        "spec_decode_acceptance_length": 2.3,
        "spec_decode_num_drafts": 10,
        "spec_decode_draft_tokens": 16,
        "spec_decode_accepted_tokens": 13,
        "spec_decode_per_position_acceptance_rates": [0.8, 0.5],
    }
    assert spec_decode_of(counts | rates) == wanted
    assert spec_decode_of({"drafts": 0, "draft_tokens": 0}) == {}
    write_vllm_bench(tmp_path / "of", REQUESTS, TIMES, WHOLE, SLO, "toy", counts | rates)
    assert wanted.items() <= json.loads((tmp_path / "of").read_text()).items()
    write_vllm_bench(tmp_path / "none", REQUESTS, TIMES, WHOLE, SLO, "toy")
    assert "spec_decode" not in (tmp_path / "none").read_text()


def test_the_export_is_read_back_as_it_was(tmp_path):
    file = tmp_path / "vllm_bench.json"
    write_vllm_bench(file, REQUESTS, TIMES, WHOLE, SLO, "toy")
    assert json.loads(file.read_text())["date"]
    read = read_vllm_bench("toy", Prefix([file.read_text()], False))
    assert read.requests["arrival_s"].tolist() == pytest.approx(
        [0.0, 0.5, 1.5]
    )  # from the first answered one on
    assert read.latencies["ttft_s"].tolist() == pytest.approx([0.5, 2.0, 2.0])
    assert read.latencies["tpot_s"].tolist()[::2] == pytest.approx([1.5, 0.5])
    assert sorted(read.gaps.gap_s) == pytest.approx([0.5] * 4 + [1, 2])
    assert read.requests["output_tokens"].tolist() == [3, 1, 5]
    assert "1 of 4 requests failed" in " ".join(read.notes)


def test_requests_are_served_in_order_of_arrival():
    served = Served.of(REQUESTS, WHOLE, TIMES)
    assert served.sent_s.tolist() == [0.25, 0.5, 1.0, 2.0]
    assert served.token_row.tolist() == [1, 1, 1, 2, 3, 3, 3, 3, 3]
    assert served.gap_row.tolist() == [1, 1, 3, 3, 3, 3]
