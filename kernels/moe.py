"""Mixture-of-experts MLP: routing, sorting by expert, two grouped GEMMs with SwiGLU between, weighted sum.

Shazeer et al. (ICLR 2017); the block-wise order is that of MegaBlocks (Gale et al., MLSys 2023). Nothing is
read back to the host: grid sizes are upper bounds, and programs after the last block return at once.

Letters: T tokens, J choices per token (top-k), E experts, H hidden, I intermediate, K inputs, N outputs. An
entry is one choice of a token, entry = token * J + j. `moe_align` gives every expert whole blocks of rows:
the rows of expert e are ends[e - 1] .. ends[e], and each contains an entry, or -1 for padding. The first GEMM
gathers tokens by row and writes silu(gate) * up by entry, the second reads and writes by entry, and
`moe_combine` sums the entries of each token.

A decode step is memory-bound and reads the experts that it uses, 6*H*I bytes each in bf16; a prefill chunk
computes 6*T*J*H*I FLOPs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton

from kernels.case import Case
from kernels.gemm import Tile, for_rows, for_target, random_tensor
from kernels.launch import INTERPRETER, launch
from kernels.moe_kernels import (
    moe_combine_kernel,
    moe_count_kernel,
    moe_gemm_kernel,
    moe_place_kernel,
    moe_route_kernel,
)
from kernels.w8a16 import Int8Weight

DTYPES = (torch.bfloat16, torch.float16)
LOGIT_DTYPES = (*DTYPES, torch.float32)
MAX_EXPERTS = 512
MAX_CHOICES = 32
# Tile by target and by the mean number of rows per expert; the gated GEMM has two accumulators of this size.
TILES = {
    "sm_80": {16: Tile(16, 64, 64, 4, 4), 64: Tile(64, 64, 64, 4, 3), 1 << 30: Tile(128, 64, 64, 8, 3)},
    "sm_90": {16: Tile(16, 64, 128, 4, 4), 64: Tile(64, 64, 64, 4, 4), 1 << 30: Tile(128, 128, 64, 8, 3)},
    "gfx942": {16: Tile(16, 64, 64, 4, 2), 64: Tile(64, 64, 64, 4, 2), 1 << 30: Tile(128, 64, 32, 8, 2)},
    INTERPRETER: {4: Tile(16, 32, 32, 4, 1), 1 << 30: Tile(32, 32, 64, 4, 1)},
}
ExpertWeight = torch.Tensor | Int8Weight  # [E, N, K], or int8 with scales [E, N]
ONE_HOT_ELEMENTS = 8192  # of the matrix that counts a chunk's entries by expert: chunk * experts
COMBINE_TILE = 1024


class Routing(NamedTuple):
    """Routing: weights fp32 [T, J]; experts int32 [T, J], by decreasing weight; -1: not computed here."""

    weights_TJ: torch.Tensor
    experts_TJ: torch.Tensor


class Alignment(NamedTuple):
    """Entries by row, int32, -1 for padding, undefined from ends[-1] on; end row per expert, int32 [E]."""

    rows: torch.Tensor
    ends_E: torch.Tensor
    block_rows: int


def moe_route(logits_TE: torch.Tensor, num_choices: int, *, renormalise: bool = True) -> Routing:
    """Returns the num_choices largest softmax weights of each token, in fp32; ties go to the lowest expert.

    logits_TE: bf16, fp16 or fp32, contiguous, up to 512 experts. renormalise: whether the weights of a token
    are scaled to sum to one (Mixtral, Qwen3). Raises ValueError for other dtypes and numbers.
    """
    num_tokens, num_experts = logits_TE.shape
    if logits_TE.dtype not in LOGIT_DTYPES or not logits_TE.is_contiguous():
        raise ValueError(f"logits are {logits_TE.dtype}; must be contiguous bfloat16, float16 or float32")
    _check_numbers(num_experts, num_choices)
    weights_TJ = torch.empty(num_tokens, num_choices, dtype=torch.float32, device=logits_TE.device)
    experts_TJ = torch.empty(num_tokens, num_choices, dtype=torch.int32, device=logits_TE.device)
    rows = 4
    launch(
        moe_route_kernel,
        (triton.cdiv(num_tokens, rows),),
        logits_TE,
        weights_TJ,
        experts_TJ,
        num_tokens,
        num_experts,
        CHOICES=num_choices,
        RENORMALISE=renormalise,
        ROWS=rows,
        EXPERTS=triton.next_power_of_2(num_experts),
        CHOICES_TILE=triton.next_power_of_2(num_choices),
        num_warps=4,
    )
    return Routing(weights_TJ, experts_TJ)


def moe_route_reference(logits_TE: torch.Tensor, num_choices: int, *, renormalise: bool = True) -> Routing:
    """Computes the reference of `moe_route` in torch."""
    shares_TE = torch.softmax(logits_TE.float(), dim=-1)
    experts_TJ = torch.sort(shares_TE, dim=-1, descending=True, stable=True).indices[:, :num_choices]
    weights_TJ = shares_TE.gather(1, experts_TJ)
    if renormalise:
        weights_TJ = weights_TJ / weights_TJ.sum(-1, keepdim=True)
    return Routing(weights_TJ, experts_TJ.to(torch.int32))


def moe_align(experts_TJ: torch.Tensor, num_experts: int, block_rows: int) -> Alignment:
    """Returns entries sorted by expert (stable); each expert's rows start at a multiple of block_rows.

    experts_TJ: int32, contiguous; entries of -1 get no row. block_rows: a power of two. Raises ValueError for
    other dtypes and numbers.
    """
    if experts_TJ.dtype != torch.int32 or not experts_TJ.is_contiguous():
        raise ValueError(f"experts are {experts_TJ.dtype}; must be contiguous torch.int32")
    _check_numbers(num_experts, 1)
    if block_rows & (block_rows - 1) or block_rows < 1:
        raise ValueError(f"block_rows is {block_rows}; must be a power of two")
    num_entries = experts_TJ.numel()
    num_rows = _most_blocks(num_entries, num_experts, block_rows) * block_rows
    rows = torch.empty(num_rows, dtype=torch.int32, device=experts_TJ.device)
    ends_E = torch.empty(num_experts, dtype=torch.int32, device=experts_TJ.device)
    experts_tile = triton.next_power_of_2(num_experts)
    chunk = min(ONE_HOT_ELEMENTS // experts_tile, max(16, triton.next_power_of_2(num_entries)))
    num_chunks = max(triton.cdiv(num_entries, chunk), 1)
    counts = torch.empty(num_chunks, num_experts, dtype=torch.int32, device=experts_TJ.device)
    if num_chunks > 1:
        launch(
            moe_count_kernel,
            (num_chunks,),
            experts_TJ,
            counts,
            num_entries,
            num_experts,
            CHUNK=chunk,
            EXPERTS=experts_tile,
            num_warps=8,
        )
    launch(
        moe_place_kernel,
        (num_chunks,),
        experts_TJ,
        counts,
        rows,
        ends_E,
        num_entries,
        num_experts,
        num_chunks,
        ONE_CHUNK=num_chunks == 1,
        BLOCK_ROWS=block_rows,
        CHUNK=chunk,
        EXPERTS=experts_tile,
        num_warps=8,
    )
    return Alignment(rows, ends_E, block_rows)


def moe_align_reference(experts_TJ: torch.Tensor, num_experts: int, block_rows: int) -> Alignment:
    """Computes the reference of `moe_align` in torch; rows from ends[-1] on are -1."""
    flat = experts_TJ.flatten().long()
    entries = torch.argsort(flat, stable=True)
    entries = entries[flat[entries] >= 0]
    counts_E = torch.bincount(flat[entries], minlength=num_experts)
    padded_E = (counts_E + block_rows - 1) // block_rows * block_rows
    ends_E = padded_E.cumsum(0)
    first_of_entry = (ends_E - padded_E)[flat[entries]]
    rank = torch.arange(len(entries), device=flat.device) - (counts_E.cumsum(0) - counts_E)[flat[entries]]
    size = _most_blocks(experts_TJ.numel(), num_experts, block_rows) * block_rows
    rows = torch.full((size,), -1, dtype=torch.int32, device=flat.device)
    rows[first_of_entry + rank] = entries.to(torch.int32)
    return Alignment(rows, ends_E.to(torch.int32), block_rows)


def moe_gemm(
    x_RK: torch.Tensor, weight: ExpertWeight, alignment: Alignment, num_entries: int, *, gated: bool
) -> torch.Tensor:
    """Multiplies each entry's row of x by its expert's weight.

    Returns [num_entries, N], or silu(gate) * up [num_entries, N / 2] if gated. x_RK: bf16 or fp16,
    contiguous, one row per token or per entry; num_entries must be a multiple of its length. weight: [E, N,
    K] of x's dtype, or int8 with scales fp32 [E, N]; contiguous; if gated, the outputs of gate, then of up.
    Entries without a row are not written. Raises ValueError for other dtypes and shapes.
    """
    weight_ENK, scales_EN = weight if isinstance(weight, Int8Weight) else (weight, None)
    num_experts, n, k = weight_ENK.shape
    _check_gemm(x_RK, weight_ENK, scales_EN, num_entries, gated)
    if gated:
        n //= 2
    out = torch.empty(num_entries, n, dtype=x_RK.dtype, device=x_RK.device)
    if num_entries == 0:
        return out
    tile = _tile(num_entries, num_experts)
    if tile.rows != alignment.block_rows:
        tile = tile._replace(rows=alignment.block_rows)
    num_blocks = len(alignment.rows) // tile.rows
    launch(
        moe_gemm_kernel,
        (num_blocks * triton.cdiv(n, tile.cols),),
        x_RK,
        weight_ENK,
        weight_ENK if scales_EN is None else scales_EN,
        alignment.rows,
        alignment.ends_E,
        out,
        num_blocks,
        n,
        k,
        num_experts,
        num_entries // len(x_RK),
        GATED=gated,
        HAS_SCALES=scales_EN is not None,
        ROWS=tile.rows,
        COLS=tile.cols,
        DEPTH=tile.depth,
        EXPERTS=triton.next_power_of_2(num_experts),
        GROUP=8,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out


def moe_gemm_reference(
    x_RK: torch.Tensor, weight: ExpertWeight, alignment: Alignment, num_entries: int, *, gated: bool
) -> torch.Tensor:
    """Computes the reference of `moe_gemm` in torch for any float type; entries without a row get zeros."""
    weight_ENK, scales_EN = weight if isinstance(weight, Int8Weight) else (weight, None)
    out_size = weight_ENK.shape[1] // (2 if gated else 1)
    out = torch.zeros(num_entries, out_size, dtype=x_RK.dtype, device=x_RK.device)
    choices = num_entries // max(len(x_RK), 1)
    first = 0
    for expert, end in enumerate(alignment.ends_E.tolist()):
        entries = alignment.rows[first:end].long()
        entries = entries[entries >= 0]
        first = end
        if len(entries):
            product = x_RK[entries // choices].float() @ weight_ENK[expert].float().T
            if scales_EN is not None:
                product *= scales_EN[expert]
            if gated:
                gate, up = product.chunk(2, dim=-1)
                product = F.silu(gate) * up
            out[entries] = product.to(x_RK.dtype)
    return out


def moe_combine(y: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Sums each token's entries by their weights in fp32: [T, H] in y's dtype; experts of -1 are skipped.

    y: [T * J, H], bf16 or fp16, contiguous. Raises ValueError for other dtypes and shapes.
    """
    num_tokens, num_choices = routing.experts_TJ.shape
    if y.dtype not in DTYPES or y.dim() != 2 or len(y) != num_tokens * num_choices or not y.is_contiguous():
        raise ValueError(
            f"y is {y.dtype} {list(y.shape)}; must be contiguous bfloat16 or float16 with "
            f"{num_tokens * num_choices} rows"
        )
    hidden = y.shape[1]
    out_TH = torch.empty(num_tokens, hidden, dtype=y.dtype, device=y.device)
    launch(
        moe_combine_kernel,
        (num_tokens, triton.cdiv(hidden, COMBINE_TILE)),
        y,
        routing.weights_TJ,
        routing.experts_TJ,
        out_TH,
        hidden,
        CHOICES=num_choices,
        TILE=COMBINE_TILE,
        num_warps=4,
    )
    return out_TH


