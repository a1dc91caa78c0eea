"""Commands that start a server are found in what people post, and nothing is executed."""

import os

import pytest

from experiments.app.launch_lines.commands import command_in
from sim.settings.errors import ConfigError

SCRIPT = r"""#!/bin/bash
# don't run: vllm serve another/model
set -euo pipefail
export VLLM_ATTENTION_BACKEND=FLASHINFER
MODEL=${MODEL:-Qwen/Qwen3-32B}
TP=4
ARGS=(
  --enable-prefix-caching   # yes
  --max-num-seqs 128
)
cat > config.yaml <<'EOF'
max-model-len: 16k
EOF
echo "it's $(date)"
touch {folder}/executed; `touch {folder}/executed`
if [ -z "$X" ]; then
  CUDA_VISIBLE_DEVICES=0,1,2,3 nohup vllm serve "$MODEL" \
    --tensor-parallel-size $TP --config config.yaml \
    "${ARGS[@]}" --speculative-config '{
      "method": "ngram", "num_speculative_tokens": 3
    }' --port ${PORT:-8000} > server.log 2>&1 &
fi
"""
COMPOSE = """
services:
  cache: {image: redis, command: redis-server}
  vllm:
    image: vllm/vllm-openai:v0.10.0
    environment: {HF_TOKEN: abc}
    command: --model openai/gpt-oss-120b --tensor-parallel-size 2
"""
KUBERNETES = """
apiVersion: v1
kind: Service
metadata: {name: x}
---
apiVersion: apps/v1
kind: Deployment
spec:
  template:
    spec:
      containers:
      - name: vllm
        image: vllm/vllm-openai:latest
        command: ["/bin/sh", "-c"]
        args:
        - |
          sleep 5
          vllm serve deepseek-ai/DeepSeek-R1 --trust-remote-code \\
            --data-parallel-size $(DP)
        env:
        - {name: DP, value: "8"}
"""
HELM = """
apiVersion: apps/v1
spec:
  containers:
  - image: lmsysorg/sglang:latest
    command: [python3, -m, sglang.launch_server]
    args: [--model-path, Qwen/Qwen3-8B, --tp, "2"]
"""


def tokens(text):
    found = command_in(text)
    return found.engine, " ".join(found.tokens)


@pytest.mark.parametrize(
    ("text", "engine", "words"),
    [
        ("vllm serve a/b -tp 2", "vllm", "a/b -tp 2"),
        ("A=1 B='x y' exec /usr/bin/vllm serve a/b", "vllm", "a/b"),
        ("python3 -m vllm.entrypoints.openai.api_server --model a/b", "vllm", "--model a/b"),
        ("python -m sglang.launch_server --model-path a/b", "sglang", "--model-path a/b"),
        ("uv run sglang serve --model-path a/b", "sglang", "--model-path a/b"),
        ("trtllm-serve a/b --tp_size 2", "tensorrt_llm", "a/b --tp_size 2"),
        ("mpirun -n 8 trtllm-llmapi-launch trtllm-serve serve a/b", "tensorrt_llm", "a/b"),
        ("cd /x && vllm serve a/b | tee log; echo done", "vllm", "a/b"),
        ('bash -c "vllm serve a/b --port 1"', "vllm", "a/b --port 1"),
        ("vllm serve a/b \\\n  --port 1 \\\n  # a note\n", "vllm", "a/b --port 1"),
        (
            "docker run --gpus all -v ~/m:/m -e HF_TOKEN=x -p 80:80 vllm/vllm-openai:latest --model a/b",
            "vllm",
            "--model a/b",
        ),
        (
            "docker run lmsysorg/sglang:latest python3 -m sglang.launch_server --model-path a/b",
            "sglang",
            "--model-path a/b",
        ),
        ("TP=8\nvllm serve a/b -tp ${TP} --port ${P:-9}", "vllm", "a/b -tp 8 --port 9"),
        ("vllm serve a/b --port '$P'", "vllm", "a/b --port $P"),
    ],
)
def test_a_line_has_its_command_found(text, engine, words):
    assert tokens(text) == (engine, words)


