"""Tokens that would end an output and may not be drawn yet, because its request wants more tokens first."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch


class StopMask(NamedTuple):
    """The masked tokens of a slot, at positions before `end`. Without tokens, nothing is masked."""

    slot: int
    end: int
    tokens: tuple[int, ...]


class ChangedMasks:
    """The masks that the device does not have yet."""

    def __init__(self) -> None:
        self._slots: set[int] = set()  # with a mask
        self.changed: list[StopMask] = []
        """Masks to set with the next launch."""

    def set(self, slot: int, end: int, tokens: Collection[int]) -> bool:
        """Masks tokens of a slot at positions before `end`, in place of its former mask.

        Returns whether the slot has a mask now: it has none without tokens.
        """
        if tokens or slot in self._slots:
            self.changed.append(StopMask(slot, end, tuple(tokens)))
        (self._slots.add if tokens else self._slots.discard)(slot)
        return bool(tokens)


class StopMasks:
    """The masks of all slots on a device. S rows, V tokens, K tokens of the longest mask."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._end_S = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._tokens_SK = torch.zeros(num_slots, 1, dtype=torch.int64, device=device)

    def set(self, mask: StopMask) -> None:
        """Sets the mask of a slot in place of its former one."""
        self._end_S[mask.slot] = mask.end if mask.tokens else 0
        if not mask.tokens:
            return
        num_more = len(mask.tokens) - self._tokens_SK.shape[1]
        if num_more > 0:  # a repeated token is masked twice
            repeated = self._tokens_SK[:, :1].expand(-1, num_more)
            self._tokens_SK = torch.cat([self._tokens_SK, repeated], dim=1)
        tokens = torch.tensor(mask.tokens, device=self._tokens_SK.device)
        self._tokens_SK[mask.slot] = tokens[0]
        self._tokens_SK[mask.slot, : len(tokens)] = tokens

    def masked(
        self, logits_SV: torch.Tensor, slots_S: torch.Tensor, positions_S: torch.Tensor
    ) -> torch.Tensor:
        """Returns the logits with minus infinity for masked tokens. positions_S: of the tokens to draw."""
        tokens_SK = self._tokens_SK[slots_S]
        is_masked_S1 = (positions_S < self._end_S[slots_S])[:, None]
        values_SK = logits_SV.gather(1, tokens_SK).masked_fill(is_masked_S1, -torch.inf)
        return logits_SV.scatter(1, tokens_SK, values_SK)
