"""Memory of KV caches and of quantised weights."""

from __future__ import annotations

from functools import partial

from experiments.reproduce.claims.built import PALM, decode, model
from experiments.reproduce.claims.sources import BOOK, PAGED_ATTENTION, POPE, VLLM_BLOG
from experiments.reproduce.rows import EXACT, Compared, Direct, Family, Kind, Row, Source

INF = float("inf")
ATTENTION = Source(
    "DeepSeek-AI, DeepSeek-V2, 2024, table 1: elements per token of MHA, GQA, MQA and MLA",
    "https://arxiv.org/abs/2405.04434",
    was_read=True,
)
MLA = Source(
    "Introductions to MLA; by the elements per token of DeepSeek-V2, table 1, which was read",
    "https://arxiv.org/abs/2405.04434",
    was_read=True,
)
DATABRICKS = Source(
    "Databricks, LLM Inference Performance Engineering: Best Practices, 2023, table 3",
    "https://www.databricks.com/blog/llm-inference-performance-engineering-best-practices",
    was_read=True,
)
AWQ = Source("Lin et al., AWQ, MLSys 2024", "https://arxiv.org/abs/2306.00978")
TINY_CHAT = Source(
    "mit-han-lab/llm-awq, tinychat/README.md, table of the RTX 4090 (July 2025)",
    "https://github.com/mit-han-lab/llm-awq",
    was_read=True,
)
LATENT = ("model=deepseek_r1", "model.config.num_hidden_layers=60")  # the attention of DeepSeek-V2
EXPANDED = (  # the same 128 heads of 128 with keys and values of their own
    "model=llama2_70b",
    "model.config.num_hidden_layers=60",
    "model.config.num_attention_heads=128",
    "model.config.num_key_value_heads=128",
    "+model.config.head_dim=128",
)
CONTEXT = 4096
WHOLE = ("model=llama2_7b", "model.config.max_position_embeddings=16384")
SHARED_KV = ("model/transform=shared_kv", "model.transform.window=null", "model.transform.num_kv_heads=null")


def kv_bytes(*settings: str) -> float:
    """Returns the bytes of KV of a token."""
    return model(*settings).kv_bytes_per_token()


def kv_ratio(more: tuple[str, ...], less: tuple[str, ...], num_tokens: int = CONTEXT) -> float:
    """Returns how many times as much KV a sequence needs with the settings `more`."""
    return model(*more).kv_bytes_of_sequence(num_tokens) / model(*less).kv_bytes_of_sequence(num_tokens)


def weight_bytes(*settings: str) -> float:
    """Returns the bytes of all weights on one device."""
    return model(*settings).weight_bytes_per_rank(1)


def awq_ms(is_quantised: bool) -> float:
    """Returns the milliseconds of a token of one sequence on the GPU of AWQ's table."""
    weights = ("model.weights=int4_wo",) if is_quantised else ()
    return 1e3 * decode("model=llama2_7b", "hardware=rtx_4090", "engine=vllm", *weights, context=200).seconds


AWQ_SETTING = "engine=vllm, RTX 4090, one sequence, 200 tokens (assumed)"


def _awq(name: str, weights: str, published: float, is_quantised: bool) -> Row:
    return Row(
        name=name,
        kind=Kind.SIMULATED,
        claim=f"a token of Llama-2-7B with {weights}, RTX 4090",
        published=(published, published),
        unit="ms",
        source=TINY_CHAT,
        setting=AWQ_SETTING,
        ours=Direct(function=partial(awq_ms, is_quantised)),
    )


