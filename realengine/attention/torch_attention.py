"""torch's attention for chunks of prompts: scaled_dot_product_attention, and varlen_attn.

Both read keys and values in consecutive rows, so the contexts are copied first, and both need lengths on the
host, which waits for the device once per step.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from kernels.attention_reference import gather_slots, gather_tokens
from kernels.prefill_hopper import HALVES
from realengine.attention.chunked import Call, Support

MAX_HEAD_DIM = 256  # of FlashAttention-2


class SdpaAttention:
    """`scaled_dot_product_attention`, one sequence after the other."""

    name = "torch_sdpa"

    def __init__(self) -> None:
        self.support = Support(dtypes=(*HALVES, torch.float32, torch.float64), quantised=True)

    def lacks(self, call: Call) -> str | None:
        """Returns what else of a call is not supported; None: nothing."""
        return None

    def __call__(self, call: Call, out_THD: torch.Tensor) -> None:
        """Writes the attention of the call's sequences."""
        q, kv, tables = call.q_THD, call.kv, call.contexts.block_tables_BM
        lengths = call.lengths()
        for seq, ((start, end), length) in enumerate(
            zip(itertools.pairwise(lengths.starts), lengths.contexts, strict=True)
        ):
            if start == end:
                continue
            keys = gather_tokens(kv.keys, kv.key_scales, tables[seq], 0, length, q.dtype)
            values = gather_tokens(kv.values, kv.value_scales, tables[seq], 0, length, q.dtype)
            whole = end - start == length
            out = F.scaled_dot_product_attention(
                q[start:end].transpose(0, 1)[None],
                keys.transpose(0, 1)[None],
                values.transpose(0, 1)[None],
                attn_mask=None if whole else causal_lower_right(end - start, length),
                is_causal=whole,
                scale=call.options.scale_of(q.shape[2]),
                enable_gqa=True,
            )
            out_THD[start:end] = out[0].transpose(0, 1)


class VarlenAttention:
    """`torch.nn.attention.varlen.varlen_attn`, FlashAttention-2 for all sequences in one call.

    Raises ValueError on a CPU, or if this torch does not have it.
    """

    name = "torch_varlen"

    def __init__(self, device: torch.device) -> None:
        self.support = Support(dtypes=HALVES, head_dims=tuple(range(8, MAX_HEAD_DIM + 1, 8)), window=True)
        if device.type != "cuda":
            raise ValueError(f"attention_backend={self.name}: needs a GPU; choose torch_sdpa")
        try:
            self._attend = importlib.import_module("torch.nn.attention.varlen").varlen_attn
        except (ImportError, AttributeError):
            raise ValueError(
                f"attention_backend={self.name}: torch {torch.__version__} has no varlen_attn; "
                "choose torch_sdpa"
            ) from None
        self._has_groups = "enable_gqa" in inspect.signature(self._attend).parameters

    def lacks(self, call: Call) -> str | None:
        """Returns what else of a call is not supported; None: nothing."""
        return None

    def __call__(self, call: Call, out_THD: torch.Tensor) -> None:
        """Writes the attention of the call's sequences."""
        q, kv, lengths = call.q_THD, call.kv, call.lengths()
        group = q.shape[1] // kv.keys.shape[2]
        slots = self._slots(call)
        keys = gather_slots(kv.keys, None, slots, q.dtype)
        values = gather_slots(kv.values, None, slots, q.dtype)
        grouped: dict[str, Any] = {}
        if self._has_groups:
            grouped["enable_gqa"] = True
        elif group > 1:
            keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
        end = lengths.starts[-1]
        window = call.options.window
        attended = self._attend(
            q[:end].contiguous(),
            keys,
            values,
            call.chunks.start_loc,
            F.pad(call.contexts.lens_B.cumsum(0), (1, 0)).int(),
            call.chunks.max_len,
            call.contexts.max_len,
            scale=call.options.scale_of(q.shape[2]),
            window_size=(-1 if window is None else window - 1, 0),
            **grouped,
        )
        out_THD[:end] = attended

    def _slots(self, call: Call) -> torch.Tensor:
        """Returns the slots of all contexts' tokens, made once for all layers of a step."""
        shared = {} if call.contexts.splits is None else call.contexts.splits
        if "slots" not in shared:
            tables, block_size = call.contexts.block_tables_BM, call.kv.keys.shape[1]
            slots = (
                tables[:, :, None] * block_size + torch.arange(block_size, device=tables.device)
            ).flatten(1)
            shared["slots"] = torch.cat(
                [slots[seq, :length] for seq, length in enumerate(call.lengths().contexts)]
            ).long()
        found: torch.Tensor = shared["slots"]
        return found
