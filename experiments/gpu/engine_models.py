"""Models with random weights on which the engine is checked and measured, and the requests that it serves."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from experiments.gpu.measurement import Run, UnavailableError, free
from realengine.ahead.setups import MODELS
from realengine.model.architecture import Architecture
from realengine.model.variants import GemmaParts, GptOssParts, LatentSizes
from realengine.serving.llm import LLM
from realengine.serving.sampling_params import SamplingParams

LLAMA_8B, LLAMA_1B, QWEN3_0_6B = (MODELS[name] for name in ("llama-3.1-8b", "llama-3.2-1b", "qwen3-0.6b"))
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
SMALL = replace(
    TINY,
    vocab_size=4096,
    hidden_size=512,
    num_layers=4,
    num_heads=8,
    head_dim=64,
    intermediate_size=1024,
    max_position_embeddings=4096,
)
EXPERTS: Mapping[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}
LATENT = LatentSizes(query_rank=None, rank=512, nope_dim=128, rope_dim=64, value_dim=128, scale=192**-0.5)
WINDOW = {"sliding_window": 48, "full_attention_layers": (1,)}
KINDS: Mapping[str, Mapping[str, Any]] = {
    "full": {"model_type": "qwen3", "qk_norm": True},
    "window": {"model_type": "mistral", "sliding_window": 48},
    "sinks": {
        "model_type": "gpt_oss",
        "qkv_bias": True,
        "gpt_oss": GptOssParts(alpha=1.702, limit=7.0, is_packed=False),
        **WINDOW,
        **EXPERTS,
    },
    "softcap": {
        "model_type": "gemma2",
        "tie_word_embeddings": True,
        "gemma": GemmaParts(
            query_scale=0.125, attention_softcap=50.0, logits_softcap=30.0, local_rope_theta=None
        ),
        **WINDOW,
    },
    "alibi": {"model_type": "baichuan", "alibi": True, "fused_qkv": True},
    "latent": {"model_type": "deepseek_v2", "head_dim": 192, "latent": LATENT},
    "experts": {"model_type": "qwen3_moe", "qk_norm": True, **EXPERTS},
}
"""What the models of every kind of attention have beside the sizes of SMALL."""


def model_of(kind: str, run: Run) -> Architecture:
    """Returns the model of a kind of attention."""
    base, own = run.size(SMALL, TINY), KINDS[kind]
    if "latent" in own or "alibi" in own:  # as many KV heads as heads
        base = replace(base, num_kv_heads=base.num_heads)
    found: Architecture = replace(base, **own)
    return found


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
    seed: int, lengths: Sequence[int], num_output_tokens: int, vocab_size: int
) -> list[Request]:
    """Returns requests with random prompts of these lengths; no other call's prompts begin like them."""
    draw = random.Random(f"{seed} {num_output_tokens} {list(lengths)}")
    return [Request([draw.randrange(vocab_size) for _ in range(n)], num_output_tokens) for n in lengths]


def params_of(request: Request, **others: Any) -> SamplingParams:
    """Returns greedy sampling parameters that ignore EOS."""
    return SamplingParams(
        **{"temperature": 0.0, "max_tokens": request.num_output_tokens, "ignore_eos": True, **others}
    )


class Engine(NamedTuple):
    """An engine with random weights, its model, and the seconds of its start."""

    llm: LLM
    spec: Architecture
    seconds: float

    def generate(self, requests: Sequence[Request], **params: Any) -> list[Any]:
        """Serves requests together. Raises RuntimeError if one fails."""
        outputs = self.llm.generate([r.prompt for r in requests], [params_of(r, **params) for r in requests])
        failed = next((output.error for output in outputs if output.error is not None), None)
        if failed is not None:
            raise RuntimeError(f"a request ended with an error: {failed}")
        return outputs


@contextmanager
def served(spec: Architecture, settings: Mapping[str, Any], run: Run) -> Iterator[Engine]:
    """Yields an engine, and frees its memory at the end. Raises UnavailableError for an attention_backend."""
    begin = time.perf_counter()
    try:
        llm = LLM(spec, device=run.device.type, **settings)
    except ValueError as error:  # of another machine or library, which an attention_backend needs
        if not str(error).startswith("attention_backend="):
            raise
        raise UnavailableError(str(error)) from None
    engine = Engine(llm, spec, time.perf_counter() - begin)
    del llm
    try:
        yield engine
    finally:
        del engine.llm.engine
        free(run.device)


def setup(spec: Architecture, **settings: Any) -> Callable[[Run], Any]:
    """Returns the set-up of measurements that share an engine."""
    return partial(served, spec, settings)
