"""Decoding speed of one model on one GPU, step by step (gpt-fast), and MBU against the number of users."""

from __future__ import annotations

from functools import partial

from experiments.papers.published_speedups import Comparison, mean_tokens
from experiments.papers.published_speedups import Row as Draft
from experiments.papers.speculation import speedup
from experiments.reproduce.claims.built import decode
from experiments.reproduce.claims.sources import BOOK
from experiments.reproduce.rows import Computed, Family, Row, Source

GPT_FAST = Source(
    "PyTorch's blog, Accelerating Generative AI with PyTorch II: GPT, Fast, November 2023",
    "https://pytorch.org/blog/accelerating-generative-ai-2/",
    was_read=True,
)
DATABRICKS = Source(
    "Databricks, LLM Inference Performance Engineering: Best Practices, 2023, text at figures 2, 3 and 5",
    "https://www.databricks.com/blog/llm-inference-performance-engineering-best-practices",
    was_read=True,
)
GAUDI = Source(
    "Databricks, LLM Training and Inference with Intel Gaudi 2 AI Accelerators, January 2024, introduction",
    "https://www.databricks.com/blog/llm-training-and-inference-intel-gaudi2-ai-accelerators",
    was_read=True,
)
LLAMA = ("model=llama2_7b", "hardware=a100_80gb_sxm")
CONTEXT = 100  # the blog's prompts have 5 tokens, its outputs about 200
INT4 = "model.weights=int4_wo"
EAGER_KERNELS, LOOP_KERNELS = 61, 42
"""Kernels that a layer launches per token: gpt-fast without torch.compile, and Llama in transformers 4.37.1.

Counted with PyTorch's dispatcher on small models (model.py of 30 November 2023, attention as its generate.py
asks for it), without views, which launch nothing.
"""
LOOP_LAUNCH_S = 70e-6
"""Host time per kernel of the model that gives the loop's 40.24 tokens/s on an A100 (Spec-Bench, issue 4)."""
SPECULATING = Comparison(
    name="gpt-fast",
    source=GPT_FAST.text,
    rows=(),
    reason="",
    engine=(*LLAMA, INT4, "engine=vllm"),
    context=CONTEXT,
)
TINY_LLAMA = Draft(  # a model of 1.1 B parameters with Llama-2's vocabulary
    setting="TinyLlama",
    published=244.7 / 202.1,
    tokens=mean_tokens(0.6, 4),
    draft=(
        "speculation=draft_model",
        "model@speculation.draft.model=llama3_2_1b",
        "speculation.draft.model.config.vocab_size=32000",
        "speculation.draft.model.weights=int4_wo",
    ),
    assumed="0.6 for every place",
)
FEW, MANY = 1, 64
LARGE = ("model=llama2_70b", "engine=vllm")
PROMPT = 512  # tokens of Databricks' requests


def speed(*settings: str) -> float:
    """Returns the tokens/s of one sequence."""
    return decode(*LLAMA, *settings, context=CONTEXT).tokens_per_s


def speculative_speed() -> float:
    """Returns the tokens/s of one sequence with int4 weights and a small draft model."""
    return speed("engine=vllm", INT4) * speedup(SPECULATING, TINY_LLAMA)


def mbu(*settings: str, batch: int = FEW, context: int = PROMPT) -> float:
    """Returns the share of the bandwidth with which the weights are read in a decode iteration."""
    point = decode(*settings, batch=batch, context=context)
    weights = decode(*settings, batch=1, context=1).bytes_moved
    return point.mbu * weights / point.bytes_moved


def small_mbu(hardware: str, gpus: int) -> float:
    """Returns the MBU of a 7B model with one user, in per cent."""
    engine = ("model=llama2_7b", "engine=tensorrt_llm")
    return 100 * mbu(*engine, f"hardware={hardware}", f"tensor_parallel_size={gpus}")


def fall(hardware: str) -> float:
    """Returns the MBU of Llama-2-70B with many users over that with one."""
    settings = (*LARGE, f"hardware={hardware}", "tensor_parallel_size=8")
    many, few = (mbu(*settings, batch=batch, context=1024) for batch in (MANY, FEW))
    return many / few


def tpot_s(hardware: str, gpus: int, batch: int = FEW) -> float:
    """Returns the seconds of a token of Llama-2-70B."""
    settings = (*LARGE, f"hardware={hardware}", f"tensor_parallel_size={gpus}")
    return decode(*settings, batch=batch, context=PROMPT).seconds


def lower(batch: int) -> float:
    """Returns by how many per cent a token takes less long on four H100 than on four A100 40GB."""
    return 100 * (1 - tpot_s("h100_sxm", 4, batch) / tpot_s("a100_40gb_sxm", 4, batch))


def _step(name: str, claim: str, published: float, setting: str, *engine: str, why: str = "") -> Row:
    return Row(
        name=name,
        claim=claim,
        published=(published, published),
        unit="tokens/s",
        source=GPT_FAST,
        setting=setting,
        ours=Computed(function=partial(speed, *engine)),
        why=why,
    )


