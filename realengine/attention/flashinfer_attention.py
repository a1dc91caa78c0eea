"""FlashInfer's paged prefill attention for chunks of prompts; the package is optional.

The lengths are read back to the host once per step, because FlashInfer plans its work there.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.nn.functional as F

from realengine.attention.chunked import Call, Support

WORKSPACE_BYTES = 128 << 20


class FlashInferAttention:
    """`BatchPrefillWithPagedKVCacheWrapper`, one per kind of layer.

    Raises ValueError on a CPU, or if FlashInfer is not installed.
    """

    name = "flashinfer"

    def __init__(self, device: torch.device) -> None:
        self.support = Support(
            dtypes=(torch.float16, torch.bfloat16),
            head_dims=(64, 128, 256),
            window=True,
            softcap=True,
            is_dense=False,
        )
        if device.type != "cuda":
            raise ValueError(f"attention_backend={self.name}: needs a GPU; choose torch_sdpa")
        try:
            self._library: Any = importlib.import_module("flashinfer")
        except ImportError as error:
            raise ValueError(
                f"attention_backend={self.name}: the package flashinfer-python cannot be imported ({error}); "
                "install it, or choose triton, torch_sdpa or torch_varlen"
            ) from None
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrappers: dict[tuple[Any, ...], Any] = {}

    def lacks(self, call: Call) -> str | None:
        """Returns what else of a call is not supported; None: nothing."""
        return None if call.kv.keys.is_contiguous() and call.kv.values.is_contiguous() else "strided caches"

    def __call__(self, call: Call, out_THD: torch.Tensor) -> None:
        """Writes the attention of the call's sequences."""
        end = call.lengths().starts[-1]
        attended = self._planned(call).run(call.q_THD[:end].contiguous(), tuple(call.kv[:2]))
        out_THD[:end] = attended

    def _planned(self, call: Call) -> Any:
        """Returns the wrapper of a kind of layer, whose plan is made once per step."""
        options, q = call.options, call.q_THD
        scale = options.scale_of(q.shape[2])
        key = self.name, *q.shape[1:], *call.kv.keys.shape[1:3], options.window, options.softcap, scale
        shared = {} if call.contexts.splits is None else call.contexts.splits
        if key in shared:
            return shared[key]
        if key not in self._wrappers:
            self._wrappers[key] = self._library.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD")
        wrapper, block_size, lens = self._wrappers[key], call.kv.keys.shape[1], call.contexts.lens_B
        counts = [-(-length // block_size) for length in call.lengths().contexts]
        tables = call.contexts.block_tables_BM
        pages = torch.cat([tables[seq, :count] for seq, count in enumerate(counts)])
        ends = (lens + block_size - 1).div(block_size, rounding_mode="floor").cumsum(0)
        wrapper.plan(
            call.chunks.start_loc,
            F.pad(ends, (1, 0)).int(),
            pages,
            ((lens - 1).clamp(min=0) % block_size + 1).int(),
            q.shape[1],
            call.kv.keys.shape[2],
            q.shape[2],
            block_size,
            causal=True,
            sm_scale=scale,
            window_left=-1 if options.window is None else options.window - 1,
            logits_soft_cap=options.softcap,
            q_data_type=q.dtype,
            kv_data_type=call.kv.keys.dtype,
        )
        shared[key] = wrapper
        return wrapper
