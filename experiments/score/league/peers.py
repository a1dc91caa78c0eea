"""The peers: what each is asked for a row, and its answer in the quantities of the league.

The names of models and GPUs are those of aiconfigurator, whose tables AISimulate shares. A peer gets the
layout, the number formats, the limits of the scheduler and the requests of the row, and the newest complete
tables of the row's engine, its default. It first answers from measured operators alone (SILICON); if its
tables lack some, with its own estimates of them (HYBRID).
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd

from experiments.score.league.asked import Asked, RefusedError
from experiments.study.presets import preset
from hwmodels.model import DenseMlp, ModelSpec
from hwmodels.model.attention import GroupedQueryAttention

PROGRAM = Path(__file__).with_name("peer_program.py")

MODELS = {
    "deepseek-r1": "deepseek-ai/DeepSeek-R1",
    "gpt-oss-120b": "openai/gpt-oss-120b",
    "gpt-oss-20b": "openai/gpt-oss-20b",
    "llama-3.1-405b": "meta-llama/Meta-Llama-3.1-405B",
    "llama-3.1-70b": "meta-llama/Meta-Llama-3.1-70B",
    "llama-3.1-8b": "meta-llama/Meta-Llama-3.1-8B",
    "llama-4-scout": "meta-llama/Llama-4-Scout-17B-16E-Instruct",
    "minimax-m2.5": "MiniMaxAI/MiniMax-M2.5",
    "mixtral-8x7b": "mistralai/Mixtral-8x7B-v0.1",
    "nemotron-3-nano-30b-a3b": "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "nemotron-3-super-120b-a12b": "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-FP8",
    "nemotron-super-49b": "nvidia/Llama-3_3-Nemotron-Super-49B-v1",
    "qwen3-0.6b": "Qwen/Qwen3-0.6B",
    "qwen3-1.7b": "Qwen/Qwen3-1.7B",
    "qwen3-235b-a22b": "Qwen/Qwen3-235B-A22B",
    "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B",
    "qwen3-32b": "Qwen/Qwen3-32B",
    "qwen3-8b": "Qwen/Qwen3-8B",
    "qwen3.5-397b-a17b": "Qwen/Qwen3.5-397B-A17B",
}
"""Our models, by the names under which the peers' packages have their configurations."""
ARCHITECTURES = {"qwen2.5-72b": "Qwen2ForCausalLM", "qwen2.5-7b": "Qwen2ForCausalLM"}
"""Models that the packages lack, with an architecture that they know: these get a `config.json`."""
SYSTEMS = {
    "a100_80gb_sxm": "a100_sxm",
    "b200_sxm": "b200_sxm",
    "b60": "b60",
    "h100_sxm": "h100_sxm",
    "h200_sxm": "h200_sxm",
    "l40s": "l40s",
    "rtx_pro_6000_server": "rtx_pro_6000_server",
}
FORMATS = {
    "bf16": "bfloat16",
    "fp16": "bfloat16",
    "fp8": "fp8",
    "fp8_block": "fp8_block",
    "int4_wo": "int4_wo",
    "nvfp4": "nvfp4",
}
MODES = ("SILICON", "HYBRID")
LONGEST = 160
"""Characters of a kept reason."""
HASHED_TOKENS = 512
"""Tokens of a prompt to which a hash of a trace belongs."""


def named(asked: Asked, folder: Path) -> tuple[str, str]:
    """Returns the peer's name of the model, or a folder with its configuration, and that of the GPU.

    Raises RefusedError for a model or a GPU that the peer's package does not know.
    """
    model, gpu = asked.scenario.model, preset("hardware", asked.row["gpu"])
    if gpu not in SYSTEMS:
        raise RefusedError("the package has no tables of the GPU")
    if model.name in MODELS:
        return MODELS[model.name], SYSTEMS[gpu]
    if model.name not in ARCHITECTURES:
        raise RefusedError("the package has no configuration of the model")
    path = folder / model.name
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(configuration(model)), encoding="utf-8")
    return str(path), SYSTEMS[gpu]


def configuration(model: ModelSpec) -> dict[str, Any]:
    """Returns the `config.json` of a dense model whose layers are all alike."""
    [block] = model.blocks
    attention, mlp = block.attention, block.mlp
    assert isinstance(attention, GroupedQueryAttention), "as in all ARCHITECTURES"
    assert isinstance(mlp, DenseMlp), "as in all ARCHITECTURES"
    return {
        "architectures": [ARCHITECTURES[model.name]],
        "hidden_size": model.hidden_size,
        "num_hidden_layers": block.count,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "intermediate_size": mlp.intermediate_size,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_position_embeddings,
        "tie_word_embeddings": model.tie_word_embeddings,
        "torch_dtype": "bfloat16",
    }


