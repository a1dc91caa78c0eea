"""Specification of a decoder-only transformer, as far as time and memory depend on it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Protocol

from fieldlimits import Checked, NonNegativeInt, OneOf, PositiveInt, check
from hwmodels.device import Device
from hwmodels.model.attention import Attention, GroupedQueryAttention, LatentAttention, NoAttention
from hwmodels.model.recurrent import LinearAttention
from hwmodels.model.weights import (
    KV_BYTES,
    ONE_RANK,
    Matrix,
    Ranks,
    Role,
    check_weight_format,
    share_of,
    weight_format,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseMlp(Checked):
    """MLP that computes down(act(gate(x)) * up(x)), or down(act(up(x))) if not gated."""

    intermediate_size: PositiveInt
    gated: bool = True
    bias: bool = False

    def matrices(self, hidden_size: int, ranks: Ranks = ONE_RANK) -> tuple[Matrix, ...]:
        width = share_of(self.intermediate_size, ranks.tensor)
        return mlp_pair("", hidden_size, width, gated=self.gated)

    def active_elements(self, hidden_size: int) -> int:
        return sum(matrix.elements for matrix in self.matrices(hidden_size))

    def vector_elements(self, hidden_size: int, ranks: Ranks = ONE_RANK) -> int:
        """Returns the number of bias elements, which every rank holds completely."""
        return (hidden_size + (2 if self.gated else 1) * self.intermediate_size) if self.bias else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class MixtureOfExperts(Checked):
    """Mixture of experts: a router sends each token to top_k of num_experts.

    Shared experts see all tokens.
    """

    num_experts: PositiveInt
    top_k: PositiveInt
    intermediate_size: PositiveInt
    """Width of one routed expert."""
    shared_intermediate_size: NonNegativeInt = 0
    """Width of all shared experts together."""
    shared_gate: bool = False
    """A gate of one output scales the shared experts (Qwen2-MoE, Qwen3-Next)."""
    gated: bool = True
    latent_size: PositiveInt | None = None
    """Width of the routed experts' inputs and outputs (Nemotron 3 Super, Kimi-K3); None: the hidden size.

    One matrix projects a token down to it before it is sent to the experts, one projects their sum up.
    """
    bias: bool = False
    """Biases in the routed experts (gpt-oss)."""
    router_bias: bool = False
    """One number per expert in the router: a bias, or DeepSeek-V3's balance correction."""

    def __post_init__(self) -> None:
        check(self)
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k={self.top_k}: must be 1 to num_experts={self.num_experts}")

    def matrices(self, hidden_size: int, ranks: Ranks = ONE_RANK) -> tuple[Matrix, ...]:
        """Returns the matrices of one rank: the complete router, and the rank's share of the routed experts.

        The shared experts follow, then the projections to and from the experts' width, on every rank.
        """
        width = share_of(self.intermediate_size, ranks.moe_tensor)
        experts = share_of(self.num_experts, ranks.expert)
        shared_width = share_of(self.shared_intermediate_size, ranks.tensor)
        return (
            Matrix("router", hidden_size, self.num_experts, role=Role.plain),
            *mlp_pair(
                "expert_",
                self.expert_hidden_size(hidden_size),
                width,
                gated=self.gated,
                count=experts,
                role=Role.routed,
            ),
            *(mlp_pair("shared_", hidden_size, shared_width, gated=self.gated) if shared_width else ()),
            *self.latent_matrices(hidden_size),
        )

    def expert_hidden_size(self, hidden_size: int) -> int:
        """Returns the width of a routed expert's input and output."""
        return hidden_size if self.latent_size is None else self.latent_size

    def latent_matrices(self, hidden_size: int) -> tuple[Matrix, ...]:
        """Returns the projections to the routed experts' width and back; none if it is the hidden size."""
        if self.latent_size is None:
            return ()
        return (
            Matrix("latent_down_proj", hidden_size, self.latent_size),
            Matrix("latent_up_proj", self.latent_size, hidden_size),
        )

    def active_elements(self, hidden_size: int) -> int:
        """Returns the weights applied to one token: top_k experts, shared experts, router."""
        return sum(
            matrix.elements // self.num_experts * self.top_k
            if matrix.role is Role.routed
            else matrix.elements
            for matrix in self.matrices(hidden_size)
        )

    def vector_elements(self, hidden_size: int, ranks: Ranks = ONE_RANK) -> int:
        """Returns the elements of biases and of the gate of the shared experts.

        Biases of experts are sharded with them.
        """
        shared_gate = hidden_size if self.shared_gate else 0
        up = (2 if self.gated else 1) * share_of(self.intermediate_size, ranks.moe_tensor)
        experts = share_of(self.num_experts, ranks.expert) if self.bias else 0
        of_expert = up + self.expert_hidden_size(hidden_size)
        return self.router_bias * self.num_experts + shared_gate + experts * of_expert


