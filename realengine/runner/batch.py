"""Model input of one step, as tensors on the device; copies of small arrays to the device without waiting."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.attention import Contexts
from kernels.lora import Segments
from kernels.prefill_attention import DraftTree


class TreeRows(NamedTuple):
    """The rows after the decodes that bring the nodes of a token tree instead of consecutive tokens."""

    tree: DraftTree
    num_rows: int
    num_tokens: int


class WholeStep(NamedTuple):
    """The tokens of a step that context-parallel ranks divide (`realengine.model.context_cut`)."""

    bounds: tuple[int, ...]
    """The first token of each rank, and the number of all tokens."""
    own: slice
    """This rank's tokens."""
    positions_T: torch.Tensor
    """Positions of all tokens."""
    slots_T: torch.Tensor
    """Positions of the KV of all tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """B rows with T tokens, concatenated. The first `num_decodes` rows bring one token, the others chunks.

    tokens_T   | d | d | d | c c c c c c | c c |      chunk_starts [0, 6, 8]
    """

    tokens_T: torch.Tensor
    """Token ids, int64."""
    positions_T: torch.Tensor
    """Positions, int64."""
    slots_T: torch.Tensor
    """Position of each token's KV, int64: block id * block size + offset in the block."""
    block_tables_BM: torch.Tensor
    """Block tables, int32."""
    chunk_starts: torch.Tensor
    """int32 [B - num_decodes + 1]; counted from the first token of the first chunk."""
    context_lens_B: torch.Tensor
    """Context lengths, int32; the step's own tokens included."""
    sampled_rows_S: torch.Tensor | None
    """Rows of T that predict a token, int64. None: all do."""
    num_decodes: int
    max_query_len: int
    """Longest query of the chunks; 0 without any."""
    max_context_len: int
    """Upper bound of the context lengths of all rows."""
    adapters: Segments | None = None
    """LoRA adapters of the tokens; None: none."""
    tree: TreeRows | None = None
    """The rows with token trees, which come before the other chunks; None: there are none."""

    step: WholeStep | None = None
    """Of a context-parallel rank, which has some tokens of a longer step; None: they are all."""

    _contexts: dict[tuple[int, int], Contexts] = field(default_factory=dict, init=False, repr=False)

    @property
    def num_rows(self) -> int:
        """Number of rows, B."""
        return len(self.context_lens_B)

    def contexts(self, first: int, end: int) -> Contexts:
        """Returns the contexts of rows first to end; all layers get the same, and share what they compute."""
        found = self._contexts.get((first, end))
        if found is None:
            rows = slice(first, end)
            tables_BM, lens_B = self.block_tables_BM[rows], self.context_lens_B[rows]
            found = self._contexts[first, end] = Contexts(tables_BM, lens_B, self.max_context_len, {})
        return found


class Upload:
    """Two pinned buffers, used in turn: the copy of one step may still run while the next step is packed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers = [torch.empty(0, dtype=torch.int32)] * 2
        self._copied: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0

    def stage(self, words: NDArray[np.int32]) -> torch.Tensor:
        """Returns the words in pinned memory, to be copied to the device; on a CPU, the words."""
        if self._device.type == "cpu":
            return torch.from_numpy(words)
        last_copied = torch.cuda.Event()
        last_copied.record()  # after the copy of the previous step, which was queued
        self._copied[self._turn] = last_copied
        self._turn ^= 1
        copied = self._copied[self._turn]
        if copied is not None:
            copied.synchronize()
        if len(self._buffers[self._turn]) < len(words):
            size = 1 << (len(words) - 1).bit_length()
            self._buffers[self._turn] = torch.empty(size, dtype=torch.int32, pin_memory=True)
        staged = self._buffers[self._turn][: len(words)]
        staged.copy_(torch.from_numpy(words))
        return staged

    def sent(self, words: NDArray[np.int32]) -> torch.Tensor:
        """Returns the words of a step on the device."""
        return self.stage(words).to(self._device, non_blocking=True)

    def copied(self, array: NDArray[np.int32]) -> torch.Tensor:
        """Copies a rarely sent array to the device; may wait for it."""
        return torch.from_numpy(array).to(self._device)
