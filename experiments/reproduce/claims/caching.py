"""Prompt caching of hosted APIs, and caches over several replicas."""

from __future__ import annotations

from experiments.papers.phase_layouts import largest_rate
from experiments.reproduce.claims.built import tariff
from experiments.reproduce.claims.shipped import run_summary, summary

BILL = "bill_usd"
SYSTEM, MESSAGE, ANSWER, NUM_TURNS = 90_000, 128, 512, 10
"""Tokens of `prompt_caching_turns`."""
LONG_ANSWERS = ("workload.system_prompt_tokens.value=60000", "workload.answer_tokens.mean=9000")
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
