"""Speculative decoding: the most quoted rows of `experiments.papers.speculation`, and the formula."""

from __future__ import annotations

from dataclasses import replace

from experiments.papers.published_speedups import Row as Draft
from experiments.papers.published_speedups import mean_tokens
from experiments.papers.speculation import simulated, speedup
from experiments.papers.speculation_rows import COMPARISONS, LEVIATHAN, SPEC_BENCH
from experiments.reproduce.claims.built import decode

BY_NAME = {comparison.name: comparison for comparison in COMPARISONS}
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


def by_row(comparison: str, setting: str) -> float:
    """Returns our speed-up of a row of `experiments.papers.speculation_rows`."""
    return speedup(BY_NAME[comparison], _row(comparison, setting))


def with_reference() -> float:
    """Returns the speed-up of prompt lookup for answers that copy from retrieved documents."""
    return speedup(SPEC_BENCH, replace(_row(SPEC_BENCH.name, "7B, prompt lookup"), tokens=RAG_TOKENS))


def milliseconds(name: str) -> float:
    """Returns the time of one token of one sequence."""
    return 1e3 * decode(f"model={name}", *CHIPS, context=1024).seconds


def _row(comparison: str, setting: str) -> Draft:
    return next(row for row in BY_NAME[comparison].rows if row.setting == setting)


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
