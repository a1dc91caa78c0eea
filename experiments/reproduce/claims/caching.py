"""Prompt caching of hosted APIs, and caches over several replicas."""

from __future__ import annotations

from experiments.papers.phase_layouts import largest_rate
from experiments.reproduce.claims.shipped import run_summary
from experiments.reproduce.claims.sources import PROMPT_CACHING
from experiments.reproduce.rows import Compared, Family, Row, Searched, Source

TTFT, BILL = "ttft.p50_s", "bill_usd"
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


def _cached(name: str, claim: str, published: float, metric: str, at: int | None, why: str = "") -> Row:
    experiment = "prompt_caching" if at else "prompt_caching_turns"
    return Row(
        name=name,
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
            "book_ttft", "questions about a book of 100,000 tokens: TTFT 11.5 s to 2.4 s", 79, TTFT, 100_000
        ),
        _cached("book_cost", "questions about a book of 100,000 tokens: cost", 90, BILL, 100_000),
        _cached(
            "examples_ttft", "prompt with examples, 10,000 tokens: TTFT 1.6 s to 1.1 s", 31, TTFT, 10_000
        ),
        _cached("examples_cost", "prompt with examples, 10,000 tokens: cost", 86, BILL, 10_000),
        _cached("turns_ttft", "ten turns with a long system prompt: TTFT 10 s to 2.5 s", 75, TTFT, None),
        _cached(
            "turns_cost",
            "ten turns with a long system prompt: cost",
            53,
            BILL,
            None,
            why=(
                "The lengths are not published: 53 % would need outputs that cost half of what prompts cost, "
                "such as 9,000 output tokens per turn after 90,000 prompt tokens; ours have 512."
            ),
        ),
        Row(
            name="mooncake",
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
