"""The names of `attention_backend`, and the backend with the chosen implementation."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels.launch import INTERPRETER, target
from kernels.prefill_hopper import HALVES, HEAD_DIMS, prefill_hopper, unsupported
from realengine.attention.chunked import Call, ChunkedAttention, Implementation, Support
from realengine.attention.flashinfer_attention import FlashInferAttention
from realengine.attention.torch_attention import SdpaAttention, VarlenAttention
from realengine.model.backend import Backend


class HopperAttention:
    """`kernels.prefill_hopper`. Raises ValueError on other chips."""

    name = "triton_hopper"

    def __init__(self) -> None:
        self.support = Support(
            dtypes=HALVES, head_dims=HEAD_DIMS, window=True, softcap=True, sinks=True, quantised=True
        )
        if target() not in ("sm_90", INTERPRETER):
            raise ValueError(
                f"attention_backend={self.name}: needs a GPU with compute capability 9.0 (H100, H200), this "
                f"is {target()}; choose triton"
            )

    def lacks(self, call: Call) -> str | None:
        """Returns what else of a call is not supported; None: nothing."""
        reason: str | None = unsupported(*call)
        return reason

    def __call__(self, call: Call, out_THD: torch.Tensor) -> None:
        """Writes the attention of the call's sequences."""
        prefill_hopper(*call, out_THD=out_THD)


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
