"""A decoder with multi-head latent attention (DeepSeek-V2, 2024), in both of its forms.

The cache holds one row per token: latent numbers from which the keys and values of all heads are made, and
the rotated key that they share. Absorbed: the projections of keys and values are applied to the query and to
the result, so attention reads the rows as they are; decodes and short chunks use this form. Expanded: keys
and values of each head are made from the rows of the whole context, in blocks of their own; this takes fewer
operations if a chunk has many queries.

Letters: T tokens, H query heads, C width of a row, V latent numbers, R rotated ones, D numbers of a query
head, L tokens of the longest context.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kernels.attention import AttentionOptions, Contexts
from kernels.paged_kv import LatentKv, PagedKv
from kernels.prefill_attention import Chunks
from kernels.rope import Rotation
from realengine.model.backend import Backend
from realengine.model.decoder import Decoder, dense, linear_of
from realengine.model.linear import Linear
from realengine.model.quantization import Weights
from realengine.model.variants import LatentSizes
from realengine.runner.batch import Batch

NORM_EPS = 1e-6  # of the norms of latent rows, whatever rms_norm_eps is
EXPANDED_BYTES = 1 << 29
"""Most memory for the keys and values of the expanded form; longer contexts use the absorbed form."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LatentLayer:
    """Weights of a layer's latent attention, or a tensor-parallel rank's heads of them."""

    q_a: Linear | None
    q_a_norm: torch.Tensor | None
    kv_a: Linear
    kv_a_norm: torch.Tensor
    up_keys: torch.Tensor
    """[H, nope_dim, V]: from a latent row to the unrotated key of each head."""
    up_values: torch.Tensor
    """[H, value_dim, V]: from a latent row to the value of each head."""


