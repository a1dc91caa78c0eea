"""Changes of logits before a token is drawn: biases, and tokens that a row may not draw.

- Biases: numbers that are added to the logits of some tokens of a slot, at positions before an end. Those of
  `logit_bias` have no end; a token that may not end an output yet has minus infinity (`min_tokens`).
- Allowed tokens: of rows whose outputs must have a form, the tokens that may come next, anew in each step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

NO_END = 1 << 62
"""Position that no token has."""


class Bias(NamedTuple):
    """A number that is added to the logit of a token, at positions before `end`."""

    token: int
    value: float
    end: int


class SlotBiases(NamedTuple):
    """The biases of a slot, in place of its former ones."""

    slot: int
    biases: tuple[Bias, ...]


class ChangedBiases:
    """The biases that the device does not have yet."""

    def __init__(self) -> None:
        self._slots: set[int] = set()  # with biases
        self.changed: list[SlotBiases] = []
        """Biases to set with the next launch."""

    def set(
        self, slot: int, end: int, stop_tokens: Collection[int], logit_bias: Mapping[int, float] | None
    ) -> bool:
        """Sets the biases of a slot; returns whether it has any now.

        stop_tokens: they are not drawn at positions before `end`.
        """
        biases = [Bias(token, value, NO_END) for token, value in (logit_bias or {}).items()]
        biases += [Bias(token, -np.inf, end) for token in stop_tokens]
        if biases or slot in self._slots:
            self.changed.append(SlotBiases(slot, tuple(biases)))
        (self._slots.add if biases else self._slots.discard)(slot)
        return bool(biases)


class Biases:
    """The biases of all slots on a device. S rows, V tokens, K biases of the slot that has most."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._tokens_SK = torch.zeros(num_slots, 1, dtype=torch.int64, device=device)
        self._values_SK = torch.zeros(num_slots, 1, dtype=torch.float32, device=device)
        self._ends_SK = torch.zeros(num_slots, 1, dtype=torch.int64, device=device)  # 0: it is none

    def set(self, changed: SlotBiases) -> None:
        """Sets the biases of a slot in place of its former ones."""
        slot, biases = changed
        self._ends_SK[slot] = 0
        if not biases:
            return
        num_more = len(biases) - self._tokens_SK.shape[1]
        if num_more > 0:
            pad = torch.nn.functional.pad
            self._tokens_SK = pad(self._tokens_SK, (0, num_more))
            self._values_SK = pad(self._values_SK, (0, num_more))
            self._ends_SK = pad(self._ends_SK, (0, num_more))
        for of_all_SK, own in zip(
            (self._tokens_SK, self._values_SK, self._ends_SK), zip(*biases, strict=True), strict=True
        ):
            of_all_SK[slot, : len(biases)] = torch.tensor(own, dtype=of_all_SK.dtype, device=of_all_SK.device)

    def added(
        self, logits_SV: torch.Tensor, slots_S: torch.Tensor, positions_S: torch.Tensor
    ) -> torch.Tensor:
        """Returns the logits with the biases, added in fp32. positions_S: of the tokens to draw.

        Their dtype stays, as kernels of the draw are compiled for it ahead of the requests.
        """
        holds_SK = positions_S[:, None] < self._ends_SK[slots_S]
        values_SK = torch.where(holds_SK, self._values_SK[slots_S], 0.0)
        biased_SV = logits_SV.float().scatter_add(1, self._tokens_SK[slots_S], values_SK)
        return biased_SV.to(logits_SV.dtype)


class AllowedTokens(NamedTuple):
    """The tokens that some rows of a step may draw.

    rows_C: rows of its logits. bits_CW: a bit for each token, in words of 32, the lowest bit first; there may
    be more bits than tokens.
    """

    rows_C: NDArray[np.int32]
    bits_CW: NDArray[np.int32]

    def masked(self, logits_SV: torch.Tensor) -> torch.Tensor:
        """Returns the logits with minus infinity for the tokens that a row may not draw."""
        device = logits_SV.device
        rows_C = torch.from_numpy(self.rows_C).to(device).long()
        bytes_CB = torch.from_numpy(self.bits_CW.view(np.uint8)).to(device)  # little-endian
        places = torch.arange(8, dtype=torch.uint8, device=device)
        is_allowed_CV = ((bytes_CB[:, :, None] >> places) & 1).flatten(1)[:, : logits_SV.shape[1]].bool()
        kept_CV = logits_SV[rows_C].masked_fill(~is_allowed_CV, -torch.inf)
        return logits_SV.index_copy(0, rows_C, kept_CV)
