"""The names of `attention_backend`, and the backend with the chosen implementation."""

from __future__ import annotations

from collections.abc import Callable

import torch

from realengine.attention.chunked import ChunkedAttention, Implementation
from realengine.attention.flashinfer_attention import FlashInferAttention
from realengine.attention.hopper import HopperAttention
from realengine.attention.torch_attention import SdpaAttention, VarlenAttention
from realengine.model.backend import Backend

OWN = "triton"
IMPLEMENTATIONS: dict[str, Callable[[torch.device], Implementation]] = {
    HopperAttention.name: lambda _: HopperAttention(),
    SdpaAttention.name: lambda _: SdpaAttention(),
    VarlenAttention.name: VarlenAttention,
    FlashInferAttention.name: FlashInferAttention,
}
NAMES = (OWN, *IMPLEMENTATIONS)


def with_attention(backend: Backend, name: str, device: torch.device) -> Backend:
    """Returns the backend whose chunks of prompts the implementation of this name computes.

    Raises ValueError if it does not exist on this machine.
    """
    if name == OWN:
        return backend
    if name == HopperAttention.name and backend.name != "triton":
        raise ValueError(f"attention_backend={name}: needs backend=triton; choose torch_sdpa")
    implementation = IMPLEMENTATIONS[name](device)
    return backend._replace(prefill_attention=ChunkedAttention(implementation, backend.prefill_attention))
