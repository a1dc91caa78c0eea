"""Decoding speed of one model on one GPU, step by step (gpt-fast), and MBU against the number of users."""

from __future__ import annotations

from experiments.papers.published_speedups import Comparison, mean_tokens
from experiments.papers.published_speedups import Row as Draft
from experiments.papers.speculation import speedup
from experiments.reproduce.claims.built import PALM, decode, prefill

LLAMA = ("model=llama2_7b", "hardware=a100_80gb_sxm")
CONTEXT = 100  # the blog's prompts have 5 tokens, its outputs about 200
INT4 = "model.weights=int4_wo_g32"  # the blog: scales for 32 weights
SPECULATING = Comparison(
    name="gpt-fast",
    source="PyTorch's blog, Accelerating Generative AI with PyTorch II: GPT, Fast, November 2023",
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
        "speculation.draft.model.weights=int4_wo_g32",
    ),
    assumed="0.6 for every place",
)
FEW = 1
LARGE = ("model=llama2_70b", "engine=vllm")
PROMPT, ANSWER = 512, 64  # tokens of Databricks' requests
PALM_540B = (*PALM, "model.config.num_key_value_heads=1", "model.config.torch_dtype=bfloat16")
PROMPTS = 250, 1050  # of the slope of the prefill's time (assumed)


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


def tpot_s(hardware: str, gpus: int, batch: int = FEW) -> float:
    """Returns the seconds of a token of Llama-2-70B."""
    settings = (*LARGE, f"hardware={hardware}", f"tensor_parallel_size={gpus}")
    return decode(*settings, batch=batch, context=PROMPT).seconds


def tpot_ratio(hardware: str, gpus: int, other: str, other_gpus: int) -> float:
    """Returns the time of a token of Llama-2-70B on some GPUs over that on others."""
    return tpot_s(hardware, gpus) / tpot_s(other, other_gpus)


def lower(batch: int) -> float:
    """Returns by how many per cent a token takes less long on four H100 than on four A100 40GB."""
    return 100 * (1 - tpot_s("h100_sxm", 4, batch) / tpot_s("a100_40gb_sxm", 4, batch))


def small(hardware_gpus: int) -> tuple[str, ...]:
    """Returns the settings of the 7B model of the text on some A100 40GB."""
    engine = ("model=llama2_7b", "engine=tensorrt_llm", "hardware=a100_40gb_sxm")
    return (*engine, f"tensor_parallel_size={hardware_gpus}")


def small_tpot_lower(batch: int) -> float:
    """Returns by how many per cent a token of the 7B model takes less long on four GPUs than on two."""
    two, four = (decode(*small(gpus), batch=batch, context=160).seconds for gpus in (2, 4))
    return 100 * (1 - four / two)


def small_ttft(gpus: int) -> float:
    """Returns the time of a prompt of the 7B model on some GPUs over that on one."""
    return prefill(*small(gpus), prompt=PROMPT).seconds / prefill(*small(1), prompt=PROMPT).seconds


def large_ttft() -> float:
    """Returns the time of a prompt of Llama-2-70B on eight A100 over that on four."""
    eight, four = (
        prefill(*LARGE, "hardware=a100_40gb_sxm", f"tensor_parallel_size={gpus}", prompt=PROMPT).seconds
        for gpus in (8, 4)
    )
    return eight / four


def batch_gain(batch: int) -> float:
    """Returns the requests/s of static batches of the 7B model on one A100 over those of single requests."""

    def per_s(size: int) -> float:
        tokens_s = (ANSWER - 1) * decode(*small(1), batch=size, context=PROMPT + ANSWER // 2).seconds
        return size / (prefill(*small(1), batch=size, prompt=PROMPT).seconds + tokens_s)

    return per_s(batch) / per_s(1)


def input_tokens() -> float:
    """Returns how many further prompt tokens take as long as one output token of Llama-2-70B."""
    settings = (*LARGE, "hardware=a100_80gb_sxm", "tensor_parallel_size=8")
    short, long = PROMPTS
    more_s = prefill(*settings, prompt=long).seconds - prefill(*settings, prompt=short).seconds
    return decode(*settings, context=(short + long) // 2).seconds * (long - short) / more_s


def palm_prefill_mfu() -> float:
    """Returns the MFU of prompts of PaLM 540B, in per cent. 48 chips: its heads are not divided by 64."""
    settings = (*PALM_540B, "hardware=tpu_v4", "tensor_parallel_size=48", "engine=vllm")
    return 100 * prefill(*settings, batch=256, prompt=2048).mfu


def over_transformers() -> float:
    """Returns the decoding speed of an engine with graphs and tuned kernels over that of transformers."""
    return speed("engine=vllm") / speed("engine=hf_static")
