"""A run of identical layers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fieldlimits import Checked, PositiveInt, check
from hwmodels.model.attention import Attention
from hwmodels.model.matrices import ONE_RANK, Matrix, Ranks, Role
from hwmodels.model.mlp import Mlp
from hwmodels.model.quantization import check_weight_format


@dataclass(frozen=True, kw_only=True, slots=True)
class Block(Checked):
    """`count` identical layers; if kinds of layers alternate, each kind is one block."""

    count: PositiveInt
    attention: Attention
    mlp: Mlp
    num_norms: PositiveInt = 2
    """Number of RMS norms over the hidden state per layer; Gemma has 4."""
    formats: tuple[tuple[str, str], ...] = ()
    """Names of matrices whose storage format is not that of their role, and the format."""

    def __post_init__(self) -> None:
        check(self)
        for name, stored in self.formats:
            check_weight_format(f"formats.{name}", stored)

    def layer_matrices(self, hidden_size: int, ranks: Ranks = ONE_RANK) -> tuple[Matrix, ...]:
        """Returns the matrices of one of the layers, on one rank."""
        own = dict(self.formats)
        matrices = (
            *self.attention.matrices(hidden_size, ranks.tensor),
            *self.mlp.matrices(hidden_size, ranks),
        )
        if not own:
            return matrices
        return tuple(replace(matrix, stored=own.get(matrix.name)) for matrix in matrices)

    def without_formats(self, *roles: Role) -> Block:
        """Returns the layers with matrices of these roles stored as the model says for their role."""
        if not self.formats:
            return self
        of_role = {matrix.name for matrix in self.layer_matrices(1) if matrix.role in roles}
        return replace(self, formats=tuple(item for item in self.formats if item[0] not in of_role))

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
