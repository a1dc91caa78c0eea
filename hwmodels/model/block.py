"""A run of identical layers."""

from __future__ import annotations

from dataclasses import dataclass

from hwmodels.checks import check_whole
from hwmodels.model.attention import Attention
from hwmodels.model.matrices import ONE_RANK, Matrix, Ranks
from hwmodels.model.mlp import Mlp


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """`count` identical layers; if kinds of layers alternate, each kind is one block."""

    count: int
    attention: Attention
    mlp: Mlp
    num_norms: int = 2
    """Number of RMS norms over the hidden state per layer; Gemma has 4."""

    def __post_init__(self) -> None:
        check_whole("count", self.count)
        check_whole("num_norms", self.num_norms)

    def layer_matrices(self, hidden_size: int, ranks: Ranks = ONE_RANK) -> tuple[Matrix, ...]:
        """Returns the matrices of one of the layers, on one rank."""
        return (*self.attention.matrices(hidden_size, ranks.tensor), *self.mlp.matrices(hidden_size, ranks))

    def layer_vector_elements(self, hidden_size: int, ranks: Ranks = ONE_RANK) -> int:
        """Returns the elements of norms, biases and other vectors of one layer, on one rank."""
        return (
            self.num_norms * hidden_size
            + self.attention.vector_elements(hidden_size)
            + self.mlp.vector_elements(hidden_size, ranks)
        )

    def layer_active_elements(self, hidden_size: int) -> int:
        """Returns the number of matrix weights that one token is multiplied with in one layer."""
        attention = sum(matrix.elements for matrix in self.attention.matrices(hidden_size))
        return attention + self.mlp.active_elements(hidden_size)
