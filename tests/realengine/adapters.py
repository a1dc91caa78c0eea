"""LoRA adapters with random weights."""

from __future__ import annotations

import hashlib

import torch

from realengine.model.lora_adapter import Adapter, LowRank, linear_layers

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def random_adapter(architecture, rank, targets=TARGETS, seed=0, scaling=1.0):
    """Draws both matrices from a normal distribution (standard deviation 0.02, fp32) by (seed, name)."""

    def drawn(name, *shape):
        stream = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(stream, "little") >> 1)
        return torch.empty(shape).normal_(std=0.02, generator=generator)

    layers = {}
    for name, part in linear_layers(architecture).items():
        if name.rpartition(".")[2] in targets:
            num_out, num_in = part.shape
            layers[name] = LowRank(
                drawn(f"{name}.lora_A", rank, num_in), drawn(f"{name}.lora_B", num_out, rank)
            )
    return Adapter(scaling=scaling, layers=layers)
