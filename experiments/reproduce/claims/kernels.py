"""Attention kernels: published speed-ups of FlashAttention over its predecessors."""

from __future__ import annotations

from functools import partial

from experiments.reproduce.claims.built import device, model
from experiments.reproduce.rows import EXACT, Direct, Family, Kind, Row, Source
from hwmodels.iterations.iteration import causal_pairs
from hwmodels.iterations.layout import ParallelLayout
from hwmodels.iterations.memory_profile import MemoryProfile
from hwmodels.operators.attention import AttentionCurve, HeadLayout, PrefillAttention

FIRST = Source(
    "Dao, FlashAttention-2, 2023, section 1, on FlashAttention",
    "https://arxiv.org/abs/2307.08691",
    was_read=True,
)
SECOND = Source("Dao, FlashAttention-2, 2023, section 4.1", "https://arxiv.org/abs/2307.08691", was_read=True)
THIRD = Source(
    "Shah et al., FlashAttention-3, 2024, abstract", "https://arxiv.org/abs/2407.08608", was_read=True
)
A100, H100 = ("a100_80gb_sxm", "sm80"), ("h100_sxm", "sm90")
WIDTH = 2048
HEAD_DIM = 64
FITTED = "The rates of the named kernels are those of the papers: this row checks that they stay so."


def seconds(chip: tuple[str, str], kernels: str, num_tokens: int) -> float:
    """Returns the time of the attention of a causal prompt in one layer with heads of 64, in 16 bits."""
    hardware, capability = chip
    num_heads = WIDTH // HEAD_DIM
    heads = HeadLayout(num_heads=num_heads, num_kv_heads=num_heads, head_dim=HEAD_DIM)
    prefill = PrefillAttention(
        heads, device(f"hardware={hardware}"), AttentionCurve(compute_capability=capability), kernels
    )
    return float(prefill.seconds(1, num_tokens, causal_pairs(num_tokens), num_tokens))


def faster(chip: tuple[str, str], old: str, new: str, num_tokens: int = 4096) -> float:
    """Returns how many times as fast the new kernel is."""
    return seconds(chip, old, num_tokens) / seconds(chip, new, num_tokens)


def activation_ratio(model_name: str, num_tokens: int) -> float:
    """Returns the memory of a forward pass over twice the tokens of a prompt, over that of its tokens."""
    profile, spec = MemoryProfile(), model(f"model={model_name}")
    twice, once = (
        profile.activation_bytes(spec, ParallelLayout(), tokens, 1) for tokens in (2 * num_tokens, num_tokens)
    )
    return twice / once


FAMILY = Family(
    name="kernels",
    title="Attention kernels",
    rows=(
        Row(
            name="flash_memory",
            kind=Kind.COMPUTED,
            claim="FlashAttention: memory of a prompt of twice the length over once, linear in the length",
            published=(2, 2),
            unit="times",
            source=Source(
                "Dao-AILab/flash-attention, README.md: linear, while standard attention is quadratic",
                "https://github.com/Dao-AILab/flash-attention",
                was_read=True,
            ),
            setting="activations of Llama-2-7B in the memory plan, prompts of 2,048 and 4,096 tokens",
            tolerance=EXACT,
            ours=Direct(function=partial(activation_ratio, "llama2_7b", 2048)),
            why=(
                "The memory plan has no score matrices with any kernel: the text's savings over standard "
                "attention, 10 times at 2,048 tokens and 20 times at 4,096, have no row."
            ),
        ),
        Row(
            name="flash_1",
            kind=Kind.FITTED,
            claim="FlashAttention over standard attention",
            published=(2, 4),
            unit="times",
            source=FIRST,
            setting="A100, a causal prompt of 4,096 tokens, heads of 64",
            ours=Direct(function=partial(faster, A100, "standard", "flash_attention_1")),
            why=FITTED,
        ),
        Row(
            name="flash_2",
            kind=Kind.FITTED,
            claim="FlashAttention-2 over standard attention",
            published=(3, 10),
            unit="times",
            source=SECOND,
            setting="A100, a causal prompt of 4,096 tokens, heads of 64",
            ours=Direct(function=partial(faster, A100, "standard", "flash_attention_2")),
            why=FITTED,
        ),
        Row(
            name="flash_2_over_1",
            kind=Kind.FITTED,
            claim="FlashAttention-2 over FlashAttention",
            published=(1.7, 3),
            unit="times",
            source=SECOND,
            setting="A100, a causal prompt of 4,096 tokens, heads of 64",
            ours=Direct(function=partial(faster, A100, "flash_attention_1", "flash_attention_2")),
            why=FITTED,
        ),
        Row(
            name="flash_3",
            kind=Kind.FITTED,
            claim="FlashAttention-3 over FlashAttention-2",
            published=(1.5, 2),
            unit="times",
            source=THIRD,
            setting="H100, a causal prompt of 16,384 tokens, heads of 64",
            ours=Direct(function=partial(faster, H100, "flash_attention_2", "flash_attention_3", 16384)),
            why=FITTED,
        ),
    ),
)
