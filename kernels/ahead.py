"""Compile every kernel's cases for other chips, without one, and hold their resources against limits.

    python -m kernels.ahead [--target sm_90] [--freeze] [module ...]

A driver that only names a chip stands in for the real one; each launch of `cases()` is compiled by it with
its real arguments. One JSON row a compiled kernel goes to stdout; the exit status is 1 where a limit is
broken or a kernel does not compile. Limits: the chip's shared memory, no spills, and what `limits.json` says
of a kernel. A case whose launcher refuses a chip with ValueError (fp8 on sm_80) is a row that says so.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

import kernels
from kernels.case import Case
from kernels.launch import Grid, compiling_for

LIMITS = Path(__file__).with_name("limits.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class Chip:
    """A compilation target and the shared memory that one block may have."""

    target: GPUTarget
    shared_bytes: int


CHIPS = {
    "sm_80": Chip(target=GPUTarget("cuda", 80, 32), shared_bytes=163 << 10),
    "sm_89": Chip(target=GPUTarget("cuda", 89, 32), shared_bytes=99 << 10),
    "sm_90": Chip(target=GPUTarget("cuda", 90, 32), shared_bytes=227 << 10),
    "sm_100": Chip(target=GPUTarget("cuda", 100, 32), shared_bytes=227 << 10),
    "gfx942": Chip(target=GPUTarget("hip", "gfx942", 64), shared_bytes=64 << 10),
    "gfx950": Chip(target=GPUTarget("hip", "gfx950", 64), shared_bytes=160 << 10),
}
DEFAULT_CHIPS = ("sm_80", "sm_90", "gfx942")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One compiled kernel of one case. spills: bytes of stack and number of spilling instructions, added."""

    module: str
    case: str
    target: str
    kernel: str = ""
    registers: int = 0
    spills: int = 0
    shared_bytes: int = 0
    tensor_ops: int = 0
    warpgroup_ops: int = 0
    compile_s: float = 0.0
    unsupported: str = ""
    broken: str = ""


class NamedDriver(DriverBase):
    """Stands for a chip that is not there: names it, so that Triton compiles for it."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return CHIPS[self.name].target

    def get_current_device(self) -> int:
        return list(CHIPS).index(self.name)  # kernels are kept by device: each chip has its own

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        pass

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_benchmarker(self) -> Any:
        raise RuntimeError(f"{self.name} is only compiled for: nothing runs here")


def main(argv: list[str] | None = None) -> int:
    """Compile, print the rows, return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m kernels.ahead", description=__doc__.split("\n", 1)[0])
    parser.add_argument("modules", nargs="*", metavar="module", help="kernel modules; default: all")
    parser.add_argument("--target", action="append", choices=list(CHIPS), help=f"default: {DEFAULT_CHIPS}")
    parser.add_argument("--case", default="", help="only cases whose name holds this")
    parser.add_argument(
        "--freeze", action="store_true", help="write what was seen, with slack, to limits.json"
    )
    asked = parser.parse_args(argv)
    if triton.knobs.runtime.interpret:
        parser.error("TRITON_INTERPRET is set: interpreted kernels cannot be compiled; unset it")
    known = kernel_modules()
    for name in asked.modules:
        if name not in known:
            parser.error(f"no kernel module {name!r}; there are: {', '.join(known)}")
    limits = {} if asked.freeze else json.loads(LIMITS.read_text())
    rows = []
    for row in compiled(asked.modules or known, asked.target or DEFAULT_CHIPS, limits, asked.case):
        print(json.dumps({key: value for key, value in asdict(row).items() if value != ""}), flush=True)
        rows.append(row)
    if not rows:
        parser.error("no case was compiled")
    if asked.freeze:
        freeze(rows)
    return int(any(row.broken for row in rows))


def kernel_modules() -> list[str]:
    """The modules of `kernels` that have cases."""
    names = [module.name for module in pkgutil.iter_modules(kernels.__path__)]
    return [name for name in names if hasattr(importlib.import_module(f"kernels.{name}"), "cases")]


def compiled(
    modules: Iterable[str], chips: Iterable[str], limits: dict[str, Any], part_of_name: str = ""
) -> Iterator[Row]:
    """A row for every kernel that the cases of `modules` launch, compiled for each of `chips`."""
    for chip in chips:
        triton.runtime.driver.set_active(NamedDriver(chip))
        try:
            for module in modules:
                for case in importlib.import_module(f"kernels.{module}").cases():
                    if part_of_name in case.name:
                        yield from _case_rows(module, case, chip, limits)
        finally:
            with suppress(RuntimeError):  # a machine without a GPU has no driver to go back to
                triton.runtime.driver.reset_active()