@dataclass(frozen=True, kw_only=True, slots=True)
class NoMlp:
    """A layer without an MLP: only a token mixer (Nemotron-H, Mamba)."""

    def matrices(self, hidden_size: int, ranks: Ranks = ONE_RANK) -> tuple[Matrix, ...]:
        return ()

    def active_elements(self, hidden_size: int) -> int:
        return 0

    def vector_elements(self, hidden_size: int, ranks: Ranks = ONE_RANK) -> int:
        return 0


Mlp = DenseMlp | MixtureOfExperts | NoMlp


def mlp_pair(
    prefix: str, hidden_size: int, width: int, *, gated: bool, count: int = 1, role: Role = Role.dense
) -> tuple[Matrix, Matrix]:
    """Returns the up projection, fused with the gate's if there is one, and the down projection."""
    up = Matrix(f"{prefix}gate_up_proj", hidden_size, 2 * width, count, role, slices=(width, width))
    if not gated:
        up = Matrix(f"{prefix}up_proj", hidden_size, width, count, role)
    return up, Matrix(f"{prefix}down_proj", width, hidden_size, count, role)


__all__ = [
    "Attention",
    "Block",
    "DenseMlp",
    "GroupedQueryAttention",
    "KvLayers",
    "LatentAttention",
    "LinearAttention",
    "Matrix",
    "MixtureOfExperts",
    "Mlp",
    "ModelSpec",
    "NoAttention",
    "NoMlp",
    "OtherWeights",
    "Ranks",
    "Role",
]

DTYPES = ("bf16", "fp16", "fp32")


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherWeights(Checked):
    """Weights outside the layers that occupy memory but take no time for text tokens, in the model's dtype.

    Vision and audio towers, and tables from which a token reads one row.
    """

    name: str
    elements: PositiveInt


