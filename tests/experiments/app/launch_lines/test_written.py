"""The launch commands of vLLM and SGLang for a candidate."""

import shlex

from experiments.app.launch_lines.written import sglang_launch, vllm_launch
from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from experiments.app.settings.variants import Variants
from experiments.capacity.candidates import build_candidates
from experiments.capacity.settings import CapacitySettings


def candidate_with(*overrides):
    variants = Variants(
        ConfigSource(config_name="simulate", dirs=[CONFIG_DIR]), ["model=llama3_1_8b", *overrides]
    )
    return build_candidates(CapacitySettings(), variants)[0][0]


def test_launch_commands_have_a_flag_for_what_is_set_and_a_note_for_what_has_none():
    plain = candidate_with(
        "tensor_parallel_size=2",
        "pipeline_parallel_size=2",
        "model.weights=fp8",
        "model.kv_cache_dtype=fp8",
        "engine.max_num_seqs=77",
        "engine.max_num_batched_tokens=3000",
        "engine.max_model_len=9000",
        "caching=paged",
        "batching.enable_chunked_prefill=false",
    )
    vllm, sglang = vllm_launch(plain), sglang_launch(plain)
    words = shlex.split(vllm.command.replace("\\\n", " "))
    assert words[:3] == ["vllm", "serve", "meta-llama/Llama-3.1-8B"]
    given_flags = dict(zip(words, [*words[1:], ""], strict=True))
    assert {name: given_flags.get(name) for name in (
        "--tensor-parallel-size", "--pipeline-parallel-size", "--max-num-seqs", "--max-num-batched-tokens",
        "--max-model-len", "--quantization", "--kv-cache-dtype", "--gpu-memory-utilization", "--block-size",
    )} == {
        "--tensor-parallel-size": "2", "--pipeline-parallel-size": "2", "--max-num-seqs": "77",
        "--max-num-batched-tokens": "3000", "--max-model-len": "9000", "--quantization": "fp8",
        "--kv-cache-dtype": "fp8", "--gpu-memory-utilization": "0.92", "--block-size": "16",
    }  # fmt: skip
    assert "--dtype" not in vllm.command
    half = candidate_with("model.dtype=fp16")
    assert "--dtype float16" in vllm_launch(half).command
    assert "--dtype float16" in sglang_launch(half).command
    assert {"--no-enable-prefix-caching", "--no-enable-chunked-prefill", "--async-scheduling"} < {*words}
    assert vllm.notes == []
    words = shlex.split(sglang.command.replace("\\\n", " "))
    assert words[:5] == ["python", "-m", "sglang.launch_server", "--model-path", "meta-llama/Llama-3.1-8B"]
    given_flags = dict(zip(words, [*words[1:], ""], strict=True))
    assert given_flags["--max-running-requests"] == "77"
    assert given_flags["--max-prefill-tokens"] == "3000"
    assert given_flags["--kv-cache-dtype"] == "fp8_e4m3"
    assert "--disable-radix-cache" in words
    other = candidate_with("engine=sglang", "scheduling=shortest_job_first", "prediction=oracle",
                           "model.weights=int4_wo")  # fmt: skip
    notes = "\n".join(vllm_launch(other).notes)
    assert "batching=sglang: vLLM has no flag" in notes
    assert "scheduling=shortest_job_first: vLLM has no flag" in notes
    assert "caching=radix" in notes
    assert "model.weights=int4_wo: replace the model's name by that of a checkpoint" in notes
    assert "prediction=" in notes
    pruned = vllm_launch(candidate_with("model/transform=prune_depth"))
    assert "meta-llama" not in pruned.command
    assert any("no published weights" in note for note in pruned.notes)
