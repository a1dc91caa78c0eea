"""Measures the limits of the GPU; the shares that other parts report are relative to these numbers.

Copies and reads of gigabytes, matrix products of size 8192 on random data (zeros run faster), the products
of Llama-3.1-8B's layers for 1 to 8192 rows (the curve that a roofline needs), the cost of a launch, of a
round trip to the host, and of transfers over the bus.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from experiments.calibrate.engine.timing import (
    Call,
    Timing,
    host_s,
    input_sets,
    recorded,
    synchronize,
    timed,
    wall_s,
)
from experiments.gpu.record import Record, UnavailableError, read
from kernels.launch import launch

FP8 = torch.float8_e4m3fn
# The layers of Llama-3.1-8B: (inputs, outputs).
LAYERS = {
    "qkv": (4096, 6144),
    "o": (4096, 4096),
    "gate_up": (4096, 28672),
    "down": (14336, 4096),
    "lm_head": (4096, 128256),
}
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
TINY = 200  # kernels per timed sequence of small kernels


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Rates that shares are relative to; None: not measured."""

    copy_bytes_per_s: float | None = None
    read_bytes_per_s: float | None = None
    bf16_flops_per_s: float | None = None
    fp8_flops_per_s: float | None = None
    int8_flops_per_s: float | None = None

    @classmethod
    def of(cls, folder: Path) -> Limits:
        """Reads the limits from limits.json in a folder of results."""
        rows = {row["name"]: row for row in read(folder / "limits.json")["rows"]}

        def best(key: str, *names: str) -> float | None:
            return max((rows[name][key] for name in names if key in rows.get(name, {})), default=None)

        return cls(
            copy_bytes_per_s=best("bytes_per_s", "copy"),
            read_bytes_per_s=best("bytes_per_s", "read"),
            bf16_flops_per_s=best("flops_per_s", "gemm_bfloat16"),
            fp8_flops_per_s=best("flops_per_s", "gemm_fp8_fast", "gemm_fp8"),
            int8_flops_per_s=best("flops_per_s", "gemm_int8"),
        )


def run(record: Record) -> None:
    """Measures all limits, the most important first."""
    device, quick = record.device, record.quick
    record.measure("copy", lambda: _copy(device, quick))
    record.measure("read", lambda: _read(device, quick))
    size = 64 if quick else 8192
    for name, product in _products(size, device):
        record.measure(f"gemm_{name}", partial(_gemm, product, size, device))
    record.measure("launch", lambda: _launches(device))
    record.measure("item", lambda: _item(device))
    record.measure("pinned", lambda: _pinned(device, quick))
    layers = {"o": (32, 48)} if quick else LAYERS
    for layer, (k, n) in layers.items():
        for m in (1, 4) if quick else ROWS:
            record.measure(f"linear_{layer}_m{m}", partial(_linear, m, k, n, device))


