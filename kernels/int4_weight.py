"""4-bit weights in groups with scale and zero point (AWQ and GPTQ), in the layout that `kernels.w4a16` reads.

Lin et al., AWQ (MLSys 2024); Frantar et al., GPTQ (ICLR 2023). Both packings are converted to one layout when
a model is loaded. Letters: N outputs, K inputs, B blocks of 128 inputs, G groups of 32, 64 or 128 inputs.

Layout: words int32 [B, N, 16]. Word i of (b, n) contains the weights of inputs 128 * b + 16 * r + i for r =
0..7, each at bit 4 * (r // 2) + 16 * (r % 2). The 16 inputs with the same r are called a run.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

GROUP_SIZES = (32, 64, 128)
BLOCK = 128  # inputs per block of words
RUN = 16  # inputs of a block that share a bit position
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which of eight outputs is at each position of an AWQ word
_BIT_OF_RUN = tuple(4 * (run // 2) + 16 * (run % 2) for run in range(BLOCK // RUN))


class Int4Weight(NamedTuple):
    """Weight of a linear layer in the kernels' layout.

    words: int32 [B, N, 16]. scales: fp16, bf16 or fp32 [G, N]. zeros: zero points, uint8 [G, N], 0 to 16. The
    groups extend to the end of the last block; those after num_inputs have the scale 0. order: int64 [K] if
    GPTQ has reordered the inputs: input i of the weight is input order[i] of the layer.
    """

    words_BNI: torch.Tensor
    scales_GN: torch.Tensor
    zeros_GN: torch.Tensor
    num_inputs: int
    group_size: int
    order_K: torch.Tensor | None = None


def quantise_int4(weight_NK: torch.Tensor, group_size: int = 128) -> Int4Weight:
    """Rounds a weight [N, K] to 4 bits: each group's range, extended to 0, to 0..15. K: a multiple of 16."""
    n, k = weight_NK.shape
    grouped = F.pad(weight_NK.float(), (0, -k % group_size)).view(n, -1, group_size)
    low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
    scales_NG = ((high - low) / 15).clamp(min=1e-8).half().clamp(min=2**-24).float()
    zeros_NG = (-low / scales_NG).round().clamp(0, 15)
    nibbles = (grouped / scales_NG[..., None] + zeros_NG[..., None]).round().clamp(0, 15)
    nibbles_NK = nibbles.reshape(n, -1)[:, :k].to(torch.uint8)
    return _weight(nibbles_NK, scales_NG.T.half(), zeros_NG.T.to(torch.uint8), group_size)


def from_gptq(
    qweight: torch.Tensor,
    qzeros: torch.Tensor,
    scales_GN: torch.Tensor,
    g_idx: torch.Tensor | None = None,
    *,
    group_size: int,
    zeros_less_one: bool = True,
) -> Int4Weight:
    """Converts a GPTQ checkpoint's tensors: qweight int32 [K/8, N], qzeros int32 [G, N/8], lowest bits first.

    g_idx: group of each input [K]; None: in order. group_size -1: one group. zeros_less_one: whether zero
    points are stored minus one, as in the format "gptq" (not in "gptq_v2"). Raises ValueError if the shapes
    do not match.
    """
    k, n = qweight.shape[0] * 8, qweight.shape[1]
    _check_packed(scales_GN, qzeros, k, n, group_size)
    nibbles_KN = _nibbles(qweight, range(8)).permute(0, 2, 1).reshape(k, n)
    zeros_GN = _nibbles(qzeros, range(8)).reshape(qzeros.shape[0], n) + int(zeros_less_one)
    order_K = None
    if g_idx is not None:
        in_order = torch.arange(k, device=g_idx.device) // (k if group_size == -1 else group_size)
        order_K = torch.argsort(g_idx, stable=True)
        if not torch.equal(g_idx[order_K].long(), in_order):
            raise ValueError(f"g_idx: each group must have {group_size} inputs")
        if torch.equal(g_idx.long(), in_order):
            order_K = None
        else:
            nibbles_KN = nibbles_KN[order_K]
    return _from_groups(nibbles_KN.T, scales_GN, zeros_GN, group_size, order_K)


def from_awq(
    qweight: torch.Tensor, qzeros: torch.Tensor, scales_GN: torch.Tensor, *, group_size: int
) -> Int4Weight:
    """Converts an AWQ checkpoint's tensors ("gemm" format): qweight int32 [K, N/8], qzeros int32 [G, N/8].

    A word has eight outputs, in the order 0 2 4 6 1 3 5 7. group_size -1: one group. Raises ValueError if the
    shapes do not match.
    """
    k, n = qweight.shape[0], qweight.shape[1] * 8
    _check_packed(scales_GN, qzeros, k, n, group_size)
    positions = [_AWQ_ORDER.index(output) for output in range(8)]
    nibbles_KN = _nibbles(qweight, positions).reshape(k, n)
    zeros_GN = _nibbles(qzeros, positions).reshape(qzeros.shape[0], n)
    return _from_groups(nibbles_KN.T, scales_GN, zeros_GN, group_size, None)


