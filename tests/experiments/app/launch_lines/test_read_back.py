"""The launch commands that `capacity` prints are read back by --from as the settings that they came from."""

import pytest

from experiments.app.launch_lines.commands import command_in
from experiments.app.launch_lines.engines import translated
from experiments.app.launch_lines.written import sglang_launch, tensorrt_llm_launch, vllm_launch
from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from experiments.app.settings.hydra_errors import composed
from experiments.app.settings.variants import Variants
from experiments.capacity.candidates import build_candidates
from experiments.capacity.settings import CapacitySettings
from policies.batching import of_rank
from policies.caching.prefix import PrefixCaching
from policies.caching.radix import Radix
from sim.settings.scenario import build_scenario

SOURCE = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR])
LAUNCHES = {"vllm": vllm_launch, "sglang": sglang_launch, "tensorrt_llm": tensorrt_llm_launch}
FINDING = (PrefixCaching, Radix)
"""Caches that find prefixes: SGLang has one kind, a radix tree."""
MOE = ("model=deepseek_r1", "hardware=h200_sxm", "attention_data_parallel_size=8", "expert_parallel_size=8")


def read_back(launch, overrides):
    """Returns the scenario that a candidate's command means."""
    settings = CapacitySettings(hardware=(), tensor_parallel_sizes=(), quantisations=(None,))
    candidate = build_candidates(settings, Variants(SOURCE, overrides))[0][0]
    found = translated(command_in(launch(candidate).command), [CONFIG_DIR])
    assert found.refused == {}
    hardware = [text for text in overrides if text.startswith("hardware=")]
    return candidate.scenario, build_scenario(composed(SOURCE, [*found.overrides, *hardware]))


@pytest.mark.sampled(fast=8, slow=16)
@pytest.mark.parametrize("engine", LAUNCHES)
@pytest.mark.parametrize(
    "overrides",
    [
        ("model=llama3_1_8b",),
        ("model=qwen3_32b", "tensor_parallel_size=2", "engine.max_num_seqs=77", "engine.max_model_len=9000"),
        (
            "model=llama3_1_70b",
            "tensor_parallel_size=4",
            "pipeline_parallel_size=2",
            "hardware=a100_80gb_sxm",
        ),
        ("model=llama3_1_8b", "engine.cuda_graphs.enabled=false", "engine.num_kv_blocks=5000"),
        ("model=llama3_1_8b", "engine.host.overlapped=false", "engine.max_num_batched_tokens=3000"),
        ("model=llama3_1_8b", "caching=prefix", "caching.block_size=32", "model.kv_cache_dtype=fp8"),
        (
            *MOE,
            "engine.max_num_seqs=2048",
            "engine.max_num_batched_tokens=32768",
            "engine.gpu_memory_utilization=0.85",  # by itself, SGLang sets 48 GiB aside for such chunks
        ),
        (*MOE, "engine.num_kv_blocks=80000", "engine.load_balance_method=round_robin"),
    ],
    ids=str,
)
def test_a_printed_command_means_the_settings_of_its_candidate(engine, overrides):
    ours, theirs = read_back(LAUNCHES[engine], (f"engine={engine}", *overrides))
    assert theirs.layout == ours.layout
    assert theirs.model.name == ours.model.name
    assert theirs.kv_bytes_per_token == ours.kv_bytes_per_token
    assert theirs.engine.max_num_seqs == ours.engine.max_num_seqs
    assert theirs.max_num_batched_tokens == ours.max_num_batched_tokens
    assert theirs.max_model_len == ours.max_model_len
    assert theirs.engine.num_kv_blocks == ours.engine.num_kv_blocks
    assert theirs.memory_share == pytest.approx(ours.memory_share, abs=1e-3)
    assert theirs.engine.cuda_graphs.enabled == ours.engine.cuda_graphs.enabled
    assert theirs.host.overlapped == ours.host.overlapped
    assert type(theirs.batching) is type(ours.batching)
    assert isinstance(theirs.caching, FINDING) == isinstance(ours.caching, FINDING)
    assert theirs.caching.block_size == ours.caching.block_size
    assert type(theirs.scheduling) is type(ours.scheduling)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_layers_of_each_stage_are_a_variable_before_the_command(engine):
    uneven = ("pipeline_parallel_size=2", "pp_layer_partition=[40,24]", "engine.pp_max_micro_batch_size=16")
    ours, theirs = read_back(
        LAUNCHES[engine], (f"engine={engine}", "model=qwen3_32b", "hardware=h200_sxm", *uneven)
    )
    assert theirs.layout == ours.layout
    assert theirs.layout.pp_layer_partition == (40, 24)
    if engine == "sglang":
        assert theirs.engine.pp_max_micro_batch_size == 16


def test_the_limits_in_a_command_are_those_of_a_rank_of_the_simulated_engine():
    """vLLM's flags are of one of eight ranks, of which each has a scheduler of its own."""
    ours, theirs = read_back(vllm_launch, ("engine=vllm", *MOE))
    settings = CapacitySettings(hardware=(), tensor_parallel_sizes=(), quantisations=(None,))
    candidate = build_candidates(settings, Variants(SOURCE, ["engine=vllm", *MOE]))[0][0]
    command = vllm_launch(candidate).command
    for flag in ("--data-parallel-size 8", "--max-num-batched-tokens 8192", "--max-num-seqs 1024"):
        assert flag in " ".join(command.split())
    for scenario in (ours, theirs):
        core = scenario.core(80_000)
        assert core.ranks.size == 8
        assert core.ranks.max_num_seqs == 1024
        assert of_rank(scenario.batching, 8).max_num_batched_tokens == 8192


def test_sglangs_ranks_are_chosen_by_its_flag():
    _, theirs = read_back(sglang_launch, ("engine=sglang", *MOE, "engine.load_balance_method=total_requests"))
    assert theirs.data_parallel.load_balance_method == "total_requests"
    _, theirs = read_back(sglang_launch, ("engine=sglang", *MOE))
    assert theirs.data_parallel.load_balance_method == "round_robin"


def test_decode_context_parallelism_shares_the_devices_of_vllms_tensor_parallelism():
    sizes = ("tensor_parallel_size=2", "context_parallel_size=4")
    ours, theirs = read_back(vllm_launch, ("engine=vllm", "model=llama3_1_8b", *sizes))
    assert (theirs.tensor_parallel_size, theirs.context_parallel_size) == (2, 4)
    assert theirs.layout.num_devices == ours.layout.num_devices == 8


def test_formats_and_drafts_of_a_command_are_read_back():
    given = ("engine=vllm", "model=llama3_1_8b", "model.weights=fp8", "speculation=ngram")
    settings = CapacitySettings(hardware=(), tensor_parallel_sizes=(), quantisations=("fp8",))
    candidate = build_candidates(settings, Variants(SOURCE, given))[0][0]
    found = translated(command_in(vllm_launch(candidate).command), [CONFIG_DIR])
    theirs = build_scenario(composed(SOURCE, found.overrides))
    assert theirs.model.weights == "fp8"
    assert theirs.speculation.num_speculative_tokens == candidate.scenario.speculation.num_speculative_tokens
    assert theirs.speculation.min_ngram == candidate.scenario.speculation.min_ngram
