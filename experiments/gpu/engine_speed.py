"""Measures the engine's speed with random weights: decode, prefill, idle gaps, and a public workload.

Shares are relative to the limits that this run has measured. MBU: the bytes that a decode step must read
(weights once, each sequence's KV once), divided by its time and the measured read bandwidth. MFU: the FLOPs
of a prompt, divided by its time and the measured bf16 GEMM rate.
"""

from __future__ import annotations

import statistics
import time
from functools import partial
from typing import Any

from experiments.calibrate.engine.timing import synchronize
from experiments.gpu.decoding import Decoding
from experiments.gpu.engine_models import (
    LLAMA_8B,
    QWEN3_0_6B,
    TINY,
    Request,
    kv_token_bytes,
    params_of,
    prefill_flops,
    public_workload,
    random_requests,
    read_once_bytes,
    served,
)
from experiments.gpu.gaps import idle_between_steps
from experiments.gpu.limits import Limits
from experiments.gpu.record import Record, Row
from policies.batching.chunked import Chunked
from realengine.model.architecture import Architecture
from realengine.serving.llm import LLM

ITEM_BYTES = 2
MODELS = {"engine_llama_8b": LLAMA_8B, "engine_qwen3_0_6b": QWEN3_0_6B}
TARGETS = {"decode_batch1": 0.80, "decode_batch64": 0.75, "prefill": 0.60}
GAP_TARGET_S = 100e-6
MAX_MODEL_LEN = 8448
PROMPT = 8192
STEPS = 64  # steps over which a decode rate is measured
PROFILED = 12


def run(record: Record) -> None:
    """Measures all rows of a model on one engine."""
    limits = Limits.of(record.folder)
    spec = TINY if record.quick else MODELS[record.name]
    aims = TARGETS if record.name == "engine_llama_8b" else {}
    settings: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 4, "num_kv_blocks": 200}
    if not record.quick:
        settings = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 256, "dtype": "bfloat16"}
    settings["batching"] = Chunked(max_num_batched_tokens=256 if record.quick else PROMPT)
    begin = time.perf_counter()
    with served(spec, record.device, **settings) as llm:
        built_s = time.perf_counter() - begin
        record.measure(
            "build",
            lambda: {"seconds": built_s, "said": f"{built_s:.1f} s including weights and CUDA graphs"},
        )
        sizes = ((1, 20), (3, 24)) if record.quick else ((1, 128), (64, 960))
        for num_seqs, prompt_len in sizes:
            record.measure(
                f"decode_batch{num_seqs}",
                partial(_decode, record, llm, spec, num_seqs, prompt_len, limits, aims),
            )
        length = 64 if record.quick else PROMPT
        record.measure("prefill", lambda: _prefill(record, llm, spec, length, limits, aims))
        record.measure("public_workload", lambda: _workload(record, llm, 4 if record.quick else 256))


def _decode(
    record: Record,
    llm: LLM,
    spec: Architecture,
    num_seqs: int,
    prompt_len: int,
    limits: Limits,
    aims: dict[str, float],
) -> dict[str, Any]:
    """Measures the time of a step in which all sequences decode, and the device's idle time between steps."""
    steps = 4 if record.quick else STEPS
    requests = random_requests(
        record.seed, num_seqs, (prompt_len, prompt_len), 3 * steps + 2 * PROFILED, spec.vocab_size
    )
    decoding = Decoding(llm, requests)
    rate = decoding.tokens_per_s(steps, record.device)
    idle = idle_between_steps(llm.engine.step, 2 if record.quick else PROFILED, record.device)
    decoding.abort()
    context = prompt_len + 1.5 * steps
    step_s = num_seqs / rate
    moved = read_once_bytes(spec, ITEM_BYTES) + num_seqs * context * kv_token_bytes(spec, ITEM_BYTES)
    share = moved / step_s / limits.read_bytes_per_s if limits.read_bytes_per_s else None
    row: dict[str, Any] = {
        "num_seqs": num_seqs,
        "mean_context": context,
        "step_s": step_s,
        "tokens_per_s": rate,
        "bytes_per_step": moved,
        "mbu": share,
        "idle": None if idle is None else idle._asdict(),
    }
    summary = f"{step_s * 1e3:.3f} ms per step, {rate:.0f} output tokens/s, "
    summary += "bandwidth not measured" if share is None else f"MBU {share:.2f}"
    row |= _judged(share, aims.get(f"decode_batch{num_seqs}"))
    if idle is not None:
        row["gap_target_s"], row["gap_met"] = GAP_TARGET_S, idle.gap_s <= GAP_TARGET_S
        summary += f", gap between steps {idle.gap_s * 1e6:.0f} us (target {GAP_TARGET_S * 1e6:.0f})"
    return row | {"said": summary + _verdict(row)}