def _nibbles(words: torch.Tensor, positions: range | list[int]) -> torch.Tensor:
    """Unpacks [..., C] to [..., C, 8]: the nibbles of each word, the one at positions[0] first."""
    shifts = torch.tensor([4 * position for position in positions], dtype=torch.int32, device=words.device)
    return ((words[..., None] >> shifts) & 0xF).to(torch.uint8)


def _check_packed(scales_GN: torch.Tensor, qzeros: torch.Tensor, k: int, n: int, group_size: int) -> None:
    groups = 1 if group_size == -1 else -(-k // group_size)
    if scales_GN.shape != (groups, n) or qzeros.shape != (groups, n // 8):
        raise ValueError(
            f"scales {list(scales_GN.shape)}, qzeros {list(qzeros.shape)}; must be {[groups, n]} and "
            f"{[groups, n // 8]} for {k} inputs and {n} outputs in groups of {group_size}"
        )


def _from_groups(
    nibbles_NK: torch.Tensor,
    scales_GN: torch.Tensor,
    zeros_GN: torch.Tensor,
    group_size: int,
    order_K: torch.Tensor | None,
) -> Int4Weight:
    if group_size == -1:
        group_size, groups = BLOCK, -(-nibbles_NK.shape[1] // BLOCK)
        scales_GN, zeros_GN = scales_GN.expand(groups, -1), zeros_GN.expand(groups, -1)
    return _weight(nibbles_NK, scales_GN, zeros_GN, group_size, order_K)


def _weight(
    nibbles_NK: torch.Tensor,
    scales_GN: torch.Tensor,
    zeros_GN: torch.Tensor,
    group_size: int,
    order_K: torch.Tensor | None = None,
) -> Int4Weight:
    """Packs nibbles [N, K] into the kernels' layout, padded to whole blocks with groups of scale 0."""
    n, k = nibbles_NK.shape
    if group_size not in GROUP_SIZES:
        raise ValueError(f"group size {group_size}: must be 32, 64, 128, or -1 for one group")
    if k % RUN:
        raise ValueError(f"{k} inputs: must be a multiple of {RUN}")
    num_blocks = -(-k // BLOCK)
    padded = F.pad(nibbles_NK, (0, num_blocks * BLOCK - k)).to(torch.int32)
    runs_NBRI = padded.view(n, num_blocks, BLOCK // RUN, RUN)
    words_NBI = torch.zeros_like(runs_NBRI[:, :, 0])
    for run, bit in enumerate(_BIT_OF_RUN):
        words_NBI |= runs_NBRI[:, :, run] << bit
    more = num_blocks * BLOCK // group_size - len(scales_GN)
    return Int4Weight(
        words_NBI.transpose(0, 1).contiguous(),
        F.pad(scales_GN, (0, 0, 0, more)).contiguous(),
        F.pad(zeros_GN, (0, 0, 0, more)).contiguous(),
        k,
        group_size,
        order_K,
    )


def dense_reference(weight: Int4Weight, dtype: torch.dtype) -> torch.Tensor:
    """Returns the weight [N, K] in any float type, inputs in the weight's own order."""
    nibbles_NK = unpack(weight.words_BNI)
    scales_NK, zeros_NK = (
        values.T.float().repeat_interleave(weight.group_size, 1)
        for values in (weight.scales_GN, weight.zeros_GN)
    )
    return ((nibbles_NK - zeros_NK) * scales_NK)[:, : weight.num_inputs].to(dtype)


def unpack(words_BNI: torch.Tensor) -> torch.Tensor:
    """Returns the nibbles as uint8 [N, B * 128]."""
    bits = torch.tensor(_BIT_OF_RUN, dtype=torch.int32, device=words_BNI.device)
    nibbles_BNRI = ((words_BNI[:, :, None, :] >> bits[:, None]) & 0xF).to(torch.uint8)
    return nibbles_BNRI.transpose(0, 1).reshape(words_BNI.shape[1], -1)


def check_layout(weight: Int4Weight) -> None:
    """Raises ValueError unless the weight is in this layout."""
    words_BNI, scales_GN, zeros_GN, num_inputs, group_size, _ = weight
    num_blocks, n = -(-num_inputs // BLOCK), words_BNI.shape[1]
    if group_size not in GROUP_SIZES:
        raise ValueError(f"group size {group_size}: must be 32, 64 or 128")
    if words_BNI.dtype != torch.int32 or words_BNI.shape != (num_blocks, n, RUN):
        raise ValueError(
            f"words are {words_BNI.dtype} {list(words_BNI.shape)}; must be int32 {[num_blocks, n, RUN]}"
        )
    groups = num_blocks * BLOCK // group_size
    if scales_GN.shape != (groups, n) or zeros_GN.shape != (groups, n) or zeros_GN.dtype != torch.uint8:
        raise ValueError(
            f"scales {list(scales_GN.shape)}, zeros {zeros_GN.dtype} {list(zeros_GN.shape)}; both must be "
            f"{[groups, n]}, zeros in uint8"
        )
    if not (words_BNI.is_contiguous() and scales_GN.is_contiguous() and zeros_GN.is_contiguous()):
        raise ValueError("words, scales and zeros must be contiguous")
