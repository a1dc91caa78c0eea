"""Single entry point of all kernels: `launch` runs a kernel, or compiles it for a chip.

A kernel's tile sizes are looked up by target, never tuned at run time. With `compiling_for`, launches can be
checked on machines without a GPU: they become compilations for any chip, with the arguments' real types and
alignment (see `kernels.ahead`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import triton
from triton.runtime.interpreter import InterpretedFunction

INTERPRETER = "interpreter"
SM_COUNTS = {"sm_80": 108, "sm_90": 132, "gfx942": 304, INTERPRETER: 4}
Grid = tuple[int, ...]
Compile = Callable[[Any, Grid, tuple[Any, ...], dict[str, Any]], None]

_compile: tuple[str, Compile] | None = None


def launch(kernel: Any, grid: Grid, *args: Any, **meta: Any) -> None:
    """Runs `kernel` on a grid of programs; an empty grid does nothing.

    args: tensors and numbers in the order of the kernel's parameters. meta: its constexprs by name,
    num_warps and num_stages. CPU tensors run in Triton's interpreter if TRITON_INTERPRET=1 was set before the
    kernel's module was imported; otherwise RuntimeError is raised.
    """
    if _compile is not None:
        _compile[1](kernel, grid, args, meta)
        return
    if 0 in grid:
        return
    if not isinstance(kernel, InterpretedFunction) and any(
        isinstance(arg, torch.Tensor) and arg.device.type == "cpu" for arg in args
    ):
        raise RuntimeError(
            f"{kernel.__name__}: its tensors are on the CPU; use a GPU, the torch reference of its module, "
            "or (slow, for tests) TRITON_INTERPRET=1 in the environment before kernels are imported"
        )
    kernel[grid](*args, **meta)


def target() -> str:
    """Returns the chip for which kernels are launched: "sm_80", "sm_90", "gfx942", ...; or "interpreter"."""
    if _compile is not None:
        return _compile[0]
    return _device_target()


def sm_count(device: torch.device) -> int:
    """Returns the number of multiprocessors (compute units) of the device, or of the compilation target."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    return SM_COUNTS[nearest(target(), SM_COUNTS)]


@cache
def _nearest(name: str, names: tuple[str, ...]) -> str:
    if name in names:
        return name
    if name.startswith("gfx"):
        return "gfx942"
    return "sm_90" if name.startswith("sm_") and int(name[3:]) >= 90 else "sm_80"


def nearest(name: str, table: Mapping[str, object]) -> str:
    """Returns the key that chip `name` uses in a table by target: its own, or the most similar chip's."""
    return _nearest(name, tuple(table))


@contextmanager
def compiling_for(name: str, compile_one: Compile) -> Iterator[None]:
    """Calls compile_one(kernel, grid, args, meta) for every launch instead of running it, for chip `name`."""
    global _compile
    _compile = (name, compile_one)
    try:
        yield
    finally:
        _compile = None


@cache
def _device_target() -> str:
    if not torch.cuda.is_available():
        return INTERPRETER
    chip = triton.runtime.driver.active.get_current_target()
    return f"sm_{chip.arch}" if chip.backend == "cuda" else str(chip.arch)
