"""Context parallelism of prompts: the ranks divide the tokens of a step, and gather keys and values.

    tokens of a step   | d d | c c c c c | c c c |        two decodes, chunks of 5 and 3 tokens; two ranks
    rank 0             | d d | c c c     |
    rank 1                         | c c | c c c |

Each rank computes projections, attention and MLPs of its tokens. In every layer the keys and values of all
tokens are gathered, and each rank writes all of them, so that its tokens see all before them (as vLLM's
prefill context parallelism with all-gather; a ring would send the same, part by part). Steps of decodes only
are computed whole by every rank. The shares are consecutive and equal in tokens, not in the keys that they
see, so the last rank has the most attention to compute.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from realengine.runner.batch import Batch
from realengine.runner.parallel import Group


class ContextCut(NamedTuple):
    """The tokens of a step that a rank computes, first to end - 1, among those of all ranks."""

    group: Group
    bounds: tuple[int, ...]
    """The first token of each rank, and the number of all tokens."""
    first: int
    end: int
    positions_T: torch.Tensor
    """Positions of all tokens."""
    slots_T: torch.Tensor
    """Positions of the KV of all tokens."""

    @classmethod
    def of(cls, batch: Batch, group: Group) -> ContextCut | None:
        """Returns a rank's part of a step; None: each rank computes all of it."""
        num_tokens, size = len(batch.tokens_T), group.world_size
        if size == 1 or batch.num_rows == batch.num_decodes or num_tokens < size:
            return None
        bounds = tuple(num_tokens * rank // size for rank in range(size + 1))
        first, end = bounds[group.rank : group.rank + 2]
        return cls(group, bounds, first, end, batch.positions_T, batch.slots_T)

    def own(self, batch: Batch) -> Batch:
        """Returns the batch of this rank's tokens; chunks of which it has none have no queries."""
        num_decodes = batch.num_decodes
        before, after = (min(edge, num_decodes) for edge in (self.first, self.end))
        start, stop = (max(edge - num_decodes, 0) for edge in (self.first, self.end))
        ends = batch.chunk_starts[1:]
        behind = torch.minimum((ends - stop).clamp(min=0), ends - batch.chunk_starts[:-1])
        rows = slice(before, after)
        tables, lens = batch.block_tables_BM, batch.context_lens_B
        tokens = slice(self.first, self.end)
        adapters = batch.adapters
        if adapters is not None:
            starts = (adapters.starts.clamp(self.first, self.end) - self.first).to(adapters.starts.dtype)
            adapters = adapters._replace(starts=starts)
        return Batch(
            tokens_T=batch.tokens_T[tokens],
            positions_T=batch.positions_T[tokens],
            slots_T=batch.slots_T[tokens],
            block_tables_BM=torch.cat([tables[rows], tables[num_decodes:]]),
            chunk_starts=(batch.chunk_starts.clamp(start, stop) - start).to(batch.chunk_starts.dtype),
            context_lens_B=torch.cat([lens[rows], (lens[num_decodes:] - behind).to(lens.dtype)]),
            sampled_rows_S=batch.sampled_rows_S,
            num_decodes=after - before,
            max_query_len=min(batch.max_query_len, max(stop - start, 1)),
            max_context_len=batch.max_context_len,
            adapters=adapters,
            cut=self,
        )

    def gathered(self, x_TN: torch.Tensor) -> torch.Tensor:
        """Returns the rows of all tokens, from each rank those of its own."""
        sizes = [end - first for first, end in zip(self.bounds, self.bounds[1:], strict=False)]
        longest = max(sizes)
        padded = F.pad(x_TN.flatten(1), (0, 0, 0, longest - len(x_TN)))
        rows = self.group.gather_rows(padded).split(longest)
        found = torch.cat([part[:size] for part, size in zip(rows, sizes, strict=True)])
        return found.view(-1, *x_TN.shape[1:])

    def sampled(self, x_TN: torch.Tensor, rows_S: torch.Tensor) -> torch.Tensor:
        """Returns rows of all tokens, which are given by the ranks that have them."""
        is_own_S = (rows_S >= self.first) & (rows_S < self.end)
        own_SN = x_TN[torch.where(is_own_S, rows_S - self.first, 0)]
        return self.group.all_reduce(own_SN.masked_fill(~is_own_S[:, None], 0))
