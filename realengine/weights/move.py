"""Moves loaded weights from one device to another."""

from __future__ import annotations

from typing import Any

import torch

from realengine.model.quantization import Weights


def weights_on(weights: Weights, device: torch.device) -> Weights:
    """Returns weights on a device; those that are there are not copied, and equal tensors stay one."""
    done: dict[int, torch.Tensor] = {}

    def moved(part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            return done.setdefault(id(part), part.to(device))
        return type(part)(*map(moved, part)) if isinstance(part, tuple) else part

    return {name: moved(weight) for name, weight in weights.items()}
