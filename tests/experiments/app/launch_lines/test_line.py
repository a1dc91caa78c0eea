"""--from: what a command line becomes, and how it stands beside settings."""

import pytest

from experiments.app.cli import main
from experiments.app.launch_lines.commands import command_in
from experiments.app.launch_lines.engines import translated
from experiments.app.launch_lines.line import with_launch_line
from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from experiments.app.settings.hydra_errors import composed
from sim.settings.errors import ConfigError
from sim.settings.scenario import build_scenario

LLAMA = "vllm serve meta-llama/Llama-3.1-8B-Instruct"
QWEN = "vllm serve Qwen/Qwen3-8B"
YARN = '{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}'
MODEL = "--model meta-llama/Llama-3.1-8B-Instruct"
IMAGE = "docker run --gpus all vllm/vllm-openai"
SGLANG = "python -m sglang.launch_server --model-path Qwen/Qwen3-32B"


def settings(command, *beside):
    return translated(command_in(command), [CONFIG_DIR], beside).settings


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (LLAMA, {"engine": "vllm", "model": "llama3_1_8b", "tensor_parallel_size": "1"}),
        (f"{LLAMA} -tp 4 -pp=2", {"tensor_parallel_size": "4", "pipeline_parallel_size": "2"}),
        (f"VLLM_PP_LAYER_PARTITION=12,20 {LLAMA} -pp 2", {"pp_layer_partition": "[12,20]"}),
        (f"SGLANG_PP_LAYER_PARTITION='40, 24' {SGLANG} --pp-size 2 --pp-max-micro-batch-size 16",
         {"pp_layer_partition": "[40,24]", "engine.pp_max_micro_batch_size": "16"}),
        (f"{LLAMA} -O.cudagraph_mode=NONE", {"engine.cuda_graphs.enabled": "false"}),
        (f"{LLAMA} -O '{{\"cudagraph_mode\": \"NONE\"}}'", {"engine.cuda_graphs.enabled": "false"}),
        (f"{IMAGE}:v0.15.1 {MODEL}", {"engine": "vllm", "engine.version": "0.15.1"}),
        (f"{IMAGE}:v0.10.2 {MODEL}", {"engine": "vllm_sync", "engine.version": "0.10.2"}),
        (f"{IMAGE}:v0.10.2 {MODEL} --async-scheduling", {"engine": "vllm_0_10_async"}),
        (f"{IMAGE}:v0.8.5.post1 {MODEL}", {"engine": "vllm_sync", "engine.version": "0.9.0"}),
        (f"{IMAGE}:v0.6.3 {MODEL}", {"engine": "vllm_v0"}),
        (f"{IMAGE}:v0.6.3 {MODEL} --enable-chunked-prefill", {"engine": "vllm_v0", "batching": "chunked"}),
        (f"{IMAGE}:latest {MODEL}", {"engine": "vllm"}),
        (f"docker run lmcache/vllm-openai:v0.3.1 {MODEL}", {"engine": "vllm"}),  # a version of LMCache
        (f"docker run nvcr.io/nvidia/vllm:25.09-py3 {LLAMA}", {"engine": "vllm"}),
        (f"docker run registry:5000/vllm/vllm-openai:v0.9.2@sha256:ab {MODEL}", {"engine": "vllm_sync"}),
        (f"pip install vllm==0.9.2\n{LLAMA}", {"engine": "vllm_sync", "engine.version": "0.9.2"}),
        (f"pip install vllm==0.9.2 # not vllm==0.8.1\n{LLAMA}", {"engine": "vllm"}),  # which one is unsure
        ("docker run nvcr.io/nvidia/tensorrt-llm/release:1.0.0 trtllm-serve Qwen/Qwen3-8B",
         {"engine": "tensorrt_llm_1_0"}),
        (f"docker run lmsysorg/sglang:v0.4.6.post1-cu124 {SGLANG}", {"engine": "sglang"}),
        (f"{LLAMA} -dp 3", {"replicas": "3", "routing": "least_outstanding"}),
        (f"{LLAMA} --kv-cache-dtype fp8_e4m3", {"model.kv_cache_dtype": "fp8"}),
        (f"{LLAMA} --quantization fp8 --dtype half", {"model.weights": "fp8", "model.dtype": "fp16"}),
        (f"{LLAMA} --max-model-len 32K", {"engine.max_model_len": "32768"}),
        (f"{LLAMA} --api-server-count 4", {"engine.frontend.servers": "4"}),
        (f"{LLAMA} --no-enable-prefix-caching --block-size 32",
         {"caching": "paged", "caching.block_size": "32"}),
        (f"{LLAMA} --no-enable-chunked-prefill", {"batching.enable_chunked_prefill": "false"}),
        (f"{LLAMA} --scheduling-policy priority", {"scheduling": "priority"}),
        (f"{LLAMA} --no-async-scheduling --enforce-eager",
         {"engine.host.overlapped": "false", "engine.cuda_graphs.enabled": "false"}),
        (f"{LLAMA} -O0", {"engine.cuda_graphs.enabled": "false"}),
        (f"{LLAMA} -O1", {"engine.cuda_graphs.mode": "piecewise"}),
        (f"{LLAMA} -cc.cudagraph_mode=PIECEWISE", {"engine.cuda_graphs.mode": "piecewise"}),
        (f"{LLAMA} --kv-cache-memory-bytes 8G", {"engine.kv_cache_memory_bytes": "8589934592"}),
        (f"{QWEN} --max-model-len 131072 --hf-overrides '{{\"rope_scaling\": {YARN}}}'",
         {"model.config.max_position_embeddings": "131072", "engine.max_model_len": "131072"}),
        (f"{QWEN} --hf-overrides '{{\"text_config\": {{\"rope_parameters\": {YARN}}}}}'",
         {"model.config.max_position_embeddings": "131072"}),
        (f"{QWEN} --hf-overrides '{{\"rope_parameters\": {{\"full_attention\": {YARN}}}}}'",
         {"model.config.max_position_embeddings": "131072"}),
        (f"{QWEN} -O0 -cc.cudagraph_mode=PIECEWISE", {"engine.cuda_graphs.mode": "piecewise"}),
        (f"{QWEN} --hf-overrides '{{\"num_hidden_layers\": 18}}'", {"model.config.num_hidden_layers": "18"}),
        ("vllm serve Qwen/Qwen3.5-27B --mamba-ssm-cache-dtype bfloat16",
         {"++model.config.mamba_ssm_dtype": "bfloat16"}),
        ("vllm serve nvidia/NVIDIA-Nemotron-Nano-9B-v2 --mamba-ssm-cache-dtype float32",
         {"++model.config.mamba_ssm_cache_dtype": "float32"}),
        ("SGLANG_MAMBA_SSM_DTYPE=bfloat16 sglang serve --model-path Qwen/Qwen3.5-27B",
         {"++model.config.mamba_ssm_dtype": "bfloat16"}),
        (f"VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 {QWEN} --max-model-len 65536",
         {"model.config.max_position_embeddings": "65536", "engine.max_model_len": "65536"}),
        (f"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1 {SGLANG} --context-length 65536",
         {"model.config.max_position_embeddings": "65536", "engine.max_model_len": "65536"}),
        (f"{LLAMA} --compilation-config '{{\"cudagraph_mode\": \"NONE\"}}'",
         {"engine.cuda_graphs.enabled": "false", "engine.compilation": "inductor"}),
        (f"{LLAMA} --num-gpu-blocks-override 999 --cpu-offload-gb 8",
         {"engine.num_kv_blocks": "999", "engine.offload.cpu_offload_gb": "8.0"}),
        (f"{LLAMA} --compilation-config '{{\"cudagraph_capture_sizes\": [1, 64]}}'",
         {"engine.cuda_graphs.max_capture_size": "64"}),
        (f"{LLAMA} --prefill-schedule-interval 4",
         {"batching": "paced_prefills", "batching.prefill_schedule_interval": "4"}),
        (f"{LLAMA} --speculative-config '{{\"method\": \"eagle3\", \"model\": \"a/b\","
         " \"num_speculative_tokens\": 5}'",
         {"speculation": "eagle3", "speculation.model": "a/b", "speculation.num_speculative_tokens": "5"}),
        ("vllm serve deepseek-ai/DeepSeek-R1 -tp 2 -dp 8 -ep --max-num-seqs 100",
         {"tensor_parallel_size": "2", "attention_data_parallel_size": "8", "expert_parallel_size": "16",
          "engine.max_num_seqs": "800"}),
        ("vllm serve Qwen/Qwen3-32B-AWQ --quantization awq_marlin", {"model.weights": "int4_wo"}),
        (f"{SGLANG} --tp 2 --mem-fraction-static 0.85 --chunked-prefill-size 4096",
         {"engine": "sglang", "tensor_parallel_size": "2", "engine.gpu_memory_utilization": "0.85",
          "engine.max_num_batched_tokens": "4096"}),
        ("sglang serve --model-path Qwen/Qwen3-235B-A22B --tp 8 --dp 4 --enable-dp-attention --ep 8",
         {"tensor_parallel_size": "2", "attention_data_parallel_size": "4", "expert_parallel_size": "8"}),
        (f"{SGLANG} --dp 2 --disable-radix-cache --schedule-policy lpm",
         {"replicas": "2", "caching": "paged"}),
        (f"{SGLANG} --tokenizer-worker-num 8", {"engine.frontend.servers": "8"}),
        (f"{SGLANG} --schedule-policy lpm", {"scheduling": "longest_prefix"}),
        (f"{SGLANG} --ep-size 2 --tp 2", {"tensor_parallel_size": "2"}),
        (f"{SGLANG} --chunked-prefill-size -1 --cuda-graph-max-bs 64",
         {"batching.enable_chunked_prefill": "false", "engine.cuda_graphs.max_capture_size": "64"}),
        (f"{LLAMA} --enable-lora --lora-modules a=/a b=/b",
         {"adapters": "fixed_slots", "adapters.max_loras": "1", "adapters.max_lora_rank": "16",
          "adapters.max_cpu_loras": "1"}),
        (f"{LLAMA} -tp 2 --enable-lora --max-loras 4 --max-lora-rank 64 --max-cpu-loras 9"
         " --fully-sharded-loras --lora-target-modules qkv_proj o_proj gate_up_proj down_proj",
         {"adapters.max_loras": "4", "adapters.max_lora_rank": "64", "adapters.max_cpu_loras": "9",
          "engine.kernels.lora.fully_sharded_loras": "true"}),
        (f"{LLAMA} --enable-lora --compilation-config '{{\"cudagraph_specialize_lora\": false}}'",
         {"engine.kernels.lora.cudagraph_specialize_lora": "false"}),
        (f"{SGLANG} --lora-paths a=/a --max-loras-per-batch 4 --lora-backend triton",
         {"adapters.max_loras": "4", "adapters.max_lora_rank": "null", "adapters.max_cpu_loras": "null",
          "engine.kernels.lora.backend": "sglang_triton"}),
        (f"{SGLANG} --enable-lora --max-lora-rank 32 --max-loaded-loras 20",
         {"adapters.max_loras": "8", "adapters.max_lora_rank": "32", "adapters.max_cpu_loras": "20"}),
        ("trtllm-serve openai/gpt-oss-120b --tp_size 4 --max_batch_size 256",
         {"engine": "tensorrt_llm", "batching": "inflight", "batching.enable_chunked_context": "false",
          "caching": "prefix", "engine.max_num_seqs": "256", "tensor_parallel_size": "4"}),
    ],
)  # fmt: skip
def test_a_command_means_these_settings_and_they_build(command, expected):
    found = settings(command)
    assert expected.items() <= found.items()
    build_scenario(
        composed(
            ConfigSource(config_name="simulate", dirs=[CONFIG_DIR]),
            [f"{key}={value}" for key, value in found.items()],
        )
    )


