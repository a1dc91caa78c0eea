"""Models with random weights on which the engine is measured, and the requests that it serves."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from realengine.ahead.setups import MODELS
from realengine.model.architecture import Architecture
from realengine.serving.llm import LLM
from realengine.serving.sampling_params import SamplingParams

LLAMA_8B = MODELS["llama-3.1-8b"]
QWEN3_0_6B = MODELS["qwen3-0.6b"]
TINY = Architecture(
    model_type="llama",
    vocab_size=512,
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    intermediate_size=96,
    max_position_embeddings=512,
    rms_norm_eps=1e-5,
)
SMALL = Architecture(
    model_type="qwen3",
    vocab_size=4096,
    hidden_size=512,
    num_layers=4,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    intermediate_size=1024,
    max_position_embeddings=4096,
    rms_norm_eps=1e-6,
    qk_norm=True,
)


class Request(NamedTuple):
    """A prompt in token ids and the number of output tokens, which is served in full (EOS is ignored)."""

    prompt: list[int]
    num_output_tokens: int


def read_once_bytes(architecture: Architecture, itemsize: int) -> int:
    """Returns the bytes of weights that a decode step reads: all but the input embedding."""
    return itemsize * (layer_weights(architecture) + architecture.vocab_size * architecture.hidden_size)


def layer_weights(architecture: Architecture) -> int:
    """Returns the parameters in all blocks' linear layers; Llama-3.1-8B: 32 * 218,103,808 = 6,979,321,856."""
    spec = architecture
    attention = spec.hidden_size * spec.head_dim * (2 * spec.num_heads + 2 * spec.num_kv_heads)
    return spec.num_layers * (attention + 3 * spec.hidden_size * spec.intermediate_size)


def kv_token_bytes(architecture: Architecture, itemsize: int) -> int:
    """Returns the bytes of the keys and values of one token in all layers."""
    return 2 * architecture.num_layers * architecture.num_kv_heads * architecture.head_dim * itemsize


def prefill_flops(architecture: Architecture, num_tokens: int) -> float:
    """Returns the FLOPs of one prompt's prefill.

    Two per weight and token, four per visible (query, key) pair and head dimension, and one row of logits.
    """
    spec = architecture
    pairs = num_tokens * (num_tokens + 1) / 2
    attention = 4.0 * spec.num_layers * spec.num_heads * spec.head_dim * pairs
    return 2.0 * layer_weights(spec) * num_tokens + attention + 2.0 * spec.vocab_size * spec.hidden_size


def public_workload(num_requests: int = 256) -> list[Request]:
    """Returns nano-vllm's published workload: inputs and outputs uniform in 100 to 1,024 tokens, seed 0.

    Draws come in nano-vllm's order (all prompts, then all output lengths), so 256 requests have its 133,966
    output tokens.
    """
    draw = random.Random(0)
    prompts = [[draw.randint(0, 10000) for _ in range(draw.randint(100, 1024))] for _ in range(num_requests)]
    return [Request(prompt, draw.randint(100, 1024)) for prompt in prompts]


def random_requests(
    seed: int, num_requests: int, lengths: tuple[int, int], num_output_tokens: int, vocab_size: int
) -> list[Request]:
    """Returns requests whose prompt lengths are uniform between the two `lengths`."""
    draw = random.Random(seed)
    return [
        Request([draw.randrange(vocab_size) for _ in range(draw.randint(*lengths))], num_output_tokens)
        for _ in range(num_requests)
    ]


def params_of(request: Request, **others: Any) -> SamplingParams:
    """Returns greedy sampling parameters that ignore EOS."""
    return SamplingParams(
        **{"temperature": 0.0, "max_tokens": request.num_output_tokens, "ignore_eos": True, **others}
    )


@contextmanager
def served(architecture: Architecture, device: torch.device, **settings: Any) -> Iterator[LLM]:
    """Yields an engine with random weights, and frees its memory at the end."""
    llm = LLM(architecture, device=device.type, **settings)
    try:
        yield llm
    finally:
        del llm.engine
        free(device)


def free(device: torch.device) -> None:
    """Frees unused memory of Python and of the device's allocator."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
