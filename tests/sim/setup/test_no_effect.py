"""Settings without an effect are refused, with the key and what to do; those that agree are accepted."""

import pytest

from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from sim import simulate
from sim.settings.errors import ConfigError
from sim.settings.scenario import build_scenario

MOE = ("model=qwen3_30b_a3b", "expert_parallel_size=8", "attention_data_parallel_size=8")
GROQ = ("hardware=groq_lpu_576", "model=llama3_1_8b")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("batching=prefill_delayer", "batching.num_ranks=4", *MOE),
            r"batching\.num_ranks=4: must be 8, the attention groups of a replica",
        ),
        (
            ("batching=prefill_delayer", *MOE, "latency=afd", "latency.num_ffn_devices=4"),
            r"batching\.num_ranks=8: must be 4, the attention groups of a replica",
        ),
        (
            (
                "engine.kernels.routing.placement=eplb",
                "engine.kernels.routing.num_redundant_experts=8",
            ),
            r"routing\.num_redundant_experts=8: llama-3.1-8b has no experts; set it to 0",
        ),
        (
            ("engine.kernels.routing.placement=scattered",),
            r"routing\.placement=scattered: llama-3.1-8b has no experts; set it to dealt",
        ),
        (
            (
                "engine.kernels.routing.kind=measured",
                "engine.kernels.routing.exponent=null",
                "engine.kernels.routing.loads=[1,2,3]",
            ),
            r"routing\.loads=3 numbers: llama-3.1-8b has no experts; set it to null, with kind=zipf",
        ),
        (
            ("model=qwen3_30b_a3b", "engine.kernels.routing.placement=eplb"),
            r"routing\.placement=eplb, expert_parallel_size=1: all experts are on one rank",
        ),
        (
            (*GROQ, "engine.offload.cpu_offload_gb=1"),
            r"engine\.offload\.cpu_offload_gb=1: .* holds the model in the SRAM of its chips",
        ),
        (
            (*GROQ, "engine.offload.n_gpu_layers=1"),
            r"engine\.offload\.n_gpu_layers=1: .* holds the model in the SRAM.*; set it to null",
        ),
        (
            (*GROQ, "engine.kernels.attention_kernels=flash_decoding"),
            r"engine\.kernels\.attention_kernels=flash_decoding: .* no GPU kernels run; set it to null",
        ),
        ((*GROQ, "caching=h2o"), r"caching=h2o: .* reading attention weights there is not modelled"),
        (
            ("encoders.image_share=0.9",),
            r"encoders\.image_share=0.9, replicas=0: without encoders prompts have",
        ),
        (("turns.min_turn_s=1",), r"turns\.min_turn_s=1, sleep_level=null: no model takes turns"),
    ],
)
def test_settings_without_effect_are_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        scenario(*overrides)


def scenario(*overrides):
    return build_scenario(ConfigSource(config_name="simulate", dirs=[CONFIG_DIR]).compose(list(overrides)))


@pytest.mark.parametrize(
    "overrides",
    [
        ("batching=prefill_delayer", *MOE),
        (
            *("batching=prefill_delayer", "batching.num_ranks=4", *MOE),
            *("latency=afd", "latency.num_ffn_devices=4"),
        ),
        (*MOE, "engine.kernels.routing.placement=eplb", "engine.kernels.routing.num_redundant_experts=8"),
        ("encoders.replicas=1", "encoders.image_share=0.9"),
        (*GROQ, "caching=streaming_llm"),
    ],
)
def test_settings_that_agree_are_accepted(overrides):
    assert all(pool.plan_memory().num_blocks > 0 for pool in scenario(*overrides).pools_by_name.values())


def test_a_delayer_beside_a_single_group_is_noted():
    notes = simulate("batching=prefill_delayer", slo=None, workload__num_requests=2).summary["notes"]
    assert any(
        note.startswith("batching.num_ranks=8: prompts wait for so many attention groups") for note in notes
    )
    one = simulate("batching=prefill_delayer", "batching.num_ranks=1", slo=None, workload__num_requests=2)
    assert not any("num_ranks" in note for note in one.summary["notes"])


@pytest.mark.parametrize("name", ["attention_data_parallel_padding", "sequence_parallel"])
def test_layouts_that_afd_does_not_model_are_refused(name):
    one = scenario(*MOE, "latency=afd", "latency.num_ffn_devices=4", "tensor_parallel_size=2", f"{name}=true")
    with pytest.raises(ValueError, match=f"{name}=true: is not modelled with latency=afd; set it to false"):
        one.iteration_model()