def test_the_yaml_file_of_trtllm_wins_over_its_flags(tmp_path):
    (tmp_path / "extra.yml").write_text(
        "enable_attention_dp: true\nkv_cache_config: {dtype: fp8, free_gpu_memory_fraction: 0.85}\n"
        "cuda_graph_config: {max_batch_size: 512}\nmax_batch_size: 16\nprint_iter_log: true\n"
        "moe_config: {backend: TRTLLM}\nscheduler_config: {capacity_scheduler_policy: MAX_UTILIZATION}\n"
    )
    file = f"--extra_llm_api_options {tmp_path}/extra.yml"
    command = f"trtllm-serve deepseek-ai/DeepSeek-R1 --tp_size 8 --max_batch_size 64 {file}"
    found = translated(command_in(command), [CONFIG_DIR])
    assert {
        "tensor_parallel_size": "1",
        "attention_data_parallel_size": "8",
        "engine.max_num_seqs": "128",
        "engine.gpu_memory_utilization": "0.85",
        "model.kv_cache_dtype": "fp8",
        "engine.cuda_graphs.max_capture_size": "512",
        "batching": "inflight_max_utilization",
    }.items() <= found.settings.items()
    assert list(found.without_effect) == ["print_iter_log", "moe_config.backend TRTLLM", "--max_batch_size"]
    (tmp_path / "extra.yml").write_text("max_batchsize: 3\n")
    with pytest.raises(ConfigError, match="max_batchsize: trtllm-serve has no such key; nearest: max_batch"):
        translated(command_in(command), [CONFIG_DIR])


