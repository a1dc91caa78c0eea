"""Reads tables of weights for drafts: from a safetensors checkpoint, or random ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from realengine.model.architecture import Architecture
from realengine.speculation.drafter import DrafterContext
from realengine.speculation.settings import DraftSource
from realengine.weights.load import load_table, random_weight
from realengine.weights.safetensors import SafetensorsCheckpoint
from realengine.weights.weight import Part, Weight


def read_weights(
    source: DraftSource,
    context: DrafterContext,
    table: Callable[[SafetensorsCheckpoint | None], Sequence[Weight]],
    *,
    is_ours: Callable[[str], bool] = lambda name: True,
) -> tuple[dict[str, torch.Tensor], SafetensorsCheckpoint | None]:
    """Returns the weights of a draft by their own names, and the checkpoint that they are from.

    table: returns the table of weights of a checkpoint; None: of random weights. is_ours: whether a tensor of
    the checkpoint belongs to the draft; others are not read. Raises ValueError, with file and tensor, for
    missing, misshapen and unknown tensors.
    """
    if isinstance(source, Architecture):
        weights = table(None)
        drawn = (
            random_weight(each, each, context.dtype, context.device, seed=context.seed) for each in weights
        )
        return {each.name: tensor for each, tensor in zip(weights, drawn, strict=True)}, None
    try:
        checkpoint = SafetensorsCheckpoint(Path(source).expanduser())
        ignored = [name for name in checkpoint.shapes if not is_ours(name)]
        tensors = load_table(table(checkpoint), checkpoint, context.dtype, context.device, ignored=ignored)
    except ValueError as error:
        raise ValueError(f"speculative_config: model={source}: {error}") from error
    return tensors, checkpoint


def whole(name: str, stored: str, shape: tuple[int, ...]) -> Weight:
    """Returns a weight of one unchanged checkpoint tensor."""
    everything = tuple(slice(0, size) for size in shape)
    part = Part(name=stored, shape=shape, into=everything, take=everything)
    return Weight(name=name, shape=shape, parts=(part,))
