"""Experts of several data-parallel ranks: tokens travel to the ranks with their experts, and outputs back.

Each rank has tokens of its own, and computes its experts for the tokens of all. There are two ways:

    allgather_reducescatter   all tokens go to all ranks, padded to the longest rank's; the outputs are summed
                              and each rank gets its part. For few tokens
    all_to_all                a token goes to the ranks with an expert that it has chosen. The ranks tell each
                              other the numbers first, for which the host waits. For many tokens

They are named after vLLM's `all2all_backend`. With tensor parallelism the ranks of equal number exchange
tokens among each other, and the outputs are summed over the tensor-parallel ranks afterwards, as always.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from kernels.moe_routing import Routing
from realengine.runner.parallel import ExpertRanks, Group

BACKENDS = ("allgather_reducescatter", "all_to_all")
MOST_GATHERED = 256
"""Tokens of the longest rank up to which all are gathered, if no way is chosen."""


class TokenExchange:
    """The data-parallel ranks with the same number among the tensor-parallel ones."""

    def __init__(self, group: Group, ranks: ExpertRanks, tensor_rank: int, backend: str | None) -> None:
        """Creates one rank's end.

        group: these ranks. ranks: those of the experts. backend: of `BACKENDS`; None: by the tokens.
        """
        self._group = group
        self._backend = backend
        size = len(ranks.slots[0])
        stride = ranks.group.world_size // group.world_size
        holders = [(place * stride + tensor_rank) // ranks.num_shares for place in range(group.world_size)]
        self._firsts = [size * holder for holder in holders]
        self._size = size
        self.rank_tokens: Sequence[int] = ()
        """Tokens of each rank in the step that is computed, set before it."""

    def mixed(
        self, x_TH: torch.Tensor, routing: Routing, compute: Callable[[torch.Tensor, Routing], torch.Tensor]
    ) -> torch.Tensor:
        """Returns the outputs of this rank's tokens, summed over the ranks of the group.

        routing: with slots in place of experts. compute: this rank's experts on any tokens.
        """
        longest = max(self.rank_tokens)
        backend = self._backend or BACKENDS[longest > MOST_GATHERED]
        if backend == BACKENDS[0]:
            return self._gathered(x_TH, routing, compute, longest)
        return self._sent(x_TH, routing, compute)

    def _gathered(
        self,
        x_TH: torch.Tensor,
        routing: Routing,
        compute: Callable[[torch.Tensor, Routing], torch.Tensor],
        longest: int,
    ) -> torch.Tensor:
        padding = (0, 0, 0, longest - len(x_TH))
        rows = F.pad(x_TH, padding), F.pad(routing.weights_TJ, padding)
        slots_TJ = F.pad(routing.experts_TJ, padding, value=-1)
        x_TH_all, weights_TJ, slots_TJ = (self._group.gather_rows(each) for each in (*rows, slots_TJ))
        out_TH = compute(x_TH_all, Routing(weights_TJ, slots_TJ))
        return self._group.reduce_scatter(out_TH)[: len(x_TH)]

    def _sent(
        self, x_TH: torch.Tensor, routing: Routing, compute: Callable[[torch.Tensor, Routing], torch.Tensor]
    ) -> torch.Tensor:
        slots_TJ = routing.experts_TJ
        to = [
            ((slots_TJ >= first) & (slots_TJ < first + self._size)).any(1).nonzero()[:, 0]
            for first in self._firsts
        ]
        counts = [len(rows) for rows in to]
        given = torch.tensor(counts, device=x_TH.device)
        taken: list[int] = self._group.all_to_all(given, None, None).tolist()
        rows = torch.cat(to)
        x_RH, weights_RJ, slots_RJ = (
            self._group.all_to_all(each[rows], taken, counts) for each in (x_TH, *routing)
        )
        out_RH = compute(x_RH, Routing(weights_RJ, slots_RJ)) if len(x_RH) else x_RH
        back_RH = self._group.all_to_all(out_RH, counts, taken)
        return torch.zeros_like(x_TH, dtype=torch.float32).index_add_(0, rows, back_RH.float()).to(x_TH.dtype)
