"""Compiles every kernel's cases for chips that need not be present, and checks their resources.

    python -m kernels.ahead [--target sm_90] [--freeze] [module ...]

Each launch of `cases()` is compiled with its real arguments; a driver that only has the chip's name replaces
the real one. One JSON row per compiled kernel is printed, with the first case that launches it. The exit
status is 1 if a limit is exceeded or a kernel does not compile. The limits are: the chip's shared memory,
`TRADED_SPILLS`, tensor-core instructions if the kernel has a dot of 8 or 16 bits (warpgroup instructions on
sm_90 if the dot has 64 rows), and the kernel's registers in `limits.json`. If a launcher does not support a
chip and raises ValueError (fp8 on sm_80), the row contains this message.

`realengine.ahead` does the same for the launches of whole steps.
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
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

import kernels
from kernels.launch import Grid, compiling_for

# Matches the rows of dots for tensor cores, in lines such as "... : tensor<128x64xbf16> * tensor<...> -> ..."
DOT = re.compile(r"\btt\.dot [^:]*: tensor<(\d+)x\d+x(?:bf16|f16|f8\w+|i8)>")
LIMITS = Path(__file__).with_name("limits.json")
SLACK = 16
"""Registers allowed above the measured number, as versions of Triton and ptxas differ by a few."""
TRADED_SPILLS = 16
"""Most spills allowed, two registers (8 bytes) and their instructions. Below 255 registers ptxas chooses them
where one more program then fits a multiprocessor: with `maxnreg` such launches have no spills."""
Limits = Mapping[str, Mapping[str, int]]
"""Register limits by kernel and chip."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chip:
    """A compilation target and the shared memory that one block may use.

    warpgroup_rows: smallest number of rows of a dot for warpgroup instructions (HGMMA); None: not checked.
    """

    target: GPUTarget
    shared_bytes: int
    warpgroup_rows: int | None = None


CHIPS = {
    "sm_80": Chip(target=GPUTarget("cuda", 80, 32), shared_bytes=163 << 10),
    "sm_89": Chip(target=GPUTarget("cuda", 89, 32), shared_bytes=99 << 10),
    "sm_90": Chip(target=GPUTarget("cuda", 90, 32), shared_bytes=227 << 10, warpgroup_rows=64),
    "sm_100": Chip(target=GPUTarget("cuda", 100, 32), shared_bytes=227 << 10),
    "gfx942": Chip(target=GPUTarget("hip", "gfx942", 64), shared_bytes=64 << 10),
    "gfx950": Chip(target=GPUTarget("hip", "gfx950", 64), shared_bytes=160 << 10),
}
DEFAULT_CHIPS = ("sm_80", "sm_90", "gfx942")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Resources of one compiled kernel.

    spills: bytes of stack or scratch, plus the number of spilling instructions or spilled registers. launch:
    constexprs, warps and stages. dot_rows: largest number of rows of its 8- and 16-bit dots; 0: none.
    """

    module: str
    case: str
    target: str
    kernel: str = ""
    launch: str = ""
    registers: int = 0
    spills: int = 0
    shared_bytes: int = 0
    dot_rows: int = 0
    tensor_ops: int = 0
    warpgroup_ops: int = 0
    compile_s: float = 0.0
    unsupported: str = ""
    broken: str = ""


class NamedDriver(DriverBase):
    """Driver for a chip that is not present, so that Triton compiles for it."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return CHIPS[self.name].target

    def get_current_device(self) -> int:
        return list(CHIPS).index(self.name)  # kernels are cached per device: each chip has its own

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        pass

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_benchmarker(self) -> Any:
        raise RuntimeError(f"kernels are only compiled for {self.name}, not run")


@contextmanager
def named_driver(chip: str) -> Iterator[None]:
    """Makes Triton compile for a chip that need not be present."""
    triton.runtime.driver.set_active(NamedDriver(chip))
    try:
        yield
    finally:
        with suppress(RuntimeError):  # a machine without a GPU has no driver to restore
            triton.runtime.driver.reset_active()


