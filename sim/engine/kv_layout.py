"""The division of a model's KV over the ranks of a replica."""

from __future__ import annotations

from typing import NamedTuple


class KvLayout(NamedTuple):
    """The KV heads and layers of each rank."""

    num_kv_heads: int = 1
    """KV heads of a layer; 1 for a latent vector that all query heads share."""
    num_layers: int = 1
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    pp_layer_partition: tuple[int, ...] | None = None
    """Layers of each pipeline stage; None: equal numbers."""

    @property
    def num_ranks(self) -> int:
        """Number of ranks over which a sequence is divided."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def heads(self, rank: int) -> range:
        """Returns the KV heads of a tensor parallel rank."""
        num_heads, size = self.num_kv_heads, self.tensor_parallel_size
        if size >= num_heads:
            head = rank * num_heads // size
            return range(head, head + 1)
        return range(rank * num_heads // size, (rank + 1) * num_heads // size)

    def layers(self, stage: int) -> range:
        """Returns the layers of a pipeline stage; the first stages have one more if there is a rest."""
        if self.pp_layer_partition is not None:
            first = sum(self.pp_layer_partition[:stage])
            return range(first, first + self.pp_layer_partition[stage])
        each, more = divmod(self.num_layers, self.pipeline_parallel_size)
        first = stage * each + min(stage, more)
        return range(first, first + each + (stage < more))


ONE_RANK = KvLayout()
"""The layout of a single GPU, for models of which only the bytes of the KV are known."""
