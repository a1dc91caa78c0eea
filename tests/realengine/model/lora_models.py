"""A small model with adapters, and weights into which they are merged."""

from __future__ import annotations

import torch

from kernels.lora import Segments
from realengine.model.architecture import Architecture
from realengine.model.backend import TORCH
from realengine.model.lora import AdapterBank, make_segments
from realengine.model.lora_adapter import adapted_weights
from tests.realengine.checkpoints import LLAMA

torch.set_num_threads(1)


CPU = torch.device("cpu")
SPEC = Architecture.from_hf(LLAMA)
Q0 = "model.layers.0.self_attn.q_proj"


# A folder as PEFT writes it: hidden size 32, 4 heads of 8, 2 KV heads, MLPs of 64, 2 layers.
SIZES = {
    "self_attn.q_proj": (32, 32),
    "self_attn.k_proj": (16, 32),
    "self_attn.v_proj": (16, 32),
    "self_attn.o_proj": (32, 32),
    "mlp.gate_proj": (64, 32),
    "mlp.up_proj": (64, 32),
    "mlp.down_proj": (32, 64),
}


def delta(adapter, name):
    pair = adapter.layers[name]
    return adapter.scaling * pair.b_NR.double() @ pair.a_RK.double()


def on_device(slots, num_tokens, most=1 << 30):
    arrays = make_segments(slots, num_tokens, most)
    return Segments(torch.from_numpy(arrays.starts), torch.from_numpy(arrays.slots), most)


def make_bank(spec=SPEC, dtype=torch.float32, **given):
    return AdapterBank(spec, TORCH, dtype, CPU, **{"max_loras": 2, "max_rank": 8} | given)


def merged(weights, spec, adapter):
    """Returns the engine's weights with W + scaling * B @ A in place of W, in float64."""
    own = {name: tensor.double().clone() for name, tensor in weights.items()}
    for (layer, projection), weight in adapted_weights(spec).items():
        for part in weight.parts:
            name = part.name.removesuffix(".weight")
            if adapter is not None and name in adapter.layers:
                own[f"layers.{layer}.{projection}.weight"][part.into] += delta(adapter, name)
    return own