class Compiler:
    """Compiles launches for one chip and checks their resources against limits.

    rows: one per distinct kernel, in the order of the launches.
    """

    def __init__(self, chip: str, limits: Limits) -> None:
        self.chip = chip
        self.rows: list[Row] = []
        self._limits = limits
        self._met: set[str] = set()

    @contextmanager
    def compiling(self, module: str, case: str) -> Iterator[None]:
        """Compiles launches instead of running them; a compilation error becomes a row."""
        row = Row(module=module, case=case, target=self.chip)
        with named_driver(self.chip), compiling_for(self.chip, partial(self._compile, row)):
            yield

    def refuse(self, module: str, case: str, reason: str) -> None:
        """Adds a row with the reason why a case is not supported on this chip."""
        self.rows.append(Row(module=module, case=case, target=self.chip, unsupported=reason))

    def _compile(
        self, row: Row, kernel: Any, grid: Grid, args: tuple[Any, ...], meta: dict[str, Any]
    ) -> None:
        row = replace(
            row, kernel=kernel.__name__, launch=" ".join(f"{name}={value}" for name, value in meta.items())
        )
        begin = time.perf_counter()
        try:
            binary = kernel.warmup(*args, grid=grid, **meta)
        except Exception as error:  # the compiler raises many types
            message = f"does not compile: {type(error).__name__}: {str(error)[-600:]}"
            if message not in self._met:
                self._met.add(message)
                self.rows.append(replace(row, broken=message))
            return
        if binary.hash in self._met:
            return
        self._met.add(binary.hash)
        row = replace(
            row,
            compile_s=round(time.perf_counter() - begin, 2),
            shared_bytes=int(binary.metadata.shared),
            dot_rows=max((int(rows) for rows in DOT.findall(binary.asm["ttir"])), default=0),
            **(_use_amd(binary) if "amdgcn" in binary.asm else _use_nvidia(binary)),
        )
        most = self._limits.get(row.kernel, {}).get(self.chip)
        self.rows.append(replace(row, broken="; ".join(_broken(row, most))))


def main(argv: list[str] | None = None) -> int:
    """Compiles, prints the rows, and returns the exit status."""
    parser = argument_parser("kernels.ahead", __doc__)
    parser.add_argument("modules", nargs="*", metavar="module", help="kernel modules; default: all")
    parser.add_argument("--case", default="", help="only cases with this text in their names")
    arguments = parser.parse_args(argv)
    known = kernel_modules()
    for name in arguments.modules:
        if name not in known:
            parser.error(f"module={name}: must be a kernel module: {', '.join(known)}")
    limits = {} if arguments.freeze else read_limits(LIMITS)
    rows = []
    for chip in arguments.target or DEFAULT_CHIPS:
        for row in _case_rows(arguments.modules or known, arguments.case, Compiler(chip, limits)):
            print_row(row)
            rows.append(row)
    if not rows:
        parser.error(f"--case {arguments.case}: no case has this text in its name; nothing was compiled")
    if arguments.freeze:
        freeze(rows, LIMITS)
    return int(any(row.broken for row in rows))


def argument_parser(program: str, description: str | None) -> argparse.ArgumentParser:
    """Returns the parser of programs that compile ahead of time. Exits if kernels are interpreted."""
    about = (description or "").split("\n", 1)[0]
    parser = argparse.ArgumentParser(prog=f"python -m {program}", description=about)
    parser.add_argument("--target", action="append", choices=list(CHIPS), help=f"default: {DEFAULT_CHIPS}")
    frozen = "write the measured registers, plus slack, to limits.json"
    parser.add_argument("--freeze", action="store_true", help=frozen)
    if triton.knobs.runtime.interpret:
        parser.error("TRITON_INTERPRET is set: interpreted kernels cannot be compiled; unset it")
    return parser


def print_row(row: Row) -> None:
    """Prints a row as a line of JSON, without empty fields."""
    print(json.dumps({key: value for key, value in asdict(row).items() if value != ""}), flush=True)


def read_limits(path: Path) -> dict[str, dict[str, int]]:
    """Returns register limits by kernel and chip; empty if the file does not exist."""
    limits: dict[str, dict[str, int]] = json.loads(path.read_text()) if path.exists() else {}
    return limits