def moe_combine_reference(y: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Computes the reference of `moe_combine` in torch for any float type."""
    weights_TJ, experts_TJ = routing
    y_TJH = y.view(*experts_TJ.shape, -1).float().masked_fill((experts_TJ < 0)[..., None], 0)
    return (y_TJH * weights_TJ[..., None]).sum(1).to(y.dtype)


def moe_mlp(x_TH: torch.Tensor, w13: ExpertWeight, w2: ExpertWeight, routing: Routing) -> torch.Tensor:
    """Returns the weighted sum of each token's expert MLPs (SwiGLU): [T, H] in x's dtype.

    x_TH: bf16 or fp16, contiguous. w13: [E, 2 * I, H], gate before up; w2: [E, H, I]; of x's dtype or int8
    with scales, contiguous. Raises ValueError for other dtypes and shapes.
    """
    num_experts, num_entries = _num_experts(w13), routing.experts_TJ.numel()
    alignment = moe_align(routing.experts_TJ, num_experts, _tile(num_entries, num_experts).rows)
    hidden = moe_gemm(x_TH, w13, alignment, num_entries, gated=True)
    return moe_combine(moe_gemm(hidden, w2, alignment, num_entries, gated=False), routing)


def moe_mlp_reference(
    x_TH: torch.Tensor, w13: ExpertWeight, w2: ExpertWeight, routing: Routing
) -> torch.Tensor:
    """Computes the reference of `moe_mlp` in torch for any float type."""
    num_entries = routing.experts_TJ.numel()
    alignment = moe_align_reference(routing.experts_TJ, _num_experts(w13), 1)
    hidden = moe_gemm_reference(x_TH, w13, alignment, num_entries, gated=True)
    return moe_combine_reference(moe_gemm_reference(hidden, w2, alignment, num_entries, gated=False), routing)


def _num_experts(weight: ExpertWeight) -> int:
    return len(weight.values_NK if isinstance(weight, Int8Weight) else weight)


def _tile(num_entries: int, num_experts: int) -> Tile:
    return for_rows(for_target(TILES), triton.cdiv(num_entries, num_experts))


def _most_blocks(num_entries: int, num_experts: int, block_rows: int) -> int:
    """Returns an upper bound of the blocks: every expert that can have entries ends in a partial block."""
    used = min(num_experts, num_entries)
    return max((num_entries - used) // block_rows + used, 1)


def _check_numbers(num_experts: int, num_choices: int) -> None:
    if not 1 <= num_choices <= min(num_experts, MAX_CHOICES) or num_experts > MAX_EXPERTS:
        raise ValueError(
            f"{num_choices} of {num_experts} experts: must be 1 to {MAX_CHOICES} of at most {MAX_EXPERTS}"
        )


def _check_gemm(
    x_RK: torch.Tensor,
    weight_ENK: torch.Tensor,
    scales_EN: torch.Tensor | None,
    num_entries: int,
    gated: bool,
) -> None:
    _, n, k = weight_ENK.shape
    if x_RK.dtype not in DTYPES or weight_ENK.dtype != (x_RK.dtype if scales_EN is None else torch.int8):
        raise ValueError(
            f"x is {x_RK.dtype}, weight {weight_ENK.dtype}; x must be bfloat16 or float16, and the weight of "
            "the same dtype, or int8 with scales"
        )
    if scales_EN is not None and (
        scales_EN.dtype != torch.float32
        or scales_EN.shape != weight_ENK.shape[:2]
        or not scales_EN.is_contiguous()
    ):
        raise ValueError(
            f"scales are {scales_EN.dtype} {list(scales_EN.shape)}; must be contiguous float32 "
            f"{list(weight_ENK.shape[:2])}"
        )
    if not x_RK.is_contiguous() or not weight_ENK.is_contiguous():
        raise ValueError("x and weight must be contiguous")
    if x_RK.shape[1] != k or (gated and n % 2):
        raise ValueError(
            f"x is {list(x_RK.shape)}, weight {list(weight_ENK.shape)}: must have the same inputs"
            + (", and an even number of outputs if gated" if gated else "")
        )
    if num_entries % max(len(x_RK), 1) or (num_entries and not len(x_RK)):
        raise ValueError(f"{num_entries} entries: must be a multiple of the {len(x_RK)} rows of x")


def cases() -> Iterator[Case]:
    """Yields the layers of Qwen3-30B-A3B and of Mixtral."""
    for name, experts, choices, hidden, inner in (
        ("qwen3", 128, 8, 2048, 768),
        ("mixtral", 8, 2, 4096, 14336),
    ):
        for num_tokens in (1, 32, 1024, 4096):
            shape = (num_tokens, experts, choices, hidden, inner)
            used = min(experts, num_tokens * choices)
            for dtype in (torch.bfloat16, torch.int8) if name == "qwen3" else (torch.bfloat16,):
                yield Case(
                    f"{name}_t{num_tokens}{'_int8' if dtype == torch.int8 else ''}",
                    partial(_mlp_case, *shape, dtype),
                    3 * dtype.itemsize * used * hidden * inner + 4 * num_tokens * hidden,
                    6 * num_tokens * choices * hidden * inner,
                )
            yield Case(
                f"{name}_route_t{num_tokens}",
                partial(_route_case, *shape[:3]),
                num_tokens * (2 * experts + 8 * choices),
            )


def _mlp_case(
    tokens: int, experts: int, choices: int, hidden: int, inner: int, dtype: torch.dtype, device: torch.device
) -> Callable[[], object]:
    x_TH = random_tensor((tokens, hidden), torch.bfloat16, device)
    w13, w2 = (
        random_tensor(shape, dtype, device)
        if dtype != torch.int8
        else Int8Weight(random_tensor(shape, dtype, device), random_tensor(shape[:2], torch.float32, device))
        for shape in ((experts, 2 * inner, hidden), (experts, hidden, inner))
    )
    routing = moe_route_reference(torch.rand(tokens, experts, device=device), choices)
    return lambda: moe_mlp(x_TH, w13, w2, routing)


def _route_case(num_tokens: int, experts: int, choices: int, device: torch.device) -> Callable[[], object]:
    logits_TE = random_tensor((num_tokens, experts), torch.bfloat16, device)
    return lambda: moe_route(logits_TE, choices)
