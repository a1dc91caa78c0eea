"""A decoder-only transformer over a paged KV cache: Llama, Mistral, Qwen 2 and 3, SmolLM2.

Tokens of all sequences of a step lie one behind the other, T of them; there is no prefill phase and no decode
phase here either: a sequence brings as many tokens as its plan says.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.rope import cos_sin_table
from realengine.architecture import Architecture
from realengine.backend import Backend
from realengine.batch import Batch


class KvCache:
    """Keys and values of all layers in blocks; block 0 belongs to nobody."""

    def __init__(
        self,
        architecture: Architecture,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_blocks + 1, block_size, architecture.num_kv_heads, architecture.head_dim)
        self.block_size = block_size
        self.layers = [
            (torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))
            for _ in range(architecture.num_layers)
        ]


class Decoder:
    """The model's weights, and how a step's tokens go through them."""

    def __init__(
        self,
        architecture: Architecture,
        weights: dict[str, torch.Tensor],
        backend: Backend,
        max_model_len: int,
    ) -> None:
        if architecture.num_experts:
            raise ValueError("mixtures of experts are not served by the engine yet; choose a dense model")
        self.architecture = architecture
        self._weights = weights
        self._backend = backend
        embedding = weights["embedding.weight"]
        self.dtype, self.device = embedding.dtype, embedding.device
        self._cos_sin = cos_sin_table(
            architecture.head_dim,
            max_model_len,
            base=architecture.rope_theta,
            scaling=architecture.rope_scaling,
            device=self.device,
        )

    @torch.inference_mode()
    def logits(self, batch: Batch, cache: KvCache) -> torch.Tensor:
        """Logits [S, V] of the sampled rows; writes the KV of all tokens."""
        weights, kernels, eps = self._weights, self._backend, self.architecture.rms_norm_eps
        residual = F.embedding(batch.tokens_T, weights["embedding.weight"])
        hidden = kernels.rms_norm(residual, weights["layers.0.attention_norm.weight"], eps)
        num_layers = self.architecture.num_layers
        for i in range(num_layers):
            hidden = self._attend(i, hidden, batch, cache)
            hidden, residual = kernels.add_rms_norm(
                hidden, residual, weights[f"layers.{i}.mlp_norm.weight"], eps
            )
            hidden = kernels.silu_mul(F.linear(hidden, weights[f"layers.{i}.gate_up.weight"]))
            hidden = F.linear(hidden, weights[f"layers.{i}.down.weight"])
            if i + 1 < num_layers:
                next_norm = weights[f"layers.{i + 1}.attention_norm.weight"]
                hidden, residual = kernels.add_rms_norm(hidden, residual, next_norm, eps)
        if batch.sampled_rows_S is not None:
            hidden, residual = hidden[batch.sampled_rows_S], residual[batch.sampled_rows_S]
        hidden, _ = kernels.add_rms_norm(hidden, residual, weights["norm.weight"], eps)
        return F.linear(hidden, weights["head.weight"])

    def _attend(self, layer: int, hidden: torch.Tensor, batch: Batch, cache: KvCache) -> torch.Tensor:
        weights, kernels, spec = self._weights, self._backend, self.architecture
        name = f"layers.{layer}."
        qkv = F.linear(hidden, weights[name + "qkv.weight"], weights.get(name + "qkv.bias"))
        num_q, num_kv, head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        heads = qkv.view(-1, num_q + 2 * num_kv, head_dim)
        q, k, v = torch.split(heads, [num_q, num_kv, num_kv], dim=1)
        if spec.qk_norm:
            q, k = kernels.qk_norm(
                q, k, weights[name + "q_norm.weight"], weights[name + "k_norm.weight"], spec.rms_norm_eps
            )
        keys, values = cache.layers[layer]
        q = kernels.rope_and_write_kv(q, k, v, batch.positions_T, self._cos_sin, keys, values, batch.slots_T)
        attended = self._attention(q, keys, values, batch, spec.window(layer))
        return F.linear(attended.reshape(len(hidden), num_q * head_dim), weights[name + "o.weight"])

    def _attention(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, batch: Batch, window: int | None
    ) -> torch.Tensor:
        """Decodes by the kernel that splits their context, chunks by the one that tiles their queries."""
        num_decodes, num_rows = batch.num_decodes, batch.num_rows
        attended = []
        if num_decodes:
            attended.append(
                self._backend.decode_attention(
                    q[:num_decodes],
                    keys,
                    values,
                    batch.block_tables_BM[:num_decodes],
                    batch.context_lens_B[:num_decodes],
                    max_context_len=batch.max_context_len,
                    window=window,
                )
            )
        if num_decodes < num_rows:
            attended.append(
                self._backend.prefill_attention(
                    q[num_decodes:],
                    keys,
                    values,
                    batch.block_tables_BM[num_decodes:],
                    batch.query_start_loc[num_decodes:] - num_decodes,
                    batch.context_lens_B[num_decodes:],
                    max_query_len=batch.max_query_len,
                    max_context_len=batch.max_context_len,
                    window=window,
                )
            )
        return attended[0] if len(attended) == 1 else torch.cat(attended)
