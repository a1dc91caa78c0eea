"""Mixture of experts of a block: a router chooses each token's experts and weighs their outputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kernels.moe import ExpertWeight
from kernels.moe_routing import Routing
from policies.placement.experts import Slots
from realengine.model.backend import Backend
from realengine.model.linear import Linear
from realengine.model.token_exchange import TokenExchange
from realengine.model.variants import ExpertRouting, Scoring


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Mlp:
    """A block's dense MLP."""

    gate_up: Linear
    down: Linear


class ExpertSlots:
    """The slots of an expert-parallel rank in one layer, and the copies of each expert on all ranks.

    Slots are numbered over the ranks: those of rank r are r * size .. (r + 1) * size - 1. The tensors keep
    their addresses when experts move, so that a CUDA graph holds.
    """

    def __init__(self, slots: Slots, rank: int, num_experts: int, device: torch.device) -> None:
        """Creates the slots of a rank. slots: the experts of the slots of each rank."""
        self.slots = slots
        self._size = len(slots[0])
        self._first = rank * self._size
        most = len(slots) * self._size - num_experts + 1  # every expert has a slot
        self._copies_EC = torch.zeros(num_experts, most, dtype=torch.int64, device=device)
        self._counts_E = torch.ones(num_experts, dtype=torch.int64, device=device)
        self.loads_E = torch.zeros(num_experts, dtype=torch.int64, device=device)
        """Tokens that have chosen each expert since they were placed."""
        self.place(slots)

    def place(self, slots: Slots) -> None:
        """Takes note of the new experts of all slots, and begins to count their tokens anew."""
        self.slots = slots
        copies: list[list[int]] = [[] for _ in self._counts_E]
        for number, expert in enumerate(expert for of_rank in slots for expert in of_rank):
            copies[expert].append(number)
        most = self._copies_EC.shape[1]
        self._copies_EC.copy_(torch.tensor([own + [0] * (most - len(own)) for own in copies]))
        self._counts_E.copy_(torch.tensor([len(own) for own in copies]))
        self.loads_E.zero_()

    def chosen(self, experts_TJ: torch.Tensor) -> torch.Tensor:
        """Returns the slots of the chosen experts, int32 [T, J], and counts their tokens.

        The tokens of a step take the copies of an expert in turn.
        """
        chosen_TJ = experts_TJ.long()
        self.loads_E.index_add_(0, chosen_TJ.flatten(), torch.ones_like(chosen_TJ.flatten()))
        turns_T1 = torch.arange(len(chosen_TJ), device=chosen_TJ.device)[:, None]
        return self._copies_EC[chosen_TJ, turns_T1 % self._counts_E[chosen_TJ]].int()

    def here(self, slots_TJ: torch.Tensor) -> torch.Tensor:
        """Returns slots counted from this rank's first one; -1: another rank's."""
        own_TJ = slots_TJ - self._first
        return torch.where((own_TJ >= 0) & (own_TJ < self._size), own_TJ, -1)


