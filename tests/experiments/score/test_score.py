"""`windtunnel score`: tiny measured tables of each kind, and tables with impossible values."""

import re
import shlex

import numpy as np
import pandas as pd
import pytest
from rich.console import Console
from scipy import stats

from experiments.app.cli import main
from experiments.score import per_request, runs, silicon
from experiments.score.physical import active_weight_bytes, least_step_seconds
from experiments.score.predictions import predict_row
from experiments.score.report import concurrency_band, errors_by_group, print_errors
from experiments.study.measured_requests import scenario_of
from experiments.study.presets import ALIASES, NotSimulatedError, base_scenario, plain, preset, taken_for
from hwmodels.levels.rooflines import Spec
from sim.settings.config_groups import CONFIG_DIR, find_groups

SILICON = {
    "id": "row-0",
    "source": "lab",
    "backend": "vllm",
    "model": "smollm2-135m",
    "gpu": "l4",
    "weights": "bf16",
    "mode": "agg",
    "isl": 200,
    "osl": 9,
    "concurrency": 2.0,
    "tp_size": 1.0,
    "pp_size": 1.0,
    "attention_dp_size": 1,
    "moe_tp_size": 1,
    "moe_ep_size": 1,
    "gpus": 1.0,
    "ttft_ms": 12.0,
    "tpot_ms": 4.0,
}
RUN = {
    "id": "run-0",
    "set": "eval",
    "model": "HuggingFaceTB/SmolLM2-135M",
    "gpu": "RTX 4090",
    "tp": 1,
    "precision": "BF16",
    "workload": "general",
    "stages": "4x3;8x2",
    "system_prompt_len": 1000,
    "question_len": 500,
    "output_len": 5,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 2048,
    "gpu_memory_utilization": 0.9,
    "prefix_caching": False,
    "ttft_mean_ms": 20.0,
    "itl_mean_ms": 3.0,
}
REPLAYED_RUN = {
    "run": "night",
    "gpu": "L4",
    "model": "HuggingFaceTB/SmolLM2-135M",
    "tp": 1,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 2048,
    "max_model_len": np.nan,
    "num_gpu_blocks": np.nan,
    "gpu_memory_utilization": 0.9,
}


def replayed(count, **given):
    return [
        {
            "id": f"night/{i}",
            "run": "night",
            "arrival_s": i / 4,
            "input_tokens": 50,
            "output_tokens": 6,
            **given,
        }
        for i in range(count)
    ]


@pytest.fixture
def score(tmp_path, monkeypatch, capsys):
    """Returns score(rows, **settings): exit code, predictions by id or None if none were written, output."""

    def run(rows, *arguments, **settings):
        monkeypatch.chdir(tmp_path)
        pd.DataFrame(rows).to_csv("measured.csv", index=False)
        given = {"measured": "measured.csv", "out": "predicted.csv", "jobs": 1, **settings}
        code = main(["score", *(f"{name}={value}" for name, value in given.items()), *arguments])
        said = capsys.readouterr()
        out = tmp_path / "predicted.csv"
        return code, pd.read_csv(out).set_index("id") if out.exists() else None, said.out + said.err

    return run


# Engines at fixed concurrency


def test_a_row_gets_latencies_and_throughput_that_belong_together(score):
    """Two clients without pause. Answers of 7 to 9 tokens (nominal: 9) take TTFT and 6 to 8 times TPOT."""
    code, predicted, said = score([SILICON])
    assert code == 0
    assert list(predicted.columns) == [
        "ttft_ms",
        "tpot_ms",
        "e2e_ms",
        "output_tokens_per_s_per_gpu",
        "status",
    ]
    row = predicted.loc["row-0"]
    assert row.status == "ok"
    assert 5.9 * row.tpot_ms < row.e2e_ms - row.ttft_ms < 8.1 * row.tpot_ms
    assert 6.9 < row.output_tokens_per_s_per_gpu * row.e2e_ms / 1e3 / 2 < 9.1
    assert 0 < row.tpot_ms < row.ttft_ms < 1000
    assert "1 of 1 row predicted" in said
    assert "tpot_ms: absolute percentage error" in said


