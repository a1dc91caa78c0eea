"""Checks norms, gated activations, sampling and quantised, LoRA and MoE products at real models' sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from kernels import activation, int4_weight, lora, moe, moe_routing, norm, sampling, w4a16, w8a8, w8a16

from .comparison import Check, Random

BF16, FP16, INT8, FP8 = torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn
ROWS = (1, 5, 16, 17, 64, 129, 300)
"""Rows of products: one launch setting each, and numbers that fill no tile."""


def dense_checks(random: Random) -> Iterator[Check]:
    """Yields the checks, module by module."""
    for dtype in (BF16, FP16):
        word = str(dtype).removeprefix("torch.")
        yield f"norm/{word}", partial(_norms, random, dtype)
        yield f"activation/{word}", partial(_gates, random, dtype)
        for group_size in (128, 32):
            yield f"w4a16/{word}-group{group_size}", partial(_w4a16, random, dtype, group_size)
        yield f"w8a16/{word}", partial(_w8a16, random, dtype)
        yield f"lora/{word}", partial(_lora, random, dtype)
    for dtype in (FP8, INT8):
        yield f"w8a8/{str(dtype).removeprefix('torch.')}", partial(_w8a8, random, dtype)
    yield "sampling/greedy", partial(_greedy, random)
    yield "sampling/sample", partial(_sample, random)
    for sizes in ((8, 2, 64, 48),) if random.quick else ((128, 8, 2048, 768), (8, 2, 4096, 14336)):
        yield f"moe/{sizes[0]}experts", partial(_moe, random, *sizes)


def _norms(random: Random, dtype: torch.dtype) -> Mapping[str, Any]:
    tokens, hidden = random.sizes((37, 4096), (3, 100))
    x, residual = (random.normal(tokens, hidden, dtype=dtype, scale=3.0) for _ in range(2))
    weight, head_weight = (random.normal(size, dtype=dtype) for size in (hidden, 128))
    heads = random.normal(tokens, 48, 128, dtype=dtype)
    q, k, _ = heads.clone().split([32, 8, 8], dim=1)
    norm.qk_norm(q, k, head_weight, head_weight, 1e-6)
    normed, total = norm.add_rms_norm(x, residual, weight, 1e-5)
    pairs = {
        "rms_norm": (norm.rms_norm(x, weight, 1e-5), _rms(x, weight, 1e-5)),
        "sum": (total, x.double() + residual.double()),
        "add_rms_norm": (normed, _rms(total, weight, 1e-5)),
        "q": (q, _rms(heads[:, :32], head_weight, 1e-6)),
        "k": (k, _rms(heads[:, 32:40], head_weight, 1e-6)),
    }
    return random.compared(pairs, dtype)


def _rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x.double(), x.shape[-1:], weight.double(), eps)


def _gates(random: Random, dtype: torch.dtype) -> Mapping[str, Any]:
    tokens, size = random.sizes((37, 14336), (3, 70))
    x = random.normal(tokens, 2 * size, dtype=dtype, scale=3.0)
    gate, up = x.double().chunk(2, dim=-1)
    pairs = {
        "silu_mul": (activation.silu_mul(x), F.silu(gate) * up),
        "gelu_tanh_mul": (activation.gelu_tanh_mul(x), F.gelu(gate, approximate="tanh") * up),
    }
    return random.compared(pairs, dtype)


def _product(x_MK: torch.Tensor, dense_NK: torch.Tensor) -> torch.Tensor:
    return x_MK.double() @ dense_NK.double().T


def _products(
    random: Random, dtype: torch.dtype, call: Callable[[torch.Tensor], torch.Tensor], dense_NK: torch.Tensor
) -> Mapping[str, Any]:
    """Compares products of one weight with the reference for several row counts."""
    pairs = {}
    for m in random.sizes(ROWS, (1, 17)):
        x_MK = random.normal(m, dense_NK.shape[1], dtype=dtype)
        pairs[f"m{m}"] = call(x_MK), partial(_product, x_MK, dense_NK)
    return random.compared(pairs, dtype)


def _w4a16(random: Random, dtype: torch.dtype, group_size: int) -> Mapping[str, Any]:
    n, k = random.sizes((6144, 4096), (40, 256))
    weight = int4_weight.quantise_int4(random.normal(n, k, dtype=torch.float32), group_size)
    exact = int4_weight.dense_reference(weight, torch.float64)
    return _products(random, dtype, lambda x: w4a16.w4a16_gemm(x, weight), exact)


def _w8a16(random: Random, dtype: torch.dtype) -> Mapping[str, Any]:
    n, k = random.sizes((4096, 14336), (40, 200))
    weight = w8a16.quantise_int8(random.normal(n, k, dtype=torch.float32))
    exact = weight.values_NK.double() * weight.scales_N.double()[:, None]
    return _products(random, dtype, lambda x: w8a16.w8a16_gemm(x, weight), exact)


def _w8a8(random: Random, dtype: torch.dtype) -> Mapping[str, Any]:
    """Checks the product of the quantised values, and separately the quantisation of the activations."""
    n, k, dtype = *random.sizes((6144, 4096), (40, 256)), random.dtype(dtype)
    weight = w8a8.quantise_tokens_reference(random.normal(n, k, dtype=torch.float32), dtype)
    dense_NK = weight.values_RK.double() * weight.scales_R.double()[:, None]
    products, tokens = {}, {}
    for m in random.sizes(ROWS, (1, 17)):
        x_MK = random.normal(m, k)
        x = w8a8.quantise_tokens(x_MK, dtype)
        meant = x.values_RK.double() * x.scales_R.double()[:, None]
        products[f"m{m}"] = w8a8.w8a8_gemm(x, weight, out_dtype=FP16), partial(_product, meant, dense_NK)
        tokens[f"tokens m{m}"] = meant, x_MK
    row, other = random.compared(products, FP16), random.compared(tokens, dtype)
    return row and row | {"ok": row["ok"] and other["ok"], "why": row["why"] + other["why"], "tokens": other}


def _lora(random: Random, dtype: torch.dtype) -> Mapping[str, Any]:
    """Checks LoRA shrink and expand; the weights of an adapter that no token uses are NaN."""
    k, n, rank = random.sizes((4096, 4096, 64), (64, 48, 8))
    lengths = random.sizes((1, 0, 17, 200), (1, 0, 5))
    users = random.sizes((2, 1, -1, 0), (2, 1, 0))
    starts = random.tensor([0, *lengths], torch.int32).cumsum(0).int()
    a = random.normal(4, rank, k, dtype=dtype, scale=k**-0.5)
    b = random.normal(4, n, rank, dtype=dtype)
    a[3] = b[3] = torch.nan
    scaling, segments = random.uniform(4) + 0.5, lora.Segments(starts, random.tensor(users, torch.int32))
    x, base = (random.normal(sum(lengths), size, dtype=dtype) for size in (k, n))
    out = base.clone()
    parts = lora.lora_shrink(x, a, segments)
    lora.lora_expand(parts, b, scaling, segments, out)
    if random.compiling:
        return {}
    exact, first = base.double(), 0
    shrunk = torch.zeros(sum(lengths), rank, dtype=torch.float64, device=random.device)
    for length, user in zip(lengths, users, strict=True):
        rows = slice(first, first + length)
        first += length
        if user >= 0:
            shrunk[rows] = _product(x[rows], a[user])
            exact[rows] += scaling[user].double() * _product(shrunk[rows], b[user])
    return random.compared({"shrink": (parts.sum(0), shrunk), "expand": (out, exact)}, dtype)


def _greedy(random: Random) -> Mapping[str, Any]:
    logits = random.normal(*random.sizes((64, 128256), (2, 5000)), dtype=torch.float32)
    right = torch.equal(sampling.greedy(logits), logits.argmax(-1))
    return {"ok": right, "why": "" if right else "tokens differ from argmax"}


def _sample(random: Random) -> Mapping[str, Any]:
    """Checks that at least 98 % of the draws equal the reference's; rounding may decide the others."""
    num_seqs, vocab = random.sizes((256, 128256), (3, 5000))
    logits = random.normal(num_seqs, vocab, dtype=torch.float32, scale=3.0)
    number = torch.arange(num_seqs, device=random.device)
    settings = sampling.Sampling(
        temperature=random.uniform(num_seqs) + 0.3,
        top_k=torch.where(number % 3 == 0, 50, 0).int(),
        top_p=torch.where(number % 2 == 0, 0.95, 1.0).float(),
        min_p=torch.where(number % 5 == 0, 0.05, 0.0).float(),
        seed=number * 7919,
        request=number,
        position=number + 100,
    )
    penalties = sampling.Penalties(
        repetition=random.uniform(num_seqs) + 0.7,
        presence=random.uniform(num_seqs),
        frequency=random.uniform(num_seqs),
        counts=random.ints(0, 2, num_seqs, vocab),
        row=number,
    )
    same = 0
    for given in (None, penalties):
        drawn = sampling.sample(logits, settings, given)
        if not random.compiling:
            same += int((drawn == sampling.sample_reference(logits, settings, given)).sum())
    share = same / (2 * num_seqs)
    return {"ok": share >= 0.98, "why": f"{share:.1%} of the draws are the reference's", "share": share}


def _moe(random: Random, experts: int, choices: int, hidden: int, inner: int) -> Mapping[str, Any]:
    w13 = random.normal(experts, 2 * inner, hidden, scale=hidden**-0.5)
    w2 = random.normal(experts, hidden, inner, scale=inner**-0.5)
    pairs, right = {}, True
    for tokens in random.sizes((1, 33, 500), (1, 9)):
        x, logits = random.normal(tokens, hidden), random.normal(tokens, experts, dtype=torch.float32)
        routing = moe_routing.moe_route(logits, choices)
        wanted = moe_routing.moe_route_reference(logits, choices)
        right &= bool(torch.equal(routing.experts_TJ, wanted.experts_TJ))
        pairs[f"weights t{tokens}"] = routing.weights_TJ, wanted.weights_TJ
        reference = partial(moe.moe_mlp_reference, x.float(), w13, w2, wanted)
        pairs[f"mlp t{tokens}"] = moe.moe_mlp(x, w13, w2, wanted), reference
    row = random.compared(pairs, BF16)
    return row and row | {"ok": row["ok"] and right, "why": row["why"] + ("" if right else "; other experts")}
