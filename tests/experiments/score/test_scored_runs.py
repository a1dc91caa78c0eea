"""Runs that are scored: open loops by stages, and requests that are replayed."""

import re

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from experiments.score import per_request, runs
from experiments.score.predictions import predict_row
from experiments.study.measured_requests import scenario_of
from hwmodels.levels import Spec
from tests.experiments.score.measured_rows import REPLAYED_RUN, RUN, replayed


def test_an_open_loop_run_gets_means_and_percentiles(score):
    code, predicted, said = score([RUN], kind="experiments")
    assert code == 0
    assert list(predicted.columns) == [*runs.METRICS, "status"]
    row = predicted.loc["run-0"]
    assert row.status == "ok"
    for name in ("ttft", "e2e"):
        assert 0 < row[f"{name}_mean_ms"] <= row[f"{name}_p99_ms"]
        assert row[f"{name}_p90_ms"] <= row[f"{name}_p99_ms"]
    assert row.e2e_mean_ms == pytest.approx(row.ttft_mean_ms + 4 * row.itl_mean_ms)
    assert "itl_mean_ms: absolute percentage error" in said


def test_jitter_is_part_of_the_prediction(score):
    _, plain, _ = score([RUN], kind="experiments")
    code, noised, _ = score([RUN], "latency/jitter=lognormal", kind="experiments")
    assert code == 0
    assert noised.loc["run-0", "itl_mean_ms"] != plain.loc["run-0", "itl_mean_ms"]
    assert noised.loc["run-0", "itl_mean_ms"] == pytest.approx(plain.loc["run-0", "itl_mean_ms"], rel=0.05)


def test_arrivals_follow_the_stages():
    """4 a second for 3 s, then 8 a second for 2 s; the last request of a stage arrives at its end."""
    source = runs.scenario_of(RUN, Spec()).source()
    arrivals = list(source.arrivals())
    at = [arrival.request.arrival_s for arrival in arrivals]
    assert len(at) == 12 + 16
    assert at == sorted(at)
    assert at[11] == pytest.approx(3)
    assert at[-1] == pytest.approx(5)
    assert {arrival.request.prompt.num_tokens for arrival in arrivals} == {1500}


def test_predictions_do_not_depend_on_what_was_measured():
    measured = {"mean_output_tokens_est": 3.0, "ttft_mean_ms": 1.0, "itl_mean_ms": 1.0, "e2e_mean_ms": 9.0}
    plain = runs.predict({name: value for name, value in RUN.items() if name not in measured}, Spec())
    assert runs.predict({**RUN, **measured}, Spec()) == plain
    arrivals = runs.scenario_of({**RUN, **measured}, Spec()).source().arrivals()
    assert {arrival.num_output_tokens for arrival in arrivals} == {RUN["output_len"]}


def test_a_run_has_the_engine_profile_of_its_version(tmp_path):
    for version, overlapped in (("0.12.0", False), ("0.15.1", True), (np.nan, True)):
        assert runs.scenario_of({**RUN, "vllm": version}, Spec()).engine.host.overlapped is overlapped
        pd.DataFrame([{**REPLAYED_RUN, "vllm": version}]).to_csv(tmp_path / "runs.csv", index=False)
        (row,) = per_request.by_run(pd.DataFrame(replayed(2)), tmp_path / "x.csv").to_dict("records")
        assert scenario_of(row, Spec()).engine.host.overlapped is overlapped


def test_the_policy_has_the_token_budget_of_the_run():
    scenario = runs.scenario_of({**RUN, "chunked_prefill": False, "total_kv_blocks": 700.0}, Spec())
    assert scenario.batching.max_num_batched_tokens == scenario.engine.max_num_batched_tokens == 2048
    assert not scenario.batching.enable_chunked_prefill
    assert scenario.engine.num_kv_blocks == 700


def test_gaps_within_a_stage_are_exponential():
    source = runs.scenario_of({**RUN, "stages": "50x200"}, Spec()).source()
    gaps_s = np.diff([arrival.request.arrival_s for arrival in source.arrivals()])
    assert stats.kstest(gaps_s, stats.expon(scale=1 / 50).cdf).pvalue > 0.01


def test_prompts_are_sent_in_turn_and_share_the_system_prompt_of_their_group():
    row = {**RUN, "prefix_caching": True, "prompt_groups": 2, "prompts_per_group": 3}
    prompts = [arrival.request.prompt for arrival in runs.scenario_of(row, Spec()).source().arrivals()]
    contents = [prompt.segments for prompt in prompts]
    assert len(set(contents[:6])) == 6
    assert contents[:6] == contents[6:12]
    assert [sum(segment.num_tokens for segment in content) for content in contents] == [1500] * 28
    systems = [content[0] for content in contents[:6]]
    assert sorted(map(systems.count, set(systems))) == [3, 3]
    assert {system.num_tokens for system in systems} == {1000}


@pytest.mark.parametrize("known", [{}, {"prompt_groups": 2, "prompts_per_group": 3}])
def test_prompts_that_are_sent_again_and_again_are_cached(score, known):
    rows = [RUN, {**RUN, "id": "cached", "prefix_caching": True, **known}]
    _, predicted, _ = score(rows, kind="experiments")
    assert predicted.loc["cached", "ttft_mean_ms"] < 0.85 * predicted.loc["run-0", "ttft_mean_ms"]


