"""The copy of the KV of one sequence from one replica to another: its route and its bytes."""

from __future__ import annotations

from typing import NamedTuple

from sim.engine.replica import Replica
from sim.transfer.interconnect import Interconnect
from sim.transfer.network import Route
from sim.transfer.resharding import resharding


class KvCopy(NamedTuple):
    """The route of a copy, its bytes, and the bytes that the link could carry in the time of its messages."""

    route: Route
    num_bytes: float
    overhead_bytes: float


def kv_copy(
    interconnect: Interconnect, source: Replica, target: Replica, num_tokens: int, message_bytes: float
) -> KvCopy:
    """Returns the copy of num_tokens tokens of KV. message_bytes: see `KvTransferSettings`."""
    copies = resharding(source.pool.kv_layout, target.pool.kv_layout)
    num_senders = copies.num_equal_senders * source.pool.num_devices / source.pool.kv_layout.num_ranks
    num_blocks = target.core.block_pool.blocks_for(num_tokens)
    return KvCopy(
        interconnect.route(source.index, target.index, num_senders=num_senders),
        num_tokens * target.copies.links.bytes_per_token,
        message_bytes * copies.slices_per_block * num_blocks,
    )
