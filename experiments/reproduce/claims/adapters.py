"""Many LoRA adapters on one GPU."""

from __future__ import annotations

from experiments.reproduce.rows import Compared, Family, Kind, Row, Source

REQUESTS = "throughput.requests_per_s"
LORAX = Source(
    "Predibase, LoRAX, README.md: latency and throughput nearly constant with the number of adapters",
    "https://github.com/predibase/lorax",
    was_read=True,
)
SLORA = Source(
    "Sheng et al., S-LoRA, MLSys 2024, section 7.2 and table 3, setting S1 (copies were read)",
    "https://arxiv.org/abs/2311.03285",
    was_read=True,
)

FAMILY = Family(
    name="adapters",
    title="LoRA adapters",
    rows=(
        Row(
            name="punica",
            kind=Kind.SIMULATED,
            claim="Punica over batches of one adapter, every request with its own",
            published=(12, 12),
            unit="times",
            source=Source(
                "Chen et al., Punica, MLSys 2024, abstract",
                "https://arxiv.org/abs/2310.18547",
                was_read=True,
            ),
            setting="experiment=lora_batching, 1,000 adapters, Llama-2-7B, A100",
            ours=Compared(
                experiment="lora_batching",
                metric="throughput.output_tokens_per_s",
                arm="paged",
                over="merged",
                at=1000,
            ),
            why="Its engine reaches 1,044 tokens/s, our roofline 1,330; adapter kernels are not calibrated.",
        ),
        Row(
            name="lorax",
            kind=Kind.COMPUTED,
            claim="LoRAX: throughput of batches with 25 adapters over that with one: nearly constant",
            published=(1, 1),
            unit="times",
            source=LORAX,
            setting="experiment=lora_batching, arm paged, Llama-2-7B, A100, batches of 32",
            tolerance=0.1,
            ours=Compared(
                experiment="lora_batching",
                metric="throughput.output_tokens_per_s",
                arm="paged",
                over="paged",
                at=25,
                over_at=1,
            ),
        ),
        Row(
            name="slora",
            kind=Kind.SIMULATED,
            claim="S-LoRA over five packed engines with merged weights",
            published=(4, 4),
            unit="times",
            source=SLORA,
            setting="experiment=lora_packed, five adapters, Llama-2-7B, A100",
            ours=Compared(experiment="lora_packed", metric=REQUESTS, arm="slora", over="packed"),
        ),
        Row(
            name="slora_2000",
            kind=Kind.COMPUTED,
            claim="2,000 adapters on one GPU: requests/s over those with 5",
            published=(7.61 / 8.05, 7.61 / 8.05),
            unit="times",
            source=SLORA,
            setting="experiment=lora_thousands",
            ours=Compared(
                experiment="lora_thousands", metric=REQUESTS, arm="slora", over="slora", at=2000, over_at=5
            ),
        ),
    ),
)
