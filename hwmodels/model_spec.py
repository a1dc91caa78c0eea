"""The shape of a model, as far as time and memory depend on it: dense decoder-only transformers.

Attention is multi-head, grouped-query or multi-query, by num_kv_heads; the MLP is gated (SwiGLU) or plain.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hwmodels.checks import check_whole
from hwmodels.device import DTYPE_BYTES
from hwmodels.hf_config import read_hf_config


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """One model. Weights, activations and KV are held in `dtype`."""

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    """The longest context, prompt and output together."""
    tie_word_embeddings: bool = False
    """The LM head is the embedding table."""
    gated_mlp: bool = True
    qkv_bias: bool = False
    """Q, K and V projections have biases (Qwen2). Other biases weigh less than 1e-4 and are left out."""
    qk_norm: bool = False
    """Each head's query and key are RMS-normalised (Qwen3)."""
    sliding_window: int | None = None
    """Attention reaches this far back. Recorded, not priced yet: attention and KV count the whole context."""
    dtype: str = "bf16"
    source: str = ""

    def __post_init__(self) -> None:
        for name in (
            "num_layers",
            "hidden_size",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "intermediate_size",
            "vocab_size",
            "max_position_embeddings",
        ):
            check_whole(name, getattr(self, name))
        if self.num_heads % self.num_kv_heads:
            divisors = [n for n in range(1, self.num_heads + 1) if self.num_heads % n == 0]
            nearest = min(divisors, key=lambda n: abs(n - self.num_kv_heads))
            raise ValueError(
                f"num_kv_heads={self.num_kv_heads}: must divide num_heads={self.num_heads}; "
                f"nearest: {nearest}"
            )
        if self.dtype not in ("bf16", "fp16", "fp32"):
            raise ValueError(f"dtype={self.dtype}: must be bf16, fp16 or fp32")
        if self.sliding_window is not None:
            check_whole("sliding_window", self.sliding_window, remedy=", or null")

    @classmethod
    def from_hf_config(cls, path: str, dtype: str = "auto") -> ModelSpec:
        """The model of a Hugging Face config.json (the file or its folder).

        dtype "auto" is the checkpoint's; fp32 and unnamed ones are served in bf16, as vLLM does.
        Raises ValueError: malformed JSON, unknown architecture, a field that is missing, wrong or not
        understood, quantised weights.
        """
        settings = read_hf_config(Path(path))
        if dtype != "auto":
            settings["dtype"] = dtype
        return cls(**settings)

    @property
    def element_bytes(self) -> float:
        return DTYPE_BYTES[self.dtype]

    @property
    def attention_matrix_elements(self) -> int:
        """Weights of the Q, K, V and output projections of one layer."""
        heads = 2 * self.num_heads + 2 * self.num_kv_heads  # q and o; k and v
        return self.hidden_size * self.head_dim * heads

    @property
    def mlp_matrix_elements(self) -> int:
        """Weights of the MLP of one layer: gate, up, down (or up, down)."""
        return (3 if self.gated_mlp else 2) * self.hidden_size * self.intermediate_size

    @property
    def vector_elements(self) -> int:
        """Norm weights and biases of one layer."""
        norms = 2 * self.hidden_size + (2 * self.head_dim if self.qk_norm else 0)
        return norms + ((self.num_heads + 2 * self.num_kv_heads) * self.head_dim if self.qkv_bias else 0)

    @property
    def embedding_elements(self) -> int:
        """Weights of one vocabulary matrix (embedding table or LM head)."""
        return self.vocab_size * self.hidden_size

    @property
    def num_matmul_parameters(self) -> int:
        """N of "a token takes 2 N FLOPs": every weight that a token is multiplied with, LM head included."""
        return (
            self.num_layers * (self.attention_matrix_elements + self.mlp_matrix_elements)
            + self.embedding_elements
        )

    @property
    def num_vector_parameters(self) -> int:
        """Norm weights and biases of all layers, and the final norm."""
        return self.num_layers * self.vector_elements + self.hidden_size

    @property
    def num_parameters(self) -> int:
        """All weights; Llama-2-7B: 6,738,415,616."""
        tables = 0 if self.tie_word_embeddings else self.embedding_elements  # the LM head is in the matmuls
        return self.num_matmul_parameters + self.num_vector_parameters + tables

    def check_tensor_parallel_size(self, tensor_parallel_size: int) -> None:
        """Raise ValueError, with the nearest size that works, where the model cannot be cut that way."""
        if not self.divides(tensor_parallel_size):
            nearest = min(
                (size for size in range(1, self.num_heads + 1) if self.divides(size)),
                key=lambda size: abs(size - tensor_parallel_size),
            )
            raise ValueError(
                f"tensor_parallel_size={tensor_parallel_size}: must divide the {self.num_heads} attention "
                f"heads of {self.name}, and divide or be a multiple of its {self.num_kv_heads} KV heads; "
                f"nearest: {nearest}"
            )

    def divides(self, tensor_parallel_size: int) -> bool:
        """Whether heads can be shared out evenly; KV heads are copied where there are fewer than ranks."""
        size, kv = tensor_parallel_size, self.num_kv_heads
        return size >= 1 and self.num_heads % size == 0 and (kv % size == 0 or size % kv == 0)

    def kv_heads_per_rank(self, tensor_parallel_size: int) -> int:
        return max(1, self.num_kv_heads // tensor_parallel_size)

    def weight_bytes_per_rank(self, tensor_parallel_size: int) -> float:
        """Bytes of one rank's weights: matrices cut, norms and scarce KV heads copied."""
        size = tensor_parallel_size
        copied_kv_heads = self.kv_heads_per_rank(size) * size - self.num_kv_heads
        copies = 2 * self.num_layers * self.hidden_size * self.head_dim * copied_kv_heads
        matrices = self.num_parameters - self.num_vector_parameters + copies
        return (matrices / size + self.num_vector_parameters) * self.element_bytes

    def kv_bytes_per_token(self, tensor_parallel_size: int = 1) -> float:
        """KV bytes of one token on one rank: 2 (K, V) x layers x KV heads x head_dim x element bytes.

        Llama-2-7B in fp16: 2 x 32 x 32 x 128 x 2 = 524,288 bytes.
        """
        heads = self.kv_heads_per_rank(tensor_parallel_size)
        return 2 * self.num_layers * heads * self.head_dim * self.element_bytes
