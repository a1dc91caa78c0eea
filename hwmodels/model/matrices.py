"""Weight matrices of a layer, and the ranks over which they are sharded.

Every part of a layer lists the matrices that one rank multiplies with, as engines fuse them (Q, K and V in
one, gate and up in one) and as Megatron-LM shards them: the first of a pair by columns, the second by rows
(Shoeybi et al., 2019). Parameters, bytes and FLOPs are all counted from those lists. A share that is not a
whole number is rounded up, as engines pad it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class Role(Enum):
    """The setting of the model that determines how a matrix is stored."""

    dense = "dense"
    """Stored as `weights`: attention, dense MLPs, shared experts."""
    routed = "routed"
    """Stored as `moe_weights`: routed experts."""
    plain = "plain"
    """Stored as `dtype`: router, LM head, embedding table, which quantisers leave unchanged."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """`count` weight matrices with k inputs and n outputs each."""

    name: str
    k: int
    n: int
    count: int = 1
    role: Role = Role.dense
    stored: str | None = None
    """Storage format that the checkpoint has for this matrix; None: that of its role."""
    slices: tuple[int, ...] = ()
    """Outputs of each projection that the matrix fuses, such as q, k and v; empty: it is one projection."""

    @property
    def elements(self) -> int:
        return self.k * self.n * self.count


class Ranks(NamedTuple):
    """Numbers of ranks over which the parts of a layer are sharded."""

    tensor: int = 1
    """Ranks for attention, dense MLPs, shared experts, vocabulary."""
    moe_tensor: int = 1
    """Ranks that share each routed expert."""
    expert: int = 1
    """Ranks over which the routed experts are distributed."""


ONE_RANK = Ranks()


def share_of(size: int, num_ranks: int) -> int:
    """Divides a size among ranks, rounded up: the largest share."""
    return -(-size // num_ranks)