@pytest.mark.parametrize(
    ("scheduler", "expected"),
    [
        ("{}", {"batching": "inflight"}),
        (
            "{capacity_scheduler_policy: STATIC_BATCH}",
            {"batching": "inflight", "batching.capacity_scheduler_policy": "static_batch"},
        ),
        (
            "{capacity_scheduler_policy: MAX_UTILIZATION, context_chunking_policy: EQUAL_PROGRESS}",
            {
                "batching": "inflight_max_utilization",
                "batching.context_chunking_policy": "equal_progress",
            },
        ),
    ],
)
def test_the_scheduler_of_trtllm_is_in_its_yaml_file(tmp_path, scheduler, expected):
    file = tmp_path / "scheduler.yml"
    file.write_text(f"scheduler_config: {scheduler}\n")
    found = settings(f"trtllm-serve Qwen/Qwen3-32B --config {file}")
    assert expected.items() <= found.items()
    source = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR])
    build_scenario(composed(source, [f"{key}={value}" for key, value in found.items()]))


def test_a_chunking_policy_that_is_not_modelled_is_refused(tmp_path):
    file = tmp_path / "scheduler.yml"
    file.write_text("scheduler_config: {context_chunking_policy: FORCE_CHUNK}\n")
    with pytest.raises(
        ConfigError, match="FORCE_CHUNK is not modelled; use FIRST_COME_FIRST_SERVED or EQUAL"
    ):
        settings(f"trtllm-serve Qwen/Qwen3-32B --config {file}")


