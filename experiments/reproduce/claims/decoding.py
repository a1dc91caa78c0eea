"""Decoding speed of one model on one GPU, step by step (gpt-fast), and MBU against the number of users."""

from __future__ import annotations

from functools import partial

from experiments.papers.published_speedups import Comparison, mean_tokens
from experiments.papers.published_speedups import Row as Draft
from experiments.papers.speculation import speedup
from experiments.reproduce.claims.built import PALM, decode, prefill
from experiments.reproduce.claims.sources import ANYSCALE_METRICS, FLASH_DECODING_PP, POPE
from experiments.reproduce.rows import Direct, Family, Kind, Row, Source

GPT_FAST = Source(
    "PyTorch's blog, Accelerating Generative AI with PyTorch II: GPT, Fast, November 2023",
    "https://pytorch.org/blog/accelerating-generative-ai-2/",
    was_read=True,
)
DATABRICKS = Source(
    "Databricks, LLM Inference Performance Engineering: Best Practices, 2023, figures 2 to 5, tables 1 and 2",
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


def _step(name: str, claim: str, published: float, setting: str, *engine: str, why: str = "") -> Row:
    return Row(
        name=name,
        kind=Kind.SIMULATED,
        claim=claim,
        published=(published, published),
        unit="tokens/s",
        source=GPT_FAST,
        setting=setting,
        ours=Direct(function=partial(speed, *engine)),
        why=why,
    )


def _mbu(name: str, chips: str, published: float, hardware: str, gpus: int) -> Row:
    return Row(
        name=name,
        kind=Kind.SIMULATED,
        claim=f"MBU of a 7B model at batch 1 on {chips}",
        published=(published, published),
        unit="%",
        source=DATABRICKS,
        setting="Llama-2-7B for MPT-7B, engine=tensorrt_llm, 512 tokens",
        ours=Direct(function=partial(small_mbu, hardware, gpus)),
    )


def _lower(batch: int, published: float, *, differs: bool = False, why: str = "") -> Row:
    return Row(
        name=f"h100_batch_{batch}",
        kind=Kind.COMPUTED,
        claim=f"Llama-2-70B: time of a token on four H100 over four A100 40GB, batch {batch}",
        published=(published, published),
        unit="% less",
        source=DATABRICKS,
        setting="engine=vllm, 512 tokens",
        ours=Direct(function=partial(lower, batch)),
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
            "engine=hf_static, engine.compilation=pytorch",
            "engine=hf_static",
            "engine.compilation=pytorch",
            why=(
                "Bound by the host: 1,966 launches of 18 us, where the text's 39 ms are 19 us each. With "
                "engine=hf_static as it is, four fused kernels' worth each, it would be 46 tokens/s."
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
            kind=Kind.SIMULATED,
            claim="Llama-2-7B, A100: int4 weights and speculative decoding",
            published=(244.7, 244.7),
            unit="tokens/s",
            source=GPT_FAST,
            setting="draft of 1 B parameters in int4, 4 tokens, acceptance 0.6 (assumed: not published)",
            ours=Direct(function=speculative_speed),
        ),
        _mbu("mbu_a100", "four A100 40GB", 55, "a100_40gb_sxm", 4),
        _mbu("mbu_h100", "two H100", 60, "h100_sxm", 2),
        Row(
            name="a100_eight",
            kind=Kind.COMPUTED,
            claim="Llama-2-70B: time of a token on eight A100 40GB over four, small batches",
            published=(0.7, 0.7),
            unit="times",
            source=DATABRICKS,
            setting="engine=vllm, batch 1, 512 tokens",
            ours=Direct(function=lambda: tpot_s("a100_40gb_sxm", 8) / tpot_s("a100_40gb_sxm", 4)),
        ),
        Row(
            name="tp_batch_1",
            kind=Kind.SIMULATED,
            claim="tensor parallelism: time of a token of a 7B model on four A100 40GB over two, batch 1",
            published=(12, 12),
            unit="% less",
            source=DATABRICKS,
            setting="Llama-2-7B for MPT-7B, engine=tensorrt_llm, 160 tokens",
            ours=Direct(function=partial(small_tpot_lower, 1)),
            differs=True,
            why=(
                "The text's engine, built on FasterTransformer, loses at batch 1 what a second pair of GPUs "
                "gains, which it puts down to communication; ours has TensorRT-LLM's host and kernels, and "
                "calibrated all-reduces. At batch 16 both agree."
            ),
        ),
        Row(
            name="tp_batch_16",
            kind=Kind.SIMULATED,
            claim="tensor parallelism: time of a token of a 7B model on four A100 40GB over two, batch 16",
            published=(33, 33),
            unit="% less",
            source=DATABRICKS,
            setting="Llama-2-7B for MPT-7B, engine=tensorrt_llm, 160 tokens",
            ours=Direct(function=partial(small_tpot_lower, 16)),
        ),
        Row(
            name="tp_prompt_2",
            kind=Kind.SIMULATED,
            claim="tensor parallelism: TTFT of a 7B model on two A100 40GB over one",
            published=(0.73, 0.73),
            unit="times",
            source=DATABRICKS,
            setting="Llama-2-7B for MPT-7B, engine=tensorrt_llm, a prompt of 512 tokens",
            ours=Direct(function=partial(small_ttft, 2)),
        ),
        Row(
            name="tp_prompt_4",
            kind=Kind.COMPUTED,
            claim="tensor parallelism: TTFT of a 7B model on four A100 40GB over one",
            published=(0.56, 0.56),
            unit="times",
            source=DATABRICKS,
            setting="Llama-2-7B for MPT-7B, engine=tensorrt_llm, a prompt of 512 tokens",
            ours=Direct(function=partial(small_ttft, 4)),
        ),
        Row(
            name="tp_prompt_70b",
            kind=Kind.COMPUTED,
            claim="tensor parallelism: TTFT of Llama-2-70B on eight A100 40GB over four",
            published=(0.74, 0.74),
            unit="times",
            source=DATABRICKS,
            setting="engine=vllm, a prompt of 512 tokens",
            ours=Direct(function=large_ttft),
        ),
        Row(
            name="batch_64",
            kind=Kind.SIMULATED,
            claim="requests/s of a 7B model on one A100 40GB with static batches of 64 over single requests",
            published=(14, 14),
            unit="times",
            source=DATABRICKS,
            setting="Llama-2-7B for MPT-7B, engine=tensorrt_llm, 512 prompt and 64 output tokens",
            ours=Direct(function=partial(batch_gain, 64)),
        ),
        Row(
            name="input_tokens",
            kind=Kind.SIMULATED,
            claim="prompt tokens that take as long as one output token, Llama-2-70B",
            published=(100, 100),
            unit="tokens",
            source=ANYSCALE_METRICS,
            setting="engine=vllm, eight A100 80GB, batch 1, prompts of 250 to 1,050 tokens (assumed)",
            ours=Direct(function=input_tokens),
            differs=True,
            why=(
                "The text measured hosted services, and neither their hardware nor their load are published. "
                "The figure follows the FLOPs per byte of the device: with four H100 it is 239. With a batch "
                "of 32 it is 162."
            ),
        ),
        Row(
            name="mfu_prefill",
            kind=Kind.SIMULATED,
            claim="MFU of the prefill of PaLM 540B on TPU v4, prompts of 2,048 tokens, large batches",
            published=(76, 76),
            unit="%",
            source=POPE,
            setting="48 TPU v4 (published: 64), 256 prompts in bf16, tensor parallelism",
            ours=Direct(function=palm_prefill_mfu),
            differs=True,
            why=(
                "The text gathers weights for large batches, in place of all-reduces of activations, and its "
                "model has attention and MLP in parallel. The simulator has neither: all-reduces take 39 % "
                "of the time, norms 15 %. Without both it would be 69 %."
            ),
        ),
        Row(
            name="flash_decoding_pp",
            kind=Kind.SIMULATED,
            claim="FlashDecoding++: decoding speed over Hugging Face's transformers, best of all settings",
            published=(4.86, 4.86),
            unit="times",
            source=FLASH_DECODING_PP,
            setting="engine=vllm over engine=hf_static, Llama-2-7B, A100, one sequence of 100 tokens",
            ours=Direct(function=over_transformers),
            differs=True,
            why=(
                "Kernels of vLLM stand for those of the text, and hf_static is transformers 4.37, 46 "
                "tokens/s on an A100. Decodes of transformers wait for the host: with the launches of "
                "gpt_fast_eager, 27 tokens/s, it would be 3.6 times. The text's 1.37 times over "
                "FlashDecoding has no row: the simulator does not tell these kernels apart."
            ),
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
            kind=Kind.SIMULATED,
            claim="Llama-2-70B: time of a token on eight Gaudi 2 over eight H100: they match",
            published=(1, 1),
            unit="times",
            source=GAUDI,
            setting="engine=vllm, batch 1, 512 tokens",
            ours=Direct(function=lambda: tpot_s("gaudi2", 8) / tpot_s("h100_sxm", 8)),
            why="Gaudi 2 has 0.73 of the bandwidth, so the text's H100 reach a lower MBU; ours do not.",
        ),
    ),
)
