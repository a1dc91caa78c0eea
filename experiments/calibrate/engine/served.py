"""The measured engine, for a model of the config group `model`, with random weights.

No weights are read, because the time of a matrix product does not depend on its values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from experiments.calibrate.engine.steps import REFERENCE, Step, Tables, padding_work, work_of
from experiments.calibrate.engine.watch import Watched, WatchedDecoder
from hwmodels.model import ModelSpec
from realengine.model.architecture import Architecture
from realengine.model.backend import Backend, check_supported, choose_backend
from realengine.model.decoder import Decoder
from realengine.model.kv_cache import KvCache
from realengine.model.quantization import Weights
from realengine.runner import piecewise
from realengine.runner.executor import Executor
from realengine.runner.graphs import default_sizes
from realengine.runner.parallel import Group
from realengine.runner.work import Padding, Work
from realengine.settings import DTYPES, KV_DTYPES
from realengine.weights.load import load_weights

MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "MixtralForCausalLM": "mixtral",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3_text",
    "GptOssForCausalLM": "gpt_oss",
    "Phi3ForCausalLM": "phi3",
    "GlmForCausalLM": "glm",
    "BaichuanForCausalLM": "baichuan",
}
TORCH_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
QUANTIZATIONS = {"int4_wo": "w4a16", "int8_wo": "w8a16", "int8": "int8", "fp8": "fp8"}
"""Names of weight formats in the hardware models -> in the engine."""

CPU_KV_BYTES = 1 << 29


def architecture_of(node: Mapping[str, Any]) -> Architecture:
    """Returns the architecture of a choice of the config group `model`.

    Raises ValueError if the engine does not support it.
    """
    if node.get("transform"):
        raise ValueError(
            "model.transform: the engine does not support transformed models; choose model/transform=none"
        )
    if "path" in node:
        return Architecture.from_path(Path(node["path"]))
    config = dict(node["config"])
    named = list(config.get("architectures") or [])
    model_type = next((MODEL_TYPES[name] for name in named if name in MODEL_TYPES), None)
    if model_type is None:
        raise ValueError(
            f"model: the engine does not support {', '.join(named) or 'this architecture'}; "
            f"it supports {', '.join(MODEL_TYPES)}"
        )
    # Defaults that do not change times; most files of the group leave them out.
    defaults = {"model_type": model_type, "rms_norm_eps": 1e-5, "query_pre_attn_scalar": 256}
    return Architecture.from_hf(defaults | config)


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """A watched executor, an unwatched one, and the parts needed to give them steps."""

    architecture: Architecture
    executor: Executor
    """Executor whose operators are watched, which makes each slower; none runs in a CUDA graph."""
    plain: Executor
    """Executor without a watch, as in service."""
    weights: Weights
    watched: Watched
    padding: Padding
    backend: Backend

    @property
    def device(self) -> torch.device:
        return self.executor.device

    def work(self, step: Step) -> Work:
        """Returns the executor's input for a step; `REFERENCE` uses the padding slot."""
        if step is REFERENCE:
            return padding_work(self.padding)
        return work_of(step, self.padding, self.architecture.vocab_size, self.plain.graphs)


def serve(
    model: ModelSpec,
    architecture: Architecture,
    device: torch.device,
    *,
    max_num_seqs: int,
    max_model_len: int,
    block_size: int,
    seed: int = 0,
) -> Served:
    """Loads the model with random weights on a device.

    Raises ValueError if the engine does not support the model's number formats, or if the KV cache is too
    small for one sequence of max_model_len tokens.
    """
    _check_family(architecture)
    backend = choose_backend(None, device)
    dtype, kv_dtype = DTYPES[TORCH_DTYPES[model.dtype]], kv_dtype_of(model)
    quantization = quantization_of(model)
    check_supported(architecture, backend, dtype, kv_dtype, quantization=quantization)
    weights = load_weights(None, architecture, dtype, device, quantization=quantization, seed=seed)
    watched = Watched()
    blocks_each = -(-max_model_len // block_size)
    block_bytes = KvCache.bytes_per_block(architecture, block_size, kv_dtype)
    num_blocks = min(max_num_seqs * blocks_each, _kv_bytes(device) // block_bytes)
    if num_blocks < blocks_each:
        raise ValueError(
            f"measure.max_model_len={max_model_len}: memory has room for {num_blocks} KV blocks, but one "
            f"sequence needs {blocks_each}; set a smaller max_model_len"
        )
    cache = KvCache(architecture, num_blocks, block_size, kv_dtype, device)

    def executor_of(decoder: Decoder, backend: Backend, *, captures: bool = False) -> Executor:
        return Executor(
            decoder,
            cache,
            backend,
            num_slots=max_num_seqs,
            max_model_len=max_model_len,
            graph_sizes=default_sizes(max_num_seqs) if captures else (),
            piece_sizes=piecewise.SIZES if captures else (),
        )

    under_watch = watched.backend(backend)
    executor = executor_of(
        WatchedDecoder(watched, architecture, weights, under_watch, max_model_len, Group()), under_watch
    )
    plain = executor_of(
        Decoder(architecture, weights, backend, max_model_len, Group()),
        backend,
        captures=device.type == "cuda",
    )
    plain.capture()
    for one in (executor, plain):
        one.run(Tables.drawn(max_num_seqs, num_blocks, blocks_each, seed).work())
    return Served(
        architecture=architecture,
        executor=executor,
        plain=plain,
        weights=weights,
        watched=watched,
        padding=Padding(max_num_seqs, blocks_each),
        backend=backend,
    )


def _check_family(architecture: Architecture) -> None:
    """Raises ValueError for layers with operators for which the profile has no column."""
    reasons = {
        "latent attention computes with keys and values of one row, or expands them": architecture.latent,
        "it normalises after attention and MLP, too, and has two rotary tables": architecture.gemma,
        "its attention has sinks, and its experts biases and a clamp": architecture.gpt_oss,
        "its attention has linear biases": architecture.alibi or None,
    }
    for reason, parts in reasons.items():
        if parts is not None:
            raise ValueError(
                f"model_type={architecture.model_type}: {reason}, which no operator of a calibration is; "
                "choose a model with Llama's layers, such as llama, mistral, qwen3, phi3, glm or mixtral"
            )


def kv_dtype_of(model: ModelSpec) -> torch.dtype:
    """Returns the data type of keys and values. Raises ValueError if the engine does not support it."""
    if model.kv_dtype == model.dtype:
        dtype: torch.dtype = DTYPES[TORCH_DTYPES[model.dtype]]
        return dtype
    if model.kv_dtype not in KV_DTYPES:
        raise ValueError(
            f"model.kv_cache_dtype={model.kv_dtype}: the engine supports auto, {', '.join(KV_DTYPES)}"
        )
    kv_dtype: torch.dtype = KV_DTYPES[model.kv_dtype]
    return kv_dtype


def quantization_of(model: ModelSpec) -> str | None:
    """Returns the engine's name of the weight format of linear layers, None if they are not quantized.

    Raises ValueError if the engine does not support the format.
    """
    stored = model.moe_weights or model.weights
    if stored is None or stored == model.dtype:
        return None
    if stored not in QUANTIZATIONS:
        raise ValueError(f"model.weights={stored}: the engine supports {', '.join(QUANTIZATIONS)}")
    return QUANTIZATIONS[stored]


def _kv_bytes(device: torch.device) -> int:
    """Returns the bytes for the KV cache; on a GPU, three quarters of the memory that is free."""
    if device.type == "cpu":
        return CPU_KV_BYTES
    return int(torch.cuda.mem_get_info(device)[0] * 3 // 4)
