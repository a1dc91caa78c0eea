"""`layout=`: from the command line to the sizes, and the effect of sizes on latencies."""

from __future__ import annotations

import re

import pytest

from experiments.app.cli import main
from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from hwmodels.iterations.layout import ParallelLayout
from policies.parallelism import Load, Sizes
from sim.settings.errors import ConfigError
from sim.settings.scenario import build_run, build_scenario
from sim.setup.estimates import figures_of, prefill_seconds

SOURCE = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR])


def scenario(*overrides):
    return build_scenario(SOURCE.compose(["workload=poisson", *overrides]))


def test_the_fields_of_sizes_are_those_of_the_layout_that_is_priced():
    layout = ParallelLayout(**Sizes(2, 3, 1, 4, 8, True)._asdict())
    assert layout.num_devices == Sizes(2, 3, 1, 4, 8).num_devices == 24


def test_auto_takes_tensor_parallelism_for_latency_and_a_pipeline_for_throughput():
    """The textbook, on 8 H100 for a model of 70 B."""
    fast = scenario("layout=auto", "model=llama3_1_70b")
    assert fast.layout == ParallelLayout(tensor_parallel_size=8)
    full = scenario("layout=auto", "layout.objective=throughput", "model=llama3_1_70b")
    assert full.layout.pipeline_parallel_size > 1


def test_no_other_layout_has_less_latency_than_the_chosen_one():
    """Every split of 8 GPUs over tensor and pipeline, priced by itself."""
    chosen = scenario("layout=auto", "model=llama3_1_70b")

    def seconds(*overrides):
        one = chosen if not overrides else scenario("model=llama3_1_70b", *overrides)
        found = figures_of(one, Load(1024, 256))
        return found.prefill_s + 256 * found.decode_s(1)

    others = [
        seconds(f"tensor_parallel_size={tensor}", f"pipeline_parallel_size={8 // tensor}")
        for tensor in (1, 2, 4, 8)
    ]
    assert seconds() == min(others)


def test_experts_are_held_whole_beside_data_parallel_attention():
    found = scenario(
        "layout=auto", "layout.objective=throughput", "model=deepseek_r1", "hardware=h200_sxm"
    ).layout
    assert found.attention_data_parallel_size == found.expert_parallel_size > 1


