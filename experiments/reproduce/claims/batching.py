"""Continuous against static batching."""

from __future__ import annotations

from functools import partial

from experiments.reproduce.claims.shipped import summary
from experiments.reproduce.rows import Compared, Family, Row, Searched, Source

SYSTEMS = "static_against_continuous_systems"
THROUGHPUT = "throughput.output_tokens_per_s"
ANYSCALE = Source(
    "Anyscale, How continuous batching enables 23x throughput, June 2023, and its benchmark scripts",
    "https://www.anyscale.com/blog/continuous-batching-llm-inference",
    was_read=True,
)
ORCA = Source("Yu et al., Orca, OSDI 2022", "https://www.usenix.org/conference/osdi22/presentation/yu")
NUM_TOKENS = 958
"""Expected longest of 1,000 outputs that are exponential with a mean of 128: 128 (ln 1,000 + 0.577)."""
LONGEST = (
    "workload.lengths.output_tokens.probabilities=[0,1]",
    f"workload.lengths.output_tokens.values=[{NUM_TOKENS},{NUM_TOKENS}]",
    "workload.num_requests=200",
)


def over_naive(arm: str) -> float:
    """Returns requests/s of an arm over those of naive batches, which run to the queue's longest output."""
    naive = summary(SYSTEMS, "naive", *LONGEST)["throughput.requests_per_s"]
    return summary(SYSTEMS, arm)["throughput.requests_per_s"] / naive


def _system(name: str, claim: str, published: float, arm: str, why: str, *, differs: bool = False) -> Row:
    return Row(
        name=name,
        claim=f"{claim} over naive static batches",
        published=(published, published),
        unit="times",
        source=ANYSCALE,
        setting=f"experiment={SYSTEMS}, arm {arm}; naive batches run to {NUM_TOKENS} tokens",
        ours=Searched(function=partial(over_naive, arm)),
        differs=differs,
        why=why,
    )


FAMILY = Family(
    name="batching",
    title="Continuous against static batching",
    rows=(
        Row(
            name="continuous_usual",
            claim="continuous batching over static batching, usual gain",
            published=(2, 5),
            unit="times",
            source=Source("Documentation of serving engines and of cloud providers; no single text"),
            setting=f"experiment={SYSTEMS}, text-generation-inference over FasterTransformer",
            ours=Compared(experiment=SYSTEMS, metric=THROUGHPUT, arm="continuous", over="faster_transformer"),
        ),
        Row(
            name="continuous_order",
            claim="an order of magnitude, if output lengths differ much",
            published=(10, 10),
            unit="times",
            source=ORCA,
            setting="experiment=static_vs_continuous, output lengths with cv 2, batches of 32",
            ours=Compared(
                experiment="static_vs_continuous", metric=THROUGHPUT, arm="chunked", over="static_32"
            ),
        ),
        _system(
            "continuous_23x",
            "vLLM",
            23,
            "paged",
            "The naive batches of the text's script have four requests and all run to the longest output of "
            "the whole queue; over batches that end with their own longest output, vLLM gains 5.7 times.",
        ),
        _system(
            "continuous_8x",
            "text-generation-inference",
            8,
            "continuous",
            "At that time this server padded the KV of OPT's batches and copied it when a request joined; "
            "our engine profile has neither.",
            differs=True,
        ),
        _system(
            "static_4x",
            "FasterTransformer",
            4,
            "faster_transformer",
            "Here the gain comes from batches that end with their own longest output; kernels gain a tenth.",
        ),
    ),
)
