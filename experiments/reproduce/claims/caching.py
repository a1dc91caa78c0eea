"""Prompt caching of hosted APIs, and caches over several replicas."""

from __future__ import annotations

from experiments.papers.phase_layouts import largest_rate
from experiments.reproduce.claims.built import tariff
from experiments.reproduce.claims.shipped import run_summary, summary
from experiments.reproduce.claims.sources import PROMPT_CACHING
from experiments.reproduce.rows import Compared, Direct, Family, Kind, Row, Searched, Source

TTFT, BILL = "ttft.p50_s", "bill_usd"
BOOK, EXAMPLES, TURNS = 100_000, 10_000, None
"""Tokens of the prefixes of the text's first two use cases; its third has ten turns of unknown lengths."""
SYSTEM, MESSAGE, ANSWER, NUM_TURNS = 90_000, 128, 512, 10
"""Tokens of `prompt_caching_turns`."""
LONG_ANSWERS = ("workload.system_prompt_tokens.value=60000", "workload.answer_tokens.mean=9000")
ASSUMED = "Llama-3.1-70B, eight H100, 0.9 s outside of the engine"
CHOSEN = {("examples", "cached"), ("book", "cached"), ("turns", "cached"), ("turns", "computed")}
"""Times that are mostly those outside of the engine, which one of them chose, or that chose the turns."""
WHY_S = {
    "computed": "A prompt takes 1.4 times as long on its model and hardware, which are not published.",
    "cached": (
        "From 10,000 to 100,000 cached tokens its TTFT grows by 1.3 s, as if 29 GB of KV of this model were "
        "fetched at 23 GB/s; here they stay in the memory of the GPUs."
    ),
}
MOONCAKE = (
    "model=llama2_70b",
    "hardware=a100_80gb_sxm",
    "tensor_parallel_size=8",
    "engine=vllm_v0",
    "engine.max_model_len=131072",
    "model.config.max_position_embeddings=131072",
    "workload=mooncake_like",
    "workload.duration_s=300",
    "slo.ttft_ms=30000",
    "slo.tpot_ms=100",
)


def mooncake() -> float:
    """Returns the traffic that three prefill and one decode replica with caches serve, over four others."""

    def rate(*arm: str) -> float:
        def holds(load: float) -> bool:
            return bool(run_summary(*MOONCAKE, *arm, f"load={load}")["goodput.attained"])

        return largest_rate(holds, start=0.5, ratio=1.1)

    mixed = rate("replicas=4", "routing=least_outstanding", "batching=prefill_first", "caching=paged")
    apart = rate(
        "pools=disaggregated",
        "pools.prefill.replicas=3",
        "routing=prefix_affinity",
        "caching=tiered",
        "caching.host_gib=200",
    )
    return apart / mixed


def saved_with_long_answers() -> float:
    """Returns by how many per cent caching lowers the bill of ten turns if answers have 9,000 tokens."""
    computed, cached = (
        summary("prompt_caching_turns", arm, *LONG_ANSWERS)[BILL] for arm in ("computed", "cached")
    )
    return 100 * (1 - cached / computed)


def saved_with_writes(num_writes: int) -> float:
    """Returns by how many per cent caching lowers the bill of ten turns, some of which write the cache.

    The first turn writes it, and every turn that comes after the cache has expired.
    """
    prices = tariff("cached_prompts")
    computed = cached = 0.0
    for turn in range(NUM_TURNS):
        sent = SYSTEM + turn * (MESSAGE + ANSWER) + MESSAGE
        writes = turn < num_writes
        found, written = (0, SYSTEM) if writes else (sent - MESSAGE, 0)
        tokens = {"input_tokens": float(sent), "output_tokens": float(ANSWER), "pinned_token_s": 0.0}
        computed += prices.bill_usd(**tokens, found=0.0, written=0.0)
        cached += prices.bill_usd(**tokens, found=float(found), written=float(written))
    return 100 * (1 - cached / computed)