class LatentDecoder(Decoder):
    """A `Decoder` of a model with latent attention. Its arguments are those of `Decoder`."""

    latent: LatentSizes

    def _prepare(self, weights: Weights, max_model_len: int) -> None:
        latent = self.architecture.latent
        assert latent is not None
        self.latent = latent
        self._latent_layers = {
            i: _latent_layer(i, latent, self._num_heads, weights, self._backend) for i in self.stage.layers
        }

    def attend(self, index: int, hidden: torch.Tensor, batch: Batch, kv: PagedKv | LatentKv) -> torch.Tensor:
        """Computes the attention of a layer, its projections included, and writes the row of all tokens."""
        assert isinstance(kv, LatentKv)
        latent, layer = self.latent, self._latent_layers[index]
        narrow = hidden
        if layer.q_a is not None:
            narrow = self._backend.rms_norm(layer.q_a(hidden), layer.q_a_norm, NORM_EPS)
        q_THD = (
            self._layers[index]
            .qkv(narrow)
            .view(len(hidden), self._num_heads, latent.nope_dim + latent.rope_dim)
        )
        q_nope_THN, q_rope_THR = q_THD.split([latent.nope_dim, latent.rope_dim], dim=2)
        rows_TC = layer.kv_a(hidden)
        rotated_THR = torch.empty_like(q_rope_THR, memory_format=torch.contiguous_format)
        rotation = Rotation(batch.positions_T, self._cos_sin, latent.interleaved)
        self._backend.mla_rope_and_write(
            q_rope_THR, rows_TC, layer.kv_a_norm, NORM_EPS, rotation, kv.rows, batch.slots_T, rotated_THR
        )
        out_THV = hidden.new_empty(len(hidden), self._num_heads, latent.value_dim)
        num_decodes = batch.num_decodes
        if num_decodes:
            decodes = slice(num_decodes)
            contexts = batch.contexts(0, num_decodes)
            out_THV[decodes] = self._absorbed(
                layer, q_nope_THN[decodes], rotated_THR[decodes], kv.rows, contexts
            )
        if num_decodes < batch.num_rows:
            chunks = slice(num_decodes, None)
            attended = self._expanded if self._expands(batch) else self._absorbed_chunks
            out_THV[chunks] = attended(layer, q_nope_THN[chunks], rotated_THR[chunks], kv.rows, batch)
        return self.group.all_reduce(self._layers[index].o(out_THV.flatten(1)))

    def _absorbed(
        self,
        layer: LatentLayer,
        q_nope_THN: torch.Tensor,
        q_rope_THR: torch.Tensor,
        rows_NPC: torch.Tensor,
        contexts: Contexts,
    ) -> torch.Tensor:
        """Returns the attention [T, H, value_dim] of one query per context."""
        latent = self.latent
        q_THC = q_rope_THR.new_empty(*q_rope_THR.shape[:2], latent.width)
        q_THC[..., : latent.rank] = torch.bmm(q_nope_THN.transpose(0, 1), layer.up_keys).transpose(0, 1)
        q_THC[..., latent.rank :] = q_rope_THR
        attended_THV: torch.Tensor = self._backend.mla_decode(
            q_THC, rows_NPC, contexts, scale=latent.scale, latent_dim=latent.rank
        )
        return torch.bmm(attended_THV.transpose(0, 1), layer.up_values.transpose(1, 2)).transpose(0, 1)

    def _absorbed_chunks(
        self,
        layer: LatentLayer,
        q_nope_THN: torch.Tensor,
        q_rope_THR: torch.Tensor,
        rows_NPC: torch.Tensor,
        batch: Batch,
    ) -> torch.Tensor:
        """Returns the attention of chunks, each token of which has a context of its own."""
        first = batch.num_decodes
        tokens_T = torch.arange(len(q_nope_THN), device=q_nope_THN.device, dtype=torch.int32)
        row_T = torch.searchsorted(batch.chunk_starts[1:], tokens_T, right=True)
        lens_T = (batch.positions_T[first:] + 1).int()
        contexts = Contexts(batch.block_tables_BM[first:][row_T], lens_T, batch.max_context_len)
        return self._absorbed(layer, q_nope_THN, q_rope_THR, rows_NPC, contexts)

    def _expands(self, batch: Batch) -> bool:
        """Returns whether chunks are computed in the expanded form."""
        latent, num_rows = self.latent, batch.num_rows - batch.num_decodes
        bytes_needed = expanded_bytes(latent, self._num_heads, num_rows * batch.max_context_len, self.dtype)
        num_queries = (len(batch.tokens_T) - batch.num_decodes) / num_rows
        return num_queries >= min_expanded_queries(latent) and bytes_needed <= EXPANDED_BYTES

    def _expanded(
        self,
        layer: LatentLayer,
        q_nope_THN: torch.Tensor,
        q_rope_THR: torch.Tensor,
        rows_NPC: torch.Tensor,
        batch: Batch,
    ) -> torch.Tensor:
        """Returns the attention of chunks over keys and values that are made for this call.

        Values have as many numbers as keys, of which those behind value_dim are zeros.
        """
        latent, first = self.latent, batch.num_decodes
        block_size, width = rows_NPC.shape[1], _expanded_width(latent)
        num_blocks = -(-batch.max_context_len // block_size)
        tables_BM = batch.block_tables_BM[first:, :num_blocks]
        rows_SC = rows_NPC[tables_BM.flatten()].flatten(0, 1)
        latents_SV, keys_SR = rows_SC.split([latent.rank, latent.rope_dim], dim=1)
        shape = (tables_BM.numel(), block_size, self._num_heads, width)
        keys, values = (rows_SC.new_zeros(shape) for _ in range(2))
        flat_keys, flat_values = (x.view(-1, *shape[2:]) for x in (keys, values))
        made_keys, made_values = (
            F.linear(latents_SV, up.flatten(0, 1)).view(len(rows_SC), self._num_heads, -1)
            for up in (layer.up_keys, layer.up_values)
        )
        flat_keys[..., : latent.nope_dim] = made_keys
        flat_keys[..., latent.nope_dim : latent.nope_dim + latent.rope_dim] = keys_SR[:, None]
        flat_values[..., : latent.value_dim] = made_values
        q_THD = q_nope_THN.new_zeros(*q_nope_THN.shape[:2], width)
        q_THD[..., : latent.nope_dim] = q_nope_THN
        q_THD[..., latent.nope_dim : latent.nope_dim + latent.rope_dim] = q_rope_THR
        own_BM = torch.arange(tables_BM.numel(), device=rows_SC.device, dtype=torch.int32)
        contexts = Contexts(own_BM.view(tables_BM.shape), batch.context_lens_B[first:], batch.max_context_len)
        out_THD = torch.empty_like(q_THD)
        self._backend.prefill_attention(
            q_THD,
            PagedKv(keys, values),
            contexts,
            Chunks(batch.chunk_starts, batch.max_query_len),
            AttentionOptions(scale=latent.scale),
            out_THD=out_THD,
        )
        return out_THD[..., : latent.value_dim]


def _expanded_width(latent: LatentSizes) -> int:
    return -(-max(latent.nope_dim + latent.rope_dim, latent.value_dim) // 16) * 16


def expanded_bytes(latent: LatentSizes, num_heads: int, num_tokens: int, dtype: torch.dtype) -> int:
    """Returns the bytes of the keys and values of num_tokens tokens in the expanded form."""
    return 2 * num_tokens * num_heads * _expanded_width(latent) * dtype.itemsize


def min_expanded_queries(latent: LatentSizes) -> float:
    """Returns the queries of a chunk from which on making keys and values takes fewer operations.

    Absorbed, a query and a key take width + rank products; expanded, nope_dim + rope_dim + value_dim, and
    each key rank * (nope_dim + value_dim) to be made. 186 for DeepSeek-V2 and V3.
    """
    made = latent.rank * (latent.nope_dim + latent.value_dim)
    return made / (latent.width + latent.rank - latent.nope_dim - latent.rope_dim - latent.value_dim)


def _latent_layer(
    index: int, latent: LatentSizes, num_heads: int, weights: Weights, backend: Backend
) -> LatentLayer:
    name = f"layers.{index}."
    up = dense(weights, f"{name}kv_b.weight").view(num_heads, -1, latent.rank)
    up_keys, up_values = up.split([latent.nope_dim, latent.value_dim], dim=1)
    factored = latent.query_rank is not None
    return LatentLayer(
        q_a=linear_of(f"{name}q_a", weights, backend) if factored else None,
        q_a_norm=dense(weights, f"{name}q_a_norm.weight") if factored else None,
        kv_a=linear_of(f"{name}kv_a", weights, backend),
        kv_a_norm=dense(weights, f"{name}kv_a_norm.weight"),
        up_keys=up_keys.contiguous(),
        up_values=up_values.contiguous(),
    )