def formats(asked: Asked) -> dict[str, str]:
    """Returns the number formats of weights, experts and KV; those that the checkpoint fixes are left out.

    Raises RefusedError for a format without a counterpart.
    """
    model = asked.scenario.model
    found = {}
    if "mxfp4" not in str(model.moe_weights):
        given = {"gemm_quant_mode": model.weights}
        if model.has_experts:
            given["moe_quant_mode"] = model.moe_weights or model.weights
        for name, ours in given.items():
            if ours not in FORMATS:
                raise RefusedError(f"no counterpart of the number format {ours}")
            found[name] = FORMATS[ours]
    if model.kv_cache_dtype == "fp8":
        found["kvcache_quant_mode"] = "fp8"
    return found


def layout(asked: Asked) -> dict[str, int]:
    """Returns the sizes of the parallel groups of a replica, by aiconfigurator's names."""
    ours, has_experts = asked.scenario.layout, asked.scenario.model.has_experts
    ranks = ours.tensor_parallel_size * ours.attention_data_parallel_size
    groups = ours.expert_parallel_size if has_experts else 1
    return {
        "tp_size": ours.tensor_parallel_size,
        "pp_size": ours.pipeline_parallel_size,
        "attention_dp_size": ours.attention_data_parallel_size,
        "moe_tp_size": ranks // groups if has_experts else 1,
        "moe_ep_size": groups,
    }


