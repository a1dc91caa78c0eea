"""Published speed-ups of speculative decoding, each with the settings that it was measured with.

Of a published row only the tokens per pass are an input, where the row gives them; where it does not, the row
names what is assumed instead. Settings of engines belong to a whole comparison, never to one of its rows.
"""

from __future__ import annotations

from dataclasses import dataclass

GIVEN = ""
"""Value of `Row.assumed` if the tokens per pass are published with the row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A published speed-up over the same engine without speculation."""

    setting: str
    published: float
    tokens: float
    """Mean number of tokens that a sequence gets from a pass."""
    draft: tuple[str, ...] = ()
    """Settings that add the proposer."""
    batch: int = 1
    assumed: str = GIVEN
    """What the tokens per pass were taken from; empty: the published row."""
    draft_steps: float | None = None
    """Price of a whole draft in units of a pass; None: by the hardware models."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Rows of one source, measured on one engine."""

    name: str
    source: str
    rows: tuple[Row, ...]
    reason: str
    """Reason for the differences."""
    engine: tuple[str, ...] = ()
    """Settings of the engine without speculation; empty: rows have prices in units of a pass."""
    speculating: tuple[str, ...] = ()
    """Settings that the engine changes by itself once it speculates."""
    context: int = 600
    """Tokens of a sequence in the middle of its answer."""
    limit: int | None = None
    """Most rows of a pass; larger batches run in turns."""
    shares_memory: bool = False
    """Whether the draft has the target's weights and KV; the simulator would give it memory of its own."""
    is_fitted: bool = False
    """Whether settings of the hardware models were fitted to these rows."""


def _eagle(setting: str, kind: str, places: int, published: float, tokens: float, batch: int = 1) -> Row:
    draft = (f"speculation={kind}", f"speculation.num_speculative_tokens={places}")
    return Row(setting=setting, published=published, tokens=tokens, draft=draft, batch=batch)


def _by_places(kind: str, tokens: tuple[float, ...], tpot_ms: tuple[float, ...]) -> tuple[Row, ...]:
    name = {"eagle": "EAGLE", "eagle3": "EAGLE-3"}[kind]
    measured = enumerate(zip(tokens, tpot_ms, strict=True), start=2)
    return tuple(_eagle(f"{name}, K={k}", kind, k, 7.07 / ms, length) for k, (length, ms) in measured)


VLLM_PLACES = Comparison(
    name="EAGLE in vLLM by K",
    source="vllm issue 20780 (July 2025): Llama-3.1-8B, batch 1; the same author's runs are on H100",
    engine=("model=llama3_1_8b", "hardware=h100_sxm", "engine=vllm_sync"),
    rows=(
        *_by_places("eagle", (2.10, 2.29, 2.39, 2.43, 2.45, 2.47), (4.37, 4.29, 4.48, 4.71, 4.94, 5.20)),
        *_by_places("eagle3", (2.36, 2.79, 3.08, 3.32, 3.46, 3.54), (4.32, 4.09, 4.05, 4.13, 4.20, 4.29)),
    ),
    is_fitted=True,
    reason=(
        "The host times of drafting are fitted to these rows: 0.7 ms per step of EAGLE and 1 ms of EAGLE-3, "
        "although its LM head is four times smaller; the issue asks why, without an answer."
    ),
)

BATCHES = (2, 4, 8, 16, 24, 32, 48, 56, 64)


def _by_batch(kind: str, places: int, tokens: float, published: tuple[float, ...]) -> tuple[Row, ...]:
    name = {"eagle": "EAGLE", "eagle3": "EAGLE-3"}[kind]
    draft = (f"speculation={kind}", f"speculation.num_speculative_tokens={places}")
    return tuple(
        Row(
            setting=f"{name}, batch {batch}",
            published=speedup,
            tokens=tokens,
            draft=draft,
            batch=batch,
            assumed=f"vllm issue 20780, K={places}",
        )
        for batch, speedup in zip(BATCHES, published, strict=False)
    )


