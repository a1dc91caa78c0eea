"""Reads linear layers that a checkpoint stores in 4 bits (`realengine.weights.quantized_formats`).

`kernels.w4a16` converts AWQ's and GPTQ's layouts to one, which is sliced and stacked like a dense weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch

from kernels.int4_weight import BLOCK, Int4Weight, from_awq, from_gptq
from realengine.weights.quantized_formats import PackedFormat, stored_as
from realengine.weights.weight import Part, Weight


class Packed(Protocol):
    """The part of a checkpoint's interface that this module uses."""

    shapes: dict[str, tuple[int, ...]]

    def where(self, name: str) -> Path: ...

    def read(self, name: str, take: Sequence[slice], *, integers: bool = False) -> torch.Tensor: ...


def is_packed(weight: Weight, checkpoint: Packed) -> bool:
    """Returns whether the checkpoint stores any of the weight's parts in 4 bits."""
    return any(stored_as(part.name, "qweight") in checkpoint.shapes for part in weight.parts)


def read_packed(
    weight: Weight, share: Weight, checkpoint: Packed, packed: PackedFormat, device: torch.device
) -> list[Int4Weight]:
    """Reads the parts of a rank's share on the device. Raises ValueError with file and tensor."""
    parts = []
    for part, own in zip(weight.parts, share.parts, strict=True):
        try:
            whole = _read(part, checkpoint, packed, device)
            parts.append(_sliced(whole, *own.take))
        except ValueError as error:
            name = stored_as(part.name, "qweight")
            raise ValueError(f"{checkpoint.where(name)}: {name}: {error}") from None
    return [part._replace(order_K=_common_order(parts, weight, checkpoint)) for part in parts]


def _read(part: Part, checkpoint: Packed, packed: PackedFormat, device: torch.device) -> Int4Weight:
    def tensor(kind: str) -> torch.Tensor:
        name = stored_as(part.name, kind)
        everything = [slice(0, size) for size in checkpoint.shapes[name]]
        return checkpoint.read(name, everything, integers=kind != "scales").to(device)

    qweight, qzeros, scales_GN = tensor("qweight"), tensor("qzeros"), tensor("scales")
    if not scales_GN.isfinite().all():
        raise ValueError("the scales contain infinite numbers or NaN")
    if packed.quant_method == "awq":
        return from_awq(qweight, qzeros, scales_GN, group_size=packed.group_size)
    return from_gptq(
        qweight,
        qzeros,
        scales_GN,
        tensor("g_idx") if stored_as(part.name, "g_idx") in checkpoint.shapes else None,
        group_size=packed.group_size,
        zeros_less_one=packed.zeros_less_one,
    )


def _sliced(weight: Int4Weight, rows: slice, columns: slice) -> Int4Weight:
    """Returns the rows (outputs) and columns (inputs) of a part that belong to a rank."""
    words_BNI, scales_GN, zeros_GN, num_inputs, group_size, order_K = weight
    if columns != slice(0, num_inputs):
        if columns.start % BLOCK or (columns.stop % BLOCK and columns.stop != num_inputs):
            raise ValueError(
                f"inputs {columns.start} to {columns.stop} of {num_inputs} for this rank: "
                f"must be multiples of {BLOCK}; use fewer ranks"
            )
        if order_K is not None:
            raise ValueError("inputs in another order (desc_act) cannot be divided among ranks; use one rank")
    blocks = slice(columns.start // BLOCK, -(-columns.stop // BLOCK))
    groups = slice(blocks.start * BLOCK // group_size, blocks.stop * BLOCK // group_size)
    return Int4Weight(
        words_BNI[blocks, rows].contiguous(),
        scales_GN[groups, rows].contiguous(),
        zeros_GN[groups, rows].contiguous(),
        columns.stop - columns.start,
        group_size,
        order_K,
    )


def _common_order(parts: list[Int4Weight], weight: Weight, checkpoint: Packed) -> torch.Tensor | None:
    """Returns the common input order of projections that form one weight.

    Raises ValueError if they differ.
    """
    first: torch.Tensor | None = parts[0].order_K
    for part in parts[1:]:
        other = part.order_K
        same = first is other if first is None or other is None else torch.equal(first, other)
        if not same:
            names = ", ".join(stored_as(part.name, "g_idx") for part in weight.parts)
            raise ValueError(
                f"{checkpoint.where(names)}: {names}: must have the same order of inputs, because "
                "one GEMM computes them"
            )
    return first
