"""One step's input of the model, as tensors on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.lora import Segments


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """B rows, T tokens one behind the other. The first `num_decodes` rows bring one token, the rest chunks.

    tokens_T   | d | d | d | c c c c c c | c c |      chunk_starts [0, 6, 8]
    """

    tokens_T: torch.Tensor
    """int64"""
    positions_T: torch.Tensor
    """int64"""
    slots_T: torch.Tensor
    """int64; where each token's KV goes: block id * block size + place in the block."""
    block_tables_BM: torch.Tensor
    """int32"""
    chunk_starts: torch.Tensor
    """int32 [B - num_decodes + 1]; counted from the first token of the first chunk."""
    context_lens_B: torch.Tensor
    """int32; the step's own tokens included."""
    sampled_rows_S: torch.Tensor | None
    """int64; rows of T that predict a token. None: all do."""
    num_decodes: int
    max_query_len: int
    """Of the chunks; 0 without any."""
    max_context_len: int
    """Of all rows; at least that."""
    adapters: Segments | None = None
    """Which tokens use which LoRA adapter; None: none."""

    @property
    def num_rows(self) -> int:
        """B."""
        return len(self.context_lens_B)
