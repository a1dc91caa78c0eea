"""Speculative decoding: the most quoted rows of `experiments.papers.speculation`, and the formula."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from experiments.papers.published_speedups import Comparison, mean_tokens
from experiments.papers.published_speedups import Row as Draft
from experiments.papers.speculation import simulated, speedup
from experiments.papers.speculation_rows import CHINCHILLA, LEVIATHAN, MEDUSA, SPEC_BENCH
from experiments.reproduce.claims.built import decode
from experiments.reproduce.claims.sources import BOOK
from experiments.reproduce.rows import EXACT, Direct, Family, Kind, Row, Sampled, Source

FORMULA = Source(
    "Leviathan et al., Fast inference from transformers via speculative decoding, ICML 2023, theorem 3.8",
    "https://arxiv.org/abs/2211.17192",
    was_read=True,
)
T5 = Source(FORMULA.text.replace("theorem 3.8", "table 2"), FORMULA.url, was_read=True)
DEEPMIND = Source(
    "Chen et al., Accelerating LLM decoding with speculative sampling, 2023, table 1 and section 5",
    "https://arxiv.org/abs/2302.01318",
    was_read=True,
)
NVIDIA = Source(
    "NVIDIA's blog on Medusa with TensorRT-LLM, HGX H200, September 2024: up to 1.9 times",
    "https://developer.nvidia.com/blog/low-latency-inference-chapter-1-up-to-1-9x-higher-llama-3-1-performance-"
    "with-medusa-on-nvidia-hgx-h200-with-nvlink-switch/",
    was_read=True,
)
CHIPS = ("hardware=tpu_v4", "tensor_parallel_size=16", "engine=vllm")
PLACES = 4
COST = 0.1
ALPHAS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
"""Probabilities with which a draft token is accepted."""
RAG_TOKENS = 1.75
"""Tokens per pass of prompt lookup for retrieval-augmented generation (Spec-Bench)."""


def improvement(rate: float) -> float:
    """Returns the published formula with 4 draft tokens at a tenth of the price of a pass, by acceptance."""
    return (1 - rate ** (PLACES + 1)) / ((1 - rate) * (PLACES * COST + 1))


def by_formula(rate: float) -> float:
    """Returns our price of this setting."""
    return speedup(LEVIATHAN, _given(rate))


def by_run(rate: float, seed: int) -> float:
    """Returns the speed-up of the mean TPOT in runs of the simulator with this setting."""
    return simulated(LEVIATHAN, _given(rate), seed=seed)


def by_row(comparison: Comparison, setting: str) -> float:
    """Returns our speed-up of a row of `experiments.papers.speculation_rows`."""
    return speedup(comparison, _row(comparison, setting))


def with_reference() -> float:
    """Returns the speed-up of prompt lookup for answers that copy from retrieved documents."""
    return speedup(SPEC_BENCH, replace(_row(SPEC_BENCH, "7B, prompt lookup"), tokens=RAG_TOKENS))


def milliseconds(name: str) -> float:
    """Returns the time of one token of one sequence."""
    return 1e3 * decode(f"model={name}", *CHIPS, context=1024).seconds


def _row(comparison: Comparison, setting: str) -> Draft:
    return next(row for row in comparison.rows if row.setting == setting)


def _given(rate: float) -> Draft:
    """Returns the setting of the formula as a row."""
    return Draft(
        setting="",
        published=1.0,
        tokens=mean_tokens(rate, PLACES),
        draft=("speculation=ngram", f"speculation.num_speculative_tokens={PLACES}"),
        draft_steps=PLACES * COST,
        assumed="given",
    )


def _alpha(rate: float, *, in_runs: bool = False) -> Row:
    published = round(improvement(rate), 2)
    return Row(
        name=f"alpha_{round(100 * rate):03}{'_run' * in_runs}",
        kind=Kind.SIMULATED if in_runs else Kind.COMPUTED,
        claim=f"four draft tokens at a tenth of a pass each, acceptance {rate}{', simulated' * in_runs}",
        published=(published, published),
        unit="times",
        source=FORMULA,
        setting="eight requests of 10,000 tokens, one at a time" if in_runs else "prices in units of a pass",
        tolerance=EXACT,
        ours=(
            Sampled(function=partial(by_run, rate)) if in_runs else Direct(function=partial(by_formula, rate))
        ),
    )


FAMILY = Family(
    name="speculation",
    title="Speculative decoding",
    rows=(
        *(_alpha(rate) for rate in ALPHAS),
        *(_alpha(rate, in_runs=True) for rate in ALPHAS),
        Row(
            name="usual",
            kind=Kind.SIMULATED,
            claim="usual speed-up of speculative decoding",
            published=(2, 3),
            unit="times",
            source=Source(
                "Abstracts of Leviathan et al., 2023 (2 to 3 times), and Chen et al., 2023 (2 to 2.5 times)",
                was_read=True,
            ),
            setting="EAGLE on Vicuna-7B, A100, tokens per pass of Spec-Bench",
            ours=Direct(function=partial(by_row, SPEC_BENCH, "7B, EAGLE")),
        ),
        Row(
            name="chinchilla_pass",
            kind=Kind.SIMULATED,
            claim="a token of Chinchilla-70B",
            published=(14.1, 14.1),
            unit="ms",
            source=DEEPMIND,
            setting="16 TPU v4",
            ours=Direct(function=partial(milliseconds, "chinchilla_70b")),
        ),
        Row(
            name="chinchilla_draft",
            kind=Kind.SIMULATED,
            claim="a token of its draft of 4 B parameters",
            published=(1.8, 1.8),
            unit="ms",
            source=DEEPMIND,
            setting="16 TPU v4",
            ours=Direct(function=partial(milliseconds, "chinchilla_4b")),
        ),
        Row(
            name="chinchilla",
            kind=Kind.COMPUTED,
            claim="speed-up of Chinchilla-70B",
            published=(1.92, 2.46),
            unit="times",
            source=DEEPMIND,
            setting="published times, acceptance 0.8 (assumed)",
            ours=Direct(function=partial(by_row, CHINCHILLA, "XSum, greedy")),
        ),
        Row(
            name="t5_translation",
            kind=Kind.COMPUTED,
            claim="speed-up of T5-XXL, translation, drafts of T5-small",
            published=(3.4, 3.4),
            unit="times",
            source=T5,
            setting="published acceptance and price",
            ours=Direct(function=partial(by_row, LEVIATHAN, "translation, T5-small, K=7")),
        ),
        Row(
            name="t5_summaries",
            kind=Kind.COMPUTED,
            claim="speed-up of T5-XXL, summaries, drafts of T5-small",
            published=(3.1, 3.1),
            unit="times",
            source=T5,
            setting="published acceptance and price",
            ours=Direct(function=partial(by_row, LEVIATHAN, "summaries, T5-small, K=5")),
        ),
        Row(
            name="reference",
            kind=Kind.COMPUTED,
            claim="inference with reference, where answers copy from the prompt",
            published=(2, 2),
            unit="times",
            source=BOOK,
            setting=f"prompt lookup on Vicuna-7B, {RAG_TOKENS} tokens per pass (Spec-Bench, retrieval)",
            ours=Direct(function=with_reference),
        ),
        Row(
            name="medusa",
            kind=Kind.SIMULATED,
            claim="Medusa on Llama-3.1-405B, eight H200",
            published=(1.9, 1.9),
            unit="times",
            source=NVIDIA,
            setting="NVIDIA's tree of 64 nodes, two-shot all-reduces, 2.32 tokens per pass (Spec-Bench)",
            ours=Direct(function=partial(by_row, MEDUSA, "Llama-3.1-405B")),
            why=(
                "Its tokens per pass are not published: 2.62 would give 1.9. Without two-shot all-reduces, "
                "which the tables of TensorRT-LLM 1.x do not have, it would be 1.36."
            ),
        ),
    ),
)
