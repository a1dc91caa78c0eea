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

from dataclasses import replace
from itertools import pairwise

import torch
import torch.nn.functional as F

from realengine.runner.batch import Batch, WholeStep
from realengine.runner.parallel import Group


def own_part(batch: Batch, group: Group) -> Batch:
    """Returns a rank's part of a step; chunks of which it has no token have no queries.

    Steps of decodes only, and those of fewer tokens than ranks, are not divided.
    """
    num_tokens, num_decodes, size = len(batch.tokens_T), batch.num_decodes, group.world_size
    if size == 1 or batch.num_rows == num_decodes or num_tokens < size:
        return batch
    bounds = tuple(num_tokens * rank // size for rank in range(size + 1))
    first, end = bounds[group.rank : group.rank + 2]
    tokens, rows = slice(first, end), slice(min(first, num_decodes), min(end, num_decodes))
    start, stop = (max(edge - num_decodes, 0) for edge in (first, end))  # among the tokens of chunks
    starts, ends = batch.chunk_starts[:-1], batch.chunk_starts[1:]
    num_behind = torch.minimum((ends - stop).clamp(min=0), ends - starts)  # of each chunk, on later ranks
    tables, lens = batch.block_tables_BM, batch.context_lens_B
    adapters = batch.adapters
    if adapters is not None:
        adapters = adapters._replace(starts=adapters.starts.clamp(first, end) - first)
    return replace(
        batch,
        tokens_T=batch.tokens_T[tokens],
        positions_T=batch.positions_T[tokens],
        slots_T=batch.slots_T[tokens],
        block_tables_BM=torch.cat([tables[rows], tables[num_decodes:]]),
        chunk_starts=batch.chunk_starts.clamp(start, stop) - start,
        context_lens_B=torch.cat([lens[rows], lens[num_decodes:] - num_behind]),
        num_decodes=rows.stop - rows.start,
        max_query_len=min(batch.max_query_len, max(stop - start, 1)),
        adapters=adapters,
        step=WholeStep(bounds, tokens, batch.positions_T, batch.slots_T),
    )


def gathered(x_TN: torch.Tensor, step: WholeStep, group: Group) -> torch.Tensor:
    """Returns the rows of all tokens of a step, of which each rank has its own."""
    sizes = [end - first for first, end in pairwise(step.bounds)]
    longest = max(sizes)
    padded = F.pad(x_TN.flatten(1), (0, 0, 0, longest - len(x_TN)))
    parts = group.gather_rows(padded).split(longest)
    rows = torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])
    return rows.view(-1, *x_TN.shape[1:])


def sampled(x_TN: torch.Tensor, rows_S: torch.Tensor, step: WholeStep, group: Group) -> torch.Tensor:
    """Returns some rows of all tokens of a step, which come from the ranks that have them."""
    first, end = step.own.start, step.own.stop
    is_own_S = (rows_S >= first) & (rows_S < end)
    own_SN = x_TN[torch.where(is_own_S, rows_S - first, 0)]
    return group.all_reduce(own_SN.masked_fill(~is_own_S[:, None], 0))
