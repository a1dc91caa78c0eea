"""Copies small arrays from the host to the device without waiting for it."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray


class Upload:
    """Two pinned buffers, used in turn: the copy of one step may still run while the next step is packed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers = [torch.empty(0, dtype=torch.int32)] * 2
        self._copied: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0

    def stage(self, words: NDArray[np.int32]) -> torch.Tensor:
        """Returns the words in pinned memory, to be copied to the device; on a CPU, the words."""
        if self._device.type == "cpu":
            return torch.from_numpy(words)
        last_copied = torch.cuda.Event()
        last_copied.record()  # after the copy of the previous step, which was queued
        self._copied[self._turn] = last_copied
        self._turn ^= 1
        copied = self._copied[self._turn]
        if copied is not None:
            copied.synchronize()
        if len(self._buffers[self._turn]) < len(words):
            size = 1 << (len(words) - 1).bit_length()
            self._buffers[self._turn] = torch.empty(size, dtype=torch.int32, pin_memory=True)
        staged = self._buffers[self._turn][: len(words)]
        staged.copy_(torch.from_numpy(words))
        return staged

    def sent(self, words: NDArray[np.int32]) -> torch.Tensor:
        """Returns the words of a step on the device."""
        return self.stage(words).to(self._device, non_blocking=True)

    def copied(self, array: NDArray[np.int32]) -> torch.Tensor:
        """Copies a rarely sent array to the device; may wait for it."""
        return torch.from_numpy(array).to(self._device)