def _prefill(
    record: Record, llm: LLM, spec: Architecture, length: int, limits: Limits, aims: dict[str, float]
) -> dict[str, Any]:
    """Measures the time to the first token of a prompt that is not cached, with no other request running."""
    times = []
    for i in range(2 if record.quick else 6):
        (request,) = random_requests(record.seed + i + 1, 1, (length, length), 1, spec.vocab_size)
        synchronize(record.device)
        begin = time.perf_counter()
        (output,) = llm.generate([request.prompt], [params_of(request)])
        synchronize(record.device)
        times.append(time.perf_counter() - begin)
        if output.error is not None:
            raise RuntimeError(f"the request ended with an error: {output.error}")
    seconds = statistics.median(times[1:])
    flops = prefill_flops(spec, length)
    share = flops / seconds / limits.bf16_flops_per_s if limits.bf16_flops_per_s else None
    row: dict[str, Any] = {
        "num_tokens": length,
        "seconds": seconds,
        "times_s": times,
        "flops": flops,
        "mfu": share,
    }
    row |= _judged(share, aims.get("prefill"))
    summary = f"{seconds * 1e3:.1f} ms for {length} tokens, "
    summary += "GEMM rate not measured" if share is None else f"MFU {share:.2f}"
    return row | {"said": summary + _verdict(row)}


def _workload(record: Record, llm: LLM, num_requests: int) -> dict[str, Any]:
    """Measures the throughput of nano-vllm's requests at its temperature; all arrive at the start."""
    requests = public_workload(num_requests)
    if record.quick:
        requests = [Request([token % 512 for token in r.prompt[:30]], 5) for r in requests]
    return throughput(record, llm, requests, temperature=0.6)


def throughput(record: Record, llm: LLM, requests: list[Request], **params: Any) -> dict[str, Any]:
    """Measures the output tokens/s of all requests together; the time includes their prefill."""
    synchronize(record.device)
    begin = time.perf_counter()
    outputs = llm.generate([r.prompt for r in requests], [params_of(r, **params) for r in requests])
    synchronize(record.device)
    seconds = time.perf_counter() - begin
    failed = next((output.error for output in outputs if output.error is not None), None)
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    wanted = sum(request.num_output_tokens for request in requests)
    return {
        "num_requests": len(requests),
        "num_prompt_tokens": sum(len(request.prompt) for request in requests),
        "num_output_tokens": num_tokens,
        "seconds": seconds,
        "output_tokens_per_s": num_tokens / seconds,
        "ok": failed is None and num_tokens == wanted,
        "why": failed or f"{num_tokens} of {wanted} output tokens",
        "said": f"{num_tokens / seconds:.0f} output tokens/s ({len(requests)} requests in {seconds:.1f} s)",
    }


def _judged(share: float | None, at_least: float | None) -> Row:
    if at_least is None or share is None:
        return {}
    return {"target": at_least, "reached": share, "met": share >= at_least}


def _verdict(row: Row) -> str:
    return f"; target {row['target']:.2f}: {'met' if row['met'] else 'NOT met'}" if "target" in row else ""
