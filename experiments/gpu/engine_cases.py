"""Measures the engine in cases beside the usual ones: large, long and mixed batches, mixed steps, arrivals.

The model has Llama-3.1-8B's sizes and random weights. MBU is as in `engine_speed`. A mixed step computes a
part of a prompt beside decodes; its host time is measured, too, as it is launched kernel by kernel, or in
pieces if it is short.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np

from experiments.calibrate.engine.timing import synchronize
from experiments.gpu.decoding import Decoding
from experiments.gpu.engine_models import (
    LLAMA_8B,
    TINY,
    Request,
    kv_token_bytes,
    params_of,
    random_requests,
    read_once_bytes,
    served,
)
from experiments.gpu.limits import Limits
from experiments.gpu.record import Record
from policies.batching.chunked import Chunked
from realengine.model.architecture import Architecture
from realengine.runner.piecewise import PiecewiseGraphs
from realengine.serving.llm import LLM

ITEM_BYTES = 2
STEPS = 48
LONG = 32_768
BUDGET = 2048
SHORT = 190
RATES_PER_S = (4.0, 12.0)
ONLINE_S = 12.0
"""Duration of the arrivals of an online row, s."""


def run(record: Record) -> None:
    """Measures all rows on one engine."""
    spec = TINY if record.quick else LLAMA_8B
    settings: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 8, "num_kv_blocks": 200}
    if not record.quick:
        settings = {"max_model_len": LONG + 1024, "max_num_seqs": 256, "dtype": "bfloat16"}
    limits = Limits.of(record.folder)
    settings["batching"] = Chunked(max_num_batched_tokens=64 if record.quick else BUDGET)
    lengths: dict[str, list[int]] = {
        "decode_batch256": [512] * 256,
        "decode_context32k": [LONG],
        "decode_one_long_of_64": [LONG] + [1024] * 63,
        "decode_mixed_lengths": _spread(64, 128, 8192),
    }
    if record.quick:
        lengths = {"decode_batch256": [12] * 8, "decode_one_long_of_64": [100] + [8] * 3}
    with served(spec, record.device, **settings) as llm:
        for name, prompts in lengths.items():
            record.measure(name, partial(_decode, record, llm, spec, prompts, limits))
        for num_decodes in (2,) if record.quick else (0, 64, 256):
            name = f"mixed_step_{num_decodes}_decodes"
            record.measure(name, partial(_mixed_steps, record, llm, spec, num_decodes))
        for in_pieces in (True, False):
            name = f"short_mixed_step_{'in_pieces' if in_pieces else 'by_kernel'}"
            short = partial(_short_steps, record, llm, spec, 2 if record.quick else 64, in_pieces=in_pieces)
            record.measure(name, short)
        for rate in (50.0,) if record.quick else RATES_PER_S:
            record.measure(f"online_{rate:g}_per_s", partial(_online, record, llm, spec, rate), least_s=5.0)


def _spread(num: int, least: int, most: int) -> list[int]:
    """Returns lengths whose logarithms are equally spaced from `least` to `most`."""
    return [round(least * (most / least) ** (i / (num - 1))) for i in range(num)]


def _decode(
    record: Record, llm: LLM, spec: Architecture, prompts: Sequence[int], limits: Limits
) -> dict[str, Any]:
    """Measures the time of a step in which sequences of these prompt lengths decode."""
    steps = 3 if record.quick else STEPS
    requests = _of_lengths(record, spec, prompts, 4 * steps + len(prompts) + sum(prompts) // BUDGET)
    decoding = Decoding(llm, requests)
    rate = decoding.tokens_per_s(steps, record.device)
    decoding.abort()
    step_s = len(prompts) / rate
    context = sum(prompts) + 1.5 * steps * len(prompts)
    moved = read_once_bytes(spec, ITEM_BYTES) + context * kv_token_bytes(spec, ITEM_BYTES)
    share = moved / step_s / limits.read_bytes_per_s if limits.read_bytes_per_s else None
    return {
        "num_seqs": len(prompts),
        "num_context_tokens": context,
        "step_s": step_s,
        "tokens_per_s": rate,
        "bytes_per_step": moved,
        "mbu": share,
        "said": f"{step_s * 1e3:.3f} ms per step, {rate:.0f} output tokens/s, "
        + ("bandwidth not measured" if share is None else f"MBU {share:.2f}"),
    }


def _of_lengths(record: Record, spec: Architecture, lengths: Sequence[int], num_output: int) -> list[Request]:
    return [
        random_requests(record.seed + i, 1, (length, length), num_output, spec.vocab_size)[0]
        for i, length in enumerate(lengths)
    ]


def _mixed_steps(record: Record, llm: LLM, spec: Architecture, num_decodes: int) -> dict[str, Any]:
    """Measures steps that compute a part of a prompt beside decodes: their time, and that of the host."""
    num_steps, prompt = (2, 150) if record.quick else (12, LONG - 4096)
    decoding = Decoding(llm, _of_lengths(record, spec, [16] * num_decodes, 20 * num_steps))
    if num_decodes:
        decoding.until(2)
    extra = Decoding(llm, _of_lengths(record, spec, [prompt], 1))
    row = _timed_steps(record, llm, num_steps)
    extra.abort()
    decoding.abort()
    return {
        "num_decodes": num_decodes,
        "num_chunk_tokens": (64 if record.quick else BUDGET) - num_decodes,
        **row,
    }


def _short_steps(
    record: Record, llm: LLM, spec: Architecture, num_decodes: int, *, in_pieces: bool
) -> dict[str, Any]:
    """Measures steps that compute one short prompt beside decodes, in pieces or kernel by kernel."""
    num_steps, prompt = (2, 20) if record.quick else (20, SHORT)
    decoding = Decoding(llm, _of_lengths(record, spec, [16] * num_decodes, 20 * num_steps))
    decoding.until(2)
    prompts = _of_lengths(record, spec, [prompt] * num_steps, 1)
    others = patch.object(PiecewiseGraphs, "fit", lambda *_: False)
    with nullcontext() if in_pieces else others:
        row = _timed_steps(record, llm, num_steps, prompts)
    decoding.abort()
    return {"num_decodes": num_decodes, "num_chunk_tokens": prompt, "in_pieces": in_pieces, **row}


def _timed_steps(record: Record, llm: LLM, num_steps: int, prompts: Sequence[Request] = ()) -> dict[str, Any]:
    """Times steps and their launches. prompts: one that is added before each step."""
    runner, host_s, step_s = llm.engine.runner, [], []
    launch = runner.launch

    def timed_launch(*given: Any) -> Any:
        begin = time.perf_counter()
        launched = launch(*given)
        host_s.append(time.perf_counter() - begin)
        return launched

    with patch.object(runner, "launch", timed_launch):
        for step in range(num_steps):
            if prompts:
                llm.engine.add(prompts[step].prompt, params_of(prompts[step]))
            synchronize(record.device)
            begin = time.perf_counter()
            llm.engine.step()
            synchronize(record.device)
            step_s.append(time.perf_counter() - begin)
    return {
        "step_s": statistics.median(step_s),
        "launch_host_s": statistics.median(host_s),
        "said": f"{1e3 * statistics.median(step_s):.2f} ms per step, of which the host launches for "
        f"{1e3 * statistics.median(host_s):.2f} ms",
    }


def _online(record: Record, llm: LLM, spec: Architecture, rate_per_s: float) -> dict[str, Any]:
    """Measures TTFT and ITL of requests that arrive as a Poisson process."""
    draw = random.Random(record.seed)
    duration_s, prompt, num_output = (0.2, 20, 4) if record.quick else (ONLINE_S, 1024, 128)
    arrivals = [draw.expovariate(rate_per_s)]
    while arrivals[-1] < duration_s:
        arrivals.append(arrivals[-1] + draw.expovariate(rate_per_s))
    requests = _of_lengths(record, spec, [prompt] * len(arrivals), num_output)
    seen = _serve(llm, requests, arrivals)
    wanted, found = len(requests) * num_output, seen.num_tokens
    ttft_s, itl_s = _figures(seen.ttft_s), _figures(seen.itl_s)
    return {
        "rate_per_s": rate_per_s,
        "num_requests": len(requests),
        "output_tokens_per_s": found / seen.seconds,
        "ttft_s": ttft_s,
        "itl_s": itl_s,
        "ok": found == wanted,
        "why": f"{found} of {wanted} output tokens",
        "said": ", ".join(
            f"{name} p50 {1e3 * figures['p50']:.2f}, p99 {1e3 * figures['p99']:.2f} ms"
            for name, figures in (("TTFT", ttft_s), ("ITL", itl_s))
        ),
    }


class Served(NamedTuple):
    """The latencies that the clients of an online row have seen, in s."""

    ttft_s: list[float]
    itl_s: list[float]
    num_tokens: int
    seconds: float


def _serve(llm: LLM, requests: Sequence[Request], arrivals: Sequence[float]) -> Served:
    """Serves requests, each of which arrives at its time in s from the start."""
    engine, begin = llm.engine, time.perf_counter()
    last_s: dict[int, float] = {}  # time of the last token, or of the arrival, by request id
    num_seen: dict[int, int] = {}
    ttft_s: list[float] = []
    itl_s: list[float] = []
    next_one = 0
    while next_one < len(requests) or engine.num_unfinished:
        now = time.perf_counter() - begin
        while next_one < len(requests) and arrivals[next_one] <= now:
            answer = engine.add(requests[next_one].prompt, params_of(requests[next_one]))
            last_s[answer.request_id], num_seen[answer.request_id] = arrivals[next_one], 0
            next_one += 1
        if not engine.num_unfinished:
            time.sleep(arrivals[next_one] - now)
            continue
        changed = engine.step()
        now = time.perf_counter() - begin
        for answer in changed:
            if answer.error is not None:
                raise RuntimeError(f"a request ended with an error: {answer.error}")
            before, after = num_seen[answer.request_id], len(answer.outputs[0].tokens)
            if after > before:
                (itl_s if before else ttft_s).append(now - last_s[answer.request_id])
                last_s[answer.request_id], num_seen[answer.request_id] = now, after
    return Served(ttft_s, itl_s, sum(num_seen.values()), time.perf_counter() - begin)


def _figures(values: Sequence[float]) -> dict[str, float]:
    p50, p99 = np.quantile(values, (0.5, 0.99))
    return {"p50": float(p50), "p99": float(p99), "mean": statistics.fmean(values)}