def test_rows_that_cannot_be_simulated_get_a_reason_and_no_number(score):
    unable = {
        "disagg": ({"mode": "disagg"}, "prefill_tp_size is missing"),
        "model": ({"model": "gpt-5"}, "model=gpt-5: there is no preset of this name"),
        "gpu": ({"gpu": "tpu_v5"}, "hardware=tpu_v5: there is no preset of this name"),
        "engine": ({"backend": "mlc"}, "engine=mlc: there is no preset of this name; allowed: "),
        "clients": ({"concurrency": np.nan}, "concurrency is missing"),
        "weights": ({"weights": "fp3"}, "weights=fp3: must be one of"),
        "heads": ({"tp_size": 2, "moe_tp_size": 2, "gpus": 2}, "tensor_parallel_size=2: must divide the 9"),
        "gpus": ({"pp_size": 2, "gpus": 3}, "gpus=3: must be a multiple of 2, the GPUs of one replica"),
        "memory": (
            {"model": "llama-3.1-70b", "ttft_ms": np.nan, "tpot_ms": np.nan},
            "tensor_parallel_size=1: llama-3.1-70b needs",
        ),
        "mode": ({"mode": "foo"}, "mode=foo: must be agg or disagg"),
        "half": ({"tp_size": 2.5}, "tp_size=2.5: must be a whole number >= 1"),
        "none": ({"attention_dp_size": 0}, "attention_dp_size=0.0: must be a whole number >= 1"),
        "part": ({"gpus": 1.5}, "gpus=1.5: must be a whole number >= 1"),
        "tp": ({"tp_size": np.nan}, "tp_size is missing"),
        "pp": ({"pp_size": np.nan}, "pp_size is missing"),
        "dp": ({"attention_dp_size": np.nan}, "attention_dp_size is missing"),
        "context": (
            {"isl": 8000, "osl": 193},
            "8,000 prompt tokens plus 193 output tokens: must be <= 8,192 in total",
        ),
        "experts": (
            {"model": "mixtral-8x7b", "moe_ep_size": 4},
            "moe_tp_size=1 x moe_ep_size=4: must be tp_size=1 x attention_dp_size=1",
        ),
    }
    rows = [{**SILICON, "id": name, **given} for name, (given, _) in unable.items()]
    code, predicted, said = score([*rows, SILICON])
    assert code == 0
    for name, (_, reason) in unable.items():
        assert predicted.loc[name, "status"].startswith(reason)
        assert predicted.loc[name].drop("status").isna().all()
    assert predicted.loc["row-0", "status"] == "ok"
    assert list(predicted.index) == [*unable, "row-0"], "in the order of the table"
    assert f"1 of {len(unable) + 1} rows predicted" in said
    assert "1 row not predicted: prefill_tp_size is missing" in said


def test_prompt_and_answer_may_fill_the_context():
    row = {**SILICON, "isl": 8000, "osl": 192}
    assert silicon.scenario_of(row, Spec()).engine.max_model_len == 8192


def test_truth_may_be_absent(score):
    row = {name: value for name, value in SILICON.items() if name not in ("ttft_ms", "tpot_ms")}
    code, predicted, said = score([row])
    assert (code, predicted.loc["row-0", "status"]) == (0, "ok")
    assert "absolute percentage error" not in said


def test_only_some_rows_may_be_asked_for(score):
    _, predicted, _ = score([SILICON, {**SILICON, "id": "row-1", "isl": 100}], where="'isl<150'")
    assert list(predicted.index) == ["row-1"]


def test_the_condition_that_the_config_shows_works_as_it_is_typed(score):
    (typed,) = re.findall(r"\"where=.*", (CONFIG_DIR / "score.yaml").read_text())
    rows = [
        {**SILICON, "id": gpu, "gpu": gpu, "core": core} for gpu, core in (("h100_sxm", True), ("l4", True))
    ]
    code, predicted, said = score([*rows, {**rows[0], "id": "no", "core": False}], *shlex.split(typed))
    assert code == 0, said
    assert list(predicted.index) == ["h100_sxm"]


def test_gpus_that_were_not_measured_are_named_once(score):
    rows = [{**SILICON, "id": f"{gpu}-{i}", "gpu": gpu} for gpu in ("l4", "h100_sxm") for i in range(2)]
    _, _, said = score([*rows, {**SILICON, "id": "unable", "gpu": "t4", "mode": "disagg"}])
    assert said.count("L4 was not measured; efficiencies of RTX PRO 6000") == 1
    assert said.count("not measured") == 1