SGLANG_BATCHES = Comparison(
    name="EAGLE in SGLang by batch",
    source="EAGLE-3 (Li et al., 2025), table 3: Llama-3.1-8B, H100, SGLang 0.4.4, chain of 3",
    engine=(
        "model=llama3_1_8b",
        "hardware=h100_sxm",
        "engine=sglang",
        "engine.host.exposed_s=0",  # without speculation 158.34 tokens/s at batch 1 (the paper's table 4)
    ),
    speculating=("engine.host.overlapped=false",),  # SGLang 0.4 turns its overlap scheduler off for EAGLE
    rows=(
        *_by_batch("eagle", 3, 2.29, (1.40, 1.38, 1.23, 1.02, 0.93, 0.94, 0.88, 0.99, 0.99)),
        *_by_batch("eagle3", 3, 2.79, (1.81, 1.82, 1.62, 1.48, 1.39, 1.32, 1.38, 1.34, 1.38)),
    ),
    reason=(
        "Small batches fit. From batch 8 on a pass with EAGLE takes 2 to 7 ms longer there than here, one "
        "with EAGLE-3 up to 3 ms. Host work per sequence after each pass (loops in Python over requests and "
        "accepted tokens, plans of the attention kernels) is one part; tokens per pass at these batches are "
        "not published."
    ),
)

VLLM_BATCHES = Comparison(
    name="EAGLE in vLLM by batch",
    source="EAGLE-3 (Li et al., 2025), table 5: Llama-3.1-8B, RTX 3090, chain of 2 (EAGLE-3 second-hand)",
    engine=("model=llama3_1_8b", "hardware=rtx_3090", "engine=vllm_v0"),
    rows=(
        *_by_batch("eagle", 2, 2.10, (1.30, 1.25, 1.21, 1.10, 1.03, 0.93, 0.82, 0.71)),
        *_by_batch("eagle3", 2, 2.36, (1.75, 1.68, 1.58, 1.49, 1.42, 1.36, 1.21, 1.01)),
    ),
    reason=(
        "Tokens per pass are not published; those of a later version are assumed. The version of early 2025 "
        "is the one before vLLM 1, whose host work for each step of drafting is not known and not priced: "
        "small batches gain less there. From batch 24 on rows of a pass cost there about what they cost here."
    ),
)

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


def mean_tokens(rate: float, places: int) -> float:
    """Returns the tokens of a pass if each draft token is accepted with the same probability."""
    return sum(rate**place for place in range(places + 1))


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

MINICPM3_CONFIG = (
    ("num_hidden_layers", 62),
    ("first_k_dense_replace", 62),
    ("hidden_size", 2560),
    ("num_attention_heads", 40),
    ("q_lora_rank", 768),
    ("kv_lora_rank", 256),
    ("qk_rope_head_dim", 32),
    ("qk_nope_head_dim", 64),
    ("v_head_dim", 64),
    ("intermediate_size", 6400),
    ("vocab_size", 73448),
)
"""The config.json of openbmb/MiniCPM3-4B."""

MINICPM = Comparison(
    name="EAGLE-3 of MiniCPM3-4B in vLLM",
    source="vllm pull request 24243 (September 2025): RTX 4090, K=6, 1 and 10 concurrent requests",
    engine=(
        "model=deepseek_v2_lite",  # attention of the same kind; all layers are dense
        *(f"model.config.{key}={value}" for key, value in MINICPM3_CONFIG),
        "hardware=rtx_4090",
        "engine=vllm_sync",
        "engine.kernels.absorbed_latent_decode=false",  # vLLM expands this model's keys and values
    ),
    context=400,
    rows=tuple(
        Row(
            setting=f"batch {batch}",
            published=speedup,
            tokens=tokens,
            draft=("speculation=eagle3", "speculation.num_speculative_tokens=6"),
            batch=batch,
        )
        for batch, tokens, speedup in ((1, 2.44, 1.71), (10, 2.47, 1.62))
    ),
    reason=(
        "The published 17.6 ms per token of one request without drafts include prompts and waits of the "
        "client; a decode takes 12.5 ms here. The draft layer has the shape of the model's layers, as "
        "its own is not published."
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