@dataclass(frozen=True, slots=True, eq=False)
class Experts:
    """E experts with I intermediate values, num_choices of them per token; H is the hidden size.

    router_EH: in the model's dtype; its softmax is in fp32. gate_up [E, 2 I, H] (gate before up) and down [E,
    H, I]: in the model's dtype, int8 with one scale per channel, or 4 bits. renormalise: a token's weights
    sum to one. Each tensor-parallel rank holds a slice of every expert's I, and its output is a part of the
    sum. slots: of an expert-parallel rank, which holds the experts of its slots only; its output is a part of
    the sum, too.
    """

    router_EH: torch.Tensor
    gate_up: ExpertWeight
    down: ExpertWeight
    num_choices: int
    renormalise: bool
    backend: Backend
    slots: ExpertSlots | None = None
    exchange: TokenExchange | None = None
    """With data-parallel ranks; None: all ranks of the experts have the same tokens."""

    def __call__(self, x_TH: torch.Tensor) -> torch.Tensor:
        """Computes the output [T, H] in x's dtype."""
        return self.mixed(x_TH, self.route(x_TH))

    def route(self, x_TH: torch.Tensor) -> Routing:
        """Chooses the experts of the largest softmax scores."""
        logits_TE = F.linear(x_TH, self.router_EH)
        routing: Routing = self.backend.moe_route(logits_TE, self.num_choices, renormalise=self.renormalise)
        return routing

    def mixed(self, x_TH: torch.Tensor, routing: Routing) -> torch.Tensor:
        """Computes the weighted sum of the outputs of the chosen experts."""
        if self.slots is None:
            return self._computed(x_TH, routing)
        routing = routing._replace(experts_TJ=self.slots.chosen(routing.experts_TJ))
        if self.exchange is None:
            return self._of_slots(x_TH, routing)
        return self.exchange.mixed(x_TH, routing, self._of_slots)

    def _of_slots(self, x_TH: torch.Tensor, routing: Routing) -> torch.Tensor:
        """Computes this rank's part of the sum. routing: with slots in place of experts."""
        assert self.slots is not None
        return self._computed(x_TH, routing._replace(experts_TJ=self.slots.here(routing.experts_TJ)))

    def _computed(self, x_TH: torch.Tensor, routing: Routing) -> torch.Tensor:
        y_TH: torch.Tensor = self.backend.moe_mlp(x_TH, self.gate_up, self.down, routing)
        return y_TH


@dataclass(frozen=True, slots=True, eq=False)
class SharedExperts:
    """Experts chosen by a rule (DeepSeek-V2 and V3), and an MLP beside them that every token uses."""

    experts: Experts
    rule: ExpertRouting
    correction_E: torch.Tensor | None
    shared: Mlp | None

    def __call__(self, x_TH: torch.Tensor) -> torch.Tensor:
        """Computes the output [T, H] in x's dtype."""
        experts = self.experts
        if self.rule.is_greedy:
            routing = experts.route(x_TH)
            routing = routing._replace(weights_TJ=routing.weights_TJ * self.rule.scale)
        else:
            logits_TE = F.linear(x_TH.float(), experts.router_EH.float())
            routing = route_by(
                self.rule, logits_TE, self.correction_E, experts.num_choices, renormalise=experts.renormalise
            )
        y_TH = experts.mixed(x_TH, routing)
        if self.shared is not None:
            gated = experts.backend.silu_mul(self.shared.gate_up(x_TH))
            y_TH = y_TH + self.shared.down(gated)
        return y_TH


def route_by(
    rule: ExpertRouting,
    logits_TE: torch.Tensor,
    correction_E: torch.Tensor | None,
    num_choices: int,
    *,
    renormalise: bool,
) -> Routing:
    """Returns the experts of the largest scores in the best groups, and their weights, in fp32.

    Nothing is read back to the host, so a CUDA graph can hold it. Ties go to the lowest expert.
    """
    scores_TE = logits_TE.sigmoid() if rule.scoring is Scoring.sigmoid else logits_TE.softmax(-1)
    ranked_TE = scores_TE if correction_E is None else scores_TE + correction_E.float()
    grouped_TGE = ranked_TE.unflatten(1, (rule.num_groups, -1))
    if rule.num_chosen_groups < rule.num_groups:
        best_TG = grouped_TGE.topk(rule.group_choices, dim=-1).values.sum(-1)
        order_TG = best_TG.sort(dim=-1, descending=True, stable=True).indices
        left_out = torch.ones_like(best_TG, dtype=torch.bool)
        left_out.scatter_(1, order_TG[:, : rule.num_chosen_groups], False)
        grouped_TGE = grouped_TGE.masked_fill(left_out[..., None], -torch.inf)
    order_TE = grouped_TGE.flatten(1).sort(dim=-1, descending=True, stable=True).indices
    experts_TJ = order_TE[:, :num_choices]
    weights_TJ = scores_TE.gather(1, experts_TJ)
    if renormalise:
        weights_TJ = weights_TJ / (weights_TJ.sum(-1, keepdim=True) + rule.epsilon)
    return Routing((weights_TJ * rule.scale).contiguous(), experts_TJ.int().contiguous())
