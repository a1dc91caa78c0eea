"""Kernels in Triton's interpreter: bf16 and fp8 corrected, poisoned memory, one table of tolerances.

With KERNELS_DEVICE=cuda all tensors of these tests are on the GPU, and compiled kernels must pass the same
tests.
"""

from __future__ import annotations

import os

# This must be set before any module imports triton.
os.environ["TRITON_INTERPRET"] = "0" if "KERNELS_DEVICE" in os.environ else "1"

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter

torch.set_num_threads(1)  # two threads on a busy machine: ten times slower
DEVICE = os.environ.get("KERNELS_DEVICE", "cpu")
if DEVICE != "cpu":
    torch.set_default_device(DEVICE)

GUARD = 1 << 14  # elements on each side of a guarded tensor
# (relative, absolute for a sum of one term); the absolute part grows with the root of the reduction's length.
TOLERANCES = {
    torch.float32: (1e-5, 1e-6),
    torch.float16: (2e-3, 1e-3),
    torch.bfloat16: (1.6e-2, 8e-3),
}

_dot = interpreter.InterpreterBuilder.create_dot
_cast = interpreter.InterpreterBuilder.cast_impl
_fp_to_fp = interpreter.InterpreterBuilder.create_fp_to_fp
_FP8 = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}


def _widened(handle: interpreter.TensorHandle) -> interpreter.TensorHandle:
    """Widens bf16, which the interpreter holds as raw uint16, to the fp32 value that it stands for."""
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return interpreter.TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def _to_bf16(data: np.ndarray) -> np.ndarray:
    """Rounds to nearest even, as chips do; the interpreter truncates."""
    return (
        torch.from_numpy(np.asarray(data, dtype=np.float32))
        .bfloat16()
        .view(torch.int16)
        .numpy()
        .view(np.uint16)
    )


def _mended_cast(
    self: interpreter.InterpreterBuilder, src: interpreter.TensorHandle, dst_type: tl.dtype
) -> interpreter.TensorHandle:
    src = _widened(src)
    if dst_type.scalar == tl.bfloat16:
        return interpreter.TensorHandle(_to_bf16(src.data), tl.bfloat16)
    return src if src.dtype.scalar == dst_type.scalar else _cast(self, src, dst_type)


def _mended_fp_to_fp(
    self: interpreter.InterpreterBuilder, src: interpreter.TensorHandle, dst_type: tl.dtype, rounding: object
) -> interpreter.TensorHandle:
    """Converts to fp8 with saturation and rounding to nearest even; the interpreter turns 7.9 into 4."""
    src = _widened(src)
    if dst_type.scalar in _FP8 and src.dtype.scalar in (tl.float32, tl.float16):
        dtype = _FP8[dst_type.scalar]
        most = torch.finfo(dtype).max
        codes = torch.from_numpy(np.asarray(src.data, dtype=np.float32)).clamp(-most, most).to(dtype)
        return interpreter.TensorHandle(codes.view(torch.uint8).numpy(), dst_type.scalar)
    if dst_type.scalar == tl.bfloat16 and src.dtype.scalar in _FP8:
        src = _fp_to_fp(self, src, tl.float32, rounding)
        return interpreter.TensorHandle(_to_bf16(src.data), tl.bfloat16)
    return src if src.dtype.scalar == dst_type.scalar else _fp_to_fp(self, src, dst_type, rounding)


interpreter.InterpreterBuilder.create_dot = lambda self, a, b, d, precision, imprecise: _dot(
    self, _widened(a), _widened(b), d, precision, imprecise
)
interpreter.InterpreterBuilder.cast_impl = _mended_cast
interpreter.InterpreterBuilder.create_fp_to_fp = _mended_fp_to_fp


class Guards:
    """Tensors inside larger ones: a read past their ends meets NaN, a write is found when the test ends."""

    def __init__(self) -> None:
        self.kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a contiguous copy of `tensor` between guards of NaN (of 0, a valid index, in integers)."""
        around = torch.empty(tensor.numel() + 2 * GUARD, dtype=tensor.dtype)
        if tensor.dtype.itemsize == 1:
            around.view(torch.uint8).fill_(0x7F)  # NaN in fp8, 127 in int8
        else:
            around.fill_(torch.nan if tensor.dtype.is_floating_point else 0)
        before = around.clone()
        around[GUARD : GUARD + tensor.numel()] = tensor.reshape(-1)
        self.kept.append((around, before))
        return around[GUARD : GUARD + tensor.numel()].view(tensor.shape)

    def check(self) -> None:
        """Fails if a guard was written; forgets all guards."""
        kept, self.kept = self.kept, []
        for around, before in kept:
            for side in (slice(0, GUARD), slice(-GUARD, None)):
                now, then = around[side].view(torch.uint8), before[side].view(torch.uint8)
                assert torch.equal(now, then), f"written outside a tensor of {around.dtype}"


_guards = Guards()


@pytest.fixture(scope="session")
def guarded() -> Guards:
    """Returns guarded(tensor): a copy between guards, checked for stray writes when the test ends."""
    return _guards


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    """Fills torch.empty with NaN while a test runs, so that no unwritten output passes by luck."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
    _end_where_the_gpu_is_lost()
    _guards.check()


def _end_where_the_gpu_is_lost() -> None:
    """Ends this process after an illegal access, which fails all later calls; a new process takes over."""
    if DEVICE == "cpu":
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        os.write(2, f"the GPU is lost to this process: {error}\n".encode())
        os._exit(70)


@pytest.fixture(scope="session")
def generator() -> Callable[[int], torch.Generator]:
    """Returns generator(seed): a torch generator of its own."""
    return lambda seed: torch.Generator(DEVICE).manual_seed(seed)


@pytest.fixture(scope="session")
def assert_close() -> Callable[..., None]:
    """Returns assert_close(actual, expected, terms=1, dtype=None) for a reduction over `terms`.

    dtype: the type that sets the tolerance, if it is not the output's own (an fp32 output of fp16 inputs).
    """

    def check(
        actual: torch.Tensor, expected: torch.Tensor, terms: int = 1, dtype: torch.dtype | None = None
    ) -> None:
        assert actual.dtype == expected.dtype, f"{actual.dtype}, expected {expected.dtype}"
        if dtype is None and actual.dtype not in TOLERANCES:
            assert torch.equal(actual, expected)
            return
        relative, absolute = TOLERANCES[dtype or actual.dtype]
        torch.testing.assert_close(actual, expected, rtol=relative, atol=absolute * max(1.0, terms**0.5))

    return check
