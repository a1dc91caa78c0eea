"""LoRA adapters (Hu et al., ICLR 2022): low-rank pairs for a model's linear layers.

For a linear layer W [N, K] of the base model, A [R, K] and B [N, R]: W + scaling * B @ A. R ranks, K inputs,
N outputs.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from realengine.model.architecture import Architecture
from realengine.weights.table import expected, shard
from realengine.weights.weight import Part, Weight

PREFIX = "base_model.model."  # prefix of PEFT's names
PROJECTIONS = ("qkv", "o", "gate_up", "down")


class LowRank(NamedTuple):
    """Low-rank update of one linear layer W [N, K]: scaling * b_NR @ a_RK."""

    a_RK: torch.Tensor
    b_NR: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Adapter:
    """Low-rank pairs by the linear layer's name in the checkpoint: model.layers.0.self_attn.q_proj."""

    scaling: float
    layers: Mapping[str, LowRank]

    @property
    def rank(self) -> int:
        """The largest rank of the pairs."""
        return max(pair.a_RK.shape[0] for pair in self.layers.values())

    def check_fits(self, architecture: Architecture) -> None:
        """Raises ValueError with tensor, expected and found shape if the adapter is for another model."""
        parts = linear_layers(architecture)
        for name, (a_RK, b_NR) in self.layers.items():
            if name not in parts:
                raise ValueError(unsupported_layer_message(name, architecture))
            rank = a_RK.shape[0]
            check_shapes(name, a_RK.shape, b_NR.shape, rank, parts[name])


def adapted_weights(
    architecture: Architecture, rank: int = 0, world_size: int = 1
) -> dict[tuple[int, str], Weight]:
    """Returns this tensor-parallel rank's share of each adapted linear layer, by (layer, projection)."""
    named = re.compile(rf"layers\.(\d+)\.({'|'.join(PROJECTIONS)})\.weight")
    found = {}
    for weight in shard(expected(architecture), rank, world_size):
        if match := named.fullmatch(weight.name):
            found[int(match[1]), match[2]] = weight
    return found


def linear_layers(architecture: Architecture) -> dict[str, Part]:
    """Returns the checkpoint's linear layers that adapters change, by name without `.weight`."""
    weights = adapted_weights(architecture).values()
    return {layer_name(part): part for weight in weights for part in weight.parts}


def layer_name(part: Part) -> str:
    """Returns the name of the linear layer whose weight a checkpoint tensor is."""
    return part.name.removesuffix(".weight")


def check_shapes(name: str, a_shape: Sequence[int], b_shape: Sequence[int], rank: int, part: Part) -> None:
    """Raises ValueError unless the shapes are [rank, inputs] and [outputs, rank] of the layer."""
    num_out, num_in = part.shape
    for key, found, shape in zip(
        keys_of(name), (a_shape, b_shape), ((rank, num_in), (num_out, rank)), strict=True
    ):
        if tuple(found) != shape:
            raise ValueError(
                f"{key} has shape {list(found)}, must have {list(shape)} for rank {rank} and this model; "
                "check that the adapter was made for this base model"
            )


def keys_of(name: str) -> tuple[str, str]:
    """Returns the names of a layer's two tensors in the file."""
    return f"{PREFIX}{name}.lora_A.weight", f"{PREFIX}{name}.lora_B.weight"


def unsupported_layer_message(name: str, architecture: Architecture) -> str:
    """Returns a message on why a pair has no layer in the model."""
    layer = layer_of(name)
    if layer is not None and layer >= architecture.num_layers:
        return (
            f"{name}: the model has only {architecture.num_layers} layers; the adapter is "
            "for another base model"
        )
    supported = kinds(linear_layers(architecture))
    return f"{name}: not supported; supported: {supported} of this model's {architecture.num_layers} layers"


def layer_of(name: str) -> int | None:
    """Returns the index of the layer in a tensor's name; None outside the layers."""
    match = re.match(r"model\.layers\.(\d+)\.", name)
    return int(match[1]) if match else None


def kinds(names: Collection[str]) -> str:
    """Returns the kinds of linear layers as text: q_proj, k_proj, ..."""
    return ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in names))
