"""The two ways to compute what is not a plain matrix product: Triton kernels, or their torch references."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from kernels import activation, decode_attention, norm, prefill_attention, rope, sampling


class Backend(NamedTuple):
    """The kernels that the model calls, alike in signature."""

    name: str
    rms_norm: Callable[..., Any]
    add_rms_norm: Callable[..., Any]
    qk_norm: Callable[..., Any]
    rope_and_write_kv: Callable[..., Any]
    decode_attention: Callable[..., Any]
    prefill_attention: Callable[..., Any]
    silu_mul: Callable[..., Any]
    sample: Callable[..., torch.Tensor]
    greedy: Callable[..., torch.Tensor]


TRITON = Backend(
    "triton",
    norm.rms_norm,
    norm.add_rms_norm,
    norm.qk_norm,
    rope.rope_and_write_kv,
    decode_attention.decode_attention,
    prefill_attention.prefill_attention,
    activation.silu_mul,
    sampling.sample,
    sampling.greedy,
)

TORCH = Backend(
    "torch",
    norm.rms_norm_reference,
    norm.add_rms_norm_reference,
    norm.qk_norm_reference,
    rope.rope_and_write_kv_reference,
    decode_attention.decode_attention_reference,
    prefill_attention.prefill_attention_reference,
    activation.silu_mul_reference,
    sampling.sample_reference,
    sampling.greedy_reference,
)

BACKENDS = {backend.name: backend for backend in (TRITON, TORCH)}


def choose_backend(name: str | None, device: torch.device) -> Backend:
    """The backend of that name; None: Triton on a GPU, torch on a CPU. Raises ValueError on other names."""
    if name is None:
        return TRITON if device.type == "cuda" else TORCH
    if name not in BACKENDS:
        raise ValueError(f"backend={name}: must be one of {', '.join(BACKENDS)}")
    return BACKENDS[name]


def choose_device(name: str | None) -> torch.device:
    """The device of that name; None: a GPU. Raises RuntimeError if it is not there, and says what to do."""
    if name is None:
        if torch.cuda.is_available():
            return torch.device("cuda")
        raise RuntimeError("no GPU was found; device='cpu' runs on the processor, slowly")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(f"device={name}: no GPU was found; device='cpu' runs on the processor, slowly")
    return device