FAMILY = Family(
    name="memory",
    title="Memory of KV caches and weights",
    rows=(
        Row(
            name="kv_token",
            kind=Kind.COMPUTED,
            claim="KV of a token of Llama-2-7B",
            published=(524288, 524288),
            unit="bytes",
            source=Source("2 x 32 layers x 32 heads x 128 x 2 bytes, in many introductions"),
            setting="model=llama2_7b",
            tolerance=EXACT,
            ours=Direct(function=lambda: kv_bytes("model=llama2_7b")),
        ),
        Row(
            name="kv_13b",
            kind=Kind.COMPUTED,
            claim="KV of 32 sequences of 2,048 tokens, Llama-2-13B",
            published=(54, 54),
            unit="GB",
            source=BOOK,
            setting="model=llama2_13b",
            tolerance=EXACT,
            ours=Direct(function=lambda: kv_bytes("model=llama2_13b") * 32 * 2048 / 1e9),
        ),
        Row(
            name="kv_70b",
            kind=Kind.COMPUTED,
            claim="KV of 64 sequences of 1,024 tokens, Llama-2-70B",
            published=(20, 20),
            unit="GiB",
            source=DATABRICKS,
            setting="model=llama2_70b",
            tolerance=EXACT,
            ours=Direct(function=lambda: kv_bytes("model=llama2_70b") * 64 * 1024 / 2**30),
        ),
        Row(
            name="kv_palm",
            kind=Kind.COMPUTED,
            claim="KV of 512 sequences of 2,048 tokens, multi-head model with 500 B parameters",
            published=(3, 3),
            unit="TB",
            source=POPE,
            setting="PaLM 540B with 48 KV heads",
            tolerance=EXACT,
            ours=Direct(function=lambda: kv_bytes(*PALM) * 512 * 2048 / 1e12),
        ),
        Row(
            name="gqa_llama3_8b",
            kind=Kind.COMPUTED,
            claim="grouped-query attention: KV of all heads over KV of 8 heads, Llama-3-8B",
            published=(4, 4),
            unit="times",
            source=ATTENTION,
            setting="32 KV heads against 8",
            tolerance=EXACT,
            ours=Direct(
                function=lambda: kv_ratio(
                    ("model=llama3_8b", "model.config.num_key_value_heads=32"), ("model=llama3_8b",)
                )
            ),
        ),
        Row(
            name="gqa_llama2_70b",
            kind=Kind.COMPUTED,
            claim="grouped-query attention: KV of all heads over KV of 8 heads, Llama-2-70B",
            published=(8, 8),
            unit="times",
            source=ATTENTION,
            setting="64 KV heads against 8",
            tolerance=EXACT,
            ours=Direct(
                function=lambda: kv_ratio(
                    ("model=llama2_70b", "model.config.num_key_value_heads=64"), ("model=llama2_70b",)
                )
            ),
        ),
        Row(
            name="mqa",
            kind=Kind.COMPUTED,
            claim="multi-query attention: KV of 32 heads over KV of one",
            published=(32, 32),
            unit="times",
            source=ATTENTION,
            setting="32 KV heads against one, Llama-2-7B",
            tolerance=EXACT,
            ours=Direct(
                function=lambda: kv_ratio(
                    ("model=llama2_7b",), ("model=llama2_7b", "model.config.num_key_value_heads=1")
                )
            ),
        ),
        Row(
            name="mha_4096",
            kind=Kind.COMPUTED,
            claim="KV of 4,096 tokens, 128 heads with their own keys and values in 60 layers",
            published=(16.1, 16.1),
            unit="GB",
            source=MLA,
            setting="DeepSeek-V2's heads as multi-head attention",
            tolerance=EXACT,
            ours=Direct(function=lambda: model(*EXPANDED).kv_bytes_of_sequence(CONTEXT) / 1e9),
        ),
        Row(
            name="mla_4096",
            kind=Kind.COMPUTED,
            claim="KV of 4,096 tokens with latent attention (MLA) in 60 layers",
            published=(0.28, 0.28),
            unit="GB",
            source=MLA,
            setting="512 + 64 values per token and layer",
            tolerance=EXACT,
            ours=Direct(function=lambda: model(*LATENT).kv_bytes_of_sequence(CONTEXT) / 1e9),
        ),
        Row(
            name="mla_ratio",
            kind=Kind.COMPUTED,
            claim="KV of 128 heads with their own keys and values over KV of MLA",
            published=(57, 57),
            unit="times",
            source=MLA,
            setting="DeepSeek-V2, 4,096 tokens",
            tolerance=EXACT,
            ours=Direct(function=lambda: kv_ratio(EXPANDED, LATENT)),
        ),
        Row(
            name="window",
            kind=Kind.COMPUTED,
            claim="window of 1,000 tokens in a context of 10,000",
            published=(10, 10),
            unit="times",
            source=BOOK,
            setting="all layers of Llama-2-7B",
            tolerance=EXACT,
            ours=Direct(
                function=lambda: kv_ratio(
                    WHOLE,
                    (
                        *WHOLE,
                        "model.config.architectures=[MistralForCausalLM]",
                        "+model.config.sliding_window=1000",
                    ),
                    10_000,
                )
            ),
        ),
        Row(
            name="shared_layers",
            kind=Kind.COMPUTED,
            claim="one cache for three layers",
            published=(3, 3),
            unit="times",
            source=BOOK,
            setting="Llama-3.1-8B: 11 caches for 32 layers",
            ours=Direct(function=lambda: kv_ratio(("model=llama3_1_8b",), ("model=llama3_1_8b", *SHARED_KV))),
        ),
        Row(
            name="window_shared_mqa",
            kind=Kind.COMPUTED,
            claim="multi-query attention, windows in most layers and shared caches together",
            published=(20, INF),
            unit="times",
            source=Source(
                "Character.AI, Optimizing AI inference, 2024 (as quoted by AINews, June 2024)",
                "https://research.character.ai/optimizing-inference/",
                was_read=True,
            ),
            setting="model=character_ai_like_8b against Llama-3.1-8B, 10,240 tokens",
            ours=Direct(
                function=lambda: kv_ratio(("model=llama3_1_8b",), ("model=character_ai_like_8b",), 10_240)
            ),
            why="The published figure is a lower bound; windows save the more, the longer the context is.",
        ),
        Row(
            name="waste_contiguous",
            kind=Kind.COMPUTED,
            claim="KV memory that contiguous reservations waste",
            published=(60, 80),
            unit="%",
            source=VLLM_BLOG,
            setting="experiment=contiguous_vs_paged, Orca (Max)",
            ours=Compared(
                experiment="contiguous_vs_paged", metric="kv.wasted_share", arm="orca_max", shown="percent"
            ),
        ),
        Row(
            name="waste_paged",
            kind=Kind.COMPUTED,
            claim="KV memory that paging wastes",
            published=(0, 4),
            unit="%",
            source=VLLM_BLOG,
            setting="experiment=contiguous_vs_paged, blocks of 16 tokens",
            ours=Compared(
                experiment="contiguous_vs_paged", metric="kv.wasted_share", arm="paged", shown="percent"
            ),
        ),
        Row(
            name="paged_throughput",
            kind=Kind.SIMULATED,
            claim="throughput with paging over Orca (Max)",
            published=(2, 4),
            unit="times",
            source=PAGED_ATTENTION,
            setting="experiment=contiguous_vs_paged",
            ours=Compared(
                experiment="contiguous_vs_paged",
                metric="throughput.output_tokens_per_s",
                arm="paged",
                over="orca_max",
            ),
        ),
        Row(
            name="awq_memory",
            kind=Kind.COMPUTED,
            claim="weights in fp16 over weights in int4 (AWQ)",
            published=(4, 4),
            unit="times",
            source=AWQ,
            setting="Llama-2-7B, a scale and a zero point for 128 weights, tables in fp16",
            ours=Direct(
                function=lambda: (
                    weight_bytes("model=llama2_7b") / weight_bytes("model=llama2_7b", "model.weights=int4_wo")
                )
            ),
        ),
        _awq("awq_fp16", "fp16 weights", 15.50, False),
        _awq("awq_int4", "int4 weights (AWQ)", 5.28, True),
        Row(
            name="awq_speed",
            kind=Kind.SIMULATED,
            claim="speed of decodes with int4 weights over fp16, Llama-2-7B",
            published=(2.94, 2.94),
            unit="times",
            source=TINY_CHAT,
            setting=AWQ_SETTING,
            ours=Direct(function=lambda: awq_ms(False) / awq_ms(True)),
        ),
    ),
)
