"""The weight matrices of a layer, and over how many ranks they are cut.

Every part of a layer lists the matrices that one rank multiplies with, as engines fuse them (Q, K and V in
one, gate and up in one) and as Megatron-LM cuts them: the first of a pair by columns, the second by rows
(Shoeybi et al., 2019). Parameters, bytes and FLOPs are all counted from those lists. A share that does not
come out even is rounded up, as engines pad it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class Role(Enum):
    """Which setting of the model says how a matrix is stored."""

    dense = "dense"
    """`weights`: attention, dense MLPs, shared experts."""
    routed = "routed"
    """`moe_weights`: routed experts."""
    plain = "plain"
    """`dtype`: router, LM head, embedding table. Quantisers leave them alone."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """`count` weight matrices, k inputs to n outputs each."""

    name: str
    k: int
    n: int
    count: int = 1
    role: Role = Role.dense

    @property
    def elements(self) -> int:
        return self.k * self.n * self.count


class Ranks(NamedTuple):
    """Over how many ranks the parts of a layer are cut."""

    tensor: int = 1
    """Attention, dense MLPs, shared experts, vocabulary."""
    moe_tensor: int = 1
    """Each routed expert."""
    expert: int = 1
    """The set of routed experts."""


ONE_RANK = Ranks()


def share_of(size: int, num_ranks: int) -> int:
    return -(-size // num_ranks)
