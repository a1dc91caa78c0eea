"""Deployments of several servers: prefill and decode as pools, Dynamo's graphs, values of Helm charts."""

import json

import pytest

from experiments.app.cli import main
from experiments.app.launch_lines.commands import commands_in
from experiments.app.launch_lines.deployment import deployed
from experiments.app.launch_lines.line import with_launch_line
from experiments.app.settings.config_groups import CONFIG_DIR
from sim import simulate
from sim.settings.errors import ConfigError
from tests.experiments.validate.foreign_files import bench

GRAPH = """
apiVersion: nvidia.com/v1alpha1
kind: DynamoGraphDeployment
spec:
  services:
    Frontend:
      componentType: frontend
      replicas: 1
      extraPodSpec:
        mainContainer: {command: [python3, -m, dynamo.frontend], args: [--router-mode, kv]}
    VllmPrefillWorker:
      subComponentType: prefill
      replicas: 2
      extraPodSpec:
        mainContainer:
          env: [{name: MODEL, value: RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic}]
          command: [/bin/sh, -c]
          args: ["python3 -m dynamo.vllm --model $MODEL --tensor-parallel-size 2 --is-prefill-worker"]
    VllmDecodeWorker:
      replicas: 1
      extraPodSpec:
        mainContainer:
          env: [{name: MODEL, value: RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic}]
          args: ["python3 -m dynamo.vllm --model $MODEL --tensor-parallel-size 4 --max-num-seqs 256"]
"""
TRTLLM = """
apiVersion: nvidia.com/v1alpha1
kind: DynamoGraphDeployment
spec:
  services:
    a:
      replicas: 3
      extraPodSpec:
        mainContainer:
          command: [python3, -m, dynamo.trtllm]
          args: [--model-path, Qwen/Qwen3-8B, --disaggregation-mode, prefill, --extra-engine-args, /c/p.yaml]
    b:
      extraPodSpec:
        mainContainer:
          command: [python3, -m, dynamo.trtllm]
          args: [--model-path, Qwen/Qwen3-8B, --disaggregation-mode, decode, --extra-engine-args, /c/d.yaml]
---
apiVersion: v1
kind: ConfigMap
data:
  p.yaml: |
    max_num_tokens: 4096
    cache_transceiver_config: {backend: UCX}
  d.yaml: |
    max_num_tokens: 512
    cache_transceiver_config: {backend: UCX}
"""
SGLANG = """
services:
  prefill:
    image: lmsysorg/sglang:latest
    command: >-
      python3 -m sglang.launch_server --model-path deepseek-ai/DeepSeek-R1 --tp 8 --ep-size 8
      --disaggregation-mode prefill
    deploy: {replicas: 2}
  decode:
    image: lmsysorg/sglang:latest
    command: >-
      python3 -m sglang.launch_server --model-path deepseek-ai/DeepSeek-R1 --tp 8 --dp 8 --enable-dp-attention
      --ep-size 8 --disaggregation-mode decode
"""
LLM_D = """
modelArtifacts: {uri: "hf://Qwen/Qwen3-32B"}
decode:
  create: true
  parallelism: {tensor: 4}
  replicas: 1
  containers: [{image: ghcr.io/llm-d/llm-d-cuda:v0.3.0, modelCommand: vllmServe, args: [
    --kv-transfer-config, '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}',
    --max-model-len, "32000"]}]
prefill:
  create: true
  parallelism: {tensor: 1}
  replicas: 4
  containers: [{image: ghcr.io/llm-d/llm-d-cuda:v0.3.0, modelCommand: vllmServe, args: [
    --kv-transfer-config, '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}',
    --max-model-len, "32000"]}]
"""
SCRIPT = """
MODEL=Qwen/Qwen3-8B
CUDA_VISIBLE_DEVICES=0 vllm serve $MODEL --port 8100 \\
  --kv-transfer-config '{"kv_connector":"P2pNcclConnector","kv_role":"kv_producer","kv_port":"21001"}' &
CUDA_VISIBLE_DEVICES=1 vllm serve $MODEL --port 8200 --max-num-seqs 128 \\
  --kv-transfer-config '{"kv_connector":"P2pNcclConnector","kv_role":"kv_consumer","kv_port":"22001"}' &
CUDA_VISIBLE_DEVICES=2 vllm serve $MODEL --port 8300 --max-num-seqs 128 \\
  --kv-transfer-config '{"kv_connector":"P2pNcclConnector","kv_role":"kv_consumer","kv_port":"22002"}' &
"""
STACK = """
servingEngineSpec:
  modelSpec:
  - name: llama3
    repository: vllm/vllm-openai
    modelURL: meta-llama/Llama-3.1-8B-Instruct
    replicaCount: 2
    vllmConfig:
      enablePrefixCaching: true
      maxModelLen: 4096
      tensorParallelSize: 2
      extraArgs: ["--max-num-seqs", "64"]
"""
OFFLOADS = STACK + '    lmcacheConfig: {enabled: true, cpuOffloadingBufferSize: "20"}\n'
TRTLLM_FILE = """
cat > disagg.yaml <<EOF
hostname: localhost
port: 8000
model: Qwen/Qwen3-8B
backend: pytorch
free_gpu_memory_fraction: 0.8
context_servers:
  num_instances: 2
  tensor_parallel_size: 1
  max_num_tokens: 4096
  disable_overlap_scheduler: true
  cache_transceiver_config: {backend: UCX}
  urls: ["localhost:8001", "localhost:8002"]
generation_servers:
  num_instances: 1
  tensor_parallel_size: 2
  max_batch_size: 256
  cache_transceiver_config: {backend: UCX}
  urls: ["localhost:8003"]
EOF
trtllm-serve disaggregated -c disagg.yaml
"""
KUBEAI = """
apiVersion: kubeai.org/v1
kind: Model
spec:
  url: hf://Qwen/Qwen3-8B
  engine: VLLM
  minReplicas: 3
  args: [--max-model-len=8192]
"""
FILES = {
    "graph.yaml": (
        GRAPH,
        "engine=vllm model=llama3_1_70b model.weights=fp8 pools=disaggregated routing=prefix_index "
        "pools.prefill.replicas=2 pools.prefill.tensor_parallel_size=2 pools.decode.replicas=1 "
        "pools.decode.tensor_parallel_size=4 pools.decode.engine.max_num_seqs=256",
    ),
    "trtllm.yaml": (
        TRTLLM,
        "engine=tensorrt_llm model=qwen3_8b pools.prefill.replicas=3 pools.decode.replicas=1 "
        "pools.prefill.engine.max_num_batched_tokens=4096 pools.decode.engine.max_num_batched_tokens=512",
    ),
    "compose.yaml": (
        SGLANG,
        "engine=sglang pools=disaggregated pools.prefill.replicas=2 pools.prefill.tensor_parallel_size=8 "
        "pools.prefill.expert_parallel_size=8 pools.decode.attention_data_parallel_size=8 "
        "pools.decode.tensor_parallel_size=1 pools.decode.expert_parallel_size=8",
    ),
    "values.yaml": (
        LLM_D,
        "model=qwen3_32b engine.max_model_len=32000 pools.prefill.replicas=4 "
        "pools.prefill.tensor_parallel_size=1 pools.decode.replicas=1 pools.decode.tensor_parallel_size=4 "
        "routing=prefix_index",
    ),
    "pd.sh": (
        SCRIPT,
        "model=qwen3_8b pools.prefill.replicas=1 pools.decode.replicas=2 "
        "pools.decode.engine.max_num_seqs=128",
    ),
    "trtllm.sh": (
        TRTLLM_FILE,
        "engine=tensorrt_llm model=qwen3_8b pools.prefill.replicas=2 pools.decode.replicas=1 "
        "pools.prefill.tensor_parallel_size=1 pools.decode.tensor_parallel_size=2 "
        "pools.prefill.engine.max_num_batched_tokens=4096 pools.decode.engine.max_num_seqs=256 "
        "pools.prefill.engine.host.overlapped=false",
    ),
    "stack.yaml": (
        STACK,
        "model=llama3_1_8b engine.max_model_len=4096 tensor_parallel_size=2 engine.max_num_seqs=64 "
        "replicas=2 routing=round_robin caching=prefix",
    ),
    "offloads.yaml": (OFFLOADS, "caching=tiered caching.host_gib=20 caching.write=through replicas=2"),
    "kubeai.yaml": (KUBEAI, "model=qwen3_8b engine.max_model_len=8192 replicas=3 routing=least_outstanding"),
}


