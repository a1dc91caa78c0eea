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
from kernels.moe_kernels import moe_combine_kernel, moe_gemm_kernel
from kernels.moe_routing import (
    Alignment,
    Routing,
    moe_align,
    moe_align_reference,
    moe_route,
    moe_route_reference,
)
from kernels.mxfp4_weight import BLOCK, Mxfp4Weight, dense_mxfp4
from kernels.w8a16 import Int8Weight

DTYPES = (torch.bfloat16, torch.float16)
# Tile by target and by the mean number of rows per expert; the gated GEMM has two accumulators of this size.
TILES = {
    "sm_80": {16: Tile(16, 64, 64, 4, 4), 64: Tile(64, 64, 64, 4, 3), 1 << 30: Tile(128, 64, 64, 8, 3)},
    "sm_90": {16: Tile(16, 64, 128, 4, 4), 64: Tile(64, 64, 64, 4, 4), 1 << 30: Tile(128, 128, 64, 8, 3)},
    "gfx942": {16: Tile(16, 64, 64, 4, 2), 64: Tile(64, 64, 64, 4, 2), 1 << 30: Tile(128, 64, 32, 8, 2)},
    INTERPRETER: {4: Tile(16, 32, 32, 4, 1), 1 << 30: Tile(32, 32, 64, 4, 1)},
}
# Unpacking takes registers, with Triton 3.6 twice as many: larger tiles of 4-bit weights spill.
PACKED_TILES = TILES | {
    "sm_80": {16: Tile(16, 64, 32, 8, 4), 64: Tile(64, 64, 32, 8, 3), 1 << 30: Tile(128, 64, 32, 8, 3)},
    "sm_90": {16: Tile(16, 64, 32, 8, 4), 64: Tile(64, 64, 32, 8, 4), 1 << 30: Tile(128, 64, 32, 8, 3)},
}
ExpertWeight = torch.Tensor | Int8Weight | Mxfp4Weight  # [E, N, K], or int8 with scales [E, N], or 4 bits
COMBINE_TILE = 1024


class Clamp(NamedTuple):
    """The gated activation of gpt-oss: min(gate, limit) sigmoid(alpha gate) (1 + up within +-limit)."""

    alpha: float
    limit: float


class Biases(NamedTuple):
    """Biases of the experts' layers: gate and up [E, 2 I], down [E, H]; of x's dtype or fp32."""

    gate_up: torch.Tensor
    down: torch.Tensor