def _mbu(name: str, chips: str, published: float, hardware: str, gpus: int) -> Row:
    return Row(
        name=name,
        claim=f"MBU of a 7B model at batch 1 on {chips}",
        published=(published, published),
        unit="%",
        source=DATABRICKS,
        setting="Llama-2-7B for MPT-7B, engine=tensorrt_llm, 512 tokens",
        ours=Computed(function=partial(small_mbu, hardware, gpus)),
    )


def _fall(name: str, chip: str, hardware: str) -> Row:
    return Row(
        name=name,
        claim=f"MBU of Llama-2-70B on {chip} with {MANY} users over that with one: it falls",
        published=(0, 1),
        unit="times",
        source=BOOK,
        setting=f"eight {chip}, 1,024 tokens; bytes of the weights only, as the book defines MBU",
        ours=Computed(function=partial(fall, hardware)),
        band=(0, 1),
        why="Figure 9-5, from Databricks' text on Gaudi 2, is a drawing: only the direction is compared.",
    )


def _lower(batch: int, published: float, *, differs: bool = False, why: str = "") -> Row:
    return Row(
        name=f"h100_batch_{batch}",
        claim=f"Llama-2-70B: time of a token on four H100 over four A100 40GB, batch {batch}",
        published=(published, published),
        unit="% less",
        source=DATABRICKS,
        setting="engine=vllm, 512 tokens",
        ours=Computed(function=partial(lower, batch)),
        differs=differs,
        why=why,
    )


FAMILY = Family(
    name="decoding",
    title="Decoding speed and bandwidth",
    rows=(
        _step(
            "gpt_fast_eager",
            "Llama-2-7B, A100: eager PyTorch",
            25.5,
            f"engine=hf_static, {EAGER_KERNELS} launches per layer for {LOOP_KERNELS} in Spec-Bench's loop",
            "engine=hf_static",
            f"engine.host.launch_s={LOOP_LAUNCH_S * EAGER_KERNELS / LOOP_KERNELS:.6g}",
            why=(
                "Bound by the host: the text's 39 ms are 19 us for each of some 2,000 launches, of which "
                "Spec-Bench's loop takes 17. With engine=hf_static as it is, it would be 46 tokens/s."
            ),
        ),
        _step(
            "gpt_fast_compiled",
            "Llama-2-7B, A100: torch.compile",
            107.0,
            "engine=vllm (CUDA graphs)",
            "engine=vllm",
            why=(
                "The text's limit of 330 W is not modelled: by our power model this decode takes 175 W, so "
                "that it would not bind."
            ),
        ),
        _step(
            "gpt_fast_int8",
            "Llama-2-7B, A100: torch.compile and int8 weights",
            157.4,
            "model.weights=int8_wo",
            "engine=vllm",
            "model.weights=int8_wo",
        ),
        _step(
            "gpt_fast_int4",
            "Llama-2-7B, A100: torch.compile and int4 weights",
            202.1,
            "model.weights=int4_wo",
            "engine=vllm",
            INT4,
            why="Its scales are for 32 weights, ours for 128, and its int4 kernels reach 863 GB/s (README).",
        ),
        Row(
            name="gpt_fast_speculation",
            claim="Llama-2-7B, A100: int4 weights and speculative decoding",
            published=(244.7, 244.7),
            unit="tokens/s",
            source=GPT_FAST,
            setting="draft of 1 B parameters in int4, 4 tokens, acceptance 0.6 (assumed: not published)",
            ours=Computed(function=speculative_speed),
        ),
        _mbu("mbu_a100", "four A100 40GB", 55, "a100_40gb_sxm", 4),
        _mbu("mbu_h100", "two H100", 60, "h100_sxm", 2),
        Row(
            name="a100_eight",
            claim="Llama-2-70B: time of a token on eight A100 40GB over four, small batches",
            published=(0.7, 0.7),
            unit="times",
            source=DATABRICKS,
            setting="engine=vllm, batch 1, 512 tokens",
            ours=Computed(function=lambda: tpot_s("a100_40gb_sxm", 8) / tpot_s("a100_40gb_sxm", 4)),
        ),
        _lower(
            FEW,
            36,
            differs=True,
            why=(
                "The bandwidth, 2.15 times as much, gives 53 %, as the text has at batch 16. At batch 1 the "
                "text's H100 reach only 0.73 of the MBU of its A100, which it does not explain; here both "
                "reach the same MBU."
            ),
        ),
        _lower(16, 52),
        Row(
            name="gaudi2_latency",
            claim="Llama-2-70B: time of a token on eight Gaudi 2 over eight H100: they match",
            published=(1, 1),
            unit="times",
            source=GAUDI,
            setting="engine=vllm, batch 1, 512 tokens",
            ours=Computed(function=lambda: tpot_s("gaudi2", 8) / tpot_s("h100_sxm", 8)),
            why="Gaudi 2 has 0.73 of the bandwidth, so the text's H100 reach a lower MBU; ours do not.",
        ),
        _fall("mbu_users_a100", "A100 80GB", "a100_80gb_sxm"),
        _fall("mbu_users_h100", "H100", "h100_sxm"),
        _fall("mbu_users_gaudi2", "Gaudi 2", "gaudi2"),
    ),
)
