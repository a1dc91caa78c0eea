"""Small models and their checkpoints, written name by name and byte by byte, without the engine's table."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

LLAMA = {
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
    "torch_dtype": "float32",
    "eos_token_id": 2,
}
QWEN2 = {**LLAMA, "model_type": "qwen2", "tie_word_embeddings": True}
QWEN3 = {**LLAMA, "model_type": "qwen3", "head_dim": 16}
QWEN3_MOE = {
    **QWEN3,
    "model_type": "qwen3_moe",
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "norm_topk_prob": True,
    "mlp_only_layers": [0],
}


def random_checkpoint(config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Returns random tensors under the names of the model's own code."""
    generator = torch.Generator().manual_seed(0)

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    hidden, size, kind = config["hidden_size"], config["intermediate_size"], config["model_type"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim", hidden // heads)
    tensors = {
        "model.embed_tokens.weight": tensor(config["vocab_size"], hidden),
        "model.norm.weight": tensor(hidden),
    }
    if not config.get("tie_word_embeddings"):
        tensors["lm_head.weight"] = tensor(config["vocab_size"], hidden)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        tensors[f"{layer}.input_layernorm.weight"] = tensor(hidden)
        tensors[f"{layer}.post_attention_layernorm.weight"] = tensor(hidden)
        for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            tensors[f"{layer}.self_attn.{name}_proj.weight"] = tensor(count * head_dim, hidden)
            if kind == "qwen2":
                tensors[f"{layer}.self_attn.{name}_proj.bias"] = tensor(count * head_dim)
        tensors[f"{layer}.self_attn.o_proj.weight"] = tensor(hidden, heads * head_dim)
        if kind.startswith("qwen3"):
            tensors[f"{layer}.self_attn.q_norm.weight"] = tensor(head_dim)
            tensors[f"{layer}.self_attn.k_norm.weight"] = tensor(head_dim)
        if kind == "qwen3_moe" and i not in config["mlp_only_layers"]:
            tensors[f"{layer}.mlp.gate.weight"] = tensor(config["num_experts"], hidden)
            mlps = {
                f"{layer}.mlp.experts.{e}": config["moe_intermediate_size"]
                for e in range(config["num_experts"])
            }
        else:
            mlps = {f"{layer}.mlp": size}
        for mlp, width in mlps.items():
            tensors[f"{mlp}.gate_proj.weight"] = tensor(width, hidden)
            tensors[f"{mlp}.up_proj.weight"] = tensor(width, hidden)
            tensors[f"{mlp}.down_proj.weight"] = tensor(hidden, width)
    return tensors


GGUF_NAMES = {
    "model.embed_tokens.": "token_embd.",
    "model.norm.": "output_norm.",
    "lm_head.": "output.",
    "model.layers.": "blk.",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate.": "ffn_gate_inp.",
}


def as_gguf(config: Mapping[str, Any], checkpoint: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Returns the checkpoint in llama.cpp's names and order: stacked experts, interleaved rotary rows."""
    stored: dict[str, np.ndarray] = {}
    experts: dict[str, list[np.ndarray]] = {}
    for name, tensor in checkpoint.items():
        values = tensor.numpy()
        if ".experts." in name:
            before, after = name.split(".mlp.experts.")
            projection = after.split(".")[1].removesuffix("_proj")
            layer = before.removeprefix("model.layers.")
            experts.setdefault(f"blk.{layer}.ffn_{projection}_exps.weight", []).append(values)
            continue
        if config["model_type"] == "llama" and (".q_proj." in name or ".k_proj." in name):
            head_dim = config["hidden_size"] // config["num_attention_heads"]
            rows = np.arange(head_dim).reshape(2, -1).T.reshape(-1)  # 0, D/2, 1, D/2 + 1, ...
            values = values.reshape(-1, head_dim, values.shape[-1])[:, rows].reshape(values.shape)
        for theirs, ours in GGUF_NAMES.items():
            name = name.replace(theirs, ours)
        stored[name] = values
    return {**stored, **{name: np.stack(each) for name, each in experts.items()}}


def gguf_metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    arch = config["model_type"].replace("_", "")
    metadata = {
        "general.architecture": arch,
        f"{arch}.vocab_size": config["vocab_size"],
        f"{arch}.block_count": config["num_hidden_layers"],
        f"{arch}.context_length": config["max_position_embeddings"],
        f"{arch}.embedding_length": config["hidden_size"],
        f"{arch}.feed_forward_length": config["intermediate_size"],
        f"{arch}.attention.head_count": config["num_attention_heads"],
        f"{arch}.attention.head_count_kv": config["num_key_value_heads"],
        f"{arch}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{arch}.rope.freq_base": config["rope_theta"],
        "tokenizer.ggml.eos_token_id": 2,
    }
    if "head_dim" in config:
        metadata[f"{arch}.attention.key_length"] = config["head_dim"]
    if "num_experts" in config:
        metadata[f"{arch}.expert_count"] = config["num_experts"]
        metadata[f"{arch}.expert_used_count"] = config["num_experts_per_tok"]
        metadata[f"{arch}.expert_feed_forward_length"] = config["moe_intermediate_size"]
    return metadata


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray | tuple[int, tuple[int, ...], bytes]],
    *,
    version: int = 3,
) -> Path:
    """Writes a GGUF file; a tensor is an fp32 array or (type number, shape, bytes)."""
    header, data = bytearray(), bytearray()
    header += b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    for key, value in metadata.items():
        header += _string(key) + _value(value)
    for name, tensor in tensors.items():
        kind, shape, raw = (0, tensor.shape, tensor.tobytes()) if isinstance(tensor, np.ndarray) else tensor
        data += bytes(-len(data) % 32)
        header += _string(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        header += struct.pack("<IQ", kind, len(data))
        data += raw
    path.write_bytes(bytes(header) + bytes(-len(header) % 32) + bytes(data))
    return path


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value: Any) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    if all(isinstance(item, int) for item in value):
        return struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)
    return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(_string(item) for item in value)


def write_config(folder: Path, config: Mapping[str, Any]) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps(config))
    return file