def test_a_script_is_read_with_its_variables_arrays_and_files_and_not_executed(tmp_path):
    file = tmp_path / "run.sh"
    file.write_text(SCRIPT.replace("{folder}", str(tmp_path)))
    found = command_in(str(file))
    assert found.tokens[:9] == (
        "Qwen/Qwen3-32B", "--tensor-parallel-size", "4", "--config", "config.yaml",
        "--enable-prefix-caching", "--max-num-seqs", "128", "--speculative-config",
    )  # fmt: skip
    assert found.tokens[10:] == ("--port", "8000")
    assert found.environment["VLLM_ATTENTION_BACKEND"] == "FLASHINFER"
    assert found.files == {"config.yaml": "max-model-len: 16k"}
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("name", "content", "engine", "words"),
    [
        ("compose.yaml", COMPOSE, "vllm", "--model openai/gpt-oss-120b --tensor-parallel-size 2"),
        (
            "k8s.yaml",
            KUBERNETES,
            "vllm",
            "deepseek-ai/DeepSeek-R1 --trust-remote-code --data-parallel-size 8",
        ),
        ("rendered", HELM, "sglang", "--model-path Qwen/Qwen3-8B --tp 2"),
    ],
)
def test_containers_in_yaml_have_their_command_found(tmp_path, name, content, engine, words):
    (tmp_path / name).write_text(content)
    assert tokens(str(tmp_path / name)) == (engine, words)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing here", "has no command that starts a server; it must contain 'vllm serve MODEL"),
        ("nosuch.sh", "no such file, and no command"),
        ("vllm serve a/b; vllm serve c/d", "has 2 commands that start a server; give one of them"),
        ("trtllm-serve disaggregated -c x.yaml", "x.yaml: no such file"),
        ("echo 'vllm serve a/b", "has no command"),
    ],
)
def test_a_text_without_one_command_is_refused(text, message):
    with pytest.raises(ConfigError) as error:
        command_in(text)
    assert message in str(error.value)


def test_what_is_no_moderate_file_of_text_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(b"a" * 1_000_001)
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    (tmp_path / "deep.yaml").write_text("[" * 100 + "]" * 100)
    for name, message in (
        ("pipe", "must be a regular file"),
        ("large", "must have at most 1,000,000 bytes"),
        ("binary", "must be UTF-8 text"),
        ("deep.yaml", "must nest lists and mappings"),
    ):
        with pytest.raises(ConfigError, match=message):
            command_in(str(tmp_path / name))
    with pytest.raises(ConfigError, match="/dev/zero: must be a regular file"):
        command_in("/dev/zero")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        command_in(str(tmp_path))


def test_variables_before_a_script_are_those_it_takes_from_outside(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bench.sh").write_text("vllm serve $MODEL -tp $TP --max-num-seqs ${CONC:-16}\n")
    for before in ("", "bash ", "./"):
        words = command_in(f"MODEL=Qwen/Qwen3-8B TP=2 CONC=64 {before}bench.sh").tokens
        assert words == ("Qwen/Qwen3-8B", "-tp", "2", "--max-num-seqs", "64")
    assert command_in("bench.sh").tokens == ("$MODEL", "-tp", "$TP", "--max-num-seqs", "16")


def test_a_placeholder_is_a_value_and_no_redirection():
    words = command_in("vllm serve Qwen/Qwen3-8B --port <port> --host <host-ip> > server.log 2>&1").tokens
    assert words == ("Qwen/Qwen3-8B", "--port", "<port>", "--host", "<host-ip>")


def test_a_script_that_yaml_quotes_is_found(tmp_path):
    text = "meta:\n  title: A recipe\nguide: |\n  ```bash\n  vllm serve Qwen/Qwen3-8B \\\n    -tp 2\n  ```\n"
    (tmp_path / "recipe.yaml").write_text(text)
    assert command_in(str(tmp_path / "recipe.yaml")).tokens == ("Qwen/Qwen3-8B", "-tp", "2")
