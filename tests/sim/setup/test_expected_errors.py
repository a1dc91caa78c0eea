"""Every run states its expected errors, and on what they rest: measured, a relative measured, or never."""

from __future__ import annotations

import json

import pytest

from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR, find_groups
from hwmodels.trust import ALL_ENGINES, ALL_GPUS, HELD_BACK, LORA, ExpectedError, Level
from sim.settings.scenario import build_scenario
from sim.setup.notes import (
    ENGINES,
    expected_error_note,
    expected_errors_json,
    figures_of,
    never_compared,
    tail_of,
    traffic_of,
    unknown_because,
)
from sim.workload.modified import WithCallers

SOURCE = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR])


def rows(traffic, gpu, level, **errors):
    return [
        ExpectedError(traffic, figure, "vllm", gpu, "dense", level, 93, 3, *pair)
        for figure, pair in errors.items()
    ]


TABLE = (
    *rows("closed", "H100 SXM", Level.measured, TTFT=(18.0, 55.4), TPOT=(5.25, 14.0), throughput=(6.0, 16.0)),
    *rows("open", "H100 SXM", Level.measured, TTFT=(8.0, 22.0), ITL=(3.5, 9.0)),
    *rows("closed", ALL_GPUS, Level.measured, TTFT=(20.0, 60.0), TPOT=(6.0, 18.0)),
    *rows("closed", ALL_GPUS, Level.relative, TTFT=(30.0, 80.0), TPOT=(9.0, 35.0)),
)


@pytest.fixture(autouse=True)
def hand_made_table(monkeypatch):
    monkeypatch.setattr("sim.setup.notes.shipped", lambda: TABLE)


def scenario_of(*overrides):
    return build_scenario(SOURCE.compose(["model=llama3_1_8b", "hardware=h100_sxm", *overrides]))


def note(*overrides, held_back_share=None):
    scenario = scenario_of(*overrides)
    return expected_error_note(scenario, scenario.workload, held_back_share)


def test_measured_gpu_has_the_figures_of_its_own_kind_of_traffic():
    assert note("workload=poisson") == (
        "Expected error (median / p90): TTFT 8 / 22 %, ITL 3.5 / 9 % "
        "(measured: 93 open-loop runs in 3 groups of dense models with vLLM on H100 SXM); throughput 6 / "
        "16 % (measured: 93 closed-loop runs in 3 groups of dense models with vLLM on H100 SXM)."
    )
    closed = ("workload=closed_loop",)
    assert note(*closed) == (
        "Expected error (median / p90): TTFT 18 / 55 %, TPOT 5.2 / 14 %, "
        "throughput 6 / 16 % (measured: 93 closed-loop runs in 3 groups of dense models with vLLM on H100 "
        "SXM)."
    )


BURST = rows("burst", "H100 SXM", Level.measured, TTFT=(30.0, 70.0), TPOT=(20.0, 50.0))
ONCE = ("workload/arrivals=all_at_once", "workload.num_requests=40")
CLIENTS = ("workload/arrivals=max_concurrency", "workload.arrivals.num_users=40")
RAMP = "workload.arrivals.ramp_up_s=5"


@pytest.mark.parametrize(
    ("overrides", "traffic"),
    [
        (("workload=poisson",), "open"),
        (("workload=synthetic", *ONCE), "burst"),
        (("workload=offline_batch",), "burst"),
        (("workload=synthetic", *CLIENTS, "workload.num_requests=40"), "burst"),
        (("workload=synthetic", *CLIENTS, "workload.num_requests=41"), "closed"),
        (
            ("workload=synthetic", *CLIENTS, "workload.num_requests=40", "workload.arrivals.ramp_up_s=5"),
            "closed",
        ),
        (("workload=closed_loop",), "closed"),
        (("workload=conversation",), "open"),
        (("workload=conversation", "workload/arrivals=all_at_once"), "closed"),
    ],
)
def test_kind_of_traffic_of_a_workload(overrides, traffic):
    assert traffic_of(scenario_of(*overrides).workload) == traffic


