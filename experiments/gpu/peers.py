"""Peers beside our engine and kernels: torch's own kernels, and transformers' continuous batching.

SDPA reads dense KV, one sequence after the other, which is easier than paged KV. `generate_batch` of
transformers uses its SDPA attention, because its fast attention needs a package that plain images lack: it
gathers all KV and computes a dense mask over all requests, a weak baseline at large batches.
"""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from experiments.calibrate.engine.timing import input_sets, synchronize, timed
from experiments.gpu.engine_models import LLAMA_8B, QWEN3_0_6B, TINY, Request, public_workload, served
from experiments.gpu.engine_speed import throughput
from experiments.gpu.measurement import Measurement, Run, UnavailableError
from experiments.study.peer_config import peer_config
from kernels.decode_attention import decode_case
from kernels.prefill_attention import prefill_case
from realengine.model.architecture import Architecture

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
NO_KERNEL = ("No available kernel", "No viable backend")  # the words of torch's error
NUM_REQUESTS, NUM_OUTPUT_TOKENS = 64, 128
BLOCK_SIZE = 256  # transformers' default


def table(run: Run) -> list[Measurement]:
    """Returns the table of SDPA, and of both engines on the first requests of the public workload."""
    found = [
        Measurement("sdpa_prefill", partial(_sdpa, 1, 8192, 8192)),
        Measurement("sdpa_decode", partial(_sdpa, 16, 1, 4096)),
    ]
    for name in ("qwen3_0_6b", "llama_8b"):
        found.append(Measurement(f"engine_{name}", partial(_ours, name), limit_s=60.0))
        found.append(Measurement(f"transformers_{name}", partial(_theirs, name), limit_s=60.0))
    return found


def _sdpa(num_seqs: int, num_queries: int, context_len: int, run: Run, _: None) -> Mapping[str, Any]:
    """Times torch's backends and our kernel at the same sizes; ratio: our speed to the fastest one's."""
    found = {}
    num_seqs, num_queries, context_len = run.size(
        (num_seqs, num_queries, context_len), (num_seqs, min(num_queries, 24), 24)
    )
    for name, backend in BACKENDS.items():
        call = _attend(run.device, backend, num_seqs, num_queries, context_len)
        try:
            call()
            synchronize(run.device)
            found[name] = timed([call], run.device, rep_ms=100).median_s
        except RuntimeError as error:
            if not any(words in str(error) for words in NO_KERNEL):
                raise
    if not found:
        raise UnavailableError("torch has no kernel of SDPA for these inputs")
    case = prefill_case("llama_8b", num_seqs, num_queries, context_len, torch.bfloat16)
    if num_queries == 1:
        case = decode_case("llama_8b", f"batch{num_seqs}", [context_len] * num_seqs, torch.bfloat16)
    ours_s = timed(input_sets(case.make, run.device, case.bytes_moved), run.device).median_s
    return {"ours_s": ours_s, "theirs_s": found, "ratio": min(found.values()) / ours_s}


def _attend(
    device: torch.device, backend: SDPBackend, num_seqs: int, num_queries: int, context_len: int
) -> Callable[[], torch.Tensor]:
    def normal(heads: int, length: int) -> torch.Tensor:
        return torch.randn(num_seqs, heads, length, HEAD_DIM, device=device).bfloat16()

    q, k, v = normal(HEADS, num_queries), normal(KV_HEADS, context_len), normal(KV_HEADS, context_len)
    grouped = backend is not SDPBackend.EFFICIENT_ATTENTION  # the efficient backend has no grouped heads
    if not grouped:
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))

    def call() -> torch.Tensor:
        with sdpa_kernel(backend if device.type == "cuda" else SDPBackend.MATH):
            return F.scaled_dot_product_attention(q, k, v, is_causal=num_queries > 1, enable_gqa=grouped)

    return call


def _workload(name: str, run: Run) -> tuple[Architecture, list[Request]]:
    spec = TINY if run.rehearse else {"qwen3_0_6b": QWEN3_0_6B, "llama_8b": LLAMA_8B}[name]
    number, length, longest = run.size((NUM_REQUESTS, NUM_OUTPUT_TOKENS, 1024), (3, 4, 20))
    requests = public_workload()[:number]
    return spec, [
        Request([token % spec.vocab_size for token in r.prompt[:longest]], length) for r in requests
    ]


def _ours(name: str, run: Run, _: None) -> Mapping[str, Any]:
    spec, requests = _workload(name, run)
    settings = {
        "max_model_len": min(2048, spec.max_position_embeddings),
        "max_num_seqs": len(requests),
        "num_kv_blocks": sum((len(r.prompt) + r.num_output_tokens) // 16 + 2 for r in requests),
        "dtype": run.size("bfloat16", "float32"),
    }
    with served(spec, settings, run) as engine:
        throughput(run, engine, [r._replace(num_output_tokens=2) for r in requests[:2]])  # warm-up
        return throughput(run, engine, requests)


def _theirs(name: str, run: Run, _: None) -> Mapping[str, Any]:
    if importlib.util.find_spec("transformers") is None:
        raise UnavailableError("transformers is not installed here")
    spec, requests = _workload(name, run)
    model = _model(run, spec)
    _generate(model, [r._replace(num_output_tokens=2) for r in requests[:2]])
    synchronize(run.device)
    begin = time.perf_counter()
    found = _generate(model, requests)
    synchronize(run.device)
    seconds = time.perf_counter() - begin
    num_tokens = sum(len(output.generated_tokens) for output in found.values())
    wanted = sum(request.num_output_tokens for request in requests)
    ours = run.row("peers", f"engine_{name}") or {}
    row = {"seconds": seconds, "output_tokens_per_s": num_tokens / seconds, "ok": num_tokens == wanted}
    if "output_tokens_per_s" in ours:
        row["ratio"] = ours["output_tokens_per_s"] / row["output_tokens_per_s"]
    return row | {"why": "" if row["ok"] else f"{num_tokens} of {wanted} output tokens"}


def _model(run: Run, spec: Architecture) -> Any:
    """Builds transformers' model with the same sizes and random weights: the same amount of arithmetic."""
    transformers = importlib.import_module("transformers")  # optional
    kind = transformers.Qwen3Config if spec.model_type == "qwen3" else transformers.LlamaConfig
    config = peer_config(kind, spec, tie_word_embeddings=spec.tie_word_embeddings)
    dtype = run.size(torch.bfloat16, torch.float32)
    with torch.device(run.device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    model.eval()
    model.set_attn_implementation("paged|sdpa")
    return model


def _generate(model: Any, requests: list[Request]) -> Any:
    settings = importlib.import_module("transformers.generation.configuration_utils")
    # Enough blocks for all requests at once, and transformers' usual number of tokens at once.
    tokens = min(8192, sum(len(r.prompt) for r in requests) + BLOCK_SIZE)
    blocks = sum((len(r.prompt) + r.num_output_tokens) // BLOCK_SIZE + 2 for r in requests)
    config = settings.GenerationConfig(
        max_new_tokens=requests[0].num_output_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    # No torch.inference_mode: generate_batch computes in a thread of its own, which it does not cover.
    return model.generate_batch(
        [r.prompt for r in requests],
        generation_config=config,
        # Without max_batch_tokens, it is what memory allows, with a dense mask of so many rows.
        continuous_batching_config=settings.ContinuousBatchingConfig(
            num_blocks=blocks, max_batch_tokens=tokens
        ),
    )
