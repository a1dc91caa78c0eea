"""Settings of the ranks of data-parallel attention, and each rank's share of the limits.

Limits of an engine and of its policies are those of all ranks together: each rank has an equal share, rounded
down, as SGLang 0.5.23 divides `--chunked-prefill-size` and `--max-running-requests` with
`--enable-dp-attention`. vLLM 0.32 has a scheduler for each rank, whose `--max-num-batched-tokens` and
`--max-num-seqs` are such shares.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import Annotated, Protocol, runtime_checkable

from fieldlimits import Checked, OneOf, PositiveInt
from policies.batching import Batching

LOAD_BALANCE_METHODS = ("total_requests", "round_robin")
LIMITS = (
    "max_num_batched_tokens", "max_num_scheduled_tokens", "max_num_active_seqs", "batch_size", "n_parallel",
    "n_batch", "max_batch_prefill_tokens", "max_batch_total_tokens",
)  # fmt: skip
"""Settings of batching policies of which each rank has a share."""


@runtime_checkable
class DividesLimits(Protocol):
    """A batching policy that makes the policy of a rank itself; others have a share of `LIMITS`."""

    def of_rank(self, size: int) -> Batching:
        """Returns a new policy for each of `size` ranks."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class DataParallel(Checked):
    """Settings of the ranks of an engine."""

    size: PositiveInt = 1
    load_balance_method: Annotated[str, OneOf(LOAD_BALANCE_METHODS)] = "total_requests"


def of_rank(batching: Batching, size: int) -> Batching:
    """Returns the policy of one of `size` ranks: a copy that has its share of the limits."""
    if isinstance(batching, DividesLimits):
        return batching.of_rank(size)
    own = deepcopy(batching)
    for name in LIMITS:
        limit = getattr(own, name, None)
        if isinstance(limit, int):
            object.__setattr__(own, name, max(1, limit // size))  # settings are frozen
    return own
