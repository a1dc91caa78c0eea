"""Order of requests, fairness, failures and dispatch."""

from __future__ import annotations

from experiments.reproduce.claims.shipped import summary
from experiments.reproduce.rows import Compared, Family, Row, Searched, Source

LENGTHS_MATTER = "fcfs_mlfq_s3_sjf"
E2E = "e2e.mean_s"
ALPACA = (  # lengths of Alpaca, as in `beam_search`
    "workload.lengths.prompt_tokens.mean=19",
    "workload.lengths.prompt_tokens.cv=0.7",
    "workload.lengths.output_tokens.mean=58",
    "workload.num_requests=2000",
    "engine.max_num_seqs=2048",
)


def s3() -> float:
    """Returns the throughput with regions of the predicted length over that with the longest ones."""
    known, longest = (
        summary("contiguous_vs_paged", arm, *ALPACA)["throughput.output_tokens_per_s"]
        for arm in ("orca_oracle", "orca_max")
    )
    return known / longest


def shares(arm: str) -> float:
    """Returns the requests/s of the tenant that sends twice as much over those of the other."""
    found = summary("fair_shares", arm, "workload.tenants={large:2,small:1}")
    large, small = (found[f"by_tenant.{tenant}.throughput.requests_per_s"] for tenant in ("large", "small"))
    return large / small


def vtc() -> float:
    """Returns the ratio of the service of two tenants under virtual token counters."""
    return shares("vtc")


def fcfs() -> float:
    """Returns the ratio of the service of two tenants, first come, first served."""
    return shares("fcfs")


TENANTS = "experiment=fair_shares with tenants 2 to 1, Llama-2-7B, A10G, both always have waiting requests"
VTC = Source(
    "Sheng et al., Fairness in serving large language models, OSDI 2024, figure 3 (rates: its artifact)",
    "https://arxiv.org/abs/2401.00588",
)

FAMILY = Family(
    name="scheduling",
    title="Order of requests, fairness, failures and dispatch",
    rows=(
        Row(
            name="fastserve",
            claim="FastServe's mean completion time: lower than first come, first served",
            published=(5.1, 5.1),
            unit="times",
            source=Source(
                "Wu et al., FastServe, 2023, first version, abstract: up to 5.1 times over Orca",
                "https://arxiv.org/abs/2305.05920",
            ),
            setting=f"experiment={LENGTHS_MATTER}, feedback queue that keeps KV, Llama-3.1-8B, H100",
            ours=Compared(
                experiment=LENGTHS_MATTER, metric=E2E, arm="mlfq_keeps_kv", over="fcfs", shown="times less"
            ),
            differs=True,
            why=(
                "The paper states the best of its loads; here one load is run, at which the median falls ten "
                "times, and long outputs, which wait for all others, keep the mean up."
            ),
        ),
        Row(
            name="s3",
            claim="S3: regions of the predicted length over regions of the longest possible one",
            published=(6.49, 6.49),
            unit="times",
            source=Source("Jin et al., S3, NeurIPS 2023, abstract", "https://arxiv.org/abs/2306.06000"),
            setting="experiment=contiguous_vs_paged with lengths of Alpaca, predictions without error",
            ours=Searched(function=s3),
        ),
        Row(
            name="vtc",
            claim="VTC: service of a tenant that sends twice as much as another, over that of the other",
            published=(1, 1),
            unit="times",
            source=VTC,
            setting=TENANTS,
            ours=Searched(function=vtc),
        ),
        Row(
            name="vtc_fcfs",
            claim="FCFS: service of a tenant that sends twice as much as another, over that of the other",
            published=(2, 2),
            unit="times",
            source=VTC,
            setting=TENANTS,
            ours=Searched(function=fcfs),
        ),
        Row(
            name="dejavu",
            claim="DejaVu: latency of requests without copies of the KV over that with, one failure",
            published=(1.54, 1.54),
            unit="times",
            source=Source("Strati et al., DejaVu, ICML 2024, section 5", "https://arxiv.org/abs/2403.01876"),
            setting="experiment=crash_recovery, mean E2E, one of four replicas crashes",
            ours=Compared(
                experiment="crash_recovery", metric=E2E, arm="kv", over="scratch", shown="times less"
            ),
            differs=True,
            why=(
                "There one pipeline serves everything, and a failure sends all its requests back to the "
                "start; here three of four replicas go on, and 35 of 2,000 requests are affected."
            ),
        ),
        Row(
            name="llumnix",
            claim="Llumnix: P99 TTFT lower than with other dispatch, by migration of running requests",
            published=(15, 15),
            unit="times",
            source=Source(
                "Sun et al., Llumnix, OSDI 2024: up to 15 times, as a review states",
                "https://arxiv.org/abs/2406.03243",
            ),
            setting="experiment=routers_on_mooncake, prefix index over round robin",
            ours=Compared(
                experiment="routers_on_mooncake",
                metric="ttft.p99_s",
                arm="prefix_index",
                over="round_robin",
                shown="times less",
            ),
            differs=True,
            why=(
                "Live migration of requests is not modelled: ours is the gain of a better dispatch alone, "
                "which three seeds do not tell from noise."
            ),
        ),
    ),
)