def test_more_clients_take_longer_and_yield_more(score):
    rows = [{**SILICON, "id": str(clients), "concurrency": clients} for clients in (1, 8, 32)]
    _, predicted, _ = score(rows)
    assert predicted.tpot_ms.is_monotonic_increasing
    assert predicted.output_tokens_per_s_per_gpu.is_monotonic_increasing


def test_lengths_are_drawn_from_the_upper_fifth_where_the_benchmark_does_so():
    """InferenceMAX draws each between 0.8 and 1.0 of the nominal one."""
    drawn = silicon.lengths_of({**SILICON, "source": "inferencemax", "isl": 1000, "osl": 100})
    assert (drawn.prompt_tokens.low, drawn.prompt_tokens.high) == (800, 1000)
    assert (drawn.output_tokens.low, drawn.output_tokens.high) == (80, 100)
    assert silicon.lengths_of({**SILICON, "isl": 1000}).prompt_tokens.value == 1000


def test_a_row_becomes_the_replicas_that_its_gpus_make():
    row = {**SILICON, "gpu": "h100_sxm", "model": "llama-3.1-8b", "tp_size": 2, "gpus": 8, "weights": "fp8"}
    scenario = silicon.scenario_of(row, Spec())
    assert (scenario.replicas, scenario.tensor_parallel_size) == (4, 2)
    assert (scenario.model.weights, scenario.model.kv_cache_dtype) == ("fp8", "fp8")
    moe = {"model": "qwen3-30b-a3b", "attention_dp_size": 4, "moe_ep_size": 8, "moe_weights": "nvfp4"}
    scenario = silicon.scenario_of({**row, **moe}, Spec())
    assert scenario.layout.num_devices == 8
    assert scenario.expert_parallel_size == 8
    assert scenario.model.moe_weights == "nvfp4"
    assert scenario.engine.max_num_seqs == 4 * silicon.scenario_of(row, Spec()).engine.max_num_seqs


# Open-loop runs


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
    assert predicted.loc["cached", "ttft_mean_ms"] < 0.8 * predicted.loc["run-0", "ttft_mean_ms"]


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


# Replayed requests


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


# What cannot be right