def test_a_run_says_why_its_layout_was_chosen():
    cfg = SOURCE.compose(["workload=poisson", "workload.num_requests=3", "layout=auto", "layout.devices=2"])
    built, source = build_run(cfg)
    notes = built.run(source).summary["notes"]
    assert notes[2].startswith("layout=auto: tensor 2 is the best of 3 layouts for latency")
    assert any("runner-up is pipeline 2" in note for note in notes)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["layout=auto", "layout.devices=0"], "layout.devices=0: must be >= 1"),
        (["layout=auto", "tensor_parallel_size=2"], "tensor_parallel_size=2: layout=auto chooses it"),
        (["layout=auto", "layout.objective=speed"], "layout.objective=speed: must be .*latency"),
        (["layout=auto", "layout.device=2"], "layout.device: no such setting; nearest: layout.devices"),
        (
            ["layout=auto", "layout.devices=1", "model=llama3_1_70b"],
            r"layout.devices=1: no layout of llama-3.1-70b \(141.1 GB of weights\) fits H100 SXM \(85.5",
        ),
        (
            ["layout=auto", "layout.prompt_tokens=200000"],
            "layout.prompt_tokens=200000, layout.output_tokens=256: must be <= 131072 together",
        ),
        (["layout=auto", "layout.objective=slo", "slo=none"], "layout.objective=slo: the run has no SLO"),
        (["layout=auto", "layout.objective=slo", "slo.tpot_ms=0.1"], "meets ttft 500 ms, tpot 0.1 ms"),
        (["tensor_parallel_size=3"], "tensor_parallel_size=3: must divide .* nearest: 2"),
        (["layout=best"], "nearest: as_set|layout=best"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_layouts_exit_2_with_one_message(overrides, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(["simulate", *overrides]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error), error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_roofline_takes_a_layout_too(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(["roofline", "layout=auto", "layout.devices=2", "batch_sizes=[1]", "out=null"]) == 0
    assert "layout=auto: tensor 2" in capsys.readouterr().out


def test_a_pipeline_leaps_exactly():
    tables = []
    for leap in ("true", "false"):
        few = ("workload.num_requests=60", "workload.arrivals.rate_per_s=20", f"sim.leap={leap}")
        built, source = build_run(SOURCE.compose(["workload=poisson", "pipeline_parallel_size=4", *few]))
        tables.append(built.run(source).in_pandas().requests)
    assert tables[0].equals(tables[1])


# Context parallel


@pytest.mark.parametrize("ring", [2, 4, 8])
def test_a_ring_reads_a_long_prompt_almost_as_many_times_faster(ring):
    """100,000 tokens at once: attention and matrices are shared out, some of the ring's messages show."""
    one, cut = (
        scenario(f"context_parallel_size={size}", "batching.max_num_batched_tokens=100000")
        for size in (1, ring)
    )
    speedup = ttft_s(one, 100_000) / ttft_s(cut, 100_000)
    assert 0.8 * ring < speedup < ring


@pytest.mark.parametrize("ring", [2, 4, 8])
def test_a_ring_gains_nothing_on_a_short_prompt(ring):
    """100 tokens: every device reads all weights, and waits for messages."""
    one, cut = (scenario(f"context_parallel_size={size}") for size in (1, ring))
    assert ttft_s(cut, 100) > 0.98 * ttft_s(one, 100)


def ttft_s(one, prompt):
    return prefill_seconds(one.iteration_model(), prompt, one.max_num_batched_tokens)


def test_time_to_the_first_token_of_simulated_requests_falls_likewise():
    """Three prompts of 30,000 tokens, one after the other."""
    means = {}
    for ring in (1, 4):
        settings = [
            "workload=poisson",
            "workload.num_requests=3",
            "workload.arrivals.rate_per_s=0.05",
            "workload.lengths.prompt_tokens.value=30000",
            "workload.lengths.output_tokens.value=2",
            f"context_parallel_size={ring}",
        ]
        built, source = build_run(SOURCE.compose(settings))
        means[ring] = built.run(source).summary["ttft"]["mean_s"]
    assert 2.5 < means[1] / means[4] < 4


def test_a_lone_prompt_overlaps_with_nothing_but_its_own_chunks():
    """4 stages: whole, it takes 4 times as long as each of many; in 4 chunks (4 + 3) / 4 times as long."""
    cut = scenario("pipeline_parallel_size=4", "model=llama3_1_70b", "model.weights=fp8")
    model, budget = cut.iteration_model(), cut.max_num_batched_tokens
    rounds = figures_of(cut, Load(budget, 1)).prompt_s
    assert 3.9 < prefill_seconds(model, budget, budget) / rounds < 4.1
    assert 1.7 < prefill_seconds(model, budget, budget // 4) / rounds < 1.9


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["pp_layer_partition=[20,20]"],
            r"pp_layer_partition=\[20,20\]: the sum is 40; must be 32, the lay",
        ),
        (["pp_layer_partition=[10,10,12]"], r"must have one number for each of the pipeline_parallel_size=2"),
        (["pp_layer_partition=[31.5,0.5]"], r"pp_layer_partition\[0\]=31.5: must be an integer"),
        (["pp_layer_partition=16"], r"pp_layer_partition=16: must be a list or null"),
        (
            ["engine.pp_max_micro_batch_size=-1"],
            "engine.pp_max_micro_batch_size=-1: must be >= 0",
        ),
    ],
)
def test_bad_settings_of_stages_are_named(overrides, message):
    with pytest.raises(ConfigError, match=message):
        scenario("pipeline_parallel_size=2", *overrides)


def test_an_uneven_partition_needs_the_memory_of_its_fullest_stage_and_slows_it():
    even, uneven = (
        scenario("pipeline_parallel_size=2", f"pp_layer_partition={given}") for given in ("null", "[24,8]")
    )
    assert uneven.plan_memory().weights_bytes > 1.3 * even.plan_memory().weights_bytes
    assert figures_of(uneven, Load(8192, 1)).prompt_s == pytest.approx(
        1.5 * figures_of(even, Load(8192, 1)).prompt_s, rel=0.02
    )
    assert figures_of(uneven, Load(8192, 1)).prefill_s == pytest.approx(
        figures_of(even, Load(8192, 1)).prefill_s, rel=0.01
    )


def test_unknown_layouts_are_config_errors():
    cfg = SOURCE.compose(["workload=poisson", "layout=auto"])
    cfg.layout._target_ = "policies.parallelism.auto.Automatic"
    with pytest.raises(ConfigError, match=r"layout\._target_"):
        build_scenario(cfg)