def settings(folder, text, name="a.yaml"):
    path = folder / name
    path.write_text(text)
    return deployed(commands_in(str(path)), [CONFIG_DIR]).settings


@pytest.mark.parametrize("name", FILES)
def test_a_deployment_becomes_pools_or_replicas(name, tmp_path):
    text, expected = FILES[name]
    found = settings(tmp_path, text, name)
    assert {*expected.split()} <= {f"{key}={value}" for key, value in found.items()}
    assert ("pools" in found) == ("pools." in expected)


def test_a_deployment_runs(tmp_path):
    overrides = [f"{key}={value}" for key, value in settings(tmp_path, GRAPH).items()]
    run = simulate(*overrides, "workload=poisson", "workload.num_requests=20")
    assert run.summary["requests"]["finished"] == 20
    assert set(run.replicas["pool"]) == {"prefill", "decode"}


@pytest.mark.parametrize(
    ("connector", "environment", "expected"),
    [
        ('{"kv_connector":"OffloadingConnector","kv_role":"kv_both",'
         '"kv_connector_extra_config":{"cpu_bytes_to_use":85899345920}}', "", "40"),
        ('{"kv_connector":"LMCacheConnectorV1","kv_role":"kv_both"}', "LMCACHE_MAX_LOCAL_CPU_SIZE=30 ", "30"),
        ('{"kv_connector":"LMCacheConnectorV1","kv_role":"kv_both"}', "", "5"),
    ],
)  # fmt: skip
def test_kv_in_host_memory_is_a_tier(connector, environment, expected):
    line = f"{environment}vllm serve Qwen/Qwen3-8B -tp 2 --kv-transfer-config '{connector}'"
    found = deployed(commands_in(line), [CONFIG_DIR]).settings
    assert (found["caching"], found["caching.host_gib"]) == ("tiered", expected)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("vllm serve Qwen/Qwen3-8B --kv-transfer-config '{\"kv_connector\":\"NixlConnector\"}'",
         "give a file with the commands of both"),
        ("LMCACHE_REMOTE_URL=lm://x:1 vllm serve Qwen/Qwen3-8B --kv-transfer-config "
         "'{\"kv_connector\":\"LMCacheConnectorV1\",\"kv_role\":\"kv_both\"}'", "LMCacheConnectorV1"),
        ("python3 -m sglang.launch_server --model-path Qwen/Qwen3-8B --disaggregation-mode decode",
         "give a file with the commands of both"),
        ("python3 -m dynamo.vllm --model Qwen/Qwen3-8B --is-prefill-worker", "give a file with the comm"),
        ("python3 -m dynamo.vllm --model Qwen/Qwen3-8B --engine-request-limit 5", "refuses requests"),
    ],
)  # fmt: skip
def test_a_part_of_a_deployment_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        deployed(commands_in(text), [CONFIG_DIR])


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("--max-num-seqs 128 ", "--max-num-seqs 64 ", r"the decode servers differ in engine.max_num_seqs"),
        (
            "vllm serve $MODEL --port 8100",
            "vllm serve Qwen/Qwen3-4B --port 8100",
            r"have model=qwen3_4b, the dec",
        ),
        ("kv_producer", "kv_consumer", r"has 3 commands that start a server"),
    ],
)
def test_pools_have_servers_of_one_kind_and_one_model(tmp_path, old, new, message):
    with pytest.raises(ConfigError, match=message):
        settings(tmp_path, SCRIPT.replace(old, new, 1), "a.sh")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("-c disagg.yaml", "", r"needs -c FILE"),
        ("-c disagg.yaml", "-c other.yaml", r"other.yaml: no such file"),
        ("generation_servers:", "generation:", r"disagg.yaml: generation_servers must be a mapping"),
        ("num_instances: 2", "num_instances: true", r"context_servers: num_instances=True: must be a whole"),
        ("num_instances: 2", "num_instances: two", r"context_servers: num_instances=two: must be a whole"),
        ("hostname: localhost", "hostname: [", r"disagg.yaml: is not valid YAML"),
        ("backend: pytorch", "backend: trt", r"--backend trt: only the PyTorch backend is modelled"),
        ("trtllm-serve disaggregated", "trtllm-serve mm_embedding_serve", r"mm_embedding_serve: is not read"),
    ],
)
def test_a_file_of_servers_that_cannot_be_read_is_an_error(tmp_path, old, new, message):
    with pytest.raises(ConfigError, match=message):
        settings(tmp_path, TRTLLM_FILE.replace(old, new), "a.sh")