def aiconfigurator_call(asked: Asked, folder: Path) -> dict[str, Any]:
    """Returns the arguments of aiconfigurator's `cli_estimate`: a constant batch of mean lengths."""
    if asked.concurrency is None:
        raise RefusedError("the tool has no arrivals: its input is a constant batch")
    model, system = named(asked, folder)
    sizes, clients = layout(asked), asked.concurrency
    call = {
        "model_path": model,
        "system_name": system,
        "backend_name": asked.backend,
        "isl": round(mean(one.prompt_tokens for one in asked.requests)),
        "osl": round(mean(one.output_tokens for one in asked.requests)),
        "batch_size": -(-clients // (asked.scenario.num_replicas * sizes["attention_dp_size"])),
        **sizes,
        **formats(asked),
    }
    if not asked.scenario.model.has_experts:
        del call["moe_tp_size"], call["moe_ep_size"]
    return call


def aiconfigurator_figures(asked: Asked, found: dict[str, Any]) -> dict[str, float]:
    """Returns the compared quantities. A constant batch has one TTFT and one TPOT, for mean and median."""
    ttft_ms, tpot_ms = found["ttft"], found["tpot"]
    prompt = mean(one.prompt_tokens for one in asked.requests)
    output = mean(one.output_tokens for one in asked.requests)
    assert asked.concurrency is not None, "refused otherwise"
    requests_per_s = 1e3 * asked.concurrency / (ttft_ms + tpot_ms * (output - 1))
    every = {
        **dict.fromkeys(("ttft_mean_ms", "ttft_p50_ms"), ttft_ms),
        **dict.fromkeys(("tpot_mean_ms", "tpot_p50_ms", "itl_mean_ms"), tpot_ms),
        "requests_per_s": requests_per_s,
        "output_tokens_per_s": requests_per_s * output,
        "total_tokens_per_s": requests_per_s * (prompt + output),
    }
    return {figure: every[name] for figure, name in asked.statistics.items()}


def aisimulate_call(asked: Asked, folder: Path) -> dict[str, Any]:
    """Returns AISimulate's configuration of a prediction, and writes the requests as a trace to `folder`."""
    model, system = named(asked, folder)
    scenario, sizes = asked.scenario, layout(asked)
    trace = folder / "trace.jsonl"
    write_trace(trace, asked)
    load: dict[str, Any] = {"type": "trace_timestamps"}
    if asked.concurrency is not None:
        load = {"type": "concurrency", "concurrency": asked.concurrency}
    source = {"type": "trace", "format": "mooncake", "paths": [str(trace)], "block_size": HASHED_TOKENS}
    share = sizes["attention_dp_size"]
    worker: dict[str, Any] = {
        "parallelism": {
            "replicas": scenario.num_replicas,
            "tensor": sizes["tp_size"],
            "pipeline": sizes["pp_size"],
            "attention_data": share,
            "moe_tensor": sizes["moe_tp_size"],
            "moe_expert": sizes["moe_ep_size"],
        },
        "scheduler": {
            "max_batched_tokens": scenario.max_num_batched_tokens // share,
            "max_sequences": scenario.max_num_seqs // share,
        },
        "kv_cache": {"prefix_caching": False},
    }
    if pd.notna(fraction := asked.row.get("memory_fraction")):
        worker["kv_cache"]["capacity"] = {"memory_fraction": float(fraction)}
    if not scenario.model.has_experts:
        del worker["parallelism"]["moe_tensor"], worker["parallelism"]["moe_expert"]
    engine: dict[str, Any] = {
        "mode": "aggregated",
        "model": model,
        "hardware": system,
        "backend": asked.backend,
        **formats(asked),
        "workers": {"aggregated": worker},
    }
    return {"traffic": {"source": source, "load": load}, "engine": engine}


def write_trace(path: Path, asked: Asked) -> None:
    """Writes the requests in Mooncake's format; no two prompts share a block."""
    begun = 0
    with path.open("w", encoding="utf-8") as file:
        for one in asked.requests:
            blocks = -(-one.prompt_tokens // HASHED_TOKENS)
            line = {
                "timestamp": 1e3 * one.arrival_s,
                "input_length": one.prompt_tokens,
                "output_length": one.output_tokens,
                "hash_ids": [*range(begun, begun + blocks)],
            }
            begun += blocks
            file.write(json.dumps(line) + "\n")


AISIMULATE_FIGURES = {
    "ttft_mean_ms": "mean_ttft_ms",
    "ttft_p50_ms": "median_ttft_ms",
    "tpot_mean_ms": "mean_tpot_ms",
    "tpot_p50_ms": "median_tpot_ms",
    "itl_mean_ms": "mean_itl_ms",
    "output_tokens_per_s": "output_throughput_tok_s",
}


def aisimulate_figures(asked: Asked, found: dict[str, Any]) -> dict[str, float]:
    """Returns the compared quantities. Raises RefusedError if it served fewer requests than were sent."""
    served = found["completed_requests"]
    if served != len(asked.requests):
        raise RefusedError("some requests were not served")
    every = {ours: found[its] for ours, its in AISIMULATE_FIGURES.items()}
    every["requests_per_s"] = 1e3 * served / found["duration_ms"]
    every["total_tokens_per_s"] = found["output_throughput_tok_s"] + found["input_throughput_tok_s"]
    return {figure: float(every[name]) for figure, name in asked.statistics.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """Functions that ask a peer, and read its answer."""

    call: Callable[[Asked, Path], dict[str, Any]]
    """Returns the arguments of `peer_program` for a row. Raises RefusedError."""
    with_mode: Callable[[dict[str, Any], str], dict[str, Any]]
    """Returns the arguments with one of `MODES`."""
    figures: Callable[[Asked, dict[str, Any]], dict[str, float]]


def _aisimulate_mode(call: dict[str, Any], mode: str) -> dict[str, Any]:
    return {**call, "engine": {**call["engine"], "database_mode": mode}}


PEERS = {
    "aisimulate": Peer(call=aisimulate_call, with_mode=_aisimulate_mode, figures=aisimulate_figures),
    "aiconfigurator": Peer(
        call=aiconfigurator_call,
        with_mode=lambda call, mode: {**call, "database_mode": mode},
        figures=aiconfigurator_figures,
    ),
}


def short(reason: str) -> str:
    """Returns the first `LONGEST` characters of the first line of a peer's reason."""
    line = " ".join(reason.splitlines()[0].split())
    return line if len(line) <= LONGEST else f"{line[:LONGEST]}..."


class PeerProcess:
    """A running peer in an environment of its own; a context manager."""

    def __init__(self, name: str, python: Path) -> None:
        """Starts the peer. python: the interpreter of its environment."""
        self._peer = PEERS[name]
        self._folder = TemporaryDirectory()
        self._process = subprocess.Popen(
            [str(python.absolute()), str(PROGRAM), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={},
        )

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()

    def predict(self, asked: Asked) -> dict[str, float]:
        """Returns the compared quantities, `cpu_s`, and `estimated`: 1 for HYBRID. Raises RefusedError."""
        call = self._peer.call(asked, Path(self._folder.name))
        reasons, cpu_s = [], 0.0
        for mode in MODES:
            answer = self._answer(self._peer.with_mode(call, mode))
            cpu_s += answer["cpu_s"]
            if "figures" in answer:
                figures = self._peer.figures(asked, answer["figures"])
                return {**figures, "cpu_s": cpu_s, "estimated": float(mode != MODES[0])}
            reasons.append(answer["refusal"])
        raise RefusedError(short(reasons[-1]))

    def _answer(self, call: dict[str, Any]) -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None, "a pipe"
        assert stdout is not None, "a pipe"
        stdin.write(json.dumps(call) + "\n")
        stdin.flush()
        line = stdout.readline()
        if not line:
            raise RefusedError("the process ended")
        answer: dict[str, Any] = json.loads(line)
        return answer
