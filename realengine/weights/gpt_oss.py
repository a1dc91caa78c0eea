"""Experts of gpt-oss: stored with alternating outputs of gate and up, transposed or in MXFP4.

| own weight | plain checkpoint | MXFP4 |
| --- | --- | --- |
| experts_gate_up [E, 2 I, H] | gate_up_proj [E, H, 2 I] | gate_up_proj_blocks [E, 2 I, H / 32, 16], _scales |
| experts_gate_up.bias [E, 2 I] | gate_up_proj_bias [E, 2 I] | the same |
| experts_down [E, H, I] | down_proj [E, I, H] | down_proj_blocks [E, H, I / 32, 16], _scales |

Outputs 0, 2, 4, ... of gate_up_proj are those of gate, 1, 3, 5, ... those of up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import torch

from kernels.mxfp4_weight import BLOCK, Mxfp4Weight
from realengine.model.architecture import Architecture
from realengine.weights.weight import Weight, part_of, whole

PLAIN, PACKED = "gpt_oss", "gpt_oss_mxfp4"
NAMES: Mapping[str, str] = {
    "sinks": "model.layers.{i}.self_attn.sinks",
    "o_bias": "model.layers.{i}.self_attn.o_proj.bias",
    "router": "model.layers.{i}.mlp.router.weight",
    "router_bias": "model.layers.{i}.mlp.router.bias",
    "gate_up": "model.layers.{i}.mlp.experts.gate_up_proj",
    "down": "model.layers.{i}.mlp.experts.down_proj",
}


class Reader(Protocol):
    """A checkpoint from which whole tensors are read."""

    def read(self, name: str, take: tuple[slice, ...], *, integers: bool = False) -> torch.Tensor: ...


def weights_of(architecture: Architecture, names: Mapping[str, str]) -> Iterator[Weight]:
    """Yields a layer's weights besides those of its attention's projections and of its norms."""
    parts = architecture.gpt_oss
    assert parts is not None
    experts, hidden = architecture.num_experts, architecture.hidden_size
    inner = architecture.moe_intermediate_size
    yield whole("sinks", names["sinks"], (architecture.num_heads,))
    yield whole("o.bias", names["o_bias"], (hidden,))
    yield whole("router.weight", names["router"], (experts, hidden))
    yield whole("router.bias", names["router_bias"], (experts,))
    for own, of, num_outputs, num_inputs in (
        ("experts_gate_up", "gate_up", 2 * inner, hidden),
        ("experts_down", "down", hidden, inner),
    ):
        shape = (experts, num_outputs, num_inputs)
        if parts.is_packed:
            blocks = (*shape[:2], num_inputs // BLOCK, BLOCK // 2)
            stored = (part_of(f"{names[of]}_blocks", blocks), part_of(f"{names[of]}_scales", blocks[:3]))
            yield Weight(name=f"{own}.weight", shape=shape, parts=stored, stored=PACKED)
        else:
            plain = part_of(names[of], (experts, num_inputs, num_outputs))
            yield Weight(name=f"{own}.weight", shape=shape, parts=(plain,), stored=PLAIN)
        bias = part_of(f"{names[of]}_bias", shape[:2])
        yield Weight(name=f"{own}.bias", shape=shape[:2], parts=(bias,), stored=PLAIN)


def read_experts(
    weight: Weight, checkpoint: Reader, dtype: torch.dtype, device: torch.device
) -> torch.Tensor | Mxfp4Weight:
    """Reads an expert weight or bias of this family."""

    def in_order(stored: torch.Tensor) -> torch.Tensor:
        if "gate_up" not in weight.name:
            return stored.contiguous()
        return torch.cat([stored[:, 0::2], stored[:, 1::2]], dim=1)

    parts = [checkpoint.read(part.name, part.take, integers=weight.stored == PACKED) for part in weight.parts]
    if weight.stored == PACKED:
        return Mxfp4Weight(in_order(parts[0].flatten(2)).to(device), in_order(parts[1]).to(device))
    stored = parts[0] if weight.name.endswith("bias") else parts[0].transpose(1, 2)
    found = in_order(stored).to(device=device, dtype=dtype)
    if not found.isfinite().all():
        raise ValueError(f"{weight.parts[0].name}: contains infinite numbers or NaN in {dtype}")
    return found
