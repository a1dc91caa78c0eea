"""Measured rows of public sources: `windtunnel score kind=public`."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import experiments.score
from experiments.score import public
from experiments.score.kinds import KINDS
from experiments.score.table import read_table
from experiments.study.presets import NotSimulatedError
from hwmodels.levels import Calibrated, Spec
from sim.workload.arrivals import AllAtOnce, ClosedLoop, Constant, Poisson

ROWS = Path(experiments.score.__file__).parent / "data" / "public_rows.csv"
ROW = {
    "id": "row-0",
    "part": "fit",
    "source": "somewhere",
    "date": "2026-01",
    "address": "example.org",
    "backend": "vllm",
    "backend_version": "0.15.0",
    "model": "smollm2-135m",
    "weights": "bf16",
    "gpu": "l4",
    "gpus": 1,
    "tp_size": 1,
    "pp_size": 1,
    "attention_dp_size": 1,
    "moe_ep_size": np.nan,
    "arrivals": "closed_loop",
    "concurrency": 2,
    "rate_per_s": np.nan,
    "num_requests": 20,
    "lengths": "fixed",
    "isl": 200,
    "isl_max": np.nan,
    "osl": 9,
    "osl_max": np.nan,
    "ttft_mean_ms": 12.0,
    "tpot_mean_ms": 4.0,
    "output_tokens_per_s": 300.0,
}


@pytest.fixture(scope="module")
def table():
    """Returns the table of the project, read and checked as by the command."""
    kind = KINDS["public"]
    return kind.rows(read_table(ROWS, kind.columns, kind.positive), ROWS)


def test_every_row_has_a_source_a_day_and_what_is_assumed(table):
    assert table["address"].str.len().gt(10).all()
    assert table["date"].str.match(r"20\d\d(-\d\d){0,2}$").all()
    assert table["assumed"].str.len().gt(10).all()
    assert table["note"].str.len().gt(5).all()


def test_no_source_is_in_both_parts(table):
    assert table.groupby("source")["part"].nunique().eq(1).all()
    assert table.groupby("address")["part"].nunique().eq(1).all()


def test_no_latency_is_impossible(table):
    ttft, e2e = table["ttft_ms"], table["e2e_ms"]
    assert not (ttft > e2e).any()
    for name in ("ttft", "tpot"):
        mean, p99 = table[f"{name}_ms"], table[f"{name}_p99_ms"]
        assert not (mean > 1.001 * p99).any(), table.loc[mean > 1.001 * p99, "id"].tolist()


def test_throughputs_and_lengths_of_a_row_agree(table):
    """Output tokens/s are requests/s times the mean output, where a source states all three."""
    stated = table[table["requests_per_s"].gt(0.5) & table["output_tokens_per_s"].notna()]
    ratio = stated["requests_per_s"] * stated["osl"] / stated["output_tokens_per_s"]
    assert len(stated) >= 50
    assert ratio.between(0.9, 1.1).all(), stated.loc[~ratio.between(0.9, 1.1), "id"].tolist()


@pytest.mark.parametrize(
    ("changed", "arrivals"),
    [
        ({}, ClosedLoop(num_users=2)),
        ({"arrivals": "all_at_once"}, AllAtOnce()),
        ({"arrivals": "poisson", "rate_per_s": 3.0}, Poisson(rate_per_s=3.0)),
        ({"arrivals": "constant", "rate_per_s": 3.0}, Constant(rate_per_s=3.0)),
    ],
    ids=lambda value: str(value.get("arrivals")) if isinstance(value, dict) else "",
)
def test_the_arrivals_are_those_of_the_row(changed, arrivals):
    workload = public.workload_of({**ROW, **changed})
    assert (workload.arrivals, workload.num_requests) == (arrivals, 20)


def test_a_closed_loop_whose_requests_are_not_counted_has_ten_for_each_client():
    assert public.workload_of({**ROW, "num_requests": np.nan}).num_requests == 20


@pytest.mark.parametrize(("lengths", "most"), [("fixed", np.nan), ("uniform", 300), ("lognormal", 1024)])
def test_the_lengths_have_the_mean_and_the_maximum_of_the_row(lengths, most):
    drawn = public.distribution(lengths, 200.0, most).from_normal(
        np.random.default_rng(0).normal(size=20_000)
    )
    assert drawn.mean() == pytest.approx(200, rel=0.02)
    assert drawn.max() <= (200 if lengths == "fixed" else most)
    assert (drawn.std() > 0) == (lengths != "fixed")


def test_the_compared_statistic_is_the_mean_or_else_the_median():
    row = {**ROW, "ttft_mean_ms": np.nan, "ttft_p50_ms": 7.0}
    mean, median = (public.predict(each, Spec())["ttft_ms"] for each in (ROW, row))
    assert public.quantity(row, public.STATED["ttft_ms"]) == 7.0
    figures = public.figures_of(public.scenario_of(ROW, Spec()))
    assert (mean, median) == (figures["ttft_mean_ms"], figures["ttft_p50_ms"])
    assert mean != median


def test_the_server_of_tensorrt_llm_runs_whole_prompts_and_its_benchmark_is_tuned():
    row = {**ROW, "backend": "trtllm", "backend_version": "1.2.0", "max_num_batched_tokens": 4096}
    served, in_process = (
        public.scenario_of(each, Spec()).batching for each in (row, {**row, "client": public.IN_PROCESS})
    )
    assert (served.enable_chunked_context, in_process.enable_chunked_context) == (False, True)
    assert served.capacity_scheduler_policy == "guaranteed_no_evict"
    assert served.max_num_batched_tokens == in_process.max_num_batched_tokens == 4096


@pytest.mark.parametrize(
    ("version", "stages", "profile"),
    [("0.8.3", 2, "vllm_v0"), ("0.8.3", 1, "vllm_sync"), ("0.10.2", 2, "vllm_sync"), ("0.7.3", 2, "vllm_v0")],
)
def test_pipelines_of_vllm_0_8_run_on_v0(version, stages, profile):
    assert public.profile_of({**ROW, "backend_version": version, "pp_size": stages}) == profile


def test_prompts_of_vllm_v0_cost_the_launches_of_modules_that_are_not_compiled():
    """A short prompt on 8 H200 waits for launches: 80 layers of about 10 kernels at 54 us are over 40 ms."""
    row = {**ROW, "backend_version": "0.7.3", "model": "llama-3-70b", "gpu": "h200_sxm", "tp_size": 8}
    row |= {"gpus": 8, "concurrency": 1, "num_requests": 2, "isl": 256, "osl": 4, "client": public.IN_PROCESS}
    scenario = public.scenario_of(row, Calibrated())
    compiled = replace(scenario, engine=replace(scenario.engine, compilation=None))
    eager_ms, compiled_ms = (public.figures_of(each)["ttft_mean_ms"] for each in (scenario, compiled))
    assert eager_ms > 40 > 30 > compiled_ms


def test_all_tokens_are_compared_with_all_tokens():
    row = {**ROW, "output_tokens_per_s": np.nan, "total_tokens_per_s": 5000.0}
    ratio = public.predict(row, Spec())["tokens_per_s"] / public.predict(ROW, Spec())["tokens_per_s"]
    assert ratio == pytest.approx((200 + 9) / 9)


def test_limits_and_layout_of_a_row_are_simulated():
    row = {
        **ROW,
        "model": "qwen3-30b-a3b",
        "gpu": "h100_sxm",
        "tp_size": 1,
        "attention_dp_size": 4,
        "gpus": 8,
    }
    row |= {"moe_ep_size": 4, "max_num_seqs": 64, "max_num_batched_tokens": 4096, "memory_fraction": 0.8}
    row |= {"max_model_len": 2048}
    scenario = public.scenario_of(row, Calibrated())
    assert (scenario.layout.num_devices, scenario.replicas) == (4, 2)
    assert scenario.layout.expert_parallel_size == 4
    assert (scenario.engine.max_num_seqs, scenario.batching.max_num_batched_tokens) == (256, 16_384)
    assert (scenario.engine.gpu_memory_utilization, scenario.engine.max_model_len) == (0.8, 2048)


def test_the_engine_is_that_of_the_version_and_its_switches():
    assert public.profile_of({**ROW, "backend_version": "0.7.3"}) == "vllm_v0"
    assert public.profile_of({**ROW, "backend_version": np.nan, "date": "2025-11"}) == "vllm_sync"
    switched = {**ROW, "backend_version": "0.11.0", "async_scheduling": True}
    assert public.profile_of(switched) == "vllm_0_10_async"
    assert public.scenario_of(ROW, Spec()).engine.cuda_graphs.enabled
    assert not public.scenario_of({**ROW, "cuda_graphs": False}, Spec()).engine.cuda_graphs.enabled


def test_a_client_in_the_process_of_the_engine_has_no_frontend():
    over_http, inside = (
        public.predict({**ROW, "concurrency": 1, "client": client}, Spec())["ttft_ms"]
        for client in (np.nan, "in_process")
    )
    frontend_s = public.scenario_of(ROW, Spec()).engine.frontend_s
    assert over_http - inside == pytest.approx(1e3 * frontend_s, rel=0.01)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"part": "both"}, "measured.csv: id=row-0: part=both: must be one of fit, test"),
        ({"arrivals": "posson"}, "id=row-0: arrivals=posson: must be one of all_at_once, .*poisson"),
        ({"lengths": "normal"}, "id=row-0: lengths=normal: must be one of fixed, uniform, lognormal"),
        ({"cuda_graphs": "off"}, "id=row-0: cuda_graphs=off: must be true, false or empty"),
        ({"client": "http"}, "id=row-0: client=http: must be in_process or empty"),
        ({"arrivals": "poisson"}, "id=row-0: rate_per_s is missing: arrivals=poisson needs it"),
        ({"concurrency": np.nan}, "id=row-0: concurrency is missing: arrivals=closed_loop needs it"),
        (
            {"arrivals": "all_at_once", "num_requests": np.nan},
            "id=row-0: num_requests is missing: arrivals=all_at_once needs it",
        ),
        ({"lengths": "uniform"}, "id=row-0: isl_max=nan: must be >= isl=200, as lengths=uniform"),
        (
            {"lengths": "lognormal", "isl_max": 900, "osl_max": 5},
            "id=row-0: osl_max=5: must be >= osl=9, as lengths=lognormal",
        ),
        (
            {"ttft_mean_ms": np.nan, "tpot_mean_ms": np.nan, "output_tokens_per_s": np.nan},
            "id=row-0: no measured value; give one of ttft_mean_ms, ",
        ),
        ({"ttft_mean_ms": -1.0}, "id=row-0: ttft_mean_ms=-1.0: must be a finite number > 0"),
        ({"osl": 0}, "id=row-0: osl=0: must be a finite number > 0"),
        ({"max_num_seqs": "many"}, "id=row-0: max_num_seqs=many: must be a finite number > 0"),
    ],
)
def test_rows_that_are_no_measurement_of_a_workload_are_refused(score, changed, message):
    code, predicted, said = score([{**ROW, **changed}], kind="public")
    assert (code, predicted) == (2, None)
    assert pd.Series([said]).str.contains(message, regex=True).all(), said


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": "no-such-model"}, "model=no-such-model: there is no preset"),
        ({"gpu": "h200x"}, "hardware=h200x: there is no preset"),
        ({"backend": "vlm"}, "engine=vlm: there is no preset"),
        ({"gpus": 3, "tp_size": 2}, "gpus=3: must be a multiple of 2"),
        ({"isl": 9000}, "9,000 prompt tokens plus 9 output tokens"),
        ({"concurrency": 1.5}, "concurrency=1.5: must be a whole number"),
        (
            {"model": "qwen3-30b-a3b", "tp_size": 4, "gpus": 4, "moe_ep_size": 3},
            "moe_ep_size=3: must divide tp_size x attention_dp_size = 4",
        ),
    ],
)
def test_rows_that_cannot_be_simulated_say_why(changed, message):
    with pytest.raises((NotSimulatedError, ValueError), match=message):
        public.predict({**ROW, **changed}, Spec())


def test_the_command_prints_errors_by_part_engine_device_and_family(score):
    rows = [{**ROW, "id": f"row-{part}", "part": part} for part in ("fit", "test")]
    code, predicted, said = score(rows, kind="public", latency="spec")
    assert code == 0
    assert list(predicted["status"]) == ["ok", "ok"]
    assert predicted["ttft_ms"].nunique() == 1
    for words in ("tpot_ms: absolute", "tokens_per_s: absolute", "part", "arch", "backend", "dense", "l4"):
        assert words in said
    assert "2 of 2 rows predicted" in said


def test_the_list_of_sources_counts_the_rows_of_each(table):
    listed = pd.read_csv(ROWS.parent / "sources.csv").set_index("source")
    rows = table.groupby("source")
    assert listed["rows"].to_dict() == rows.size().to_dict()
    assert listed["part"].to_dict() == rows["part"].first().to_dict()
    assert len(listed) >= 20


@pytest.mark.parametrize(
    ("version", "sampler"),
    [
        ("0.8.4", False),
        ("0.8.5", True),
        ("0.10.2", True),
        ("0.11.0", True),
        ("0.11.1", False),
        ("0.19.0", False),
    ],
)
def test_flashinfer_samples_in_the_images_that_have_it(version, sampler):
    scenario = public.scenario_of({**ROW, "backend_version": version}, Spec())
    assert scenario.engine.flashinfer_sampler is sampler
    assert not public.samples_with_flashinfer({**ROW, "backend": "sglang", "backend_version": version})


def test_gpt_oss_fits_on_the_gpu_on_which_it_ran(table):
    """71.2 GiB hold 64.4 of weights, 0.1 of libraries and 2.9 for sampling 1,024 rows; sorted, 7.4."""
    row = table[table["id"] == "gpustack-gpt-oss-120b-h100-88"].iloc[0].to_dict()
    assert public.scenario_of(row, Spec()).plan_memory().num_blocks * 16 > 32_768
    with pytest.raises(ValueError, match=r"gpt-oss-120b needs 72.1 GiB on each H100 SXM, 0.9 GiB more"):
        public.scenario_of({**row, "backend_version": "0.12.0"}, Spec()).plan_memory()
