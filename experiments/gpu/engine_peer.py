"""Measures transformers' continuous batching (`generate_batch`) beside the engine: same sizes and requests.

It uses the SDPA attention of transformers, because its fast attention needs a package that plain images lack.
SDPA gathers all KV and computes a dense mask over all requests: a weak baseline at large batches. The row's
`baseline` says so.
"""

from __future__ import annotations

import importlib
import importlib.util
import time
from functools import partial
from typing import Any

import torch

from experiments.calibrate.engine.timing import synchronize
from experiments.gpu.engine_models import (
    LLAMA_8B,
    QWEN3_0_6B,
    TINY,
    Request,
    free,
    public_workload,
    served,
)
from experiments.gpu.engine_speed import throughput
from experiments.gpu.record import Record, UnavailableError
from experiments.study.peer_config import peer_config
from realengine.model.architecture import Architecture

AT_LEAST = 3.0
NUM_REQUESTS = 64
NUM_OUTPUT_TOKENS = 128
BLOCK_SIZE = 256  # transformers' default
BASELINE = "transformers generate_batch, paged|sdpa: a weak baseline (dense mask over all KV)"


def run(record: Record) -> None:
    """Measures both on the first requests of the public workload, all outputs of one length."""
    models = {"tiny": TINY} if record.quick else {"qwen3_0_6b": QWEN3_0_6B, "llama_8b": LLAMA_8B}
    number, length = (3, 4) if record.quick else (NUM_REQUESTS, NUM_OUTPUT_TOKENS)
    for name, spec in models.items():
        requests = [Request(r.prompt, length) for r in public_workload(256)[:number]]
        if record.quick:
            requests = [
                Request([token % spec.vocab_size for token in r.prompt[:20]], length) for r in requests
            ]
        ours = record.measure(f"{name}/engine", partial(_ours, record, spec, requests))
        theirs = record.measure(
            f"{name}/transformers",
            partial(_theirs, record, spec, requests),
            least_s=1.0 if record.quick else 25.0,
        )
        if ours is not None and theirs is not None:
            record.measure(f"{name}/ratio", partial(_ratio, ours, theirs), least_s=0.0)


def _ours(record: Record, spec: Architecture, requests: list[Request]) -> dict[str, Any]:
    longest = max(len(r.prompt) + r.num_output_tokens for r in requests)
    settings: dict[str, Any] = {
        "max_model_len": min(2048, spec.max_position_embeddings),
        "max_num_seqs": len(requests),
    }
    settings["num_kv_blocks"] = len(requests) * (longest // 16 + 2)
    if record.device.type == "cuda":
        settings["dtype"] = "bfloat16"
    with served(spec, record.device, **settings) as llm:
        throughput(record, llm, [r._replace(num_output_tokens=2) for r in requests[:2]])  # warm-up
        return throughput(record, llm, requests)


def _theirs(record: Record, spec: Architecture, requests: list[Request]) -> dict[str, Any]:
    if importlib.util.find_spec("transformers") is None:
        raise UnavailableError("transformers is not installed here")
    model = _model(record, spec)
    try:
        _generate(model, [r._replace(num_output_tokens=2) for r in requests[:2]])
        synchronize(record.device)
        begin = time.perf_counter()
        found = _generate(model, requests)
        synchronize(record.device)
        seconds = time.perf_counter() - begin
    finally:
        del model
        free(record.device)
    num_tokens = sum(len(output.generated_tokens) for output in found.values())
    wanted = sum(request.num_output_tokens for request in requests)
    return {
        "num_requests": len(requests),
        "num_output_tokens": num_tokens,
        "seconds": seconds,
        "output_tokens_per_s": num_tokens / seconds,
        "ok": num_tokens == wanted,
        "why": f"{num_tokens} of {wanted} output tokens",
        "baseline": BASELINE,
        "said": f"{num_tokens / seconds:.0f} output tokens/s; {BASELINE}",
    }


def _model(record: Record, spec: Architecture) -> Any:
    """Builds transformers' model with the same sizes and random weights: the same amount of arithmetic."""
    transformers = importlib.import_module("transformers")  # optional
    kind = transformers.Qwen3Config if spec.model_type == "qwen3" else transformers.LlamaConfig
    config = peer_config(kind, spec, tie_word_embeddings=spec.tie_word_embeddings)
    dtype = torch.bfloat16 if record.device.type == "cuda" else torch.float32
    with torch.device(record.device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    model.eval()
    model.set_attn_implementation("paged|sdpa")
    return model


def _generate(model: Any, requests: list[Request]) -> Any:
    settings = importlib.import_module("transformers.generation.configuration_utils")
    # Enough blocks for all requests at once.
    blocks = sum((len(r.prompt) + r.num_output_tokens) // BLOCK_SIZE + 2 for r in requests)
    config = settings.GenerationConfig(
        max_new_tokens=requests[0].num_output_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    # No torch.inference_mode: generate_batch computes in a thread of its own, which it does not cover.
    return model.generate_batch(
        [r.prompt for r in requests],
        generation_config=config,
        continuous_batching_config=settings.ContinuousBatchingConfig(num_blocks=blocks),
    )


def _ratio(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    times = ours["output_tokens_per_s"] / theirs["output_tokens_per_s"]
    met = times >= AT_LEAST
    summary = (
        f"{times:.1f} times transformers' throughput, target {AT_LEAST:.0f}: {'met' if met else 'NOT met'}"
    )
    return {"target": AT_LEAST, "reached": times, "met": met, "said": summary}