def test_the_first_use_of_a_prompt_is_computed(score):
    known = {"prompt_groups": 28, "prompts_per_group": 1}
    rows = [{**RUN, "prefix_caching": True, **known}, {**RUN, "id": "no cache", **known}]
    _, predicted, _ = score(rows, kind="experiments")
    assert predicted.loc["run-0", "ttft_mean_ms"] == pytest.approx(predicted.loc["no cache", "ttft_mean_ms"])


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"precision": "FP4"}, "precision=FP4: must be one of FP16, BF16, FP8"),
        ({"stages": "8by600"}, "stages: 8by600: must be RATExSECONDS"),
        ({"tp": 1.5}, "tp=1.5: must be a whole number >= 1"),
        ({"max_num_seqs": np.nan}, "max_num_seqs is missing"),
        (
            {"question_len": 3100},
            "4,100 prompt tokens plus 5 output tokens: must be <= 4,096 in total, the context length",
        ),
        ({"stages": "8x0"}, "stages: 8x0: rate and seconds must be > 0"),
        ({"stages": "infx10"}, "stages: infx10: rate x seconds must be 1 to 10,000,000 requests"),
        ({"stages": "1e9x10"}, "stages: 1e9x10: rate x seconds must be 1 to 10,000,000 requests"),
        ({"stages": "0.01x10"}, "stages: 0.01x10: rate x seconds must be 1 to 10,000,000 requests"),
        ({"question_len": 10.5}, "question_len=10.5: must be a whole number >= 1"),
        ({"model": "acme/none"}, "model=acme/none: there is no preset of this name"),
    ],
)
def test_runs_that_cannot_be_simulated_get_a_reason(given, reason):
    row = predict_row("experiments", Spec(), {**RUN, **given})
    assert set(row) == {"id", "status"}
    assert row["status"].startswith(reason)


def test_a_replayed_run_gets_means_over_its_requests(score, tmp_path):
    """Alone, each request takes TTFT and 5 more tokens."""
    pd.DataFrame([REPLAYED_RUN]).to_csv(tmp_path / "runs.csv", index=False)
    code, predicted, said = score(replayed(4, ttft_ms=20.0, tpot_ms=4.0, e2e_ms=40.0), kind="requests")
    assert code == 0
    assert list(predicted.columns) == [*per_request.METRICS, "status"]
    row = predicted.loc["night"]
    assert row.status == "ok"
    assert row.e2e_mean_ms == pytest.approx(row.ttft_mean_ms + 5 * row.tpot_mean_ms)
    assert "e2e_mean_ms: absolute percentage error" in said


def test_replayed_requests_keep_their_times_and_lengths(tmp_path):
    pd.DataFrame([REPLAYED_RUN]).to_csv(tmp_path / "runs.csv", index=False)
    table = pd.DataFrame(replayed(3, ttft_ms=20.0)).sample(frac=1, random_state=1)
    (row,) = per_request.by_run(table, tmp_path / "requests.csv").to_dict("records")
    assert (row["ttft_mean_ms"], "tpot_mean_ms" in row) == (20.0, False)
    assert scenario_of(row, Spec()).engine.host.overlapped
    arrivals = list(scenario_of(row, Spec()).source().arrivals())
    assert [arrival.request.arrival_s for arrival in arrivals] == [0, 0.25, 0.5]
    assert {(a.request.prompt.num_tokens, a.num_output_tokens) for a in arrivals} == {(50, 6)}


@pytest.mark.parametrize(
    ("run", "request_", "reason"),
    [
        ({"tp": 0.5}, {}, "tp=0.5: must be a whole number >= 1"),
        ({"ep": 2}, {}, "ep=2: must be 1, because smollm2-135m has no experts"),
        ({"enable_lora": True}, {}, "enable_lora=True: is not simulated; must be empty or false"),
        ({}, {"input_tokens": 9000}, "9,000 prompt tokens plus 6 output tokens: must be <= 8,192 in total"),
        ({"max_model_len": 50}, {}, "50 prompt tokens plus 6 output tokens: must be <= 50 in total"),
    ],
)
def test_a_run_that_cannot_be_replayed_gets_a_reason(score, tmp_path, run, request_, reason):
    pd.DataFrame([{**REPLAYED_RUN, **run}]).to_csv(tmp_path / "runs.csv", index=False)
    code, predicted, _ = score(replayed(2, **request_), kind="requests")
    assert code == 0
    assert predicted.loc["night", "status"].startswith(reason)
    assert predicted.loc["night"].drop("status").isna().all()


def test_a_run_without_settings_is_named(score, tmp_path):
    code, _, said = score(replayed(2), kind="requests")
    assert code == 2
    assert re.search(r"the settings of its runs, .*runs.csv, cannot be read", said)
    pd.DataFrame([{**REPLAYED_RUN, "run": "day"}]).to_csv(tmp_path / "runs.csv", index=False)
    code, predicted, said = score(replayed(2), kind="requests")
    assert (code, predicted) == (2, None)
    assert "run=night: no such run in" in said
