"""Attention kernels: published speed-ups of FlashAttention over its predecessors."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.reproduce.claims.built import device, model
from hwmodels.iterations import causal_pairs
from hwmodels.iterations.layout import ParallelLayout
from hwmodels.iterations.memory import MemoryProfile
from hwmodels.operators.attention import AttentionCurve, HeadLayout, PrefillAttention

WIDTH = 2048
HEAD_DIM = 64


def seconds(chip: Sequence[str], kernels: str, num_tokens: int) -> float:
    """Returns the time of the attention of a causal prompt in one layer with heads of 64, in 16 bits."""
    hardware, capability = chip
    num_heads = WIDTH // HEAD_DIM
    heads = HeadLayout(num_heads=num_heads, num_kv_heads=num_heads, head_dim=HEAD_DIM)
    prefill = PrefillAttention(
        heads, device(f"hardware={hardware}"), AttentionCurve(compute_capability=capability), kernels
    )
    return float(prefill.seconds(1, num_tokens, causal_pairs(num_tokens), num_tokens))


def faster(chip: Sequence[str], old: str, new: str, num_tokens: int = 4096) -> float:
    """Returns how many times as fast the new kernel is."""
    return seconds(chip, old, num_tokens) / seconds(chip, new, num_tokens)


def activation_ratio(model_name: str, num_tokens: int) -> float:
    """Returns the memory of a forward pass over twice the tokens of a prompt, over that of its tokens."""
    profile, spec = MemoryProfile(), model(f"model={model_name}")
    twice, once = (
        profile.activation_bytes(spec, ParallelLayout(), tokens, 1) for tokens in (2 * num_tokens, num_tokens)
    )
    return twice / once
