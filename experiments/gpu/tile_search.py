"""Alternatives to the launch tables: the tiles to try for each case, and how one replaces the table's."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from kernels import ahead
from kernels.case import Case

Values = dict[str, Any]  # a tile's fields


@dataclass(frozen=True, kw_only=True, slots=True)
class Search:
    """One case of a kernel module, and the values that each field of its tile may take.

    not_compiled: fields that do not change the compiled kernel, only how it is launched. pure: each call
    gives the same result, so that the results of different tiles can be compared.
    """

    module: str
    case: str
    fields: Mapping[str, tuple[int, ...]]
    not_compiled: tuple[str, ...] = ()
    pure: bool = True

    @property
    def name(self) -> str:
        return f"{self.module}/{self.case}"

    def candidates(self) -> list[Values]:
        """Returns all combinations of the fields' values."""
        return [dict(zip(self.fields, values, strict=True)) for values in product(*self.fields.values())]

    def make(self) -> Case:
        """Returns the case. Raises ValueError if the module has no case of that name."""
        module = importlib.import_module(f"kernels.{self.module}")
        for case in module.cases():
            if case.name == self.case:
                found: Case = case
                return found
        raise ValueError(f"{self.name}: the module has no such case")


DECODE = {"block_n": (32, 64, 128), "num_warps": (4, 8), "num_stages": (3, 4, 5), "resident": (2, 4, 8)}
PREFILL = {"block_m": (64, 128), "block_n": (32, 64, 128), "num_warps": (4, 8), "num_stages": (2, 3, 4)}
MLA = {
    "block_h": (16, 32, 64),
    "block_n": (16, 32, 64),
    "num_warps": (4, 8),
    "num_stages": (2, 3),
    "resident": (1, 2),
}


