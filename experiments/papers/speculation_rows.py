"""All published speed-ups of speculative decoding; those of EAGLE in engines are in `speculation_eagle`."""

from __future__ import annotations

from experiments.papers.published_speedups import Comparison, Row, mean_tokens
from experiments.papers.speculation_eagle import MINICPM, SGLANG_BATCHES, VLLM_BATCHES, VLLM_PLACES

TREE_HOST = "speculation.draft.start_s=3e-3"
"""Host time of a tree in a generate loop: candidates, mask, best path and its KV; an estimate."""


def _spec_bench(size: str, *published: tuple[float, float]) -> tuple[Row, ...]:
    methods = (
        ("EAGLE", ("speculation=eagle", "speculation/tree=eagle_26", TREE_HOST)),
        ("Medusa", ("speculation=medusa", "speculation/tree=medusa_64", TREE_HOST)),
        ("prompt lookup", ("speculation=ngram", "speculation.num_speculative_tokens=10")),
        (
            "draft model of 68 M",
            (
                "speculation=draft_model",
                "model@speculation.draft.model=llama_68m",
                "speculation.num_speculative_tokens=5",
            ),
        ),
        ("lookahead", ("speculation=lookahead", "speculation.window=7", "speculation.guesses=7", TREE_HOST)),
    )
    return tuple(
        Row(
            setting=f"{size}, {method}",
            published=speedup,
            tokens=tokens,
            draft=(f"model=vicuna_{size.lower()}", *draft),
        )
        for (method, draft), (tokens, speedup) in zip(methods, published, strict=True)
    )


SPEC_BENCH = Comparison(
    name="Spec-Bench",
    source="Spec-Bench's leaderboard: Vicuna v1.3, A100 80GB, fp16, greedy, Hugging Face transformers",
    engine=(
        "hardware=a100_80gb_sxm",
        "engine=hf_static",
        "batching.batch_size=1",
        "engine.host.launch_s=70e-6",  # 40.24 tokens/s without drafts, taken as the 7B model's (issue 4)
    ),
    rows=(
        *_spec_bench("7B", (3.61, 2.29), (2.32, 1.78), (1.73, 1.59), (2.28, 1.49), (1.66, 1.27)),
        *_spec_bench("13B", (3.64, 2.34), (2.39, 1.75), (1.68, 1.48), (2.18, 1.49), (1.63, 1.22)),
        *_spec_bench("33B", (3.39, 2.47), (2.33, 1.79), (1.55, 1.42), (2.01, 1.61), (1.61, 1.24)),
    ),
    reason=(
        "Host-bound: a pass with 64 rows takes here about as long as one with one row, and 3 ms are "
        "estimated for the host's work on a tree. What is published grows by 0.05 to 0.2 ms per layer "
        "with the rows of a pass, also for prompt lookup; no operator that is priced here explains it."
    ),
)

DEEPSEEK = Comparison(
    name="MTP of DeepSeek-R1",
    source="HabanaAI vllm-fork pull request 1264: DeepSeek-R1 on Gaudi, K=1, tokens per pass counted there",
    engine=("model=deepseek_r1", "hardware=h200_sxm", "tensor_parallel_size=8", "engine=vllm_sync"),
    context=1500,
    limit=256,  # "we hit maximum batch_size": with one draft token, 128 sequences run at once
    rows=tuple(
        Row(
            setting=f"batch {batch}",
            published=speedup,
            tokens=tokens,
            draft=("speculation=mtp",),
            batch=batch,
        )
        for batch, speedup, tokens in (
            (4, 1.6, 1 + 1918 / 2180),
            (32, 1.5, 1 + 15371 / 17408),
            (128, 1.35, 1 + 61143 / 69988),
            (256, 1.0, 1 + 122973 / 139286),
        )
    ),
    reason=(
        "Other hardware: eight H200 stand for eight Gaudi, so only the shape by batch is compared. At batch "
        "256 the engine's largest batch holds half as many sequences with drafts."
    ),
)


def _constant(places: int) -> tuple[str, ...]:
    """Returns a proposer of so many tokens, to which any price can be given."""
    return ("speculation=ngram", f"speculation.num_speculative_tokens={places}")


def _leviathan() -> tuple[Row, ...]:
    table = (
        ("translation, T5-small", 7, 0.75, 0.02, 3.4),
        ("translation, T5-base", 7, 0.80, 0.04, 2.8),
        ("translation, T5-large", 7, 0.82, 0.11, 1.7),
        ("summaries, T5-small", 5, 0.65, 0.02, 3.1),
        ("summaries, T5-base", 5, 0.73, 0.04, 3.0),
        ("summaries, T5-large", 3, 0.74, 0.11, 2.2),
    )
    return tuple(
        Row(
            setting=f"{name}, K={k}",
            published=speedup,
            tokens=mean_tokens(rate, k),
            draft=_constant(k),
            draft_steps=k * price,
        )
        for name, k, rate, price, speedup in table
    )