def freeze(rows: Iterable[Row], path: Path) -> None:
    """Writes the rows' registers as limits of their kernels on their chips; other limits are kept."""
    limits = read_limits(path)
    most: dict[tuple[str, str], int] = {}
    for row in rows:
        if row.registers:
            most[row.kernel, row.target] = max(most.get((row.kernel, row.target), 0), row.registers)
    for (kernel, chip), registers in most.items():
        limits.setdefault(kernel, {})[chip] = registers + SLACK
    path.write_text(json.dumps(limits, indent=1, sort_keys=True) + "\n")


def kernel_modules() -> list[str]:
    """Returns the names of the modules of `kernels` that have cases."""
    names = [module.name for module in pkgutil.iter_modules(kernels.__path__)]
    return [name for name in names if hasattr(importlib.import_module(f"kernels.{name}"), "cases")]


def _case_rows(modules: Iterable[str], part_of_name: str, compiler: Compiler) -> Iterator[Row]:
    """Yields the rows of the cases with part_of_name in their names, as they are compiled."""
    for module in modules:
        for case in importlib.import_module(f"kernels.{module}").cases():
            if part_of_name not in case.name:
                continue
            first = len(compiler.rows)
            with compiler.compiling(module, case.name):
                try:
                    case.make(torch.device("cpu"))()
                except ValueError as error:
                    compiler.refuse(module, case.name, str(error))
            yield from compiler.rows[first:]


def _broken(row: Row, most_registers: int | None) -> Iterator[str]:
    """Yields one message per limit that a kernel exceeds."""
    chip = CHIPS[row.target]
    if row.spills > TRADED_SPILLS:
        yield f"spills {row.spills}, limit {TRADED_SPILLS}"
    if most_registers is not None and row.registers > most_registers:
        yield f"registers {row.registers}, limit {most_registers}"
    if row.shared_bytes > chip.shared_bytes:
        yield f"shared memory {row.shared_bytes} bytes, limit {chip.shared_bytes}"
    if row.dot_rows and not row.tensor_ops:
        yield f"a dot of {row.dot_rows} rows without tensor-core instructions"
    elif chip.warpgroup_rows and row.dot_rows >= chip.warpgroup_rows and not row.warpgroup_ops:
        yield f"a dot of {row.dot_rows} rows without warpgroup instructions"


def _use_nvidia(binary: Any) -> dict[str, int]:
    """Reads the resources from the machine code; registers are per thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(binary.asm["cubin"])
        cubin.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        command = [tool, "-res-usage", "-sass", cubin.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    warpgroup = len(re.findall(r"\b(?:HGMMA|IGMMA|QGMMA|UTC\w*MMA)\b", text))
    return {
        "registers": _most(r"\bREG:(\d+)", text),
        "spills": _most(r"\bSTACK:(\d+)", text) + len(re.findall(r"\b(?:LDL|STL)\b", text)),
        "tensor_ops": warpgroup + len(re.findall(r"\b(?:HMMA|IMMA|QMMA)\b", text)),
        "warpgroup_ops": warpgroup,
    }


def _use_amd(binary: Any) -> dict[str, int]:
    """Reads the resources from the metadata in the assembly; registers are vector registers.

    Scalar registers are spilled to lanes of vector registers, not to memory, so they do not count as spills.
    (In prefill attention there are up to 26, saved before a loop and restored after it.)
    """
    text = binary.asm["amdgcn"]
    spills = (r"\.vgpr_spill_count:\s*(\d+)", r"\.private_segment_fixed_size:\s*(\d+)")
    return {
        "registers": _most(r"\.vgpr_count:\s*(\d+)", text),
        "spills": sum(_most(pattern, text) for pattern in spills),
        "tensor_ops": len(re.findall(r"\bv_(?:s?mfma|wmma)", text)),
    }


def _most(pattern: str, text: str) -> int:
    return max((int(number) for number in re.findall(pattern, text)), default=0)


if __name__ == "__main__":
    sys.exit(main())