def gemm(rows: tuple[int, ...], cols: tuple[int, ...], depth: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Returns the tile fields of quantised and MoE products."""
    return {"rows": rows, "cols": cols, "depth": depth, "num_warps": (4, 8), "num_stages": (2, 3, 4, 5)}


FEW, MANY = (16,), (64, 128)
SEARCHES = (
    Search(
        module="decode_attention",
        case="llama_8b-bfloat16-batch16-context4096",
        fields=DECODE,
        not_compiled=("resident",),
    ),
    Search(module="prefill_attention", case="llama_8b-bfloat16-batch1-8192of8192", fields=PREFILL),
    Search(module="w4a16", case="8b_gate_up_m1_bfloat16", fields=gemm(FEW, (64, 128, 256), (128,))),
    Search(
        module="decode_attention",
        case="llama_8b-bfloat16-batch1-context32768",
        fields=DECODE,
        not_compiled=("resident",),
    ),
    Search(
        module="decode_attention",
        case="llama_8b-bfloat16-batch64-context1024",
        fields=DECODE,
        not_compiled=("resident",),
    ),
    Search(module="prefill_attention", case="llama_8b-bfloat16-batch4-512of4096", fields=PREFILL),
    Search(module="w4a16", case="8b_qkv_m16_bfloat16", fields=gemm(FEW, (32, 64, 128), (128,))),
    Search(module="w4a16", case="8b_gate_up_m64_bfloat16", fields=gemm(MANY, (64, 128), (128,))),
    Search(
        module="norm",
        case="add_rms_norm-4096x4096",
        fields={"elements_per_warp": (256, 512, 1024, 2048), "head_tile": (2048,)},
        pure=False,
    ),
    Search(
        module="norm",
        case="qk_norm-2048x32+8",
        fields={"elements_per_warp": (512,), "head_tile": (512, 1024, 2048, 4096)},
        pure=False,
    ),
    Search(
        module="rope",
        case="rope-2048x32+8x128",
        fields={"head_tile": (256, 512, 1024, 2048), "num_warps": (1, 2, 4, 8)},
        pure=False,
    ),
    Search(
        module="activation",
        case="silu_mul-2048x14336",
        fields={"block": (512, 1024, 2048, 4096, 8192), "num_warps": (2, 4, 8)},
    ),
    Search(module="w8a16", case="8b_gate_up_m1_bfloat16", fields=gemm(FEW, (32, 64, 128), (64, 128, 256))),
    Search(module="w8a8", case="8b_gate_up_fp8_m1", fields=gemm(FEW, (32, 64, 128), (128, 256))),
    Search(module="w8a8", case="8b_gate_up_fp8_m512", fields=gemm(MANY, (64, 128, 256), (64, 128))),
    Search(module="w8a16", case="8b_gate_up_m512_bfloat16", fields=gemm(MANY, (64, 128, 256), (32, 64))),
    Search(module="moe", case="qwen3_t32", fields=gemm(FEW, (32, 64, 128), (64, 128))),
    Search(module="moe", case="qwen3_t4096", fields=gemm(MANY, (64, 128), (32, 64))),
    Search(
        module="mla_decode",
        case="deepseek_v3-heads128-batch32-context4096",
        fields=MLA,
        not_compiled=("resident",),
    ),
    Search(
        module="mla_decode",
        case="deepseek_v3-heads16-batch64-context4096",
        fields=MLA,
        not_compiled=("resident",),
    ),
    Search(
        module="sampling",
        case="sample_penalties_top_k_top_p-64x128256",
        fields={
            "chunk": (2048, 4096, 8192),
            "tile": (4096, 8192, 16384),
            "listed": (4096, 8192),
            "chunk_warps": (4, 8),
            "row_warps": (8, 16, 32),
        },
    ),
    Search(
        module="lora",
        case="shrink_qkv_r16_t64",
        fields={
            "rows": (16,),
            "ranks": (16, 32),
            "depth": (64, 128, 256),
            "cols": (128,),
            "num_parts": (4, 8, 16),
            "num_warps": (2, 4),
            "num_stages": (3, 4),
        },
    ),
    Search(
        module="block_copy",
        case="copy_blocks-64x32x16x8x128",
        fields={"words": (1024, 2048, 4096, 8192), "num_warps": (2, 4, 8)},
        pure=False,
    ),
)
DRY_RUN = (
    Search(module="activation", case="silu_mul-1x1536", fields={"block": (512, 1024), "num_warps": (4,)}),
)


@contextmanager
def replaced(module: str, values: Values) -> Iterator[None]:
    """Replaces every entry of the module's launch table by the tile of these values, inside the context."""
    table: dict[str, Any] = importlib.import_module(f"kernels.{module}").TILES
    before = dict(table)
    table.update({chip: _replaced(entry, values) for chip, entry in before.items()})
    try:
        yield
    finally:
        table.update(before)


def present(module: str, chip: str) -> Any:
    """Returns the launch table's entry for a chip, as in the sources; None if it has none."""
    return importlib.import_module(f"kernels.{module}").TILES.get(chip)


def compiled(search: Search, values: Values, chip: str) -> dict[str, Any]:
    """Compiles the case's kernels with this tile; returns registers, spills and shared memory.

    `unusable` says why the tile should not be timed. Run it in a process that does not interpret kernels: the
    result remains in Triton's cache for later processes.
    """
    torch.set_num_threads(1)
    compiler = ahead.Compiler(chip, {})
    with replaced(search.module, values), compiler.compiling(search.module, search.case):
        try:
            search.make().make(torch.device("cpu"))()
        except ValueError as error:
            compiler.refuse(search.module, search.case, str(error))
    return {
        "registers": max((row.registers for row in compiler.rows), default=0),
        "spills": max((row.spills for row in compiler.rows), default=0),
        "shared_bytes": max((row.shared_bytes for row in compiler.rows), default=0),
        "unusable": "; ".join(filter(None, map(_unusable, compiler.rows)))[-200:],
    }


def _unusable(row: ahead.Row) -> str:
    """Returns why a kernel is not worth timing on the device; empty if it is."""
    if row.unsupported or row.broken.startswith("does not compile"):
        return str(row.unsupported or row.broken)
    if row.shared_bytes > ahead.CHIPS[row.target].shared_bytes:
        return f"shared memory {row.shared_bytes} bytes"
    return f"spills {row.spills}" if row.spills else ""


def _replaced(entry: Any, values: Values) -> Any:
    if hasattr(entry, "_fields"):
        return type(entry)(**values)
    if isinstance(entry, dict):
        return {key: _replaced(inner, values) for key, inner in entry.items()}
    return (_replaced(entry[0], values),)
