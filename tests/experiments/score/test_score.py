"""`windtunnel score`: rows at fixed concurrency, names of models and GPUs, and errors by hand."""

import re
import shlex

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from experiments.app.settings.config_groups import CONFIG_DIR, find_groups
from experiments.score import silicon
from experiments.score.report import concurrency_band, errors_by_group, print_errors
from experiments.study.presets import ALIASES, NotSimulatedError, base_scenario, plain, preset, taken_for
from hwmodels.levels import Spec
from tests.experiments.score.measured_rows import SILICON


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