@dataclass(frozen=True, kw_only=True, slots=True)
class KvLayers:
    """Layers with the same KV bytes per token and window."""

    count: int
    bytes_per_token: float
    """KV bytes per token of one layer on one rank."""
    window: int | None
    """Maximum number of tokens that are kept; None: no limit."""
    window_is_chunk: bool = False
    """Whether the window is a chunk: attention reaches back to its first token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec(Checked):
    """One model: blocks of layers between an embedding table and an LM head.

    The blocks are runs of identical layers.

    Methods that say "on one rank" take the number of ranks over which attention, dense MLPs and the
    vocabulary are sharded (tensor_parallel_size). With data parallel attention, tensor_parallel_size is
    smaller than moe_tensor_parallel_size x expert_parallel_size.
    """

    name: str
    hidden_size: PositiveInt
    vocab_size: PositiveInt
    max_position_embeddings: PositiveInt
    """Longest context in tokens, prompt and output together."""
    blocks: tuple[Block, ...]
    """Kinds of layers, in the order in which they first occur."""
    tie_word_embeddings: bool = False
    """True if the LM head is the embedding table."""
    dtype: Annotated[str, OneOf(DTYPES)] = "bf16"
    """dtype of activations, norms, router, embeddings and LM head."""
    weights: str | None = None
    """Storage format of the matrices of attention and MLPs (`WEIGHT_FORMATS`); None: dtype."""
    moe_weights: str | None = None
    """Storage format of routed experts; None: the same as `weights`."""
    lm_head_weights: str | None = None
    """Storage format of the LM head if it has its own table; None: dtype."""
    kv_cache_dtype: Annotated[str, OneOf(("auto", *KV_BYTES))] = "auto"
    """Storage format of the KV cache, a key of `KV_BYTES`; auto: dtype."""
    sparsity: Annotated[str | None, OneOf(("2:4",))] = None
    """Structured sparsity of attention and MLPs; 2:4: two of four weights are zero and not stored."""
    other_weights: tuple[OtherWeights, ...] = ()
    """Towers and tables; sharded over the ranks of tensor parallelism, in a pipeline on the first stage."""
    read_by_fields: bool = False
    """Whether the architecture is unknown and its layers follow the usual meanings of its fields."""
    num_mtp_modules: int = 0
    """Modules for multi-token prediction in the checkpoint, each like `mtp_block`; a decode uses none."""
    mtp_block: Block | None = None
    """Layer of such a module; None: like the last block's."""
    notes: tuple[str, ...] = ()
    """Notes on missing parts of the model, and on its transformations."""
    source: str = ""

    def __post_init__(self) -> None:
        check(self)
        if not self.blocks:
            raise ValueError("blocks=(): must hold at least one block")
        for name in ("weights", "moe_weights", "lm_head_weights"):
            given = getattr(self, name)
            if given is not None:
                check_weight_format(name, given)
        if self.moe_weights is not None and not self.has_experts:
            raise ValueError(
                f"moe_weights={self.moe_weights}: {self.name} has no experts; set weights, or leave it null"
            )

    @property
    def num_layers(self) -> int:
        return sum(block.count for block in self.blocks)

    @property
    def has_experts(self) -> bool:
        return any(isinstance(block.mlp, MixtureOfExperts) for block in self.blocks)

    @property
    def element_bytes(self) -> float:
        """Bytes of one element of activations."""
        return KV_BYTES[self.dtype]

    @property
    def kv_dtype(self) -> str:
        return self.dtype if self.kv_cache_dtype == "auto" else self.kv_cache_dtype

    @property
    def embedding_elements(self) -> int:
        """Weights of one vocabulary matrix (embedding table or LM head)."""
        return self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """Number of all weights except those for multi-token prediction; Llama-2-7B: 6,738,415,616."""
        layers = sum(matrix.elements for matrix in self.layer_matrices())
        tables = 1 if self.tie_word_embeddings else 2
        return layers + self.vector_elements() + tables * self.embedding_elements + self.other_elements

    @property
    def other_elements(self) -> int:
        """Number of weights of towers and of tables other than the vocabulary's."""
        return sum(other.elements for other in self.other_weights)

    def other_bytes(self, tensor_parallel_size: int = 1) -> float:
        """Returns the bytes of towers and further tables on one rank of the first stage."""
        return share_of(self.other_elements, tensor_parallel_size) * self.element_bytes

    @property
    def num_active_parameters(self) -> int:
        """Number of active weights, without unused routed experts; Mixtral-8x7B: 12.9e9."""
        tables = 0 if self.tie_word_embeddings else 1  # the LM head is in the matmuls
        return self.num_matmul_parameters + self.vector_elements() + tables * self.embedding_elements

    @property
    def num_matmul_parameters(self) -> int:
        """N of "a token takes 2 N FLOPs": all weights applied to a token, including the LM head."""
        layers = sum(block.count * block.layer_active_elements(self.hidden_size) for block in self.blocks)
        return layers + self.embedding_elements

    @property
    def flops_per_token(self) -> float:
        """FLOPs per token: 2 N, without attention over its context.

        2:4 sparsity halves those of the sparse matrices on tensor cores that support it.
        """
        flops = 2.0 * self.num_matmul_parameters
        if self.sparsity is None:
            return flops
        router_and_head = self.embedding_elements + sum(
            matrix.elements for matrix in self.layer_matrices() if matrix.role is Role.plain
        )
        return flops / 2 + router_and_head

    def layer_matrices(self, ranks: Ranks = ONE_RANK) -> list[Matrix]:
        """Returns the matrices of all layers, on one rank; counts include the number of such layers."""
        return [
            replace(matrix, count=block.count * matrix.count)
            for block in self.blocks
            for matrix in block.layer_matrices(self.hidden_size, ranks)
        ]

    def quantised_matrices(self) -> list[Matrix]:
        """Returns the matrices of all layers to which `weights` and `moe_weights` apply."""
        return [matrix for matrix in self.layer_matrices() if matrix.role is not Role.plain]

    def vector_elements(self, ranks: Ranks = ONE_RANK) -> int:
        """Returns the elements of norms, biases and other vectors, and the final norm, on one rank."""
        layers = sum(
            block.count * block.layer_vector_elements(self.hidden_size, ranks) for block in self.blocks
        )
        return layers + self.hidden_size

    def weight_format_of(self, role: Role) -> str:
        """Returns the name of the storage format (`WEIGHT_FORMATS`) of matrices of this role."""
        if role is Role.plain:
            return self.dtype
        if role is Role.routed and self.moe_weights is not None:
            return self.moe_weights
        return self.weights or self.dtype

    def bytes_per_weight(self, role: Role, stored: str | None = None) -> float:
        """Returns the bytes per weight with scales; 2:4 keeps half plus 2 bits of position: bf16 x 0.5625.

        stored: the format of a matrix, if it differs from its role's (`Matrix.stored`).
        """
        per_weight = weight_format(stored or self.weight_format_of(role)).bytes_per_weight
        if self.sparsity is None or role is Role.plain:
            return per_weight
        return per_weight / 2 + 1 / 8

    def matrix_bytes(self, matrix: Matrix) -> float:
        """Returns the bytes of a matrix of this model, with scales."""
        return matrix.elements * self.bytes_per_weight(matrix.role, matrix.stored)

    def table_bytes(self, tensor_parallel_size: int = 1) -> tuple[float, float]:
        """Returns the bytes of the embedding table and of the LM head on one rank; a tied head has none."""
        elements = self.hidden_size * share_of(self.vocab_size, tensor_parallel_size)
        head = elements * self.bytes_per_weight(Role.plain, self.lm_head_weights)
        return elements * self.element_bytes, 0.0 if self.tie_word_embeddings else head

    def weight_bytes_per_rank(
        self,
        tensor_parallel_size: int = 1,
        *,
        moe_tensor_parallel_size: int | None = None,
        expert_parallel_size: int = 1,
    ) -> float:
        """Returns the bytes of one rank's weights.

        Matrices are sharded; norms, router, and KV heads if there are fewer than ranks, are replicated.

        moe_tensor_parallel_size None means tensor_parallel_size / expert_parallel_size, at least 1.
        """
        if moe_tensor_parallel_size is None:
            moe_tensor_parallel_size = max(1, tensor_parallel_size // expert_parallel_size)
        ranks = Ranks(tensor_parallel_size, moe_tensor_parallel_size, expert_parallel_size)
        matrices = sum(self.matrix_bytes(matrix) for matrix in self.layer_matrices(ranks))
        tables = sum(self.table_bytes(tensor_parallel_size))
        return (
            matrices
            + self.vector_elements(ranks) * self.element_bytes
            + tables
            + self.other_bytes(tensor_parallel_size)
        )

    def kv_layers(self, tensor_parallel_size: int = 1) -> list[KvLayers]:
        """Returns the layers with their own KV, one entry per block, on one rank."""
        entries = [
            KvLayers(
                count=block.count,
                bytes_per_token=block.attention.kv_bytes_per_token(self.kv_dtype, tensor_parallel_size),
                window=block.attention.window,
                window_is_chunk=block.attention.window is not None
                and getattr(block.attention, "window_is_chunk", False),
            )
            for block in self.blocks
        ]
        return [entry for entry in entries if entry.bytes_per_token > 0]

    def kv_bytes_per_token(self, tensor_parallel_size: int = 1) -> float:
        """Returns the KV bytes per token on one rank, in all layers (with or without window), with scales.

        GQA: 2 (K, V) x layers x KV heads x head_dim x element bytes.
        Llama-2-7B in fp16: 2 x 32 x 32 x 128 x 2 = 524,288 bytes.
        MLA: layers x (kv_lora_rank + qk_rope_head_dim) x element bytes, on every rank.
        """
        return sum(layers.count * layers.bytes_per_token for layers in self.kv_layers(tensor_parallel_size))

    def kv_bytes_of_sequence(self, num_tokens: int) -> float:
        """Returns the KV bytes of a sequence of num_tokens tokens.

        Layers with a window keep at most the window. Total over all ranks, without duplicated KV heads and
        linear-attention states.
        """
        return sum(
            layers.count * layers.bytes_per_token * min(num_tokens, layers.window or num_tokens)
            for layers in self.kv_layers()
        )

    def state_bytes_per_sequence(self, tensor_parallel_size: int = 1) -> float:
        """Returns the state bytes of linear attention for a sequence of any length, on one rank."""
        return sum(
            block.count * block.attention.state_bytes(self.dtype, tensor_parallel_size)
            for block in self.blocks
        )

    def check_tensor_parallel_size(self, tensor_parallel_size: int) -> None:
        """Raises ValueError, with the next smaller valid size, if the model cannot be sharded like this."""
        if self.divides(tensor_parallel_size):
            return
        largest = min(block.attention.max_tensor_parallel_size for block in self.blocks)
        # Not a larger size, because it may exceed a node's devices or be odd.
        allowed = range(2, min(largest, tensor_parallel_size) + 1)
        nearest = max((size for size in allowed if self.divides(size)), default=1)
        rules = dict.fromkeys(block.attention.cutting_rule for block in self.blocks)
        raise ValueError(
            f"tensor_parallel_size={tensor_parallel_size}: must {'; '.join(rules)} of {self.name}; "
            f"nearest: {nearest}"
        )

    def divides(self, tensor_parallel_size: int) -> bool:
        """Returns whether every kind of attention divides evenly over tensor_parallel_size ranks."""
        return all(block.attention.divides(tensor_parallel_size) for block in self.blocks)

    def with_weights(
        self, weights: str | None, moe_weights: str | None = None, kv_cache_dtype: str | None = None
    ) -> ModelSpec:
        """Returns the same model with other storage formats of all matrices and, if given, of its KV."""
        kv = self.kv_cache_dtype if kv_cache_dtype is None else kv_cache_dtype
        blocks = tuple(block.without_formats(Role.dense, Role.routed) for block in self.blocks)
        return replace(
            self,
            blocks=blocks,
            weights=weights,
            moe_weights=moe_weights,
            lm_head_weights=None,
            kv_cache_dtype=kv,
        )


class Transform(Protocol):
    """Makes a smaller model from a model: see `hwmodels.model.transforms`."""

    def applied(self, model: ModelSpec) -> ModelSpec:
        """Returns the new model, with notes on the savings. Raises ValueError if it cannot be made."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Block(Checked):
    """`count` identical layers; if kinds of layers alternate, each kind is one block."""

    count: PositiveInt
    attention: Attention
    mlp: Mlp
    num_norms: PositiveInt = 2
    """Number of RMS norms over the hidden state per layer; Gemma has 4."""
    formats: tuple[tuple[str, str], ...] = ()
    """Names of matrices whose storage format differs from their role's, with the format."""

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
        """Returns the layers with matrices of these roles in the model's format for the role."""
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
        """Returns the number of matrix weights applied to one token in one layer."""
        attention = sum(matrix.elements for matrix in self.attention.matrices(hidden_size))
        return attention + self.mlp.active_elements(hidden_size)


def precision_notes(model: ModelSpec, device: Device) -> list[str]:
    """Returns notes on formats without hardware support and on unusable sparsity, if any."""
    formats = {("weights", model.weight_format_of(Role.dense))}
    if model.has_experts:
        formats.add(("moe_weights", model.weight_format_of(Role.routed)))
    of_role = {name for _, name in formats}
    others = sorted({name for block in model.blocks for _, name in block.formats} - of_role)
    notes = []
    for setting, name in (*sorted(formats, reverse=True), *(("formats", name) for name in others)):
        stored = weight_format(name)
        if stored.falls_back_on(device):
            computed = stored.compute_dtype(device, model.dtype)
            notes.append(
                f"{setting}={stored.name}: {device.name} does not compute in {stored.compute}; weights are "
                f"stored in {stored.name} and multiplied in {computed}."
            )
    if model.sparsity is not None and not device.sparse_tensor_cores:
        notes.append(
            f"sparsity={model.sparsity}: {device.name} has no sparse tensor cores; it saves bytes, not FLOPs."
        )
    return notes
