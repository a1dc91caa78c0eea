"""Single entry point of all kernels: `launch` runs a kernel, or compiles it for a chip.

A kernel's tile sizes are looked up by target, never tuned at run time. With `compiling_for`, launches can be
checked on machines without a GPU: they become compilations for any chip, with the arguments' real types and
alignment (see `kernels.ahead`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import triton
from triton.runtime.interpreter import InterpretedFunction

INTERPRETER = "interpreter"
SM_COUNTS = {"sm_80": 108, "sm_90": 132, "gfx942": 304, INTERPRETER: 4}
Grid = tuple[int, ...]
Compile = Callable[[Any, Grid, tuple[Any, ...], dict[str, Any]], None]

_compile: tuple[str, Compile] | None = None
_recorded: ContextVar[list[Repeatable] | None] = ContextVar("_recorded", default=None)


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
    compiled = kernel[grid](*args, **meta)
    recorded = _recorded.get()
    if recorded is not None:
        recorded.append(_repeatable(kernel, compiled, grid, args, meta))


class Repeatable(NamedTuple):
    """A launch that was made, to be made again with some of its tensors replaced."""

    run: Callable[..., object]
    """Launches the kernel with all its arguments in their order."""
    args: tuple[Any, ...]


def _repeatable(
    kernel: Any, compiled: Any, grid: Grid, args: tuple[Any, ...], meta: Mapping[str, Any]
) -> Repeatable:
    if compiled is None:  # the interpreter's
        return Repeatable(partial(kernel[grid], **meta), args)
    constants = tuple(meta[name] for name in kernel.arg_names[len(args) :])
    return Repeatable(compiled[(*grid, 1, 1)[:3]], args + constants)


@contextmanager
def recorded_launches() -> Iterator[list[Repeatable]]:
    """Yields a list to which every launch is appended, of this thread."""
    found: list[Repeatable] = []
    before = _recorded.set(found)
    try:
        yield found
    finally:
        _recorded.reset(before)


class Repeated:
    """Launches that are made again and again on other tensors, such as the KV of another layer.

    tensors: those that others replace, which must have their dtypes, shapes, strides and alignment; a launch
    is repeated if it takes one of them, or a tensor that a repeated launch before it takes. Arguments are
    neither checked nor looked at, which is most of what a launch costs the host.
    """

    def __init__(self, launches: Sequence[Repeatable], tensors: Sequence[torch.Tensor | None]) -> None:
        places = {id(tensor): place for place, tensor in enumerate(tensors) if tensor is not None}
        touched = set(places)
        self._launches: list[tuple[Callable[..., object], list[Any], list[tuple[int, int]]]] = []
        for run, args in launches:
            own = {id(arg) for arg in args if isinstance(arg, torch.Tensor)}
            if own & touched:
                touched |= own
                swapped = [(i, places[id(arg)]) for i, arg in enumerate(args) if id(arg) in places]
                self._launches.append((run, list(args), swapped))

    def on(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """Launches the kernels on these tensors."""
        for run, args, swapped in self._launches:
            for index, place in swapped:
                args[index] = tensors[place]
            run(*args)


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
