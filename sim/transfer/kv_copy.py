"""The copy of the KV of one sequence from one replica to another: its route and its bytes.

Between replicas with other parallel sizes, ranks send some of their heads to several ranks. A rank holds the
KV of its heads: num_kv_heads / size of them, or a copy of one if there are more ranks than KV heads. The KV
of a latent vector (MLA) counts as one head. A transfer to other ranks splits or joins heads:

    8 KV heads, 2 ranks -> 4 ranks                  2 KV heads, 4 ranks (2 copies) -> 2 ranks
    source 0: heads 0-3  -> target 0: 0-1           source 0: head 0  -> target 0
                         -> target 1: 2-3           source 1: head 0     (sends nothing)
    source 1: heads 4-7  -> target 2: 4-5           source 2: head 1     (sends nothing)
                         -> target 3: 6-7           source 3: head 1  -> target 1

Every target rank reads its own copy, as with vLLM's NixlConnector, so the bytes are those that the target
holds; copies of a head in the source send to different target ranks, as far as there are enough. A rank of a
pipeline stage sends its layers to the stages that have them in the target.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import NamedTuple

from sim.engine.replica import Replica
from sim.engine.replica_pool import KvLayout
from sim.transfer.network import Interconnect, Route


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


class Resharding(NamedTuple):
    """The copies of one transfer."""

    num_senders: int
    """Source ranks that send."""
    num_copies: int
    """Pairs of a source rank and a target rank with a copy between them."""
    slices_per_block: int
    """Parts of a block's KV with adjacent bytes, over all copies: keys and values of each layer, if the heads
    of a block follow each other in memory (vLLM's HND layout)."""
    num_equal_senders: float
    """All bytes over those of the source rank that sends most: num_senders if all of these send the same."""


@lru_cache(maxsize=256)
def resharding(source: KvLayout, target: KvLayout) -> Resharding:
    """Returns the copies from one layout of a model to another.

    8 KV heads and 32 layers from 2 ranks to 4: 4 copies from 2 senders, each of 32 x 2 slices. Raises
    ValueError for layouts of different models.
    """
    if source[:2] != target[:2]:
        raise ValueError(
            f"KV of {source.num_layers} layers with {source.num_kv_heads} KV heads: cannot be sent to a "
            f"replica with {target.num_layers} layers and {target.num_kv_heads} KV heads"
        )
    heads = _head_copies(source, target)
    layers = [
        (stage, len(shared))
        for stage in range(source.pipeline_parallel_size)
        for other in range(target.pipeline_parallel_size)
        if (shared := set(source.layers(stage)) & set(target.layers(other)))
    ]
    sent: Counter[tuple[int, int]] = Counter()  # heads x layers by source rank and stage
    for stage, num_layers in layers:
        for (sender, _), num_heads in heads.items():
            sent[sender, stage] += num_heads * num_layers
    return Resharding(
        num_senders=len(sent),
        num_copies=len(heads) * len(layers),
        slices_per_block=2 * len(heads) * sum(num_layers for _, num_layers in layers),
        num_equal_senders=sent.total() / max(sent.values()),
    )


def _head_copies(source: KvLayout, target: KvLayout) -> Counter[tuple[int, int]]:
    """Returns the heads of a layer that are copied, by (source rank, target rank)."""
    holders: dict[int, list[int]] = {}
    for rank in range(source.tensor_parallel_size):
        for head in source.heads(rank):
            holders.setdefault(head, []).append(rank)
    copies: Counter[tuple[int, int]] = Counter()
    num_readers: Counter[int] = Counter()  # target ranks that have read a head so far
    for rank in range(target.tensor_parallel_size):
        for head in target.heads(rank):
            ranks = holders[head]
            copies[ranks[num_readers[head] % len(ranks)], rank] += 1
            num_readers[head] += 1
    return copies