def _copy(device: torch.device, quick: bool) -> dict[str, Any]:
    """Measures the rate of a device-to-device copy: bytes read plus bytes written, per second."""
    size = _bytes(device, 1 << 32, quick)
    source = torch.empty(size // 4, dtype=torch.int32, device=device).random_()
    destination = torch.empty_like(source)
    found = timed([lambda: destination.copy_(source)], device, rep_ms=150)
    rate = 2 * size / found.median_s
    return {"bytes": size, "bytes_per_s": rate, "said": f"{rate / 1e12:.2f} TB/s", **found.row()}


def _read(device: torch.device, quick: bool) -> dict[str, Any]:
    """Measures the read bandwidth: the fastest of torch's reductions and a plain Triton loop."""
    size = _bytes(device, 1 << 33, quick)
    source = torch.empty(size // 4, dtype=torch.float32, device=device).normal_()
    ways: dict[str, Call] = {"torch_sum": lambda: source.sum(), "torch_amax": lambda: source.amax()}
    for tile, warps in ((2048, 4), (4096, 8), (8192, 8)):
        sums = torch.empty(triton.cdiv(source.numel(), tile * LOOP), dtype=torch.float32, device=device)
        sizes = {"TILE": tile, "LOOP": LOOP, "num_warps": warps}
        ways[f"triton_{tile}"] = partial(
            launch, sum_kernel, (len(sums),), source, sums, source.numel(), **sizes
        )
    rates = {name: size / timed([way], device).median_s for name, way in ways.items()}
    best = max(rates, key=lambda name: rates[name])
    summary = f"{rates[best] / 1e12:.2f} TB/s ({best})"
    return {"bytes": size, "bytes_per_s": rates[best], "by_way": rates, "said": summary}


LOOP = 8  # tiles that a program of sum_kernel reads


@triton.jit  # type: ignore[untyped-decorator]
def sum_kernel(x_ptr, sums_ptr, numel, TILE: tl.constexpr, LOOP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sums LOOP tiles of x per program, so that the time is that of reading memory."""
    first = tl.program_id(0).to(tl.int64) * (TILE * LOOP)
    o = tl.arange(0, TILE)
    b_sum = tl.zeros([TILE], dtype=tl.float32)
    for i in tl.static_range(LOOP):
        at = first + i * TILE + o
        b_sum += tl.load(x_ptr + at, mask=at < numel, other=0.0)
    tl.store(sums_ptr + tl.program_id(0), tl.sum(b_sum, 0))


def _products(size: int, device: torch.device) -> Iterator[tuple[str, Callable[[], Call]]]:
    """Yields (name, function that builds the call) for every kind of square matrix product."""

    def normal(dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(size, size, dtype=dtype, device=device).normal_()

    def plain(dtype: torch.dtype) -> Call:
        a, b = normal(dtype), normal(dtype)
        out = torch.empty_like(a)
        return lambda: torch.mm(a, b, out=out)

    def fp8(fast: bool) -> Call:
        a, b = (normal(torch.bfloat16).to(FP8) for _ in range(2))
        scale = torch.ones((), dtype=torch.float32, device=device)
        return lambda: torch._scaled_mm(a, b.t(), scale, scale, out_dtype=torch.bfloat16, use_fast_accum=fast)

    def int8() -> Call:
        a, b = (torch.randint(-128, 128, (size, size), dtype=torch.int8, device=device) for _ in range(2))
        return lambda: torch._int_mm(a, b.t())

    yield "bfloat16", lambda: plain(torch.bfloat16)
    yield "float16", lambda: plain(torch.float16)
    yield "fp8_fast", lambda: fp8(True)
    yield "fp8", lambda: fp8(False)
    yield "int8", int8


def _gemm(product: Callable[[], Call], size: int, device: torch.device) -> dict[str, Any]:
    call = product()
    try:
        call()
        synchronize(device)
    except NotImplementedError as error:
        raise UnavailableError(str(error)[:200]) from None
    found = timed([call], device, rep_ms=150)
    rate = 2 * size**3 / found.median_s
    return {"size": size, "flops_per_s": rate, "said": f"{rate / 1e12:.0f} TFLOP/s", **found.row()}


def _linear(m: int, k: int, n: int, device: torch.device) -> dict[str, Any]:
    """Times the product of x [m, k] and a weight [n, k], as the model's layers call it."""
    found = linear_timing(m, k, n, device)
    moved = 2.0 * (m * k + k * n + m * n)
    return {
        "m": m,
        "k": k,
        "n": n,
        "flops_per_s": 2 * m * k * n / found.median_s,
        "bytes_per_s": moved / found.median_s,
        **found.row(),
    }


def linear_timing(m: int, k: int, n: int, device: torch.device) -> Timing:
    """Times torch's bf16 product of x [m, k] and a weight [n, k]."""

    def make(device: torch.device) -> Call:
        x_MK = torch.empty(m, k, dtype=torch.bfloat16, device=device).normal_()
        weight_NK = torch.empty(n, k, dtype=torch.bfloat16, device=device).normal_()
        out_MN = torch.empty(m, n, dtype=torch.bfloat16, device=device)
        return lambda: torch.mm(x_MK, weight_NK.t(), out=out_MN)

    return timed(input_sets(make, device, 2.0 * k * n), device, rep_ms=40)


def _launches(device: torch.device) -> dict[str, Any]:
    """Measures seconds per small kernel, launched from Python and in a CUDA graph, and their host time."""
    x = torch.zeros(1024, device=device)
    sums = torch.zeros(1, device=device)

    def torch_kernels() -> None:
        for _ in range(TINY):
            x.add_(1.0)

    def triton_kernel() -> None:
        launch(sum_kernel, (1,), x, sums, 1024, TILE=128, LOOP=8, num_warps=1)

    found = {
        "eager_s": wall_s(torch_kernels, device, 20) / TINY,
        "torch_host_s": host_s(lambda: x.add_(1.0), device, TINY),
        "triton_host_s": host_s(triton_kernel, device, 20 if device.type == "cpu" else TINY),
    }
    if device.type == "cuda":
        graph = recorded(torch_kernels)
        found["graph_s"] = wall_s(graph.replay, device, 50) / TINY
        found["graph_launch_s"] = host_s(graph.replay, device, 20)
    summary = ", ".join(f"{name.removesuffix('_s')} {value * 1e6:.1f} us" for name, value in found.items())
    return {**found, "said": summary}


def _item(device: torch.device) -> dict[str, Any]:
    """Measures a small kernel plus the copy of its result to the host (`.item()`)."""
    x = torch.zeros((), device=device)
    seconds = wall_s(lambda: x.add_(1.0).item(), device, 200)
    return {"median_s": seconds, "said": f"{seconds * 1e6:.1f} us"}


def _pinned(device: torch.device, quick: bool) -> dict[str, Any]:
    """Measures bytes/s between pinned host memory and the device, and a round trip of 4 KiB."""
    if device.type == "cpu":
        raise UnavailableError("a CPU has no transfer between host and device")
    size = 1 << 20 if quick else 1 << 29
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(size, dtype=torch.uint8, device=device)
    to_device = wall_s(lambda: there.copy_(host, non_blocking=True), device, 8)
    to_host = wall_s(lambda: host.copy_(there, non_blocking=True), device, 8)

    def both() -> None:
        there[:4096].copy_(host[:4096], non_blocking=True)
        host[:4096].copy_(there[:4096], non_blocking=True)

    return {
        "bytes": size,
        "to_device_bytes_per_s": size / to_device,
        "to_host_bytes_per_s": size / to_host,
        "page_there_and_back_s": wall_s(both, device, 100),
        "said": f"{size / to_device / 1e9:.1f} GB/s to the device, {size / to_host / 1e9:.1f} GB/s back",
    }


def _bytes(device: torch.device, wanted: int, quick: bool) -> int:
    """Returns the wanted bytes, at most a quarter of the free memory; 1 MiB in a dry run."""
    if quick or device.type == "cpu":
        return 1 << 20
    return min(wanted, torch.cuda.mem_get_info()[0] // 4) >> 20 << 20