def test_the_adapters_of_trtllm_are_in_its_yaml_file(tmp_path):
    file = tmp_path / "lora.yml"
    command = f"trtllm-serve Qwen/Qwen3-32B --config {file}"
    file.write_text("lora_config: {lora_dir: [/a], max_loras: 4, max_cpu_loras: 6}\n")
    found = settings(command)
    names = ("max_loras", "max_lora_rank", "max_cpu_loras")
    assert [found[f"adapters.{name}"] for name in names] == ["4", "64", "6"]
    for text, message in (
        ("lora_config: {lora_dir: [/a]}", "give max_loras in it"),
        ("lora_config: {max_loras: 4, lora_target_modules: [attn_q]}", "priced on all of q, k, v, o"),
        ("lora_config: {max_loras: many}", "max_loras many: must be a whole number >= 1"),
        ("lora_config: {max_lora: 4}", "lora_config: max_lora: trtllm-serve has no such key"),
        ("peft_cache_config: {host_cache_size: 1000}", "that of lora_config.max_loras slots"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=message):
            settings(command)


def test_adapter_flags_without_adapters_have_no_effect():
    found = translated(command_in(f"{LLAMA} --max-loras 4 --no-enable-lora"), [CONFIG_DIR])
    assert "adapters" not in found.settings
    assert set(found.without_effect) == {"--max-loras", "--no-enable-lora"}


def test_roofline_has_an_adapter_of_each_slot_in_every_batch():
    found = with_launch_line(["--from", f"{LLAMA} --enable-lora --max-loras 4"], "roofline")
    assert "lora={_target_: hwmodels.model.weights.Lora, rank: 16, num_active: 4}" in found
    assert not any(word.startswith("adapters") for word in found)


def test_a_config_file_of_vllm_gives_flags_and_the_command_wins(tmp_path):
    (tmp_path / "c.yaml").write_text("model: Qwen/Qwen3-8B\nmax-model-len: 16k\ntensor_parallel_size: 2\n")
    found = settings(f"vllm serve --config {tmp_path}/c.yaml -tp 4")
    assert found["model"] == "qwen3_8b"
    assert found["engine.max_model_len"] == "16000"
    assert found["tensor_parallel_size"] == "4"
    with pytest.raises(ConfigError, match=r"--config nosuch.yaml: no such file"):
        settings("vllm serve a/b --config nosuch.yaml")


def test_a_local_folder_is_a_checkpoint(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    found = settings(f"vllm serve {tmp_path}")
    assert (found["model"], found["model.path"]) == ("hf", str(tmp_path))


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            "vllm serve Qwen/Qwen9-8B",
            "model Qwen/Qwen9-8B: there is no preset of this name (nearest: qwen3_8b",
        ),
        ("vllm serve -tp 2", "names no model; add it to the command (--model MODEL)"),
        (f"{LLAMA} another", "another: is neither a flag nor the model"),
        (f"{LLAMA} --kv-cache-dtype nvfp4", "this format of KV is not modelled"),
        (f"{LLAMA} --quantization torchao", "the checkpoint states its format"),
        (f"{LLAMA} --quantization nosuch", "this method is not modelled; "),
        (f"{LLAMA} --runner pooling", "only generation is modelled"),
        (f"{LLAMA} --enable-lora --max-lora-rank 24", "--enable-lora (rank 24): the ranks of slots"),
        (f"{LLAMA} --enable-lora --max-loras 4 --max-cpu-loras 2", "--enable-lora (host 2): host memory"),
        ("vllm serve Qwen/Qwen3-30B-A3B --enable-lora", "adapters of routed experts are not modelled"),
        (f"{LLAMA} --enable-lora --lora-target-modules q_proj", "priced on all of q, k, v, o, gate, up and"),
        (f'{SGLANG} --lora-paths \'{{"lora_name": "a", "pinned": true}}\'', "adapters.pinned beside"),
        (f"{SGLANG} --enable-lora --lora-backend torch_native", "--lora-backend torch_native: the kernels"),
        (f"{SGLANG} --enable-lora --lora-eviction-policy fifo", "--lora-eviction-policy fifo"),
        (f"{LLAMA} --hf-overrides '{{\"num_experts\": 4}}'", "num_experts may change the costs"),
        (f'{LLAMA} --hf-overrides \'{{"num_hidden_layers": "x"}}\'', "num_hidden_layers may change"),
        (f"{LLAMA} --hf-overrides '[1]'", "must be a JSON object"),
        (
            f'{LLAMA} --hf-overrides \'{{"rope_scaling": {{"type": "linear", "factor": 1e305}}}}\'',
            "rope_scaling.factor=1e+305: must be a number > 0",
        ),
        (f"{LLAMA} -cc.cudagraph_mode=FOO", "cudagraph_mode must be one of NONE, PIECEWISE"),
        (
            "vllm serve ibm-granite/granite-4.0-h-small --mamba-ssm-cache-dtype float32",
            "state of linear layers is counted in",
        ),
        ("vllm serve Qwen/Qwen3.5-27B --mamba-ssm-cache-dtype int8", "state of linear layers is counted in"),
        (f"VLLM_USE_V1=0 {LLAMA}", "the v0 engine is another one"),
        (f"VLLM_PP_LAYER_PARTITION=a,20 {LLAMA} -pp 2", "VLLM_PP_LAYER_PARTITION=a,20: must be the layers"),
        (f"VLLM_PP_LAYER_PARTITION=16:16 {LLAMA} -pp 2", "VLLM_PP_LAYER_PARTITION"),
        (f"{LLAMA} --performance-mode throughput", "doubles the limits"),
        (f"{SGLANG} --speculative-algorithm DFLASH", "is not modelled; "),
        (f"{SGLANG} --enable-hierarchical-cache", "give --hicache-size GB"),
        ("trtllm-serve openai/gpt-oss-20b --backend tensorrt", "only the PyTorch backend is modelled"),
    ],
)
def test_what_would_give_a_wrong_result_is_refused_with_the_reason(command, message):
    with pytest.raises(ConfigError, match=r"^--from: ") as error:
        settings(command)
    assert message in str(error.value)