def moe_gemm(
    x_RK: torch.Tensor,
    weight: ExpertWeight,
    alignment: Alignment,
    num_entries: int,
    *,
    gated: bool,
    bias_EN: torch.Tensor | None = None,
    clamp: Clamp | None = None,
) -> torch.Tensor:
    """Multiplies each entry's row of x by its expert's weight, and adds its bias.

    Returns [num_entries, N], or silu(gate) * up [num_entries, N / 2] if gated. x_RK: bf16 or fp16,
    contiguous, one row per token or per entry; num_entries must be a multiple of its length. weight: [E, N,
    K] of x's dtype, int8 with scales fp32 [E, N], or 4 bits; contiguous; if gated, the outputs of gate, then
    of up. clamp: the activation; None: SwiGLU. Entries without a row are not written. Raises ValueError for
    other dtypes and shapes.
    """
    stored, scales = weight if isinstance(weight, Int8Weight | Mxfp4Weight) else (weight, None)
    packed = isinstance(weight, Mxfp4Weight)
    num_experts, n, k = stored.shape
    k = 2 * k if packed else k
    if packed:
        _check_packed(x_RK, stored, scales)
    else:
        _check_gemm(x_RK, stored, scales, gated)
    _check_rows(x_RK, (n, k), num_entries, gated)
    _check_bias(bias_EN, (num_experts, n))
    if gated:
        n //= 2
    out = torch.empty(num_entries, n, dtype=x_RK.dtype, device=x_RK.device)
    if num_entries == 0:
        return out
    tile = _tile(weight, num_entries)
    if tile.rows != alignment.block_rows:
        tile = tile._replace(rows=alignment.block_rows)
    num_blocks = len(alignment.rows) // tile.rows
    launch(
        moe_gemm_kernel,
        (num_blocks * triton.cdiv(n, tile.cols),),
        x_RK,
        stored,
        stored if scales is None else scales,
        stored if bias_EN is None else bias_EN,
        alignment.rows,
        alignment.ends_E,
        out,
        num_blocks,
        n,
        k,
        num_experts,
        num_entries // len(x_RK),
        1.0 if clamp is None else clamp.alpha,
        0.0 if clamp is None else clamp.limit,
        GATED=gated,
        HAS_SCALES=scales is not None and not packed,
        HAS_BIAS=bias_EN is not None,
        CLAMPED=clamp is not None,
        MXFP4=packed,
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
    x_RK: torch.Tensor,
    weight: ExpertWeight,
    alignment: Alignment,
    num_entries: int,
    *,
    gated: bool,
    bias_EN: torch.Tensor | None = None,
    clamp: Clamp | None = None,
) -> torch.Tensor:
    """Computes the reference of `moe_gemm` in torch for any float type; entries without a row get zeros."""
    num_outputs = (weight if isinstance(weight, torch.Tensor) else weight[0]).shape[1]
    out_size = num_outputs // (2 if gated else 1)
    out = torch.zeros(num_entries, out_size, dtype=x_RK.dtype, device=x_RK.device)
    choices = num_entries // max(len(x_RK), 1)
    first = 0
    for expert, end in enumerate(alignment.ends_E.tolist()):
        entries = alignment.rows[first:end].long()
        entries = entries[entries >= 0]
        first = end
        if len(entries):
            product = x_RK[entries // choices].float() @ _dense(weight, expert).T
            if bias_EN is not None:
                product += bias_EN[expert].float()
            if gated:
                gate, up = product.chunk(2, dim=-1)
                if clamp is None:
                    product = F.silu(gate) * up
                else:
                    gate, up = gate.clamp(max=clamp.limit), up.clamp(-clamp.limit, clamp.limit)
                    product = gate * torch.sigmoid(clamp.alpha * gate) * (up + 1)
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


def moe_mlp(
    x_TH: torch.Tensor,
    w13: ExpertWeight,
    w2: ExpertWeight,
    routing: Routing,
    *,
    biases: Biases | None = None,
    clamp: Clamp | None = None,
) -> torch.Tensor:
    """Returns the weighted sum of each token's expert MLPs: [T, H] in x's dtype.

    x_TH: bf16 or fp16, contiguous. w13: [E, 2 * I, H], gate before up; w2: [E, H, I]; of x's dtype, int8 with
    scales, or 4 bits; contiguous. clamp: the activation; None: SwiGLU. Raises ValueError for other dtypes and
    shapes.
    """
    num_experts, num_entries = _num_experts(w13), routing.experts_TJ.numel()
    alignment = moe_align(routing.experts_TJ, num_experts, _tile(w13, num_entries).rows)
    up, down = biases or (None, None)
    hidden = moe_gemm(x_TH, w13, alignment, num_entries, gated=True, bias_EN=up, clamp=clamp)
    return moe_combine(moe_gemm(hidden, w2, alignment, num_entries, gated=False, bias_EN=down), routing)


def moe_mlp_reference(
    x_TH: torch.Tensor,
    w13: ExpertWeight,
    w2: ExpertWeight,
    routing: Routing,
    *,
    biases: Biases | None = None,
    clamp: Clamp | None = None,
) -> torch.Tensor:
    """Computes the reference of `moe_mlp` in torch for any float type."""
    num_entries = routing.experts_TJ.numel()
    alignment = moe_align_reference(routing.experts_TJ, _num_experts(w13), 1)
    up, down = biases or (None, None)
    hidden = moe_gemm_reference(x_TH, w13, alignment, num_entries, gated=True, bias_EN=up, clamp=clamp)
    y = moe_gemm_reference(hidden, w2, alignment, num_entries, gated=False, bias_EN=down)
    return moe_combine_reference(y, routing)


def _num_experts(weight: ExpertWeight) -> int:
    return len(weight if isinstance(weight, torch.Tensor) else weight[0])


def _dense(weight: ExpertWeight, expert: int) -> torch.Tensor:
    """Returns the weight [N, K] of an expert in fp32."""
    if isinstance(weight, Mxfp4Weight):
        return dense_mxfp4(Mxfp4Weight(weight.codes[expert], weight.scales[expert]))
    if isinstance(weight, Int8Weight):
        return weight.values_NK[expert].float() * weight.scales_N[expert][:, None]
    return weight[expert].float()


def _tile(weight: ExpertWeight, num_entries: int) -> Tile:
    tiles = for_target(PACKED_TILES if isinstance(weight, Mxfp4Weight) else TILES)
    return for_rows(tiles, triton.cdiv(num_entries, _num_experts(weight)))


def _check_gemm(
    x_RK: torch.Tensor,
    weight_ENK: torch.Tensor,
    scales_EN: torch.Tensor | None,
    gated: bool,
) -> None:
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


def _check_packed(x_RK: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor | None) -> None:
    experts, n, half = codes.shape
    shape = (experts, n, 2 * half // BLOCK)
    if x_RK.dtype not in DTYPES or any(x is None or x.dtype != torch.uint8 for x in (codes, scales)):
        raise ValueError(f"x is {x_RK.dtype}; must be bfloat16 or float16, with codes and scales of uint8")
    if scales is None or scales.shape != shape or half % (BLOCK // 2):
        raise ValueError(
            f"codes are {list(codes.shape)}: must have scales {list(shape)}, one per {BLOCK} inputs"
        )
    if not (x_RK.is_contiguous() and codes.is_contiguous() and scales.is_contiguous()):
        raise ValueError("x, codes and scales must be contiguous")


def _check_bias(bias_EN: torch.Tensor | None, shape: tuple[int, int]) -> None:
    if bias_EN is not None and (bias_EN.shape != shape or not bias_EN.is_contiguous()):
        raise ValueError(f"bias is {list(bias_EN.shape)}; must be contiguous {list(shape)}")


def _check_rows(x_RK: torch.Tensor, outputs: tuple[int, int], num_entries: int, gated: bool) -> None:
    n, k = outputs
    if x_RK.shape[1] != k or (gated and n % 2):
        raise ValueError(
            f"x is {list(x_RK.shape)}, weight [experts, {n}, {k}]: must have the same inputs"
            + (", and an even number of outputs if gated" if gated else "")
        )
    if num_entries % max(len(x_RK), 1) or (num_entries and not len(x_RK)):
        raise ValueError(f"{num_entries} entries: must be a multiple of the {len(x_RK)} rows of x")


def cases() -> Iterator[Case]:
    """Yields the layers of Qwen3-30B-A3B, of Mixtral and of gpt-oss-20b."""
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

    for num_tokens in (1, 32, 1024, 4096):
        used, hidden = min(32, num_tokens * 4), 2880
        yield Case(
            f"gpt_oss_t{num_tokens}_mxfp4",
            partial(_gpt_oss_case, num_tokens, hidden),
            3 * 17 / 32 * used * hidden * hidden + 4 * num_tokens * hidden,
            6 * num_tokens * 4 * hidden * hidden,
        )


def _gpt_oss_case(num_tokens: int, hidden: int, device: torch.device) -> Callable[[], object]:
    x_TH = random_tensor((num_tokens, hidden), torch.bfloat16, device)
    shapes = ((32, 2 * hidden, hidden), (32, hidden, hidden))
    w13, w2 = (
        Mxfp4Weight(
            torch.randint(256, (*shape[:2], shape[2] // 2), device=device, dtype=torch.uint8),
            torch.full((*shape[:2], shape[2] // BLOCK), 120, device=device, dtype=torch.uint8),
        )
        for shape in shapes
    )
    biases = Biases(*(random_tensor(shape[:2], torch.bfloat16, device) for shape in shapes))
    routing = moe_route_reference(torch.rand(num_tokens, 32, device=device), 4)
    return lambda: moe_mlp(x_TH, w13, w2, routing, biases=biases, clamp=Clamp(1.702, 7.0))


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
