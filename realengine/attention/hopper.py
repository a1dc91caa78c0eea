"""Our prefill attention for Hopper as an implementation of attention."""

from __future__ import annotations

import torch

from kernels.launch import INTERPRETER, target
from kernels.prefill_hopper import HALVES, HEAD_DIMS, prefill_hopper, unsupported
from realengine.attention.chunked import Call, Support


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
