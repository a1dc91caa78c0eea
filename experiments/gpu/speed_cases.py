"""The cases that are timed: first the sizes that have a target, then the cases of every kernel module."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any

import torch

from experiments.calibrate.engine.timing import Call
from kernels.activation import silu_mul
from kernels.ahead import kernel_modules
from kernels.attention_models import MODELS, made_cache
from kernels.case import Case
from kernels.decode_attention import decode_attention
from kernels.int4_weight import BLOCK, RUN, Int4Weight
from kernels.norm import add_rms_norm, qk_norm, rms_norm
from kernels.paged_kv import PagedKv
from kernels.prefill_attention import Chunks, prefill_attention
from kernels.rope import Rotation, rope_and_write_kv
from kernels.rope_angles import cos_sin_table
from kernels.w4a16 import w4a16_gemm

BF16 = torch.bfloat16
SPEEDUP_ROWS = (1, 2, 4, 8)
W4_LAYERS = {"qkv": (4096, 6144), "o": (4096, 4096), "gate_up": (4096, 28672), "down": (14336, 4096)}
GROUP_SIZE = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A share to reach. share_of: copy (copied bytes/s) or bf16 (bf16 FLOP/s)."""

    share_of: str
    at_least: float


DECODE = Target(share_of="copy", at_least=0.85)
DECODE_ALONE = Target(share_of="copy", at_least=0.60)
PREFILL = Target(share_of="bf16", at_least=0.60)
FUSED = Target(share_of="copy", at_least=0.80)


def targeted(quick: bool) -> Iterator[tuple[Case, Target]]:
    """Yields the cases that have a target, named module/size."""
    if quick:
        yield decode_case(2, 40), DECODE
        yield prefill_case(24), PREFILL
        yield from ((case, FUSED) for case in _fused(3, 64, 96))
        return
    for num_seqs, context_len in ((16, 4096), (64, 4096), (32, 16384)):
        yield decode_case(num_seqs, context_len), DECODE
    yield decode_case(63, 1024, num_long=1, long_len=32768), DECODE
    yield decode_case(1, 32768), DECODE_ALONE
    yield prefill_case(8192), PREFILL
    yield from ((case, FUSED) for case in _fused(8192, 4096, 14336))


def others(quick: bool) -> Iterator[Case]:
    """Returns the modules' own cases: the first of each module, then the second of each, and so on."""
    by_module = [
        [
            case._replace(name=f"{module}/{case.name}")
            for case in importlib.import_module(f"kernels.{module}").cases()
        ]
        for module in (["activation", "norm"] if quick else kernel_modules())
        if module != "prefill_hopper"  # may hang: it has a part of its own, attention_backends
    ]
    found = chain.from_iterable(zip_longest(*by_module))
    return (case for case in found if case is not None and (not quick or "-1x" in case.name))


def decode_case(num_seqs: int, context_len: int, num_long: int = 0, long_len: int = 0) -> Case:
    """Returns the case of Llama-3.1-8B's decode attention in bf16, with num_long longer sequences beside."""
    model, lens = MODELS["llama_8b"], [long_len] * num_long + [context_len] * num_seqs

    def make(device: torch.device) -> Call:
        kv, contexts = made_cache(lens, model, interpreted(device), device)
        q = normal((len(lens), model.num_heads, model.head_dim), device)
        return lambda: decode_attention(q, kv, contexts)

    kv_elements = 2 * sum(lens) * model.num_kv_heads * model.head_dim
    beside = f"-and{num_long}x{long_len}" if num_long else ""
    return Case(
        f"decode_attention/llama_8b-batch{num_seqs}-context{context_len}{beside}",
        make,
        2.0 * kv_elements + 4.0 * len(lens) * model.num_heads * model.head_dim,
        4.0 * sum(lens) * model.num_heads * model.head_dim,
    )


def prefill_case(length: int) -> Case:
    """Returns the case of a whole prompt of Llama-3.1-8B in bf16; FLOPs count the causal half only."""
    model = MODELS["llama_8b"]

    def make(device: torch.device) -> Call:
        kv, contexts = made_cache([length], model, interpreted(device), device)
        q = normal((length, model.num_heads, model.head_dim), device)
        starts = torch.tensor([0, length], dtype=torch.int32, device=device)
        return lambda: prefill_attention(q, kv, contexts, Chunks(starts, length))

    return Case(
        f"prefill_attention/llama_8b-{length}",
        make,
        4.0 * length * (model.num_heads + model.num_kv_heads) * model.head_dim,
        2.0 * length * (length + 1) * model.num_heads * model.head_dim,
    )


