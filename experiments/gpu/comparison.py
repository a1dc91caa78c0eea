"""How far a result is from its reference: one number, one table of thresholds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from experiments.gpu.record import UnavailableError

Check = tuple[str, Callable[[], Mapping[str, Any]]]  # name, and what makes its row

# Of ||out - reference|| / ||reference||: roundings of the inputs and of the output, a few times over.
THRESHOLDS = {
    torch.float32: 1e-4,
    torch.float16: 2e-3,
    torch.bfloat16: 1e-2,
    torch.int8: 2e-2,
    torch.float8_e4m3fn: 5e-2,
}


def compared(pairs: Mapping[str, tuple[torch.Tensor, torch.Tensor]], dtype: torch.dtype) -> dict[str, Any]:
    """A row: the relative error of each (result, reference), and whether all are within dtype's threshold.

    NaN is within none.
    """
    errors = {name: relative_error(*pair) for name, pair in pairs.items()}
    limit = THRESHOLDS[dtype]
    beyond = [
        f"{name} off by {error:.2g}, limit {limit:g}" for name, error in errors.items() if not error <= limit
    ]
    return {"ok": not beyond, "why": "; ".join(beyond), "relative_errors": errors, "limit": limit}


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """||out - reference|| / ||reference||; of a reference of zeros, ||out||."""
    off = torch.linalg.vector_norm(out.double() - reference.double())
    size = torch.linalg.vector_norm(reference.double())
    return float(off / size) if size > 0 else float(off)


class Random:
    """Random tensors on a device; bf16 becomes fp16 where kernels are interpreted: right only there."""

    def __init__(self, device: torch.device, quick: bool) -> None:
        self.device = device
        self.quick = quick

    def dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype to check in the place of `dtype`."""
        if dtype == torch.float8_e4m3fn and self.device.type == "cpu":
            raise UnavailableError("interpreted kernels do not round to fp8 as chips do")
        return torch.float16 if dtype == torch.bfloat16 and self.device.type == "cpu" else dtype

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> torch.Tensor:
        """Normal numbers."""
        return (torch.randn(shape, device=self.device) * scale).to(self.dtype(dtype))

    def uniform(self, *shape: int) -> torch.Tensor:
        """fp32 in [0, 1)."""
        return torch.rand(shape, device=self.device)

    def ints(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """Whole numbers from low to high - 1."""
        return torch.randint(low, high, shape, dtype=dtype, device=self.device)

    def tensor(self, values: object, dtype: torch.dtype) -> torch.Tensor:
        """These numbers on the device."""
        return torch.tensor(values, dtype=dtype, device=self.device)

    def sizes(self, full: tuple[int, ...], quick: tuple[int, ...]) -> tuple[int, ...]:
        """Those of a real model, or small ones."""
        return quick if self.quick else full

    def paged(
        self, lens: tuple[int, ...], num_heads: int, head_dim: int, dtype: torch.dtype, block_size: int = 16
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(A cache [N, P, K, D] that is NaN where no token lies, shuffled tables [B, M], lengths [B])."""
        counts = [-(-n // block_size) for n in lens]
        total = sum(counts) + 2
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
        """Other random numbers where `cache` has numbers."""
        return torch.where(cache.isnan(), torch.nan, torch.randn(cache.shape, device=self.device)).to(
            cache.dtype
        )
