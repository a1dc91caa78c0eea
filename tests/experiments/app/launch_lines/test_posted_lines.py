"""Launch lines as they were published: what is used, what has no effect on time, and what is refused.

The flags are those of the source that is named beside each line.
"""

import shlex

import pytest

from experiments.app.launch_lines.commands import command_in
from experiments.app.launch_lines.deployment import deployed
from experiments.app.launch_lines.engines import translated
from experiments.app.launch_lines.line import with_launch_line
from experiments.app.launch_lines.shell import holds, number_of
from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from experiments.app.settings.hydra_errors import composed
from sim.settings.errors import ConfigError
from sim.settings.scenario import build_scenario

GPT_OSS_H100 = """
cat > config.yaml << EOF
no-enable-prefix-caching: true
max-cudagraph-capture-size: 2048
max-num-batched-tokens: 8192
max-model-len: $MAX_MODEL_LEN
EOF
MODEL=openai/gpt-oss-120b TP=4 CONC=64
MAX_MODEL_LEN=10240
if [ "${EVAL_ONLY}" = "true" ]; then
    MAX_MODEL_LEN="$EVAL_MAX_MODEL_LEN"
fi
export VLLM_MXFP4_USE_MARLIN=1
vllm serve $MODEL --host=0.0.0.0 --port=$PORT --config config.yaml \\
  --gpu-memory-utilization=0.9 --tensor-parallel-size=$TP --max-num-seqs=$CONC > server.log 2>&1 &
"""
GPT_OSS_TRT = """
export TRTLLM_ENABLE_PDL=1
cat > gptoss.yml << EOF
cuda_graph_config:
    enable_padding: true
    max_batch_size: 64
enable_attention_dp: false
kv_cache_config:
    dtype: fp8
    enable_block_reuse: false
    free_gpu_memory_fraction: 0.85
print_iter_log: true
stream_interval: 20
num_postprocess_workers: 4
moe_config:
    backend: TRTLLM
EOF
mpirun -n 1 --oversubscribe --allow-run-as-root trtllm-serve openai/gpt-oss-120b --port=8888 \\
    --trust_remote_code --backend=pytorch --max_batch_size 512 --max_seq_len=10240 --max_num_tokens=20000 \\
    --tp_size=4 --ep_size=1 --extra_llm_api_options=gptoss.yml
"""
BRANCHES = """
TP=8
EP=8
if [ "$EP" -gt 1 ]; then
  PARALLEL=(--tensor-parallel-size 1 --data-parallel-size "$TP" --enable-expert-parallel)
else
  PARALLEL=(--tensor-parallel-size "$TP")
fi
VLLM_CMD=(
  vllm serve deepseek-ai/DeepSeek-R1 --host 0.0.0.0
  "${PARALLEL[@]}"
  --max-cudagraph-capture-size $((TP * 64))
)
"${VLLM_CMD[@]}" > log 2>&1 &
"""
COMPOSE = """
services:
  vllm:
    image: vllm/vllm-openai:latest
    runtime: nvidia
    ports: ["8000:8000"]
    ipc: host
    environment:
    - HUGGING_FACE_HUB_TOKEN=${HF_TOKEN}
    command: >
      --model Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4
      --gpu-memory-utilization 0.78
      --max-model-len 8192
      --max-num-seqs 256
      --enforce-eager
      --dtype half
      --api-key vllm-secret-key
"""
KUBERNETES = """
apiVersion: apps/v1
kind: Deployment
metadata: {name: mistral-7b}
spec:
  replicas: 1
  template:
    spec:
      containers:
      - name: mistral-7b
        image: vllm/vllm-openai:latest
        command: ["/bin/sh", "-c"]
        args: ["vllm serve mistralai/Mistral-7B-Instruct-v0.3 --trust-remote-code --enable-chunked-prefill \
          --max_num_batched_tokens 1024"]
        env:
        - name: HF_TOKEN
          valueFrom: {secretKeyRef: {name: hf-token-secret, key: token}}
"""
TWO_NODES = """
# Node 0
export NCCL_DEBUG=INFO
vllm serve Qwen/Qwen3-30B-A3B-Instruct-2507 --tensor-parallel-size 1 --data-parallel-size 8 \\
  --data-parallel-size-local 4 --data-parallel-address 10.0.12.1 --data-parallel-rpc-port 13345 \\
  --enable-expert-parallel --max-num-seqs 4 --enforce-eager

# Node 1
vllm serve Qwen/Qwen3-30B-A3B-Instruct-2507 --tensor-parallel-size 1 --headless --data-parallel-size 8 \\
  --data-parallel-size-local 4 --data-parallel-start-rank 4 --data-parallel-address 10.0.12.1
"""
RUNS = {
    "vLLM recipes, GPT-OSS": (
        "vllm serve openai/gpt-oss-120b --tensor_parallel_size 8 --max-model-len 131072 "
        "--max-num-batched-tokens 10240 --max-num-seqs 128 --gpu-memory-utilization 0.85 "
        "--no-enable-prefix-caching",
        {"engine.max_num_batched_tokens": "10240", "caching": "paged"},
    ),
    "vLLM recipes, Qwen3": (
        "vllm serve Qwen/Qwen3-235B-A22B-FP8 --trust-remote-code -tp 4 --disable-log-requests "
        "--swap-space 16 "
        "--distributed-executor-backend mp --max-num-batched-tokens 32768 --max-model-len 32768 "
        "--no-enable-prefix-caching --gpu-memory-utilization 0.8",
        {"tensor_parallel_size": "4", "engine.max_model_len": "32768"},
    ),
    "vLLM blog, MoRI-IO": (
        "vllm serve Qwen/Qwen3-235B-A22B-FP8 -tp 4 --enable-expert-parallel --max-model-len 16384 "
        "--max-num-batched-tokens 8192 --distributed-executor-backend mp --no-enable-prefix-caching "
        "--port 8100",
        {"tensor_parallel_size": "4", "expert_parallel_size": "4"},
    ),
    "vLLM recipes, Kimi-K2.5": (
        "vllm serve nvidia/Kimi-K2.5-NVFP4 --tensor-parallel-size 4 --mm-encoder-tp-mode data "
        "--compilation_config.pass_config.fuse_allreduce_rms true --tool-call-parser kimi_k2 "
        "--reasoning-parser kimi_k2 --enable-auto-tool-choice --trust-remote-code",
        {"tensor_parallel_size": "4"},
    ),
    "vLLM blog, ROCm attention": (
        "vllm serve deepseek-ai/DeepSeek-R1-0528 --tensor-parallel-size 8 --max-num-batched-tokens 16384 "
        "--trust-remote-code --no-enable-prefix-caching --disable-log-requests --gpu_memory_utilization 0.9 "
        '--attention-backend ROCM_AITER_MLA --compilation-config \'{"cudagraph_mode": '
        '"FULL_AND_PIECEWISE"}\' '
        "--async-scheduling --port 1234",
        {"engine.host.overlapped": "true"},
    ),
    "GKE recipes, Qwen3-32B": (
        "python3 -m vllm.entrypoints.openai.api_server --model Qwen/Qwen3-32B-FP8 --kv-cache-dtype fp8 "
        "--max-num-batched-tokens 4096 --max-num-seqs 256 --max-model-len 2300 --gpu-memory-utilization 0.95 "
        "--tensor-parallel-size 1",
        {"model.kv_cache_dtype": "fp8", "model.weights": "fp8_block"},
    ),
    "InferenceX, gpt-oss on H100": (
        GPT_OSS_H100,
        {"engine.max_model_len": "10240", "engine.kernels.moe_backend": "marlin",
         "engine.max_num_seqs": "64"},
    ),
    "InferenceX, gpt-oss with TensorRT-LLM": (
        GPT_OSS_TRT,
        {"engine.cuda_graphs.max_capture_size": "64", "caching": "paged", "tensor_parallel_size": "4"},
    ),
    "InferenceX, branches of layouts": (
        BRANCHES,
        {"attention_data_parallel_size": "8", "expert_parallel_size": "8", "tensor_parallel_size": "1",
         "engine.cuda_graphs.max_capture_size": "512"},
    ),
    "SGLang cookbook, DeepSeek-V3": (
        "python3 -m sglang.launch_server --model-path deepseek-ai/DeepSeek-V3 --tp 8 --dp 8 "
        "--enable-dp-attention "
        "--speculative-algorithm EAGLE --speculative-num-steps 3 --speculative-eagle-topk 1 "
        "--speculative-num-draft-tokens 4 --host 0.0.0.0 --port 8000",
        {"attention_data_parallel_size": "8", "speculation": "mtp",
         "speculation.num_speculative_tokens": "3"},
    ),
    "SGLang issue 5491, a tree of EAGLE": (
        "python -m sglang.launch_server --model /mnt/data/open_source/QwQ-32B/Qwen__QwQ-32B/ "
        "--speculative-algorithm EAGLE --speculative-draft-model-path /mnt/train/eagle/ckpt/ "
        "--speculative-num-steps 3 --speculative-eagle-topk 2 --speculative-num-draft-tokens 8 "
        "--cuda-graph-max-bs 8 --tensor-parallel-size 2 --mem-fraction-static 0.8",
        {"model": "qwq_32b", "speculation": "eagle", "speculation/tree": "beam",
         "speculation.tree.width": "2", "speculation.tree.depth": "3",
         "speculation.num_speculative_tokens": "7"},
    ),
    "SGLang issue 3362, names of older versions": (
        "CUDA_VISIBLE_DEVICES=0,1,3,7 python -m sglang.launch_server "
        "--model /ckpt/llama/Meta-Llama-3.1-70B-Instruct "
        "--tensor-parallel-size 4 --speculative-algo EAGLE "
        "--speculative-draft /ckpt/sglang-EAGLE-LLaMA3-Instruct-70B "
        "--speculative-num-steps 5 --speculative-eagle-topk 8 --speculative-num-draft-tokens 64 "
        "--mem-fraction 0.7 --disable-cuda-graph",
        {"model": "llama3_1_70b", "speculation.tree.width": "8", "speculation.num_speculative_tokens": "63",
         "engine.cuda_graphs.enabled": "false", "engine.gpu_memory_utilization": "0.7"},
    ),
    "vLLM pull request 16677, a value of a switch": (
        "vllm serve /data/models/QwQ-32B --tensor_parallel-size 2 --swap-space 0 --block-size 128 "
        "--enable-chunked-prefill false",
        {"model": "qwq_32b", "batching.enable_chunked_prefill": "false", "caching.block_size": "128"},
    ),
    "vLLM issue 9400, n-grams before --speculative-config": (
        "python -m vllm.entrypoints.openai.api_server --model /ckpt/llama/Meta-Llama-3.1-8B-Instruct -tp 1 "
        "--speculative_model [ngram] --num_speculative_tokens 5 --ngram_prompt_lookup_max 4 "
        "--use-v2-block-manager",
        {"model": "llama3_1_8b", "speculation": "ngram", "speculation.num_speculative_tokens": "5",
         "speculation.prompt_lookup_max": "4"},
    ),
    "vLLM issue 3872, a quantised model of 2024": (
        "python -m vllm.entrypoints.openai.api_server --model ./models/Qwen/Qwen1.5-32B-Chat-GPTQ-Int4 "
        "--quantization gptq --max-model-len 2048 --max-num-seq=2",
        {"model": "qwen1_5_32b", "model.weights": "int4_wo", "engine.max_num_seqs": "2"},
    ),
    "vLLM issue 16128, a folder of AutoRound": (
        "vllm serve OPEA/Mistral-Small-3.1-24B-Instruct-2503-int4-AutoRound-awq-sym --max-model-len 4096 "
        "--dtype float16 --max-num-seqs 2",
        {"model": "mistral_small_3_1_24b", "model.weights": "int4_wo"},
    ),
    "SGLang pull request 4390, groups of attention of several GPUs": (
        "python3 -m sglang.launch_server --model-path deepseek-ai/DeepSeek-Coder-V2-Lite-Instruct --tp 8 "
        "--enable-dp-attention --dp 2",
        {"model": "deepseek_v2_lite", "tensor_parallel_size": "4", "attention_data_parallel_size": "2"},
    ),
    "SGLang cookbook, GLM-5": (
        "sglang serve --model zai-org/GLM-5 --tp 8 --trust-remote-code --nsa-prefill-backend tilelang "
        "--nsa-decode-backend tilelang --chunked-prefill-size 131072 --mem-fraction-static 0.80 "
        "--watchdog-timeout 1200 --host 0.0.0.0 --port 30000",
        {"engine.max_num_batched_tokens": "131072", "engine.gpu_memory_utilization": "0.8"},
    ),
    "SGLang documentation, experts over DeepEP": (
        "python -m sglang.launch_server --model-path deepseek-ai/DeepSeek-V3 --tp 8 --dp 8 "
        "--enable-dp-attention "
        "--moe-a2a-backend deepep --deepep-mode auto --moe-runner-backend deep_gemm --enable-dp-lm-head",
        {"expert_parallel_size": "8", "attention_data_parallel_size": "8"},
    ),
    "InferenceX, DeepSeek-R1 on B200": (
        "python3 -m sglang.launch_server --model-path deepseek-ai/DeepSeek-R1 --tensor-parallel-size 8 "
        "--moe-runner-backend flashinfer_trtllm --scheduler-recv-interval 30",
        {"engine.kernels.moe_backend": "auto", "engine.scheduler_recv_interval": "30"},
    ),
    "GPUStack, Qwen3-32B on A100": (
        "trtllm-serve Qwen/Qwen3-32B --max_seq_len=40960 --enable_chunked_prefill",
        {"engine.max_model_len": "40960", "batching.enable_chunked_context": "true"},
    ),
    "vLLM issue, data parallelism over two nodes": (
        TWO_NODES,
        {"attention_data_parallel_size": "8", "expert_parallel_size": "8", "engine.max_num_seqs": "32"},
    ),
    "SGLang documentation, two nodes": (
        "python3 -m sglang.launch_server --model-path meta-llama/Meta-Llama-3.1-405B-Instruct --tp 16 "
        "--nnodes 2 --node-rank 0\n"
        "python3 -m sglang.launch_server --model-path meta-llama/Meta-Llama-3.1-405B-Instruct --tp 16 "
        "--nnodes 2 --node-rank 1",
        {"tensor_parallel_size": "16"},
    ),
    "SGLang documentation, Meta's fp8": (
        "python -m sglang.launch_server --model-path meta-llama/Meta-Llama-3.1-405B-Instruct-FP8 --tp 8 "
        "--quantization fbgemm_fp8",
        {"model": "llama3_1_405b", "tensor_parallel_size": "8"},
    ),
    "a draft of fp8": (
        "vllm serve Qwen/Qwen3-32B --speculative-config "
        '\'{"model": "Qwen/Qwen3-0.6B-FP8", "num_speculative_tokens": 4}\'',
        {"model@speculation.draft.model": "qwen3_0_6b", "speculation.draft.model.weights": "fp8_block"},
    ),
    "a Compose file": (COMPOSE, {"engine.cuda_graphs.enabled": "false", "model.dtype": "fp16"}),
    "vLLM documentation, Kubernetes": (KUBERNETES, {"engine.max_num_batched_tokens": "1024"}),
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_a_published_line_means_these_settings_and_they_build(name, tmp_path):
    text, expected = RUNS[name]
    path = tmp_path / ("line.yaml" if ":\n" in text and "<<" not in text else "line.sh")
    path.write_text(text)
    found = translated(command_in(str(path)), [CONFIG_DIR], MODELS.get(name, []))
    assert expected.items() <= found.settings.items()
    assert not found.refused
    assert not found.ignored
    build_scenario(
        composed(
            ConfigSource(config_name="simulate", dirs=[CONFIG_DIR]),
            [f"{key}={value}" for key, value in found.settings.items()] + MODELS.get(name, []),
        )
    )


MODELS = {"a Compose file": ["model=qwen2_5_7b"], "vLLM documentation, Kubernetes": ["model=mistral_7b"]}
"""Models that are given beside a line, as there is no preset of theirs."""

REFUSED = [
    ("vllm serve {} --enable-dbo --attention-backend TRITON_ATTN --port 8000",
     ["--enable-dbo", "--attention-backend"]),
    ("VLLM_BATCH_INVARIANT=1 vllm serve {} -tp 2 --disable-custom-all-reduce",
     ["--disable-custom-all-reduce", "VLLM_BATCH_INVARIANT"]),
    ("NCCL_P2P_DISABLE=1 vllm serve {} -tp 2", ["NCCL_P2P_DISABLE"]),
    ("vllm serve {} -cc.mode 0", ["--compilation-config"]),
    ("python -m sglang.launch_server --model-path {} --enable-torch-compile --enable-deterministic-inference",
     ["--enable-torch-compile", "--enable-deterministic-inference"]),
    ("python -m sglang.launch_server --model-path {} --attention-backend triton", ["--attention-backend"]),
    ("vllm serve {} --model-impl transformers", ["--model-impl"]),
]  # fmt: skip


@pytest.mark.parametrize(("line", "names"), REFUSED)
def test_what_changes_times_is_refused_at_once_and_may_be_left_out(line, names, capsys):
    line = line.format("meta-llama/Llama-3.1-8B-Instruct")
    with pytest.raises(ConfigError) as error:
        translated(command_in(line), [CONFIG_DIR])
    message = str(error.value)
    assert all(name in message for name in names)
    assert message.endswith(f"--from-ignore {','.join(names)}")
    rest = with_launch_line(["--from", line, "--from-ignore", ",".join(names)], "simulate")
    assert "model=llama3_1_8b" in rest
    assert f"left out, as --from-ignore says: {names[0]}" in capsys.readouterr().err


def test_the_same_flags_have_no_effect_where_they_ask_for_what_is_priced():
    line = (
        "NCCL_P2P_DISABLE=0 vllm serve meta-llama/Llama-3.1-8B-Instruct --disable-custom-all-reduce "
        "-cc.mode 3 "
        "--attention-backend FLASHINFER --disable-cascade-attn --stream-interval 20 --model-impl auto"
    )
    found = translated(command_in(line), [CONFIG_DIR])
    assert set(found.without_effect) == {
        "NCCL_P2P_DISABLE=0",
        "--disable-custom-all-reduce",
        "--compilation-config mode 3",
        "--compilation-config",
        "-cc.mode",
        "--attention-backend FLASHINFER",
        "--disable-cascade-attn",
        "--stream-interval",
        "--model-impl auto",
    } - {"--compilation-config", "-cc.mode"}
    with pytest.raises(ConfigError, match="--no-disable-cascade-attn: attention of a shared prefix"):
        translated(command_in(line + " --no-disable-cascade-attn"), [CONFIG_DIR])


def test_keys_of_the_yaml_file_and_unknown_flags_may_be_left_out(tmp_path):
    (tmp_path / "o.yml").write_text("torch_compile_config: {enable_fullgraph: true}\nmax_batch_size: 8\n")
    line = f"trtllm-serve openai/gpt-oss-20b --config {tmp_path}/o.yml --brand_new 3"
    with pytest.raises(ConfigError, match="no such flag"):
        translated(command_in(line), [CONFIG_DIR])
    with pytest.raises(ConfigError, match=r"torch_compile_config .* --from-ignore torch_compile_config"):
        translated(command_in(line), [CONFIG_DIR], (), ["--brand_new"])
    found = translated(command_in(line), [CONFIG_DIR], (), ["--brand_new", "torch_compile_config"])
    assert found.settings["engine.max_num_seqs"] == "8"
    with pytest.raises(ConfigError, match="--from-ignore --nosuch: the command has no such flag"):
        deployed([command_in("vllm serve Qwen/Qwen3-8B")], [CONFIG_DIR], (), ["--nosuch"])
    with pytest.raises(ConfigError, match="--from-ignore: is for --from"):
        with_launch_line(["--from-ignore", "--enable-dbo"], "simulate")


def test_a_branch_of_which_the_text_does_not_tell_leaves_its_variables_without_a_value():
    script = "ARGS='-tp 2'\nif [ $GPUS -gt 2 ]; then\n ARGS='-tp 4'\nfi\nvllm serve Qwen/Qwen3-8B $ARGS"
    with pytest.raises(
        ConfigError, match=r"\$ARGS: the variable has no value in the text, or one of several"
    ):
        translated(command_in(script), [CONFIG_DIR])
    for gpus, size in (("2", "2"), ("4", "4")):
        found = translated(command_in(f"GPUS={gpus}\n{script}"), [CONFIG_DIR])
        assert found.settings["tensor_parallel_size"] == size
    first, second = "vllm serve Qwen/Qwen3-8B", "vllm serve Qwen/Qwen3-32B"
    chosen = f"A=b\nif [ $A = c ]; then {first}\nelif [[ $A == b ]]; then {second}\nfi"
    assert command_in(chosen).tokens == ("Qwen/Qwen3-32B",)


def test_a_test_of_two_parts_chooses_the_branch():
    script = "if [[ $ISL -eq 1024 && $OSL -eq 1024 ]]; then\n{}\nelse\n{}\nfi"
    servers = script.format("vllm serve Qwen/Qwen3-8B", "vllm serve Qwen/Qwen3-32B")
    assert command_in(f"ISL=1024\nOSL=1024\n{servers}").tokens == ("Qwen/Qwen3-8B",)
    assert command_in(f"ISL=1024\nOSL=8192\n{servers}").tokens == ("Qwen/Qwen3-32B",)


def test_a_placeholder_of_two_words_is_no_redirection():
    line = "vllm serve Qwen/Qwen3-8B --tool-call-parser <your parser> --enforce-eager"
    assert command_in(line).tokens[-1] == "--enforce-eager"


def test_sums_with_blanks_and_an_output_without_one_before_it():
    script = (
        "CONC=64\nMOST=$((2 * CONC))\nvllm serve Qwen/Qwen3-8B --max-num-seqs $MOST --enforce-eager> log 2>&1"
    )
    assert command_in(script).tokens == ("Qwen/Qwen3-8B", "--max-num-seqs", "128", "--enforce-eager")


def test_a_file_with_a_value_that_only_a_shell_computes_names_it(tmp_path):
    script = "cat > a.yml << EOF\nbatch_sizes: [${LIST%, }]\nEOF\ntrtllm-serve Qwen/Qwen3-8B --config a.yml"
    with pytest.raises(ConfigError, match=r"\$\{LIST%, \} has no value in the text, which is read and not"):
        translated(command_in(script), [CONFIG_DIR])


@pytest.mark.parametrize(
    ("test", "expected"),
    [("[ 4 -gt 2 ]", True), ("[ ! 4 -gt 2 ]", False), ("[[ a != b ]]", True), ("test -n ''", False),
     ("[ -z '' ]", True), ("[ $X = a ]", None), ("[ -f file ]", None), ("grep x file", None),
     ("[ a -gt 2 ]", None), ("[[ 1 -eq 1 && 2 -eq 3 ]]", False), ("[[ 1 -eq 1 || $X = 1 ]]", True),
     ("[[ 1 -eq 1 && $X = 1 ]]", None), ("[[ $X = 1 && 1 -eq 2 ]]", False),
     ("[ 1 -eq 2 ] || [ 1 -eq 1 ]", True), ("[ 1 -eq 2 ] && [ $X = 1 ]", False),
     ("[ 1 -eq 2 ] || [ 1 -eq 1 ] && [ 1 -eq 2 ]", None), ("[ ! ! 1 -eq 1 ]", True),
     ("[[ " + "1 -eq 1 && " * 2000 + "1 -eq 1 ]]", True)],
)  # fmt: skip
def test_simple_tests_of_a_shell_hold_as_in_a_shell(test, expected):
    assert holds(shlex.split(test)) is expected


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("2 * 3 + 1", "7"),
        ("2 * (3 + 1)", "8"),
        ("7 / 2", "3"),
        ("X * 2", None),
        ("1 / 0", None),
        ("a ? 1 : 2", None),
        ("64 > 16 ? 64 : 16", "64"),
        ("(64 * 3 / 2 > 8) ? 64 * 3 / 2 : 8", "96"),
        ("1 ? 0 ? 3 : 4 : 5", "4"),
        ("3 > 2 && 1 > 2", "0"),
        ("0 || 2 == 2", "1"),
        ("1 < 2 ? 5 : 1 / 0", "5"),
        ("2 - 3", None),
        ("2 ** 9", None),
        ("(1", None),
        ("1 +", None),
        ("9" * 201, None),
        ("-7 / 2 + 10", "7"),
        ("-7 % 4 + 10", "7"),
    ],
)
def test_sums_of_a_shell_are_reckoned(expression, expected):
    assert number_of(expression) == expected
