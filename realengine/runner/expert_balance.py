"""Moves experts between expert-parallel ranks while the engine runs, as a placement policy decides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from kernels.moe import ExpertWeight
from policies.placement.experts import ExpertPlacing, Slots
from realengine.model.moe import Experts
from realengine.runner.parallel import ExpertRanks


class ExpertBalance:
    """Counts the steps of a rank; after every interval of the policy, the ranks of its stage move experts.

    All ranks of a stage run the same steps and sum the tokens of each expert, so each finds the same
    placement. Weights are moved into the tensors that the kernels read, layer by layer.
    """

    def __init__(self, experts: Mapping[int, Experts], ranks: ExpertRanks, policy: ExpertPlacing) -> None:
        """Counts from 0. experts: of the layers of this rank's stage."""
        self._experts = experts
        self._ranks = ranks
        self._policy = policy
        self._num_steps = 0
        self.num_moved = 0
        """Experts that this rank has received from others so far."""

    def stepped(self) -> None:
        """Notes a step; moves experts if it is the last one of an interval."""
        self._num_steps += 1
        interval = self._policy.step_interval
        if interval is not None and self._num_steps % interval == 0:
            self.balance()

    @torch.inference_mode()
    def balance(self) -> None:
        """Places the experts of each layer by the tokens that they got since they were placed last."""
        slots = [experts.slots for experts in self._experts.values() if experts.slots is not None]
        if not slots:
            return  # a stage without experts
        loads_LE = self._ranks.group.all_reduce(torch.stack([each.loads_E for each in slots])).tolist()
        for experts, each, loads in zip(self._experts.values(), slots, loads_LE, strict=True):
            if any(loads):
                self._move(experts, each.slots, self._policy.place(loads, self._ranks.size))

    def _move(self, experts: Experts, before: Slots, wanted: Slots) -> None:
        """Brings the experts of a layer to their new slots."""
        after = tuple(staying(old, new) for old, new in zip(before, wanted, strict=True))
        holder: dict[int, int] = {}  # the first rank that has each expert
        for rank, of_rank in enumerate(before):
            for expert in of_rank:
                holder.setdefault(expert, rank)
        ranks, own = self._ranks, before[self._ranks.rank]
        tensors = [*_tensors(experts.gate_up), *_tensors(experts.down)]
        sends: list[tuple[torch.Tensor, int]] = []
        receives: list[tuple[torch.Tensor, int]] = []
        arriving: list[tuple[int, list[torch.Tensor]]] = []
        for rank, of_rank in enumerate(after):
            for slot, expert in enumerate(of_rank):
                if before[rank][slot] == expert:
                    continue
                is_here, has_it = rank == ranks.rank, expert in before[rank]
                if is_here:
                    fresh = [
                        tensor[own.index(expert)].clone() if has_it else torch.empty_like(tensor[0])
                        for tensor in tensors
                    ]
                    arriving.append((slot, fresh))
                if has_it:
                    continue
                if is_here:
                    receives += [(tensor, ranks.peer(holder[expert])) for tensor in fresh]
                    self.num_moved += 1
                elif holder[expert] == ranks.rank:
                    sends += [
                        (tensor[own.index(expert)].contiguous(), ranks.peer(rank)) for tensor in tensors
                    ]
        ranks.group.exchange(sends, receives)
        for slot, fresh in arriving:
            for tensor, new in zip(tensors, fresh, strict=True):
                tensor[slot].copy_(new)
        assert experts.slots is not None
        experts.slots.place(after)


def staying(before: Sequence[int], wanted: Sequence[int]) -> tuple[int, ...]:
    """Returns the wanted experts of a rank in an order in which those that it has keep their slots.

    0, 1, 2 before, 2, 3, 0 wanted: 0, 3, 2.
    """
    left = list(wanted)
    kept: list[int | None] = []
    for expert in before:
        stays = expert in left
        if stays:
            left.remove(expert)
        kept.append(expert if stays else None)
    return tuple(left.pop(0) if expert is None else expert for expert in kept)


def _tensors(weight: ExpertWeight) -> tuple[torch.Tensor, ...]:
    """Returns the tensors [experts, ...] of a weight, its scales included."""
    return (weight,) if isinstance(weight, torch.Tensor) else tuple(weight)