@pytest.mark.parametrize("choice", ["poisson", "offline_batch", "closed_loop"])
def test_marks_on_requests_do_not_change_their_kind_of_traffic(choice):
    workload = scenario_of(f"workload={choice}").workload
    assert traffic_of(WithCallers(of=workload, tenants={"a": 1.0})) == traffic_of(workload)


def test_burst_has_the_errors_of_bursts_and_of_closed_loops_if_no_burst_was_compared(monkeypatch):
    words = ("workload=synthetic", *ONCE)
    assert "TPOT 5.2 / 14 %" in note(*words)
    assert "93 closed-loop runs" in note(*words)
    monkeypatch.setattr("sim.setup.notes.shipped", lambda: (*TABLE, *BURST))
    assert note(*words, held_back_share=0.9) == (
        "Expected error (median / p90): TTFT 30 / 70 %, TPOT 20 / 50 % "
        "(measured: 93 bursts in 3 groups of dense models with vLLM on H100 SXM)."
    )
    scenario = scenario_of(*words)
    found = expected_errors_json(scenario, scenario.workload)["figures"]
    assert {name: row["traffic"] for name, row in found.items()} == {"TTFT": "burst", "TPOT": "burst"}


LORA_ROW = ExpectedError("lora", LORA, "vllm", ALL_GPUS, "dense", Level.measured, 12, 6, 15.0, 40.0)


def test_adapters_have_the_errors_of_runs_with_and_without_them(monkeypatch):
    words = ("workload=lora", "adapters=fixed_slots", "workload.num=2")
    assert "Never compared: LoRA adapters" in note(*words)
    others = (LORA_ROW._replace(engine="sglang"), LORA_ROW._replace(engine=ALL_ENGINES))
    monkeypatch.setattr("sim.setup.notes.shipped", lambda: (*TABLE, *others))
    assert "Never compared: LoRA adapters" in note(*words)
    monkeypatch.setattr("sim.setup.notes.shipped", lambda: (*TABLE, *others, LORA_ROW))
    assert note(*words).endswith(
        "; throughput kept with LoRA 15 / 40 % (measured on other GPUs than H100 SXM: 12 comparisons with "
        "and without adapters in 6 groups of dense models with vLLM)."
    )
    scenario = scenario_of(*words)
    found = expected_errors_json(scenario, scenario.workload)
    assert found["figures"][LORA]["p90_percent"] == 40.0
    assert not found["never_compared"]
    assert LORA not in note("workload=poisson")
    moe = scenario_of(*words, "model=mixtral_8x7b", "tensor_parallel_size=2")
    assert "LoRA adapters" in never_compared(moe)


def test_few_groups_and_other_engines_are_named(monkeypatch):
    few = [row._replace(groups=1, rows=20, basis_groups=12) for row in BURST]
    monkeypatch.setattr("sim.setup.notes.shipped", lambda: (*TABLE, *few))
    assert note("workload=offline_batch").endswith(
        "(measured: 20 bursts in 1 group of dense models with vLLM on H100 SXM; too few groups, so not "
        "narrower than for 12 groups)."
    )
    of_all = [row._replace(engine=ALL_ENGINES, gpu=ALL_GPUS) for row in BURST]
    sglang = TABLE[0]._replace(engine="sglang")
    monkeypatch.setattr("sim.setup.notes.shipped", lambda: (sglang, *of_all))
    words = ("workload=offline_batch", "engine=sglang")
    assert note(*words).endswith(
        "(measured: 93 bursts in 3 groups of dense models with all engines and GPUs, as such runs of SGLang "
        "were not compared)."
    )
    scenario = scenario_of(*words)
    assert expected_errors_json(scenario, scenario.workload)["figures"]["TTFT"]["engine"] is None


OPEN = {"ITL": (3.5, 9.0), "TTFT p99": (14.0, 25.0)}
AT_LIMIT = rows("open", "H100 SXM", Level.measured, **{HELD_BACK: (70.0, 200.0)})
DEPENDS = "Whether more than 1 % do depends on the seed and on a few percent of load, and the p99 with it."