def _seconds(case: str, claim: str, at: int | None, published: tuple[float, float]) -> tuple[Row, ...]:
    """Returns the rows of the absolute times to first token of a use case, without caching and with it."""
    return tuple(
        Row(
            name=f"{case}_{arm}_s",
            kind=Kind.FITTED if (case, arm) in CHOSEN else Kind.SIMULATED,
            claim=f"{claim}: TTFT {'with' if arm == 'cached' else 'without'} caching",
            published=(seconds, seconds),
            unit="s",
            source=PROMPT_CACHING,
            setting=f"{ASSUMED} (neither model nor hardware are published)",
            ours=Compared(experiment=_experiment(at), metric=TTFT, arm=arm, at=at, shown="value"),
            differs=at != EXAMPLES,
            why="" if at == EXAMPLES else WHY_S[arm],
        )
        for arm, seconds in zip(("computed", "cached"), published, strict=True)
    )


def _experiment(at: int | None) -> str:
    return "prompt_caching" if at else "prompt_caching_turns"


def _cached(
    name: str, kind: Kind, claim: str, published: float, metric: str, at: int | None, why: str = ""
) -> Row:
    experiment = _experiment(at)
    return Row(
        name=name,
        kind=kind,
        claim=claim,
        published=(published, published),
        unit="% less",
        source=PROMPT_CACHING,
        setting=f"experiment={experiment}, eight H100, 0.9 s outside of the engine (assumed)",
        ours=Compared(
            experiment=experiment, metric=metric, arm="cached", over="computed", at=at, shown="% less"
        ),
        differs=bool(why),
        why=why,
    )


FAMILY = Family(
    name="caching",
    title="Prompt caching",
    rows=(
        _cached(
            "book_ttft",
            Kind.FITTED,
            "questions about a book of 100,000 tokens: TTFT 11.5 s to 2.4 s",
            79,
            TTFT,
            BOOK,
        ),
        _cached("book_cost", Kind.COMPUTED, "questions about a book of 100,000 tokens: cost", 90, BILL, BOOK),
        _cached(
            "examples_ttft",
            Kind.FITTED,
            "prompt with examples, 10,000 tokens: TTFT 1.6 s to 1.1 s",
            31,
            TTFT,
            EXAMPLES,
        ),
        _cached(
            "examples_cost", Kind.COMPUTED, "prompt with examples, 10,000 tokens: cost", 86, BILL, EXAMPLES
        ),
        _cached(
            "turns_ttft",
            Kind.FITTED,
            "ten turns with a long system prompt: TTFT 10 s to 2.5 s",
            75,
            TTFT,
            TURNS,
        ),
        _cached(
            "turns_cost",
            Kind.COMPUTED,
            "ten turns with a long system prompt: cost",
            53,
            BILL,
            TURNS,
            why=(
                "The lengths and times of the turns are not published. The next two rows have settings that "
                "would give the figure: longer answers, or two turns for which the cache has expired."
            ),
        ),
        Row(
            name="turns_cost_outputs",
            kind=Kind.FITTED,
            claim="ten turns, 60,000 tokens before answers of 9,000: cost",
            published=(53, 53),
            unit="% less",
            source=PROMPT_CACHING,
            setting="experiment=prompt_caching_turns with these lengths; its models stop at 8,192",
            ours=Searched(function=saved_with_long_answers),
        ),
        Row(
            name="turns_cost_writes",
            kind=Kind.FITTED,
            claim="ten turns, three of which write the cache: cost",
            published=(53, 53),
            unit="% less",
            source=PROMPT_CACHING,
            setting="lengths of prompt_caching_turns, two turns more than five minutes after the last one",
            ours=Direct(function=lambda: saved_with_writes(3)),
        ),
        *_seconds("book", "questions about a book of 100,000 tokens", BOOK, (11.5, 2.4)),
        *_seconds("examples", "prompt with examples, 10,000 tokens", EXAMPLES, (1.6, 1.1)),
        *_seconds("turns", "ten turns with a long system prompt", TURNS, (10, 2.5)),
        Row(
            name="mooncake",
            kind=Kind.SIMULATED,
            claim="Mooncake: traffic within the SLO over that of vLLM",
            published=(1.75, 1.75),
            unit="times",
            source=Source(
                "Qin et al., Mooncake, 2024, abstract: 75 % more requests (up to 525 % in simulations)",
                "https://arxiv.org/abs/2407.00079",
                was_read=True,
            ),
            setting="mooncake_like, Llama-2-70B, A100, 30 s and 100 ms: 3 prefill, 1 decode over 4 mixed",
            ours=Searched(function=mooncake),
        ),
    ),
)
