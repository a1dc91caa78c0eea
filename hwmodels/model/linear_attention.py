"""Linear attention: a state of constant size per sequence in place of KV per token."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from hwmodels.checks import check_whole
from hwmodels.model.attention import kept_heads
from hwmodels.model.matrices import Matrix, Role, share_of
from hwmodels.model.quantization import KV_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearAttention:
    """Gated delta net: a matrix of constant size per head instead of KV (Yang et al., 2024; Qwen3-Next)."""

    num_key_heads: int
    key_head_dim: int
    num_value_heads: int
    value_head_dim: int
    conv_kernel: int = 4
    """Number of tokens that the short convolution over Q, K and V covers."""
    state_dtype: str = "fp32"
    """dtype of the recurrent state (`KV_BYTES`); fp32 in the published implementation."""

    def __post_init__(self) -> None:
        for name in ("num_key_heads", "key_head_dim", "num_value_heads", "value_head_dim", "conv_kernel"):
            check_whole(name, getattr(self, name))
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(
                f"num_key_heads={self.num_key_heads}: must divide num_value_heads={self.num_value_heads}"
            )
        if self.state_dtype not in ("fp32", "bf16", "fp16"):
            raise ValueError(f"state_dtype={self.state_dtype}: must be fp32, bf16 or fp16")

    @property
    def window(self) -> None:
        return None

    @property
    def num_query_heads(self) -> int:
        return self.num_value_heads

    @property
    def num_kv_heads(self) -> int:
        """1, because nothing is cached and consumers need at least one head."""
        return 1

    @property
    def kv_is_latent(self) -> bool:
        return False

    @property
    def max_tensor_parallel_size(self) -> int:
        return self.num_key_heads

    @property
    def cutting_rule(self) -> str:
        return f"divide the {self.num_key_heads} key heads of the linear attention"

    def divides(self, tensor_parallel_size: int) -> bool:
        return tensor_parallel_size >= 1 and self.num_key_heads % tensor_parallel_size == 0

    def key_width(self, tensor_parallel_size: int = 1) -> int:
        return share_of(self.num_key_heads, tensor_parallel_size) * self.key_head_dim

    def value_heads_per_rank(self, tensor_parallel_size: int = 1) -> int:
        return share_of(self.num_value_heads, tensor_parallel_size)

    def value_width(self, tensor_parallel_size: int = 1) -> int:
        return self.value_heads_per_rank(tensor_parallel_size) * self.value_head_dim

    def conv_width(self, tensor_parallel_size: int = 1) -> int:
        """Returns the number of channels of the convolution over Q, K and V."""
        return 2 * self.key_width(tensor_parallel_size) + self.value_width(tensor_parallel_size)

    def matrices(self, hidden_size: int, tensor_parallel_size: int = 1) -> tuple[Matrix, ...]:
        """Returns one rank's matrices: Q, K, V, output gate z; decay and write gates b, a; output."""
        values = self.value_width(tensor_parallel_size)
        gates = 2 * self.value_heads_per_rank(tensor_parallel_size)
        return (
            Matrix("in_proj_qkvz", hidden_size, self.conv_width(tensor_parallel_size) + values),
            Matrix("in_proj_ba", hidden_size, gates, role=Role.plain),
            Matrix("out_proj", values, hidden_size),
        )

    def vector_elements(self, hidden_size: int) -> int:
        """Returns the elements of the convolution, of decay and step per value head, of the output norm."""
        return self.conv_width() * self.conv_kernel + 2 * self.num_value_heads + self.value_head_dim

    def kv_bytes_per_token(self, kv_dtype: str, tensor_parallel_size: int = 1) -> float:
        return 0.0

    def state_bytes(self, dtype: str, tensor_parallel_size: int = 1) -> float:
        """Returns the state bytes of one sequence in one layer on one rank.

        They hold value heads x key_head_dim x value_head_dim elements, and the last conv_kernel - 1 inputs of
        the convolution, which are kept in the model's dtype.
        """
        heads = self.value_heads_per_rank(tensor_parallel_size)
        recurrent = heads * self.key_head_dim * self.value_head_dim * KV_BYTES[self.state_dtype]
        return recurrent + self.conv_width(tensor_parallel_size) * (self.conv_kernel - 1) * KV_BYTES[dtype]

    def least_pair_flops(self, tensor_parallel_size: int = 1) -> float:
        return 0.0

    def with_fewer_heads(self, share: float) -> Self:
        """Returns the pruned layer; value heads are removed together with their key head."""
        key_heads = kept_heads(self.num_key_heads, share)
        group = self.num_value_heads // self.num_key_heads
        return replace(self, num_key_heads=key_heads, num_value_heads=key_heads * group)