def test_tail_of_a_run_at_a_limit_has_the_errors_of_such_runs(monkeypatch):
    table = (*rows("open", "H100 SXM", Level.measured, **OPEN), *AT_LIMIT)
    monkeypatch.setattr("sim.setup.notes.shipped", lambda: table)
    free, held = (note("workload=poisson", held_back_share=share) for share in (0.0009, 0.02))
    assert free == note("workload=poisson")
    assert "TTFT p99 14 / 25 %" in free
    assert "TTFT p99 70 / 200 % (measured" in held
    assert held.endswith(
        "TTFT p99 is of the 93 runs at such a limit, as 2 % of the requests waited for a sequence slot or KV "
        f"memory. {DEPENDS}"
    )
    scenario = scenario_of("workload=poisson")
    found = expected_errors_json(scenario, scenario.workload, 0.02)["figures"]
    assert (found["TTFT p99"]["median_percent"], found["ITL"]["median_percent"]) == (70.0, 3.5)


def test_tail_is_unknown_where_no_measured_run_was_at_a_limit(monkeypatch):
    of_experts = [row._replace(architecture="moe") for row in AT_LIMIT]
    table = (*TABLE, *rows("open", "H100 SXM", Level.measured, **{"TTFT p99": (14.0, 25.0)}), *of_experts)
    monkeypatch.setattr("sim.setup.notes.shipped", lambda: table)
    waited = "of the requests waited for a sequence slot or KV memory"
    held = note("workload=poisson", held_back_share=0.02)
    assert "14 / 25 %" not in held
    assert held.endswith(
        f"TTFT p99: unknown, as 2 % {waited}, and no such run of dense models was measured; of mixtures of "
        f"experts it is TTFT p99 70 / 200 %. {DEPENDS}"
    )
    overloaded = note("workload=poisson", held_back_share=0.6)
    assert overloaded.endswith(f"TTFT p99: unknown, as 60 % {waited}, more than in any measured run.")
    assert note("workload=closed_loop", held_back_share=0.02) == note("workload=closed_loop")


def test_a_run_that_waits_for_slots_says_so(monkeypatch):
    table = (*rows("open", "H100 SXM", Level.measured, **OPEN), *AT_LIMIT)
    monkeypatch.setattr("sim.setup.notes.shipped", lambda: table)
    base = ("model=smollm2_135m", "workload=poisson", "workload.num_requests=300")
    free = scenario_of(*base).run().summary
    assert free["waiting"]["held_back_share"] == 0
    assert free["expected_errors"][0]["figures"]["TTFT p99"]["median_percent"] == 14.0
    held = scenario_of(*base, "engine.max_num_seqs=1").run().summary
    assert held["waiting"]["held_back_share"] > 0.05
    assert "more than in any measured run" in held["notes"][1]
    assert "TTFT p99" not in held["expected_errors"][0]["figures"]


@pytest.mark.parametrize(
    ("share", "figure"),
    [(None, "TTFT p99"), (float("nan"), "TTFT p99"), (0.0, "TTFT p99"), (0.001, HELD_BACK), (0.06, None)],
)
def test_figure_of_a_tail_follows_from_the_share_held_back(share, figure):
    assert tail_of(share) == figure


def test_gpu_without_rows_of_engines_has_the_figures_of_other_gpus():
    assert note("hardware=a100_80gb_sxm").endswith(
        "TTFT 20 / 60 %, TPOT 6 / 18 % (measured on other GPUs than A100 80GB SXM: 93 closed-loop runs in "
        "3 groups of dense models with vLLM)."
    )


def test_relative_of_a_measured_gpu_says_that_it_was_never_measured():
    assert note("hardware=l40s").endswith(
        "TTFT 30 / 80 %, TPOT 9 / 35 % (L40S was never measured: 93 closed-loop runs in 3 groups of dense "
        "models with vLLM, on GPUs that were simulated without measurements of their own)."
    )


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["calibration=none"], "neither H100 SXM nor a relative of it was ever measured"),
        (["engine=tgi"], "this engine profile was never compared with measurements"),
        (["engine=sglang"], "dense models with SGLang were never compared with measurements"),
        (["model=qwen3_30b_a3b"], "mixtures of experts with vLLM were never compared with measurements"),
        (["latency=spec"], "latency=spec was never compared with measured engines"),
    ],
)
def test_what_was_never_measured_says_so(overrides, reason):
    assert note(*overrides) == f"Expected error: unknown; {reason}."
    scenario = scenario_of(*overrides)
    found = expected_errors_json(scenario, scenario.workload)
    assert found["unknown"] == reason
    assert found["figures"] == {}


