"""Servers in manifests and Python files, as their documentation shows them."""

import pytest

from experiments.app.launch_lines.commands import command_in
from experiments.app.launch_lines.engines import translated
from experiments.app.launch_lines.python_files import started
from experiments.app.settings.config_groups import CONFIG_DIR
from sim.settings.errors import ConfigError

DEPLOYMENT = """
apiVersion: apps/v1
kind: Deployment
spec:
  replicas: 3
  template:
    spec:
      containers:
      - image: vllm/vllm-openai:latest
        args: ["--model=Qwen/Qwen3-8B", "--max-num-seqs=128"]
---
apiVersion: v1
kind: Service
spec: {ports: [{port: 80}]}
"""
COMPOSE_OF_SGLANG = """
services:
  sglang:
    image: lmsysorg/sglang:latest
    entrypoint: python3 -m sglang.launch_server
    command: --model-path meta-llama/Llama-3.1-8B-Instruct --host 0.0.0.0 --port 30000
    deploy: {replicas: 2}
"""
KSERVE = """
apiVersion: serving.kserve.io/v1beta1
kind: InferenceService
spec:
  predictor:
    model:
      modelFormat: {name: huggingface}
      args: [--model_name=llama3, --model_id=meta-llama/Llama-3.1-8B-Instruct, --max-model-len=4096]
"""
RAY = """
applications:
- args:
    llm_configs:
    - model_loading_config: {model_id: qwen-0.5b, model_source: Qwen/Qwen2.5-0.5B-Instruct}
      deployment_config: {num_replicas: 4}
      engine_kwargs: {tensor_parallel_size: 2, max_model_len: 8192, enable_prefix_caching: false}
  import_path: ray.serve.llm:build_openai_app
"""
SKYPILOT = """
envs: {MODEL_NAME: meta-llama/Llama-3.1-70B-Instruct}
setup: pip install vllm==0.9.2
run: |
  vllm serve $MODEL_NAME \\
    --tensor-parallel-size 8
"""
MODAL = """
MODEL_NAME = "Qwen/Qwen3-4B"
FAST_BOOT = True
def serve():
    cmd = ["vllm", "serve", MODEL_NAME, "--served-model-name", MODEL_NAME, "llm", "--port", str(8000)]
    cmd += ["--enforce-eager" if FAST_BOOT else "--no-enforce-eager"]
    cmd.extend(["--tensor-parallel-size", str(2)])
    subprocess.Popen(" ".join(cmd), shell=True)
"""
OFFLINE = """
import os
from vllm import LLM, SamplingParams
TP = int(os.environ.get("TP", "4"))
llm = LLM("meta-llama/Llama-3.1-8B-Instruct", tensor_parallel_size=TP, enforce_eager=True,
          speculative_config={"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4})
llm.generate(["Hello"], SamplingParams(max_tokens=10))
"""
OFFLINE_SGLANG = "import sglang as sgl\nllm = sgl.Engine(model_path='Qwen/Qwen3-8B', tp_size=2)\n"
FILES = {
    "pods.yaml": (DEPLOYMENT, {"replicas": "3", "routing": "random", "engine.max_num_seqs": "128"}),
    "compose.yaml": (COMPOSE_OF_SGLANG, {"engine": "sglang", "model": "llama3_1_8b", "replicas": "2"}),
    "kserve.yaml": (KSERVE, {"model": "llama3_1_8b", "engine.max_model_len": "4096"}),
    "ray.yaml": (RAY, {"model": "qwen2_5_0_5b", "tensor_parallel_size": "2", "caching": "paged",
                       "replicas": "4", "routing": "power_of_two"}),
    "sky.yaml": (SKYPILOT, {"model": "llama3_1_70b", "engine.version": "0.9.2", "tensor_parallel_size": "8"}),
    "modal_app.py": (MODAL, {"model": "qwen3_4b", "engine.cuda_graphs.enabled": "false",
                             "tensor_parallel_size": "2"}),
    "batch.py": (OFFLINE, {"model": "llama3_1_8b", "tensor_parallel_size": "4", "speculation": "ngram",
                           "engine.default_limits": "vllm_offline", "engine.frontend": "null"}),
    "sgl.py": (OFFLINE_SGLANG, {"engine": "sglang", "model": "qwen3_8b", "tensor_parallel_size": "2"}),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_a_manifest_or_a_python_file_is_a_command(name, tmp_path):
    text, expected = FILES[name]
    (tmp_path / name).write_text(text)
    found = translated(command_in(str(tmp_path / name)), [CONFIG_DIR])
    assert expected.items() <= found.settings.items()
    assert not found.refused


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("llm = LLM(model=args.model)", r"\$args\.model"),
        ("llm = LLM(model='Qwen/Qwen3-8B', tensor_parallel_size=args.tp)", r"args\.tp"),
        ("TP = 2\nTP = 4\nllm = LLM('Qwen/Qwen3-8B', tensor_parallel_size=TP)", r"\$TP"),
        (
            "cmd = ['vllm', 'serve', 'Qwen/Qwen3-8B']\nif x:\n  cmd += ['--enforce-eager']",
            "under a condition",
        ),
        ("llm = LLM('Qwen/Qwen3-8B', **settings)", "settings"),
        ("print('vllm')", "has no command"),
        ("llm = LLM('Qwen/Qwen3-8B'", "has no command"),
    ],
)
def test_what_the_text_does_not_tell_is_an_error(text, message, tmp_path):
    (tmp_path / "run.py").write_text(text)
    with pytest.raises(ConfigError, match=message):
        translated(command_in(str(tmp_path / "run.py")), [CONFIG_DIR])


def test_a_python_file_is_not_executed_and_deep_ones_are_left(tmp_path):
    (tmp_path / "run.py").write_text(f"open({str(tmp_path / 'made')!r}, 'w')\nLLM('Qwen/Qwen3-8B')\n")
    assert command_in(str(tmp_path / "run.py")).tokens == ("--model", "Qwen/Qwen3-8B")
    assert not (tmp_path / "made").exists()
    assert list(started("a = " + "(" * 150 + "1" + ")" * 150)) == []
    assert list(started("a = " + "-" * 20_000 + "1")) == []
    assert list(started("a" + ".b" * 50_000)) == []
    assert next(started("a = b\nb = a\nLLM(a)")).words[1] in ("$a", "$b")
    bomb = "\n".join(f"a{n} = [{', '.join([f'a{n + 1}'] * 10)}]" for n in range(30))
    assert list(started(f"{bomb}\na30 = ['x']\nLLM(a0)"))[-1].words[1] == "$..."


@pytest.mark.parametrize(
    "text",
    [
        "model_loading_config: {model_id: Qwen/Qwen3-8B}\nruntime_env: [1]\nengine_kwargs: {block_size: x}",
        "model: {modelFormat: {name: huggingface}, args: [null, {a: 1}, --model_id], storageUri: [1]}",
        "run: 5\nenvs: [1, {name: x}]\ncommand: {a: b}",
    ],
)
def test_a_manifest_of_another_form_is_an_error(text, tmp_path):
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"--from|has no command"):
        translated(command_in(str(tmp_path / "bad.yaml")), [CONFIG_DIR])
