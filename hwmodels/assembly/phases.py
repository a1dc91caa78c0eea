"""Operators that several kinds of attention share: decode and prefill as two phases of one kernel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hwmodels.assembly.site import Site
from hwmodels.exact import smaller
from hwmodels.iterations.layout import RankBatch
from hwmodels.iterations.ops import Operator, Per, Quantity
from hwmodels.iterations.windows import within_window
from hwmodels.operators.attention import DecodeAttention


def both_phases(
    site: Site,
    suffix: str,
    calls: float,
    seconds: tuple[Quantity, Quantity],
    flops: tuple[Quantity, Quantity],
    stored: tuple[Quantity, Quantity],
    moved: tuple[Quantity, Quantity] | None = None,
    *,
    mixed_kernels: int = 0,
) -> Iterator[Operator]:
    """Yields the decode and the prefill operator; moved: bytes, if they differ from the stored bytes.

    mixed_kernels: further launches where both phases are in one iteration.
    """
    for i, phase in enumerate(("decode", "prefill")):
        yield Operator(
            name=f"attention_{phase}{suffix}",
            component="attention",
            per=(Per.decode, Per.prefill)[i],
            calls=calls,
            seconds=seconds[i],
            flops=flops[i],
            stored_bytes=stored[i],
            bytes_moved=(moved or stored)[i],
            dtype=site.dtype,
            kernels=1 - i,  # the two phases share one kernel
            mixed_kernels=mixed_kernels * i,
        )


def delay_beside_prefill(site: Site, decode: DecodeAttention, window: int | None, calls: float) -> Operator:
    """Returns the time that decodes lose in a kernel that also processes prompt chunks (FlashAttention-2)."""
    longer = decode.beside_prefill - 1

    def seconds(batch: RankBatch) -> Any:
        cut = within_window(batch, window)
        alone_s = decode.seconds(cut.decode_seqs, cut.decode_context_tokens)
        return longer * alone_s * smaller(batch.prefill_seqs, 1)

    return Operator(
        name="attention_decode_beside_prefill",
        component="attention",
        per=Per.prefill,
        calls=calls,
        seconds=seconds,
        dtype=site.dtype,
        kernels=0,
    )