@pytest.mark.parametrize(
    ("rows", "settings", "message"),
    [
        (
            [{**SILICON, "ttft_ms": 0.0}],
            {},
            "measured.csv: id=row-0: ttft_ms=0.0: must be a finite number > 0",
        ),
        ([{**SILICON, "tpot_ms": -3.0}], {}, "id=row-0: tpot_ms=-3.0: must be a finite number > 0"),
        ([{**SILICON, "isl": "many"}], {}, "id=row-0: isl=many: must be a finite number > 0"),
        (
            [{name.replace("concurrency", "concurency"): v for name, v in SILICON.items()}],
            {},
            "column concurrency is missing; .*concurency",
        ),
        ([SILICON], {"kind": "experiments"}, "measured.csv: column tp is missing"),
        ([SILICON], {"kind": "silicone"}, "kind=silicone: no such kind of table; .*silicon"),
        ([SILICON], {"jobs": 0}, "jobs=0: must be >= 1"),
        ([SILICON], {"out": "nowhere/predicted.csv"}, "out=nowhere/predicted.csv: there is no folder"),
        ([SILICON], {"out": "."}, "out=.: is a folder; name a file in it"),
        (
            [{**SILICON, "tpot_ms": 0.5}],
            {},
            "id=row-0: tpot_ms=0.5: 1 x L4 cannot read the weights of smollm2-135m in less than 0.7[0-9]* ms",
        ),
        ([{**SILICON, "ttft_ms": 0.012}], {}, "id=row-0: ttft_ms=0.012: 1 x L4 cannot .*; times must be"),
        ([{**SILICON, "tpot_ms": 10_001}], {}, "id=row-0: tpot_ms=10001: must be <= 10,000; times"),
        ([{**SILICON, "ttft_ms": 4e6}], {}, r"id=row-0: ttft_ms=4e\+06: must be <= 3,600,000"),
        (
            [{**RUN, "itl_mean_ms": 0.003}],
            {"kind": "experiments"},
            "id=run-0: itl_mean_ms=0.003: 1 x RTX 4090 cannot read the weights",
        ),
        ([SILICON], {"measured": "absent.csv"}, "measured=absent.csv: no such file"),
        ([SILICON], {"where": "'isl>9999'"}, "where=isl>9999: no row of the table matches"),
        ([SILICON], {"where": "'no_such_column>1'"}, "where=no_such_column>1: "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_bad_tables_and_settings_exit_2_with_one_message(score, rows, settings, message):
    code, predicted, said = score(rows, **settings)
    assert (code, predicted) == (2, None)
    assert re.search(message, said), said


def test_the_measured_table_is_not_overwritten(score, tmp_path):
    code, _, said = score([SILICON], out="./measured.csv")
    assert code == 2
    assert "out=./measured.csv: is the file of measured, which it would overwrite; name another" in said
    assert list(pd.read_csv(tmp_path / "measured.csv")["id"]) == ["row-0"]
    code, _, said = score([SILICON], trust_table="predicted.csv")
    assert code == 2
    assert "trust_table=predicted.csv: is the file of out, which it would overwrite" in said


def test_weights_that_are_not_given_do_not_mean_kv_in_fp8():
    row = {**SILICON, "weights": np.nan}
    assert silicon.scenario_of(row, Spec()).model.kv_cache_dtype == "auto"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"arrival_s": np.nan}, "id=night/0: arrival_s=nan: must be seconds"),
        ({"output_tokens": np.nan}, "id=night/0: output_tokens=nan: must be a whole number of tokens"),
        ({"input_tokens": 2.5}, "id=night/0: input_tokens=2.5: must be a whole number of tokens"),
        ({"run": np.nan}, "id=night/0: run=nan: must be given"),
    ],
)
def test_requests_without_what_a_replay_needs_are_named(score, tmp_path, given, message):
    pd.DataFrame([REPLAYED_RUN]).to_csv(tmp_path / "runs.csv", index=False)
    code, _, said = score(replayed(2, **given), kind="requests")
    assert code == 2
    assert message in said


def test_a_run_with_two_settings_is_named(score, tmp_path):
    pd.DataFrame([REPLAYED_RUN, REPLAYED_RUN]).to_csv(tmp_path / "runs.csv", index=False)
    code, _, said = score(replayed(2), kind="requests")
    assert code == 2
    assert "run=night: occurs twice in" in said


def test_a_table_without_rows_is_refused(score):
    code, predicted, said = score(pd.DataFrame(columns=list(SILICON)))
    assert (code, predicted) == (2, None)
    assert "measured=measured.csv: the table has no rows" in said


def test_a_few_impossible_rows_are_predicted_and_left_out_of_the_errors(score):
    """A few such rows may be speculative decoding that no column names; a whole table is in another unit."""
    rows = [{**SILICON, "id": f"row-{i}"} for i in range(3)]
    rows[1]["tpot_ms"] = 0.5
    code, predicted, said = score(rows)
    assert code == 0
    assert predicted["status"].tolist() == ["ok"] * 3
    assert "excluded from the errors: id=row-1: tpot_ms=0.5: 1 x L4 cannot read the weights" in said
    assert "row-0" not in said


def test_replayed_runs_in_seconds_are_refused(score, tmp_path):
    pd.DataFrame([REPLAYED_RUN]).to_csv(tmp_path / "runs.csv", index=False)
    code, _, said = score(replayed(2, tpot_ms=0.004), kind="requests")
    assert code == 2
    assert "id=night: tpot_mean_ms=0.004: 1 x L4 cannot read the weights" in said


def test_the_shortest_step_reads_what_one_token_is_multiplied_with():
    """Mixtral: 12.75e9 of its 46.7e9 weights in bf16, less the L2 of two devices."""
    row = {**SILICON, "model": "mixtral-8x7b", "gpu": "h100_sxm", "tp_size": 2, "moe_tp_size": 2, "gpus": 2}
    scenario = silicon.scenario_of(row, Spec())
    weights = 2 * (12_879_425_536 - 32_000 * 4096 - 65 * 4096)  # neither embedding table nor norms
    assert active_weight_bytes(scenario.model) == pytest.approx(weights, rel=1e-4)
    l2_bytes = 2 * scenario.hardware.l2_bytes
    assert least_step_seconds(scenario) == pytest.approx((weights - l2_bytes) / 6.7e12, rel=1e-4)
    fp8 = silicon.scenario_of({**row, "weights": "fp8", "moe_weights": "fp8"}, Spec())
    assert 0.5 < active_weight_bytes(fp8.model) / weights < 0.52


