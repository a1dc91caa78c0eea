"""Compares kernel results with references: one relative error per tensor and one threshold per dtype."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from experiments.gpu.measurement import UnavailableError
from kernels.paged_kv import INT4

Check = tuple[str, Callable[[], Mapping[str, Any]]]
"""Name of a check, and the function that returns its row."""
Pair = tuple[torch.Tensor, torch.Tensor | Callable[[], torch.Tensor]]
"""A result, and its reference or a function that computes it."""

# Upper limits of ||out - reference|| / ||reference||: a few roundings of the inputs and of the output.
THRESHOLDS = {
    torch.float32: 1e-4,
    torch.float16: 2e-3,
    torch.bfloat16: 1e-2,
    torch.int8: 2e-2,
    torch.float8_e4m3fn: 5e-2,
    INT4: 2e-2,
}


def compared(pairs: Mapping[str, Pair], dtype: torch.dtype) -> dict[str, Any]:
    """Returns a row with the relative error of each (result, reference) and whether all are within the limit.

    The limit is that of `dtype`. An error of NaN is beyond every limit.
    """
    limit, errors = THRESHOLDS[dtype], dict[str, float]()
    for name, (out, reference) in pairs.items():
        errors[name] = relative_error(out, reference() if callable(reference) else reference)
    beyond = [
        f"{name}: relative error {e:.2g}, limit {limit:g}" for name, e in errors.items() if not e <= limit
    ]
    return {"ok": not beyond, "why": "; ".join(beyond), "relative_errors": errors, "limit": limit}


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """Returns ||out - reference|| / ||reference||, or ||out|| if the reference is all zeros."""
    difference = torch.linalg.vector_norm(out.double() - reference.double())
    size = torch.linalg.vector_norm(reference.double())
    return float(difference / size) if size > 0 else float(difference)


class Random:
    """Random tensors on a device. On a CPU, bf16 becomes fp16: the interpreter is correct only for fp16.

    compiling: launches are compiled instead of run, so tensors stay empty and nothing is compared.
    """

    def __init__(self, device: torch.device, quick: bool, *, compiling: bool = False) -> None:
        self.device, self.quick, self.compiling = device, quick, compiling

    def compared(self, pairs: Mapping[str, Pair], dtype: torch.dtype) -> dict[str, Any]:
        """Returns the row of `compared`, with the dtype that stands for this one; empty if only compiled."""
        return {} if self.compiling else compared(pairs, self.dtype(dtype))

    def dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Returns the dtype to check instead of `dtype`. Raises UnavailableError for fp8 on a CPU."""
        if self.compiling or self.device.type != "cpu":
            return dtype
        if dtype == torch.float8_e4m3fn:
            raise UnavailableError("interpreted kernels do not round to fp8 as chips do")
        return torch.float16 if dtype == torch.bfloat16 else dtype

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> torch.Tensor:
        """Returns numbers of a normal distribution with standard deviation `scale`."""
        if self.compiling:
            return torch.empty(shape, dtype=dtype)
        return (torch.randn(shape, device=self.device) * scale).to(self.dtype(dtype))

    def uniform(self, *shape: int) -> torch.Tensor:
        """Returns fp32 numbers, uniform in [0, 1)."""
        return torch.rand(shape, device=self.device)

    def ints(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """Returns integers from low to high - 1."""
        return torch.randint(low, high, shape, dtype=dtype, device=self.device)

    def tensor(self, values: object, dtype: torch.dtype) -> torch.Tensor:
        """Returns `values` as a tensor on the device."""
        return torch.tensor(values, dtype=dtype, device=self.device)

    def sizes(self, full: tuple[int, ...], quick: tuple[int, ...]) -> tuple[int, ...]:
        """Returns `full`, a real model's sizes, or `quick`, small ones, in a dry run."""
        return quick if self.quick else full

    def paged(
        self, lens: tuple[int, ...], num_heads: int, head_dim: int, dtype: torch.dtype, block_size: int = 16
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns a cache [N, P, K, D], block tables [B, M] in random order and context lengths [B].

        Slots of the cache that hold no token are NaN.
        """
        counts = [-(-n // block_size) for n in lens]
        total = sum(counts) + 2
        if self.compiling:
            tables = torch.zeros(len(lens), max(counts) + 1, dtype=torch.int32)
            return (
                torch.empty(total, block_size, num_heads, head_dim, dtype=dtype),
                tables,
                self.tensor(lens, torch.int32),
            )
        cache = torch.full(
            (total, block_size, num_heads, head_dim), torch.nan, dtype=torch.float32, device=self.device
        )
        order = torch.randperm(total - 2, device=self.device) + 1
        tables = torch.zeros(len(lens), max(counts) + 1, dtype=torch.int32, device=self.device)
        used = 0
        for seq, (n, count) in enumerate(zip(lens, counts, strict=True)):
            blocks = order[used : used + count]
            used += count
            tables[seq, :count] = blocks.int()
            at = torch.arange(n, device=self.device)
            cache[blocks[at // block_size], at % block_size] = torch.randn(
                n, num_heads, head_dim, device=self.device
            )
        return cache.to(self.dtype(dtype)), tables, self.tensor(lens, torch.int32)

    def filled_like(self, cache: torch.Tensor) -> torch.Tensor:
        """Returns other random numbers in the slots where `cache` holds numbers, NaN elsewhere."""
        if self.compiling:
            return torch.empty_like(cache)
        return torch.where(cache.isnan(), torch.nan, torch.randn(cache.shape, device=self.device)).to(
            cache.dtype
        )