def freeze(rows: list[Row]) -> None:
    """Take the rows as the limits of their kernels on their chips; limits of others stay.

    Registers get 16 of slack, as Triton and ptxas versions differ by a few; a kernel seen to use the tensor
    cores in all its cases must go on doing so.
    """
    limits: dict[str, Any] = json.loads(LIMITS.read_text()) if LIMITS.exists() else {}
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.kernel:
            groups.setdefault((row.kernel, row.target), []).append(row)
    for (kernel, chip), seen in groups.items():
        limits.setdefault(kernel, {})[chip] = {
            "registers": min(max(row.registers for row in seen) + 16, 512),
            "spills": max(row.spills for row in seen),
            "tensor_ops": int(all(row.tensor_ops for row in seen)),
            "warpgroup_ops": int(all(row.warpgroup_ops for row in seen)),
        }
    LIMITS.write_text(json.dumps(limits, indent=1, sort_keys=True) + "\n")


_uses: dict[str, dict[str, int]] = {}  # by the hash of the compiled kernel: cases share them


def _case_rows(module: str, case: Case, chip: str, limits: dict[str, Any]) -> list[Row]:
    rows: dict[str, Row] = {}
    launching = ""

    def compile_one(kernel: Any, grid: Grid, args: tuple[Any, ...], meta: dict[str, Any]) -> None:
        nonlocal launching
        launching = kernel.__name__
        begin = time.perf_counter()
        binary = kernel.warmup(*args, grid=grid, **meta)
        compile_s = round(time.perf_counter() - begin, 2)
        if binary.hash not in rows:
            if binary.hash not in _uses:
                _uses[binary.hash] = _use_amd(binary) if "amdgcn" in binary.asm else _use_nvidia(binary)
            use = _uses[binary.hash]
            shared = int(binary.metadata.shared)
            row = Row(
                module=module,
                case=case.name,
                target=chip,
                kernel=launching,
                shared_bytes=shared,
                compile_s=compile_s,
                registers=use["registers"],
                spills=use["spills"],
                tensor_ops=use["tensor_ops"],
                warpgroup_ops=use["warpgroup_ops"],
                broken=_broken(use, shared, chip, limits.get(launching, {}).get(chip, {})),
            )
            rows[binary.hash] = row

    try:
        with compiling_for(chip, compile_one):
            case.make(torch.device("cpu"))()
    except ValueError as error:
        return [*rows.values(), Row(module=module, case=case.name, target=chip, unsupported=str(error))]
    except Exception as error:  # whatever the compiler raises is the finding
        said = f"{type(error).__name__}: {str(error)[-600:]}"
        return [
            *rows.values(),
            Row(
                module=module,
                case=case.name,
                target=chip,
                kernel=launching,
                broken=f"does not compile: {said}",
            ),
        ]
    return list(rows.values())


def _broken(use: dict[str, int], shared_bytes: int, chip: str, limits: dict[str, int]) -> str:
    """Which limits a kernel breaks, in words; empty where it keeps them all."""
    most = {"spills": limits.get("spills", 0), "registers": limits.get("registers", 512)}
    found = [f"{name} {use[name]}, limit {limit}" for name, limit in most.items() if use[name] > limit]
    found += [
        f"{name} {use[name]}, at least {limits[name]}"
        for name in ("tensor_ops", "warpgroup_ops")
        if use[name] < limits.get(name, 0)
    ]
    if shared_bytes > CHIPS[chip].shared_bytes:
        found.append(f"shared memory {shared_bytes} bytes, the chip has {CHIPS[chip].shared_bytes}")
    return "; ".join(found)


def _use_nvidia(binary: Any) -> dict[str, int]:
    """Registers a thread, spills and tensor-core instructions, read back from the machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(binary.asm["cubin"])
        cubin.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        usage, sass = (
            subprocess.run([tool, option, cubin.name], capture_output=True, text=True, check=True).stdout
            for option in ("-res-usage", "-sass")
        )
    spilling = len(re.findall(r"\b(?:LDL|STL)\b", sass))
    warpgroup = len(re.findall(r"\b(?:HGMMA|IGMMA|QGMMA|UTC\w*MMA)\b", sass))
    return {
        "registers": _most(r"\bREG:(\d+)", usage),
        "spills": _most(r"\bSTACK:(\d+)", usage) + spilling,
        "tensor_ops": warpgroup + len(re.findall(r"\b(?:HMMA|IMMA|QMMA)\b", sass)),
        "warpgroup_ops": warpgroup,
    }


def _use_amd(binary: Any) -> dict[str, int]:
    """The same, from the metadata in the assembly: vector registers, and matrix instructions."""
    text = binary.asm["amdgcn"]
    spilled = [r"\.vgpr_spill_count:\s*(\d+)", r"\.sgpr_spill_count:\s*(\d+)"]
    return {
        "registers": _most(r"\.vgpr_count:\s*(\d+)", text),
        "spills": sum(_most(pattern, text) for pattern in spilled),
        "tensor_ops": len(re.findall(r"\bv_(?:s?mfma|wmma)", text)),
        "warpgroup_ops": 0,
    }


def _most(pattern: str, text: str) -> int:
    return max((int(number) for number in re.findall(pattern, text)), default=0)


if __name__ == "__main__":
    sys.exit(main())