def _fused(tokens: int, hidden: int, inner: int) -> Iterator[Case]:
    def norm(add: bool) -> Callable[[torch.device], Call]:
        def make(device: torch.device) -> Call:
            x, residual, weight = (normal(shape, device) for shape in ((tokens, hidden),) * 2 + ((hidden,),))
            out = torch.empty_like(x)
            if add:
                return lambda: add_rms_norm(x, residual, weight, 1e-5, out=out, residual_out=residual)
            return lambda: rms_norm(x, weight, 1e-5, out=out)

        return make

    def heads(device: torch.device) -> Call:
        q, k, _ = normal((tokens, 48, 128), device).split([32, 8, 8], dim=1)
        weight = normal((128,), device)
        return lambda: qk_norm(q, k, weight, weight, 1e-6)

    def rope(device: torch.device) -> Call:
        q, k, v = normal((tokens, 48, 128), device).split([32, 8, 8], dim=1)
        caches = [normal((tokens // 16 + 2, 16, 8, 128), device) for _ in range(2)]
        at = torch.arange(tokens, device=device)
        slots = torch.randperm(tokens, device=device) + 16
        table = cos_sin_table(128, tokens, device=device)
        rotation, kv = Rotation(at, table), PagedKv(*caches)
        return lambda: rope_and_write_kv(q, k, v, rotation, kv, slots)

    def gate(device: torch.device) -> Call:
        x, out = normal((tokens, 2 * inner), device), normal((tokens, inner), device)
        return lambda: silu_mul(x, out=out)

    yield Case(f"norm/rms_norm-{tokens}x{hidden}", norm(False), 4.0 * tokens * hidden)
    yield Case(f"norm/add_rms_norm-{tokens}x{hidden}", norm(True), 8.0 * tokens * hidden)
    yield Case(f"norm/qk_norm-{tokens}x40", heads, 4.0 * tokens * 40 * 128)
    yield Case(f"rope/rope-{tokens}x32+8", rope, tokens * 128 * (4.0 * 32 + 8.0 * 8))
    yield Case(f"activation/silu_mul-{tokens}x{inner}", gate, 6.0 * tokens * inner)


def w4a16_case(m: int, k: int, n: int) -> Case:
    """Returns the case of the product of x [m, k] and a 4-bit weight [n, k]."""
    groups = k // GROUP_SIZE

    def make(device: torch.device) -> Call:
        words = torch.randint(
            -(1 << 31), (1 << 31) - 1, (-(-k // BLOCK), n, RUN), dtype=torch.int32, device=device
        )
        scales = torch.rand(groups, n, device=device).half() * 0.01
        zeros = torch.randint(0, 16, (groups, n), dtype=torch.uint8, device=device)
        weight = Int4Weight(words, scales, zeros, k, GROUP_SIZE)
        x = normal((m, k), device)
        return lambda: w4a16_gemm(x, weight)

    return Case(
        f"w4a16/{n}x{k}-m{m}", make, n * k / 2 + 3.0 * n * groups + 2.0 * m * (k + n), 2.0 * m * n * k
    )


def normal(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Returns normal random numbers in bf16, or in fp16 where kernels are interpreted."""
    return torch.randn(shape, device=device).to(interpreted(device))


def interpreted(device: torch.device) -> torch.dtype:
    """Returns bf16, or fp16 on a CPU, where kernels are interpreted, which is correct for fp16 only."""
    return torch.float16 if device.type == "cpu" else BF16


def shares(case: Case, seconds: float, limits: dict[str, float | None]) -> dict[str, Any]:
    """Returns the rates of a call that takes `seconds`, and their shares of the limits that were measured."""
    rates = {"copy": case.bytes_moved / seconds, "bf16": case.flops / seconds}
    found: dict[str, Any] = {"bytes_per_s": rates["copy"], "flops_per_s": rates["bf16"]}
    for name, limit in limits.items():
        if limit:
            found[f"{name}_share"] = rates[name] / limit
    return found