def test_a_table_must_be_named(capsys):
    assert main(["score"]) == 2
    assert "measured: must be given" in capsys.readouterr().err


# Names


def test_names_are_the_same_but_for_case_punctuation_owner_and_instruct():
    assert plain("h100_sxm") == plain("H100-SXM") == "h100sxm"
    assert taken_for("llama-3.1-70b") is taken_for("acme/none") is None
    assert taken_for("nvidia/DeepSeek-R1-NVFP4") == (
        "model=nvidia/DeepSeek-R1-NVFP4 is simulated as model=deepseek_r1 model.weights=nvfp4: "
        "671 B parameters, 37.6 B active, MLA, 68.6 KiB of KV per token, context 163,840."
    )
    assert base_scenario("nvidia/DeepSeek-R1-NVFP4", "B200", "vllm").model.weights == "nvfp4"
    assert preset("model", "meta-llama/Llama-3.1-70B-Instruct") == "llama3_1_70b"
    assert preset("hardware", "RTX 4090") == "rtx_4090"
    assert preset("engine", "trtllm") == "tensorrt_llm"
    with pytest.raises(NotSimulatedError, match="hardware=H1000: there is no preset of this name"):
        preset("hardware", "H1000")


def test_every_alias_leads_to_a_preset():
    groups = find_groups([CONFIG_DIR])
    for group, names in ALIASES.items():
        assert set(names.values()) <= {choice.name for choice in groups[group]}


# Errors


def test_errors_by_hand():
    """Errors +10, -20 and +40 %; one row of four has no prediction, one more no truth."""
    scored = pd.DataFrame(
        {
            "gpu": ["a", "a", "b", "b", "b"],
            "ttft_ms": [100.0, 100.0, 10.0, 10.0, np.nan],
            "ttft_ms_predicted": [110.0, 80.0, 14.0, np.nan, 5.0],
        }
    )
    errors = errors_by_group(scored, ["ttft_ms", "tpot_ms"], ["gpu", "model"])
    assert list(errors) == ["ttft_ms"]
    lines = errors["ttft_ms"].set_index("value")
    assert lines.loc["", ["rows", "coverage"]].tolist() == [4, 0.75]
    assert lines.loc["", ["mean", "median", "bias"]].tolist() == pytest.approx([70 / 3, 20, 10])
    assert lines.loc["", "p90"] == pytest.approx(36)
    assert lines.loc["a", ["rows", "coverage", "median", "bias"]].tolist() == pytest.approx([2, 1, 15, -5])
    assert lines.loc["b", ["rows", "coverage", "median"]].tolist() == pytest.approx([2, 0.5, 40])


def test_a_group_without_any_answer_has_no_errors_and_no_coverage():
    scored = pd.DataFrame({"tpot_ms": [1.0], "tpot_ms_predicted": [np.nan]})
    (line,) = errors_by_group(scored, ["tpot_ms"], [])["tpot_ms"].to_dict("records")
    assert (line["rows"], line["coverage"]) == (1, 0)
    assert np.isnan(line["median"])


def test_errors_are_printed_with_their_coverage(capsys):
    scored = pd.DataFrame({"tpot_ms": [10.0, 10.0], "tpot_ms_predicted": [11.0, np.nan]})
    print_errors(errors_by_group(scored, ["tpot_ms"], []), Console(width=120))
    printed = capsys.readouterr().out
    assert "tpot_ms: absolute percentage error" in printed
    assert re.search(r"all\W+2\W+50 %\W+10\.0\W+10\.0\W+10\.0\W+10\.0", printed)


@pytest.mark.parametrize(
    ("concurrency", "band"), [(1, "1-3"), (3.0, "1-3"), (4, "4-15"), (1023, "256-1023"), (20_000, "16384-")]
)
def test_bands_of_concurrency(concurrency, band):
    assert concurrency_band(concurrency).strip() == band
