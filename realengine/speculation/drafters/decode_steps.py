"""Batches of the steps in which a draft is made, on a KV cache with the target's block ids.

Sequence n drafts from its newest token at position P_n. Step k computes draft token k at P_n + k, whose KV
slot is that of its position. Nothing is read back to the host, and shapes depend on the number of sequences
only. Positions from the end of the context on have no KV slot; what is drafted there is never accepted.

Letters of array names: N sequences that draft, X tokens of each, M blocks, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from realengine.model.kv_cache import KvCache
from realengine.runner.batch import Batch
from realengine.speculation.drafter import Drafts, Start
from realengine.speculation.drafters.choices import Choice


def num_kv_blocks(cache: KvCache) -> int:
    """Returns the number of blocks of a cache that sequences may own."""
    return len(cache.layers[0][0]) - 1


def max_len_in(cache: KvCache, max_model_len: int) -> int:
    """Returns the number of tokens of the longest sequence: of the model, or of all blocks."""
    return min(max_model_len, num_kv_blocks(cache) * cache.block_size)


@dataclass(frozen=True, slots=True)
class DraftPlaces:
    """Where the sequences of a draft have their tokens and their KV.

    max_len: positions from here on have no KV slot.
    """

    start: Start
    block_size: int
    max_len: int

    @classmethod
    def of(cls, start: Start, cache: KvCache, max_model_len: int) -> DraftPlaces:
        """Returns the places of sequences in a cache."""
        room = start.tables_NM.shape[1] * cache.block_size
        return cls(start, cache.block_size, min(max_len_in(cache, max_model_len), room))

    def positions(self, distances_X: torch.Tensor) -> torch.Tensor:
        """Returns the positions [N, X] so far behind the newest token, or the last position."""
        return (self.start.positions_N[:, None] + distances_X).clamp(max=self.max_len - 1)

    def slots(self, distances_X: torch.Tensor) -> torch.Tensor:
        """Returns the KV slots [N, X] so far behind that of the newest token; -1: there is none."""
        wanted_NX = self.start.positions_N[:, None] + distances_X
        places_NX = wanted_NX.clamp(max=self.max_len - 1)
        ids_NX = self.start.tables_NM.gather(1, places_NX // self.block_size).long()
        slots_NX = ids_NX * self.block_size + places_NX % self.block_size
        return torch.where(wanted_NX < self.max_len, slots_NX, -1)

    def context_lens(self, num_tokens: int) -> torch.Tensor:
        """Returns the context lengths [N] with so many tokens behind the newest token's position."""
        return (self.start.positions_N + num_tokens).clamp(max=self.max_len).int()

    def decode(self, tokens_N: torch.Tensor, step: int) -> Batch:
        """Returns the batch of a decode step: one token of each sequence, `step` behind its newest one."""
        start, distance_1 = self.start, torch.full((1,), step, device=tokens_N.device)
        return Batch(
            tokens_T=tokens_N,
            positions_T=self.positions(distance_1)[:, 0],
            slots_T=self.slots(distance_1)[:, 0],
            block_tables_BM=start.tables_NM,
            chunk_starts=torch.zeros(1, dtype=torch.int32, device=tokens_N.device),
            context_lens_B=self.context_lens(step + 1),
            sampled_rows_S=None,
            num_decodes=len(tokens_N),
            max_query_len=0,
            max_context_len=min(start.max_context_len + step, self.max_len),
        )


def joined(decodes: Batch, chunks: Batch) -> Batch:
    """Returns one batch of decode rows, then of the rows of `chunks`, which has no adapters and no trees.

    Each layer writes the KV of all rows before any row attends, so a decode row sees the tokens of its
    sequence that `chunks` brings.
    """
    width = max(decodes.block_tables_BM.shape[1], chunks.block_tables_BM.shape[1])
    tables = [
        torch.nn.functional.pad(batch.block_tables_BM, (0, width - batch.block_tables_BM.shape[1]))
        for batch in (decodes, chunks)
    ]
    return replace(
        chunks,
        tokens_T=torch.cat([decodes.tokens_T, chunks.tokens_T]),
        positions_T=torch.cat([decodes.positions_T, chunks.positions_T]),
        slots_T=torch.cat([decodes.slots_T, chunks.slots_T]),
        block_tables_BM=torch.cat(tables),
        context_lens_B=torch.cat([decodes.context_lens_B, chunks.context_lens_B]),
        num_decodes=decodes.num_decodes + chunks.num_decodes,
        max_context_len=max(decodes.max_context_len, chunks.max_context_len),
        sampled_rows_S=None,
        adapters=None,
    )


def drafted_chain(
    num_levels: int,
    places: DraftPlaces,
    logits_of: Callable[[Batch, slice], torch.Tensor],
    choice: Choice,
    first: Batch | None = None,
) -> Drafts:
    """Drafts chains of num_levels tokens in decode steps, each with the tokens of the step before.

    logits_of: computes the logits of some rows of a batch. first: the batch of the first step, if it has more
    rows than those of the newest tokens, which come first.
    """
    tokens_N = places.start.newest_N
    rows, drafted = slice(len(tokens_N)), []
    for step in range(num_levels):
        batch = first if first is not None and step == 0 else places.decode(tokens_N, step)
        tokens_N = choice.tokens(logits_of(batch, rows))
        drafted.append(tokens_N)
    return Drafts(torch.stack(drafted, dim=1), choice.probs_NKV)
