"""Times torch's own kernels for the same work as ours, on dense inputs of the same sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from experiments.calibrate.engine.timing import Call, input_sets, timed
from experiments.gpu.record import UnavailableError
from experiments.gpu.speed_cases import normal

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
NO_KERNEL = ("No available kernel", "No viable backend")  # the words of torch's error


def attention_peers(
    device: torch.device, num_seqs: int, num_queries: int, context_len: int
) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Yields (name, function that times it) of each SDPA backend, on Llama-3.1-8B's heads.

    KV is dense, one sequence after the other, which is easier than paged KV.
    """
    for name, backend in BACKENDS.items():
        yield f"sdpa_{name}", partial(_sdpa, device, backend, num_seqs, num_queries, context_len)


def flex_peer(device: torch.device, num_seqs: int, num_queries: int, context_len: int) -> dict[str, Any]:
    """Times a compiled flex_attention, causal if there are several queries; compiling takes half a minute."""
    if device.type == "cpu":
        raise UnavailableError("flex_attention is compiled on a GPU only")
    causal = num_queries > 1
    mask = None
    if causal:
        mask = create_block_mask(_is_seen, None, None, num_queries, context_len, device=str(device))
    compiled = torch.compile(flex_attention, dynamic=False)
    q, k, v = _dense(device, num_seqs, num_queries, context_len)
    return timed([lambda: compiled(q, k, v, block_mask=mask, enable_gqa=True)], device, rep_ms=100).row()


def simple_peers(
    device: torch.device, tokens: int, hidden: int, inner: int
) -> Iterator[tuple[str, float, Callable[[], dict[str, Any]]]]:
    """Yields (name, bytes that our kernel moves, function that times it) of elementwise operations."""

    def rms(device: torch.device) -> Call:
        x, weight = normal((tokens, hidden), device), normal((hidden,), device)
        return lambda: F.rms_norm(x, (hidden,), weight, 1e-5)

    def silu(device: torch.device) -> Call:
        x = normal((tokens, 2 * inner), device)
        return lambda: F.silu(x[:, :inner]) * x[:, inner:]

    def argmax(device: torch.device) -> Call:
        logits = torch.randn(64, 128256 if device.type == "cuda" else 512, device=device)
        return lambda: logits.argmax(-1)

    def multinomial(device: torch.device) -> Call:
        logits = torch.randn(64, 128256 if device.type == "cuda" else 512, device=device)
        noise = torch.empty_like(logits)
        return lambda: (logits.softmax(-1) / noise.exponential_()).argmax(-1)

    for name, make, moved in (
        ("norm/torch_rms_norm", rms, 4.0 * tokens * hidden),
        ("activation/torch_silu_mul", silu, 6.0 * tokens * inner),
        ("sampling/torch_argmax", argmax, 4.0 * 64 * 128256),
        ("sampling/torch_exponential", multinomial, 16.0 * 64 * 128256),
    ):
        yield name, moved, partial(_timed, make, moved, device)


def _timed(make: Callable[[torch.device], Call], moved: float, device: torch.device) -> dict[str, Any]:
    return timed(input_sets(make, device, moved), device).row()


def _sdpa(
    device: torch.device, backend: SDPBackend, num_seqs: int, num_queries: int, context_len: int
) -> dict[str, Any]:
    q, k, v = _dense(device, num_seqs, num_queries, context_len)
    grouped = backend is not SDPBackend.EFFICIENT_ATTENTION  # the efficient backend has no grouped heads
    if not grouped:
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))

    def call() -> torch.Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=num_queries > 1, enable_gqa=grouped)

    try:
        call()
    except RuntimeError as error:
        if any(words in str(error) for words in NO_KERNEL):
            raise UnavailableError(f"{backend.name}: has no kernel for these inputs") from None
        raise
    return timed([call], device, rep_ms=100).row()


def _dense(
    device: torch.device, num_seqs: int, num_queries: int, context_len: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q = normal((num_seqs, HEADS, num_queries, HEAD_DIM), device)
    k, v = (normal((num_seqs, KV_HEADS, context_len, HEAD_DIM), device) for _ in range(2))
    return q, k, v


def _is_seen(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return query >= key
