"""Measures decoding with quantised weights and KV, a mixture of experts, and LoRA adapters.

The dense model has Llama-3.1-8B's sizes, the mixture of experts those of Qwen3-30B-A3B, with random weights.
Each row has its speed relative to the dense model in bf16, which is measured first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from experiments.gpu.decoding import Decoding
from experiments.gpu.engine_models import LLAMA_8B, TINY, random_requests
from experiments.gpu.measured_engine import measured_engine
from experiments.gpu.record import Record
from realengine.ahead.setups import MODELS
from realengine.model.architecture import Architecture
from realengine.model.lora_adapter import Adapter, LowRank, linear_layers
from realengine.serving.llm import LLM

BATCHES = (1, 64)
PROMPT, STEPS = 512, 48
RANK, NUM_ADAPTERS = 16, 4
PLAIN = "bf16"
TINY_EXPERTS = replace(
    TINY,
    model_type="qwen3_moe",
    qk_norm=True,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=64,
    norm_topk_prob=True,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """An engine to measure. num_adapters: LoRA adapters that the requests use in turn."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    has_experts: bool = False
    num_adapters: int = 0


VARIANTS: Mapping[str, Variant] = {
    PLAIN: Variant(),
    "w4a16": Variant(settings={"quantization": "w4a16"}),
    "fp8": Variant(settings={"quantization": "fp8"}),
    "fp8_kv": Variant(settings={"kv_cache_dtype": "fp8"}),
    "lora": Variant(num_adapters=NUM_ADAPTERS),
    "experts_w8a16": Variant(settings={"quantization": "w8a16"}, has_experts=True),
    "w8a16": Variant(settings={"quantization": "w8a16"}),
    "int8": Variant(settings={"quantization": "int8"}),
}
"""The most valuable ones first."""


def run(record: Record) -> None:
    """Adds the rows of each variant: how long it takes to build, and its decoding by batch."""
    plain: dict[int, float] = {}
    for name, variant in VARIANTS.items():
        dense, experts = (TINY, TINY_EXPERTS) if record.quick else (LLAMA_8B, MODELS["qwen3-30b-a3b"])
        spec = experts if variant.has_experts else dense
        loras = {f"adapter{i}": random_adapter(spec, record.seed + i) for i in range(variant.num_adapters)}
        sizes: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 4, "num_kv_blocks": 100}
        if not record.quick:
            sizes = {"max_model_len": 1024, "max_num_seqs": 64, "num_kv_blocks": 4200, "dtype": "bfloat16"}
        with measured_engine(record, name, spec, **sizes, **variant.settings, lora_adapters=loras) as llm:
            if llm is not None:
                for batch in (2,) if record.quick else BATCHES:
                    measured = partial(_decode, record, llm, spec, tuple(loras), batch)
                    row = record.measure(f"{name}/batch{batch}", partial(_beside, measured, plain.get(batch)))
                    if row is not None and name == PLAIN:
                        plain[batch] = row["tokens_per_s"]


def _beside(measured: Callable[[], dict[str, Any]], plain: float | None) -> dict[str, Any]:
    """Returns a row with its speed relative to that of the dense model in bf16, if this is known."""
    row = measured()
    if plain is None:
        return row
    speed_up = row["tokens_per_s"] / plain
    said = f"{row['said']}, {speed_up:.2f} times the dense model in bf16"
    return row | {"speed_up": speed_up, "said": said}


def _decode(
    record: Record, llm: LLM, spec: Architecture, loras: tuple[str, ...], batch: int
) -> dict[str, Any]:
    prompt, steps = (12, 3) if record.quick else (PROMPT, STEPS)
    requests = random_requests(record.seed, batch, (prompt, prompt), 3 * steps + batch, spec.vocab_size)
    decoding = Decoding(llm, requests, loras)
    rate = decoding.tokens_per_s(steps, record.device)
    decoding.abort()
    said = f"{rate:.0f} output tokens/s, {1e3 * batch / rate:.3f} ms per step"
    return {"num_seqs": batch, "tokens_per_s": rate, "step_s": batch / rate, "said": said}


def random_adapter(spec: Architecture, seed: int) -> Adapter:
    """Returns a LoRA adapter of all linear layers with random weights."""
    generator = torch.Generator().manual_seed(seed)
    layers = {}
    for name, part in linear_layers(spec).items():
        num_out, num_in = part.shape
        a_RK = torch.randn(RANK, num_in, generator=generator) * num_in**-0.5
        layers[name] = LowRank(a_RK, torch.randn(num_out, RANK, generator=generator) * 0.01)
    return Adapter(scaling=1.0, layers=layers)
