"""Kinds of MLP: dense, mixture of experts, and none."""

from __future__ import annotations

from dataclasses import dataclass

from fieldlimits import Checked, NonNegativeInt, PositiveInt, check
from hwmodels.model.weights import ONE_RANK, Matrix, Ranks, Role, share_of


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
        """Returns the matrices of one rank: the whole router, and the rank's share of the routed experts.

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
        """Returns the weights that one token is multiplied with: top_k experts, shared experts, router."""
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
    """A layer without an MLP: a mixer of tokens alone (Nemotron-H, Mamba)."""

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