LEVIATHAN = Comparison(
    name="T5-XXL",
    source="Leviathan et al., ICML 2023, table 2, T=0: T5-XXL on TPU v4; prices of a draft token second-hand",
    rows=_leviathan(),
    reason=(
        "Ours is the paper's formula. It counts passes and drafts only, and one acceptance for all places."
    ),
)

CHINCHILLA = Comparison(
    name="Chinchilla 70B",
    source="Chen et al., 2023, table 1: K=4; 1.8 ms per draft token, 14.1 ms per pass",
    rows=tuple(
        Row(
            setting=setting,
            published=speedup,
            tokens=mean_tokens(0.8, 4),
            draft=_constant(4),
            draft_steps=4 * 1.8 / 14.1,
            assumed="0.8 for every place",
        )
        for setting, speedup in (
            ("XSum, nucleus", 1.92),
            ("XSum, greedy", 2.01),
            ("HumanEval, nucleus", 2.46),
        )
    ),
    reason="The acceptance of the three tasks is not published as numbers; one value stands for all of them.",
)

GPT_FAST = Comparison(
    name="gpt-fast",
    source="gpt-fast, README.md: Llama-2-70B int4 + 7B int4, A100 at 330 W, K=4; 25.25 and 48.4 tokens/s",
    engine=("model=llama2_70b", "model.weights=int4_wo", "hardware=a100_80gb_sxm", "engine=vllm"),
    context=100,
    rows=(
        Row(
            setting="70B + 7B",
            published=48.4 / 25.25,
            tokens=mean_tokens(0.8, 4),
            draft=(
                "speculation=draft_model",
                "model@speculation.draft.model=llama2_7b",
                "speculation.draft.model.weights=int4_wo",
            ),
            assumed="0.8 for every place",
        ),
    ),
    reason=(
        "Kernels: its int4 kernels reach 860 to 1,100 GB/s (196.8 tokens/s for the 7B model alone), those "
        "that are priced here more; the engine also drafts once more after a pass that accepted all drafts."
    ),
)

MEDUSA = Comparison(
    name="Medusa on H200",
    source="NVIDIA's blog (2024): HGX H200, TensorRT-LLM, fp8; 108 and 268 tokens/s",
    engine=(
        "hardware=h200_sxm",
        "tensor_parallel_size=8",
        "engine=tensorrt_llm",
        "engine.kernels.library=vllm",  # two-shot all-reduces, as TensorRT-LLM had in 2024
        "model.weights=fp8",
    ),
    rows=tuple(
        Row(
            setting=name,
            published=speedup,
            tokens=2.32,
            draft=(f"model={model}", "speculation=medusa", "speculation/tree=medusa_64"),
            assumed="Spec-Bench, Vicuna-7B",
        )
        for name, model, speedup in (
            ("Llama-3.1-405B", "llama3_1_405b", 1.9),
            ("Llama-3.1-70B", "llama3_1_70b", 1.5),
        )
    ),
    reason=(
        "The tree is that of NVIDIA's example for Llama-3.1-70B; its tokens per pass are not published. "
        "TensorRT-LLM of 2024 all-reduced 500 KB and more in two shots, for which vLLM's kernels stand here; "
        "with one-shot kernels (41 us for the 2 MiB of 64 rows, not 20) the ratios are 1.36 and 1.08."
    ),
)

MAGICDEC = Comparison(
    name="MagicDec",
    source="Sadhukhan et al., ICLR 2025: Llama-3.1-8B as its own draft with sparse KV, up to 2.51 times",
    engine=("model=llama3_1_8b", "hardware=h100_sxm", "tensor_parallel_size=8", "engine=vllm"),
    context=32_000,
    shares_memory=True,
    rows=(
        Row(
            setting="32k tokens, batch 128",  # about the largest batch whose KV fits
            published=2.51,
            tokens=mean_tokens(0.85, 4),
            draft=(
                "speculation=draft_model",
                "model@speculation.draft.model=llama3_1_8b",
                "speculation.draft.model.config.architectures=[MistralForCausalLM]",
                "+speculation.draft.model.config.sliding_window=512",
            ),
            batch=128,
            assumed="0.85 for every place",
        ),
    ),
    reason=(
        "The setting with 2.51 is not known here: eight H100, four draft tokens, and a draft that attends to "
        "512 tokens are assumed. The gain grows with the batch, as published: 1.63 with 32 sequences."
    ),
)

COMPARISONS = (
    VLLM_PLACES,
    SGLANG_BATCHES,
    VLLM_BATCHES,
    SPEC_BENCH,
    DEEPSEEK,
    MINICPM,
    LEVIATHAN,
    CHINCHILLA,
    GPT_FAST,
    MEDUSA,
    MAGICDEC,
)