def test_settings_beside_a_deployment_win_and_some_commands_take_none(tmp_path, capsys):
    (tmp_path / "a.sh").write_text(SCRIPT)
    line = ["--from", str(tmp_path / "a.sh"), "engine.max_num_seqs=32"]
    found = with_launch_line(line, "simulate")
    assert found[-1] == "engine.max_num_seqs=32"
    assert not any(text.startswith("pools.decode.engine.max_num_seqs") for text in found)
    assert "pools.decode.replicas=2" in found
    assert "without effect on time: " in capsys.readouterr().err
    with pytest.raises(ConfigError, match="capacity takes one kind of server"):
        with_launch_line(line, "capacity")


def test_a_measured_run_is_compared_with_the_server_that_was_measured(tmp_path):
    (tmp_path / "bench.json").write_text(json.dumps(bench()))
    line = [f"against={tmp_path}/bench.json", "--from", "vllm serve Qwen/Qwen3-8B", "hardware=h100_sxm"]
    assert main(["validate", *line, f"hydra.run.dir={tmp_path}/out"]) == 0
    config = (tmp_path / "out" / "config.yaml").read_text()
    assert "Qwen3-8B" in config


def test_a_graph_of_equal_workers_is_replicas(tmp_path):
    start, end = GRAPH.index("    VllmPrefillWorker"), GRAPH.index("    VllmDecodeWorker")
    decodes = GRAPH[:start] + GRAPH[end:].replace("replicas: 1", "replicas: 4")
    found = settings(tmp_path, decodes)
    assert (found["replicas"], found["routing"], found["tensor_parallel_size"]) == ("4", "prefix_index", "4")
    assert "pools" not in found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "servingEngineSpec: {modelSpec: [{modelURL: Qwen/Qwen3-8B, vllmConfig: [1], replicaCount: x}]}",
            {"model": "qwen3_8b", "caching": "paged"},
        ),
        (
            "modelArtifacts: {uri: hf://Qwen/Qwen3-8B}\ndecode: {containers: [1, {args: 5}], replicas: [2]}",
            None,
        ),
        ("spec: {url: 'hf://a/b', engine: VLLM, args: {x: [1]}, minReplicas: -1}", None),
        ("kind: DynamoGraphDeployment\nspec: {services: {a: {replicas: yes, subComponentType: [1]}}}", None),
    ],
)
def test_values_of_another_form_count_as_missing_or_end_in_a_sentence(tmp_path, text, expected):
    if expected is None:
        with pytest.raises(ConfigError, match=r"no command|no such flag|no preset"):
            settings(tmp_path, text)
    else:
        assert expected.items() <= settings(tmp_path, text).items()
        assert "replicas" not in settings(tmp_path, text)
