"""A run of identical layers, and the heads that draft tokens after the last layer."""

from __future__ import annotations

from dataclasses import dataclass

from hwmodels.checks import check_whole
from hwmodels.model.attention import Attention
from hwmodels.model.matrices import ONE_RANK, Matrix, Ranks, Role, share_of
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


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftHeads:
    """Draft heads, which propose tokens after the next one; a plain decode neither runs nor loads them.

    medusa: each head is a residual layer, hidden to hidden, and its own LM head (Cai et al., 2024).
    mtp: each head is a layer like the model's last, fed through a projection of 2 hidden to hidden; it uses
    the model's LM head (DeepSeek-V3, 2024, section 2.2).
    """

    kind: str
    num_heads: int
    """Number of Medusa heads or MTP layers."""

    def __post_init__(self) -> None:
        if self.kind not in ("medusa", "mtp"):
            raise ValueError(f"kind={self.kind}: must be medusa or mtp")
        check_whole("num_heads", self.num_heads)

    def matrices(self, last: Block, hidden_size: int, vocab_size: int, ranks: Ranks) -> tuple[Matrix, ...]:
        """Returns the matrices of one head, on one rank."""
        if self.kind == "medusa":
            return (
                Matrix("medusa_proj", hidden_size, hidden_size, role=Role.plain),
                Matrix("medusa_lm_head", hidden_size, share_of(vocab_size, ranks.tensor), role=Role.plain),
            )
        projection = Matrix("mtp_proj", 2 * hidden_size, hidden_size)
        return (projection, *last.layer_matrices(hidden_size, ranks))

    def vector_elements(self, last: Block, hidden_size: int, ranks: Ranks) -> int:
        """Returns the vector elements of one head.

        Medusa: the bias of its layer. MTP: the vectors of its layer, and norms of both inputs and the output.
        """
        if self.kind == "medusa":
            return hidden_size
        return 3 * hidden_size + last.layer_vector_elements(hidden_size, ranks)