def test_settings_beside_a_command_win(capsys):
    line = f"{LLAMA} -tp 4 --max-num-seqs 64 --long-prefill-token-threshold 100 --port 1 --seed 7"
    words = ["--from", line, "tp=2", "hardware=l40s", "batching=prefill_first"]
    found = with_launch_line(words, "simulate")
    assert found == ["engine=vllm", "model=llama3_1_8b", "engine.max_num_seqs=64", *words[2:]]
    errors = capsys.readouterr().err
    assert "windtunnel: --from: engine=vllm model=llama3_1_8b engine.max_num_seqs=64\n" in errors
    assert "windtunnel: --from: without effect on time: --port, --seed" in errors
    assert with_launch_line([f"--from={line}", "model=qwen3_8b"], "simulate")[:1] == ["engine=vllm"]


def test_capacity_tries_the_sizes_of_the_command_alone():
    found = with_launch_line(["--from", f"{LLAMA} -tp 4 -pp 2"], "capacity")
    assert "capacity.tensor_parallel_sizes=[4]" in found
    assert "capacity.pipeline_parallel_sizes=[2]" in found


def test_flags_at_their_defaults_are_named_as_without_effect():
    found = translated(command_in(f"{LLAMA} --dtype auto -O3 --scheduling-policy fcfs"), [CONFIG_DIR])
    assert list(found.without_effect) == ["--dtype", "--optimization-level", "--scheduling-policy"]


