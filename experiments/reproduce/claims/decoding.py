"""Decoding speed of one model on one GPU, step by step (gpt-fast), and MBU against the number of users."""

from __future__ import annotations

from functools import partial

from experiments.papers.speculation import speedup
from experiments.papers.speculation_rows import Comparison, mean_tokens
from experiments.papers.speculation_rows import Row as Draft
from experiments.reproduce.claims.built import decode
from experiments.reproduce.claims.sources import BOOK
from experiments.reproduce.rows import Computed, Family, Row, Source

GPT_FAST = Source(
    "PyTorch's blog, Accelerating Generative AI with PyTorch II: GPT, Fast, November 2023",
    "https://pytorch.org/blog/accelerating-generative-ai-2/",
    was_read=True,
)
DATABRICKS = Source(
    "Databricks, LLM Inference Performance Engineering: Best Practices, 2023, figures 2 and 3 (MPT-7B)",
    "https://www.databricks.com/blog/llm-inference-performance-engineering-best-practices",
    was_read=True,
)
LLAMA = ("model=llama2_7b", "hardware=a100_80gb_sxm")
CONTEXT = 100  # the blog's prompts have 5 tokens, its outputs about 200
INT4 = "model.weights=int4_wo"
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


def speed(*settings: str) -> float:
    """Returns the tokens/s of one sequence."""
    return decode(*LLAMA, *settings, context=CONTEXT).tokens_per_s


def speculative_speed() -> float:
    """Returns the tokens/s of one sequence with int4 weights and a small draft model."""
    return speed("engine=vllm", INT4) * speedup(SPECULATING, TINY_LLAMA)


def mbu(*settings: str, batch: int = FEW, context: int = 512) -> float:
    """Returns the share of the bandwidth with which the weights are read in a decode iteration."""
    point = decode(*settings, batch=batch, context=context)
    weights = decode(*settings, batch=1, context=1).bytes_moved
    return point.mbu * weights / point.bytes_moved


def fall(hardware: str) -> float:
    """Returns the MBU of Llama-2-70B with many users over that with one."""
    settings = ("model=llama2_70b", f"hardware={hardware}", "tensor_parallel_size=8", "engine=vllm")
    many, few = (mbu(*settings, batch=batch, context=1024) for batch in (MANY, FEW))
    return many / few


def _step(name: str, claim: str, published: float, setting: str, *engine: str, why: str = "") -> Row:
    return Row(
        name=name,
        claim=claim,
        published=(published, published),
        unit="tokens/s",
        source=GPT_FAST,
        setting=setting,
        ours=Computed(function=partial(speed, *engine)),
        differs=name == "gpt_fast_eager",
        why=why,
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
        why="The text publishes a drawing, so only the direction is compared.",
    )


FAMILY = Family(
    name="decoding",
    title="Decoding speed and bandwidth",
    rows=(
        _step(
            "gpt_fast_eager",
            "Llama-2-7B, A100: eager PyTorch",
            25.5,
            "engine=hf_static",
            "engine=hf_static",
            why=(
                "Both are bound by the host: the engine profile has the time between kernels with which "
                "Hugging Face's loop makes 40 tokens/s (Spec-Bench); gpt-fast's uncompiled code needs twice "
                "that."
            ),
        ),
        _step(
            "gpt_fast_compiled",
            "Llama-2-7B, A100: torch.compile",
            107.0,
            "engine=vllm (CUDA graphs)",
            "engine=vllm",
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
        Row(
            name="mbu_a100",
            claim="MBU of a 7B model at batch 1 on four A100 40GB",
            published=(55, 55),
            unit="%",
            source=DATABRICKS,
            setting="Llama-2-7B, engine=tensorrt_llm, 512 tokens",
            ours=Computed(
                function=lambda: (
                    100
                    * mbu(
                        "model=llama2_7b",
                        "hardware=a100_40gb_sxm",
                        "tensor_parallel_size=4",
                        "engine=tensorrt_llm",
                    )
                )
            ),
        ),
        Row(
            name="mbu_h100",
            claim="MBU of a 7B model at batch 1 on two H100",
            published=(60, 60),
            unit="%",
            source=DATABRICKS,
            setting="Llama-2-7B, engine=tensorrt_llm, 512 tokens",
            ours=Computed(
                function=lambda: (
                    100
                    * mbu(
                        "model=llama2_7b",
                        "hardware=h100_sxm",
                        "tensor_parallel_size=2",
                        "engine=tensorrt_llm",
                    )
                )
            ),
        ),
        _fall("mbu_users_a100", "A100 80GB", "a100_80gb_sxm"),
        _fall("mbu_users_h100", "H100", "h100_sxm"),
        _fall("mbu_users_gaudi2", "Gaudi 2", "gaudi2"),
    ),
)
