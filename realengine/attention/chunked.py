"""Computes a call of attention with a chosen implementation if that supports it, or with our own kernel."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from kernels.attention import PLAIN, AttentionOptions, Contexts
from kernels.paged_kv import QUANTISED, PagedKv
from kernels.prefill_attention import Chunks, DraftTree
from kernels.prefill_hopper import DENSE_BYTES

MIN_QUERIES = 16
"""Queries of the longest chunk from which on it is not a pass that verifies drafts."""

_LOG = logging.getLogger("windtunnel.engine")


class Call(NamedTuple):
    """The arguments of `kernels.prefill_attention`, without a tree."""

    q_THD: torch.Tensor
    kv: PagedKv
    contexts: Contexts
    chunks: Chunks
    options: AttentionOptions

    def lengths(self) -> Lengths:
        """Reads the lengths back to the host, once for all layers of a step."""
        shared = {} if self.contexts.splits is None else self.contexts.splits
        if "lengths" not in shared:
            shared["lengths"] = Lengths(self.chunks.start_loc.tolist(), self.contexts.lens_B.tolist())
        found: Lengths = shared["lengths"]
        return found


class Lengths(NamedTuple):
    """First query of each sequence and the end, and the context lengths, on the host."""

    starts: list[int]
    contexts: list[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Support:
    """Limits of an implementation. None of them computes ALiBi or token trees."""

    dtypes: tuple[torch.dtype, ...]
    head_dims: tuple[int, ...] | None = None
    """None: any."""
    window: bool = False
    softcap: bool = False
    sinks: bool = False
    quantised: bool = False
    """KV of 8 or 4 bits, with scales per token and head."""
    is_dense: bool = True
    """Whether it reads keys and values that are copied to consecutive rows first."""

    def lacks(self, call: Call) -> str | None:
        """Returns what of a call is not supported, in a few words; None: nothing."""
        options, head_dim = call.options, call.q_THD.shape[2]
        checks = (
            (call.chunks.max_len >= MIN_QUERIES, f"chunks of fewer than {MIN_QUERIES} queries"),
            (call.q_THD.dtype in self.dtypes, f"queries of {call.q_THD.dtype}"),
            (self.head_dims is None or head_dim in self.head_dims, f"head_dim {head_dim}"),
            (self.window or options.window is None, "a window"),
            (self.softcap or options.softcap is None, "a soft cap"),
            (self.sinks or options.sinks_H is None, "sinks"),
            (options.alibi_slopes_H is None, "ALiBi"),
            (self.quantised or call.kv.keys.dtype not in QUANTISED, "quantised KV"),
            (
                not self.is_dense or _dense_bytes(call) <= DENSE_BYTES,
                f"contexts of more than {DENSE_BYTES >> 20} MiB",
            ),
        )
        return next((reason for holds, reason in checks if not holds), None)


class Implementation(Protocol):
    """Attention of chunks of prompts."""

    name: str
    support: Support

    def lacks(self, call: Call) -> str | None:
        """Returns what else of a call is not supported; None: nothing."""

    def __call__(self, call: Call, out_THD: torch.Tensor) -> None:
        """Writes the attention of the call's sequences."""


class ChunkedAttention:
    """Computes a call with an implementation if it supports it, or else with the engine's own kernel.

    counts: calls that it computed, under its name, and calls that it did not, by the reason. The first call
    of each reason is logged.
    """

    def __init__(self, implementation: Implementation, own: Callable[..., torch.Tensor]) -> None:
        self.counts: Counter[str] = Counter()
        self._implementation = implementation
        self._own = own

    def __call__(
        self,
        q_THD: torch.Tensor,
        kv: PagedKv,
        contexts: Contexts,
        chunks: Chunks,
        options: AttentionOptions = PLAIN,
        *,
        tree: DraftTree | None = None,
        out_THD: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns what `kernels.prefill_attention` returns."""
        call = Call(q_THD, kv, contexts, chunks, options)
        reason = self._reason(call, tree)
        if reason is not None:
            return self._own(q_THD, kv, contexts, chunks, options, tree=tree, out_THD=out_THD)
        out = torch.empty_like(q_THD, memory_format=torch.contiguous_format) if out_THD is None else out_THD
        self._implementation(call, out)
        return out

    def _reason(self, call: Call, tree: DraftTree | None) -> str | None:
        """Returns why the engine's own kernel computes a call; counts and logs it."""
        name = self._implementation.name
        if tree is not None:
            reason: str | None = "a token tree"
        elif call.q_THD.is_cuda and torch.cuda.is_current_stream_capturing():
            reason = "a captured graph"
        else:
            reason = self._implementation.support.lacks(call) or self._implementation.lacks(call)
        if reason is not None and not self.counts[reason]:
            _LOG.info("attention_backend=%s does not compute %s; the engine's own kernel does", name, reason)
        self.counts[name if reason is None else reason] += 1
        return reason


def _dense_bytes(call: Call) -> int:
    """Returns an upper bound of the bytes of all contexts' keys and values in the queries' dtype."""
    num_tokens = len(call.contexts.lens_B) * call.contexts.max_len
    num_kv_heads = call.kv.keys.shape[2]
    return int(2 * num_tokens * num_kv_heads * call.kv.head_dim * call.q_THD.itemsize)