def test_the_command_line_simulates_a_posted_command(capsys, tmp_path):
    small = ["workload=poisson", "workload.num_requests=5", f"hydra.run.dir={tmp_path}/run"]
    assert main(["simulate", "--from", f"{LLAMA} --max-num-seqs 32", *small]) == 0
    assert "engine.max_num_seqs=32" in capsys.readouterr().err
    assert main(["simulate", "--from"]) == 2
    assert "--from: needs a command line in quotation marks, or a file" in capsys.readouterr().err
    assert main(["compare", "--from", LLAMA]) == 2
    assert "--from: compare does not take it; it is for simulate" in capsys.readouterr().err


def test_the_image_of_a_container_names_the_version(tmp_path):
    file = tmp_path / "deployment.yaml"
    file.write_text(
        'apiVersion: apps/v1\nspec:\n  containers:\n  - image: "vllm/vllm-openai:v0.11.0"\n'
        '    command: ["vllm", "serve", "Qwen/Qwen3-8B"]\n'
    )
    found = settings(str(file))
    assert (found["engine"], found["engine.version"]) == ("vllm_sync", "0.11.0")


def test_the_share_of_memory_has_no_effect_beside_the_memory_of_kv():
    line = f"{LLAMA} --kv-cache-memory-bytes 4G --gpu-memory-utilization 0.5"
    found = translated(command_in(line), [CONFIG_DIR], ())
    assert "engine.gpu_memory_utilization" not in found.settings
    assert found.without_effect["--gpu-memory-utilization 0.5"].startswith("--kv-cache-memory-bytes says")