def test_features_that_no_measured_row_has_are_named():
    assert never_compared(scenario_of()) == []
    features = ("pipeline_parallel_size=2", "caching=tiered", "scheduling.preemption_mode=swap")
    assert note(*features).endswith(
        "Never compared: pipeline parallelism, caching=tiered, preemption by swapping."
    )


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["batching=static"], ["batching=static"]),
        (["scheduling=mlfq"], ["scheduling=mlfq"]),
        (["batching=sarathi"], []),
        (["engine=sglang"], []),
        (["speculation=eagle3"], ["speculative decoding"]),
        (["engine=tensorrt_llm"], []),
        (["engine=sglang", "batching=chunked", "scheduling=fcfs"], ["batching=chunked"]),
    ],
)
def test_policies_that_no_measured_row_has_are_named(overrides, named):
    assert never_compared(scenario_of(*overrides)) == named


def test_disaggregated_pools_were_never_compared():
    pools = scenario_of("pools=disaggregated").pools_by_name.values()
    assert [never_compared(pool) for pool in pools] == [["disaggregated prefill and decode"]] * 2


def test_json_has_the_rows_of_every_figure():
    scenario = scenario_of("workload=poisson")
    found = expected_errors_json(scenario, scenario.workload)
    assert found["unknown"] is None
    assert {name: row["traffic"] for name, row in found["figures"].items()} == {
        "TTFT": "open",
        "ITL": "open",
        "throughput": "closed",
    }
    assert found["figures"]["ITL"]["p90_percent"] == 9.0
    assert found["figures"]["ITL"]["gpu"] == "H100 SXM"


def test_engine_that_was_compared_in_an_open_loop_only_shows_these_figures(monkeypatch):
    monkeypatch.setattr("sim.setup.notes.shipped", lambda: TABLE[3:5])
    assert [list(rows) for rows in figures_of(scenario_of(), "closed")] == [["TTFT", "ITL"]]


def test_summary_of_a_run_has_the_note_and_the_figures():
    summary = scenario_of("model=smollm2_135m", "workload=poisson", "workload.num_requests=5").run().summary
    assert summary["notes"][1].startswith("Expected error (median / p90)")
    assert summary["expected_errors"][0]["figures"]["TTFT"]["median_percent"] == 8.0


def test_profiles_that_were_compared_are_those_of_measured_engines():
    compared = {}
    for choice in find_groups([CONFIG_DIR])["engine"]:
        family = SOURCE.compose([f"engine={choice.name}"]).engine.family
        if family is not None:
            compared[choice.name] = family
    assert set(compared.values()) == set(ENGINES)
    for name, family in compared.items():
        assert name.startswith(family)
    assert {"vllm_v0", "tgi", "llama_cpp", "orca", "hf_static"}.isdisjoint(compared)
    assert unknown_because(scenario_of("engine=vllm_v0")).startswith("this engine profile")


@pytest.mark.parametrize(
    ("model", "kinds"),
    [
        ("llama3_1_8b", []),
        ("nemotron_3_nano_30b_a3b", ["state-space layers"]),
        ("deepseek_v4_flash", ["attention to compressed entries"]),
        ("minimax_m3", ["attention to selected blocks"]),
    ],
)
def test_kinds_of_layers_that_no_compared_model_has_are_named(model, kinds):
    scenario = scenario_of(f"model={model}", "hardware=b300_sxm", "tensor_parallel_size=8")
    assert never_compared(scenario) == kinds


def test_an_architecture_that_is_not_known_was_never_compared(tmp_path):
    fields = {
        "architectures": ["NeverSeenForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "max_position_embeddings": 131072,
        "num_attention_heads": 32,
        "num_hidden_layers": 16,
        "vocab_size": 128256,
    }
    (tmp_path / "config.json").write_text(json.dumps(fields))
    scenario = scenario_of("model=hf", f"model.path={tmp_path}")
    assert never_compared(scenario) == ["models of an architecture that is not known"]
