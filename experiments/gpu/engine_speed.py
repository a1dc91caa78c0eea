"""Measures the engine with random weights: start, decode, prefill, host time, and workloads.

Shares are relative to the limits of the same run. MBU: the bytes that a decode step must read (weights once,
each sequence's KV once), divided by its time and the measured read bandwidth. MFU: the FLOPs of a prompt,
divided by its time and the measured rate of a bf16 product. The host launches a mixed step kernel by kernel,
or in pieces.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch.profiler import ProfilerActivity, profile

from experiments.calibrate.engine.timing import input_sets, synchronize, timed
from experiments.gpu.engine_correct import BACKENDS
from experiments.gpu.engine_models import (
    EXPERTS,
    LLAMA_1B,
    LLAMA_8B,
    QWEN3_0_6B,
    TINY,
    Engine,
    Request,
    kv_token_bytes,
    params_of,
    prefill_flops,
    public_workload,
    random_requests,
    read_once_bytes,
    setup,
)
from experiments.gpu.measurement import Measurement, Run, UnavailableError
from experiments.gpu.targets import VLLM_H200_S, VLLM_SIZES
from kernels.launch import target
from kernels.prefill_attention import prefill_case
from kernels.prefill_hopper import hopper_case
from policies.batching.chunked import Chunked
from realengine.ahead.setups import MODELS
from realengine.model.architecture import Architecture
from realengine.model.lora_adapter import Adapter, LowRank, linear_layers

ITEM_BYTES = 2
LONG = 32_768
PROFILED = 12
MOST_KERNELS = 16
RANK, ADAPTERS = 16, [f"adapter{i}" for i in range(4)]
PLAIN = "bf16"
DRAFTS = {"num_speculative_tokens": 4}
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    PLAIN: {},
    "w4a16": {"quantization": "w4a16"},
    "fp8": {"quantization": "fp8"},
    "fp8_kv": {"kv_cache_dtype": "fp8"},
    "lora": {},
    "draft_model": {},
    "experts_w8a16": {"quantization": "w8a16"},
    "w8a16": {"quantization": "w8a16"},
    "int8": {"quantization": "int8"},
    **{name: {"attention_backend": name} for name in BACKENDS},
}


def smoke(run: Run) -> list[Measurement]:
    """Returns the table of the smallest run of an engine as it is served by default, with CUDA graphs."""
    engine = _engine(run, QWEN3_0_6B, max_model_len=2048, max_num_seqs=16, num_kv_blocks=2048)
    return [
        Measurement("start", _start, engine),
        Measurement("16_requests", partial(_throughput, _of_lengths([100] * 16, 64)), engine),
        Measurement("sampled", partial(_throughput, _of_lengths([30] * 16, 16), temperature=0.8), engine),
    ]


def llama_8b(run: Run) -> list[Measurement]:
    """Returns the table of Llama-3.1-8B's sizes."""
    batching, lengths = Chunked(max_num_batched_tokens=8192), {1: 128, 64: 960, 16: 960, 256: 512}
    sizes = {"max_model_len": LONG + 1024, "max_num_seqs": 256, "batching": batching}
    engine = _engine(run, LLAMA_8B, **sizes)
    hopper = _engine(run, LLAMA_8B, **sizes, attention_backend="triton_hopper")
    return [
        Measurement("start", _start, engine),
        *(Measurement(f"decode_batch{n}", partial(_decode, [k] * n), engine) for n, k in lengths.items()),
        Measurement("prefill_8192", partial(_prefill, 8192), engine),
        Measurement("prefill_2048", partial(_prefill, 2048), engine),
        Measurement("vllm_latency", _vllm_latency, engine),
        Measurement("decode_context32k", partial(_decode, [LONG]), engine),
        Measurement("prefill_32768", partial(_prefill, LONG), engine),
        Measurement("host_batch64", partial(_decode_steps, 64), engine),
        Measurement("host_batch256", partial(_decode_steps, 256), engine),
        Measurement("mixed_step_64_decodes", partial(_mixed_steps, 64), engine),
        Measurement("idle_batch1", partial(_idle, 1), engine, 40.0),
        Measurement("idle_batch64", partial(_idle, 64), engine, 40.0),
        Measurement("idle_batch256", partial(_idle, 256), engine, 40.0),
        Measurement("public_workload", partial(_throughput, _public, temperature=0.6), engine, 40.0),
        *(Measurement(f"attention_{n}", partial(_attention, n)) for n in (8192, 2048, 4096, 16384, LONG)),
        Measurement("hopper/start", _start, hopper),
        *(Measurement(f"hopper/prefill_{n}", partial(_prefill, n), hopper) for n in (8192, LONG)),
    ]


def variants(run: Run) -> list[Measurement]:
    """Returns the table of quantised weights and KV, experts, adapters and drafts, beside plain bf16."""
    found = []
    for name, own in VARIANTS.items():
        has_experts = name.startswith("experts")
        spec = MODELS["qwen3-30b-a3b"] if has_experts else LLAMA_8B
        if run.rehearse:
            spec = replace(TINY, model_type="qwen3_moe", qk_norm=True, **EXPERTS) if has_experts else TINY
        settings = {"max_model_len": 8448, "max_num_seqs": 64, "num_kv_blocks": 4800, **own}
        if name == "lora":
            settings["lora_adapters"] = {each: random_adapter(spec, i) for i, each in enumerate(ADAPTERS)}
        if name == "draft_model":
            draft = run.size(LLAMA_1B, replace(TINY, num_layers=1))
            settings["speculative_config"] = {**DRAFTS, "method": "draft_model", "model": draft}
        engine = _engine(run, spec, **settings)
        found.append(Measurement(f"{name}/start", _start, engine))
        found += [Measurement(f"{name}/batch{n}", partial(_beside_plain, name, n), engine) for n in (64, 1)]
        if "attention_backend" in own:
            found.append(Measurement(f"{name}/prefill_8192", partial(_prefill, 8192), engine))
    return found


def _engine(run: Run, spec: Architecture, **settings: Any) -> Callable[[Run], Any]:
    """Returns the set-up of an engine; in a rehearsal, that of a tiny model."""
    if not run.rehearse:
        return setup(spec, **settings, dtype="bfloat16")
    small = {"max_model_len": 256, "max_num_seqs": 8, "num_kv_blocks": 200, "backend": "triton"}
    if "batching" in settings:
        small["batching"] = Chunked(max_num_batched_tokens=64)
    has_experts = spec.num_experts > 0
    sizes = ("max_model_len", "max_num_seqs", "num_kv_blocks", "batching")
    kept = {key: value for key, value in settings.items() if key not in sizes}
    if settings.get("quantization") == "fp8" or settings.get("kv_cache_dtype") == "fp8":
        kept = {}  # interpreted kernels do not round to fp8 as chips do
    small["dtype"] = "float16" if has_experts or kept else "float32"
    return setup(spec if has_experts else TINY, **small, **kept)


def _start(run: Run, engine: Engine) -> Mapping[str, Any]:
    return {"seconds": engine.seconds, "parts_s": engine.llm.engine.start_s}


class Decoding:
    """Requests that one engine decodes together. loras: adapters that they use in turn."""

    def __init__(self, engine: Engine, requests: Sequence[Request], loras: Sequence[str] = ()) -> None:
        self.engine = engine.llm.engine
        self._answers = [
            self.engine.add(request.prompt, params_of(request), lora=loras[i % len(loras)] if loras else None)
            for i, request in enumerate(requests)
        ]
        self._check()

    def _check(self) -> None:
        failed = next((answer.error for answer in self._answers if answer.error is not None), None)
        if failed is not None:
            raise RuntimeError(f"a request ended with an error: {failed}")

    @property
    def num_tokens(self) -> int:
        """Output tokens so far, over all requests."""
        return sum(len(answer.outputs[0].tokens) for answer in self._answers)

    def until(self, num_tokens: int) -> None:
        """Runs engine steps until each request has num_tokens output tokens."""
        while any(len(answer.outputs[0].tokens) < num_tokens for answer in self._answers):
            self.engine.step()
            self._check()

    def tokens_per_s(self, steps: int, device: torch.device) -> float:
        """Measures output tokens/s while each request gets `steps` tokens, after as many to warm up."""
        self.until(steps)  # prompts computed, graphs warm
        synchronize(device)
        tokens, begin = self.num_tokens, time.perf_counter()
        self.until(2 * steps)
        synchronize(device)
        return (self.num_tokens - tokens) / (time.perf_counter() - begin)

    def abort(self) -> None:
        """Aborts the requests and runs one step, after which the engine is empty."""
        for answer in self._answers:
            self.engine.abort(answer.request_id)
        self.engine.step()


@contextmanager
def _decoding(
    run: Run, engine: Engine, lengths: Sequence[int], num_output: int, loras: Sequence[str] = ()
) -> Iterator[Decoding]:
    """Yields requests with random prompts of these lengths, in a rehearsal of a few short ones."""
    lengths = run.size(lengths, [min(n // 64 + 4, 100) for n in lengths[:3]])
    decoding = Decoding(engine, random_requests(run.seed, lengths, num_output, engine.spec.vocab_size), loras)
    try:
        yield decoding
    finally:
        decoding.abort()


def _decode(lengths: Sequence[int], run: Run, engine: Engine, loras: Sequence[str] = ()) -> Mapping[str, Any]:
    """Measures the time of a step in which sequences of these prompt lengths decode."""
    steps, spec = run.size(64 if len(lengths) < 100 else 40, 3), engine.spec
    lengths = run.size(lengths, [min(n // 64 + 4, 100) for n in lengths[:3]])
    # Requests that are computed first go on while others wait for their prompts.
    spare = len(lengths) + sum(lengths) // 1024
    with _decoding(run, engine, lengths, 2 * steps + spare + 8, loras) as decoding:
        rate = decoding.tokens_per_s(steps, run.device)
    step_s, context = len(lengths) / rate, sum(lengths) + 1.5 * steps * len(lengths)
    moved = read_once_bytes(spec, ITEM_BYTES) + context * kv_token_bytes(spec, ITEM_BYTES)
    return {
        "num_seqs": len(lengths),
        "num_context_tokens": context,
        "step_s": step_s,
        "tokens_per_s": rate,
        "bytes_per_step": moved,
        "mbu": run.share(moved / step_s, "read"),
    }


def _beside_plain(name: str, batch: int, run: Run, engine: Engine) -> Mapping[str, Any]:
    """Measures a decode, and its speed relative to the dense model in bf16.

    Random weights accept next to no draft, so with drafts it is the inverse of the price of a pass.
    """
    row = {**_decode([512] * batch, run, engine, ADAPTERS if name == "lora" else ())}
    del row["mbu"]  # of quantised weights it would be another one
    plain = run.row("variants", f"{PLAIN}/batch{batch}")
    return row | ({"speed_up": row["tokens_per_s"] / plain["tokens_per_s"]} if plain else {})


def _idle(batch: int, run: Run, engine: Engine) -> Mapping[str, Any]:
    """Profiles decode steps; returns the device's seconds per step with a kernel and without, and the gaps.

    gap_s: median of the largest gaps, as many as lie between steps. kernels: calls and seconds per step of
    the kernels that take longest.
    """
    steps = run.size(PROFILED, 2)
    on_gpu = run.device.type == "cuda"
    with _decoding(run, engine, [512] * batch, 8 * steps + batch) as decoding:
        decoding.until(3)
        with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
            for _ in range(steps):
                decoding.engine.step()
            synchronize(run.device)
    events = [each for each in profiler.events() or () if not on_gpu or each.device_type.name == "CUDA"]
    if not events:
        raise UnavailableError("the profiler recorded nothing")
    seen = [(each.name, each.time_range.start / 1e6, each.time_range.end / 1e6) for each in events]
    return {**idle_of([(a, b) for _, a, b in seen], steps), "kernels": kernels_of(seen, steps)}


def kernels_of(seen: Sequence[tuple[str, float, float]], num_steps: int) -> dict[str, list[float]]:
    """Returns calls and seconds per step by name, from (name, begin, end) of everything that ran."""
    found: dict[str, list[float]] = {}
    for name, begin, end in seen:
        sums = found.setdefault(name[:120], [0.0, 0.0])
        sums[0] += 1 / num_steps
        sums[1] += (end - begin) / num_steps
    return dict(sorted(found.items(), key=lambda item: -item[1][1])[:MOST_KERNELS])


def idle_of(seen: Sequence[tuple[float, float]], num_steps: int) -> dict[str, float]:
    """Computes the idle time from the (begin, end) intervals of everything that ran, which may overlap."""
    ordered = sorted(seen)
    gaps, busy = list[float](), 0.0
    first, end = ordered[0]
    for begin, until in ordered[1:]:
        if begin > end:
            gaps.append(begin - end)
            busy += end - first
            first = begin
        end = max(end, until)
    busy += end - first
    largest = sorted(gaps, reverse=True)[: max(num_steps - 1, 1)]
    gap_s, idle = statistics.median(largest or [0.0]), sum(gaps)
    return {"gap_s": gap_s, "busy_s": busy / num_steps, "idle_s": idle / num_steps}


def _prefill(length: int, run: Run, engine: Engine) -> Mapping[str, Any]:
    """Measures the time to the first token of a prompt that is not cached, with no other request running."""
    times, length = [], run.size(length, 40)
    for i in range(run.size(3 if length > 8192 else 5, 2)):
        requests = random_requests(run.seed + i + 1, [length], 1, engine.spec.vocab_size)
        synchronize(run.device)
        begin = time.perf_counter()
        engine.generate(requests)
        synchronize(run.device)
        times.append(time.perf_counter() - begin)
    seconds, flops = statistics.median(times[1:]), prefill_flops(engine.spec, length)
    share = run.share(flops / seconds, "bf16")
    return {"num_tokens": length, "seconds": seconds, "times_s": times, "flops": flops, "mfu": share}


def _attention(length: int, run: Run, _: None) -> Mapping[str, Any]:
    """Times the attention of a whole prompt in one layer; FLOPs count the causal half only.

    hopper: the same by `kernels.prefill_hopper`, where the chip has it.
    """
    length = run.size(length, 24)
    case = prefill_case("llama_8b", 1, length, length, torch.bfloat16)
    found = timed(input_sets(case.make, run.device, case.bytes_moved), run.device)
    row = found.row() | {"bf16_share": run.share(case.flops / found.median_s, "bf16")}
    if target() != "sm_90":
        return row
    other = hopper_case("llama_8b", 1, length, length, torch.bfloat16, 16)
    hopper_s = timed(input_sets(other.make, run.device, other.bytes_moved), run.device).median_s
    return row | {"hopper_s": hopper_s, "hopper_share": run.share(case.flops / hopper_s, "bf16")}


def _vllm_latency(run: Run, engine: Engine) -> Mapping[str, Any]:
    """Measures the latency test of vLLM's published benchmark; its ratio is known for an H200 only."""
    batch, length, num_output = run.size(VLLM_SIZES, (2, 8, 3))
    times = []
    for i in range(run.size(4, 2)):
        requests = random_requests(run.seed + i, [length] * batch, num_output, engine.spec.vocab_size)
        begin = time.perf_counter()
        engine.generate(requests)
        times.append(time.perf_counter() - begin)
    seconds = statistics.median(times[1:])
    row = {"seconds": seconds, "output_tokens_per_s": batch * num_output / seconds}
    is_same = run.device.type == "cuda" and "H200" in torch.cuda.get_device_name(run.device)
    return row | ({"published_s": VLLM_H200_S, "ratio": VLLM_H200_S / seconds} if is_same else {})


def _of_lengths(lengths: Sequence[int], num_output: int) -> Callable[[Run, Architecture], list[Request]]:
    def requests(run: Run, spec: Architecture) -> list[Request]:
        small = run.size(lengths, [n // 10 + 1 for n in lengths[:3]])
        return random_requests(run.seed, small, run.size(num_output, 3), spec.vocab_size)

    return requests


def _public(run: Run, spec: Architecture) -> list[Request]:
    if not run.rehearse:
        return public_workload()
    return [Request([token % spec.vocab_size for token in r.prompt[:30]], 3) for r in public_workload(3)]


def _throughput(
    requests_of: Callable[[Run, Architecture], list[Request]], run: Run, engine: Engine, **params: Any
) -> Mapping[str, Any]:
    return throughput(run, engine, requests_of(run, engine.spec), **params)


def throughput(run: Run, engine: Engine, requests: list[Request], **params: Any) -> dict[str, Any]:
    """Measures the output tokens/s of all requests together; the time includes their prefill."""
    synchronize(run.device)
    begin = time.perf_counter()
    outputs = engine.generate(requests, **params)
    synchronize(run.device)
    seconds = time.perf_counter() - begin
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    wanted = sum(request.num_output_tokens for request in requests)
    return {
        "num_requests": len(requests),
        "num_prompt_tokens": sum(len(request.prompt) for request in requests),
        "num_output_tokens": num_tokens,
        "seconds": seconds,
        "output_tokens_per_s": num_tokens / seconds,
        "ok": num_tokens == wanted,
        "why": "" if num_tokens == wanted else f"{num_tokens} of {wanted} output tokens",
    }


def _timed_steps(run: Run, engine: Engine, num_steps: int) -> dict[str, Any]:
    """Times steps and their launches."""
    serving = engine.llm.engine
    runner, host_s, step_s = serving.runner, list[float](), list[float]()
    launch = runner.launch

    def timed_launch(*given: Any) -> Any:
        begin = time.perf_counter()
        launched = launch(*given)
        host_s.append(time.perf_counter() - begin)
        return launched

    with patch.object(runner, "launch", timed_launch):
        for _ in range(num_steps):
            synchronize(run.device)
            begin = time.perf_counter()
            serving.step()
            synchronize(run.device)
            step_s.append(time.perf_counter() - begin)
    return {"step_s": statistics.median(step_s), "launch_host_s": statistics.median(host_s)}


def _decode_steps(batch: int, run: Run, engine: Engine) -> Mapping[str, Any]:
    """Measures decode steps one by one, and the host time to launch each; they do not overlap."""
    with _decoding(run, engine, [128] * batch, 100 + batch) as decoding:
        decoding.until(2)
        return _timed_steps(run, engine, run.size(30, 2))


def _mixed_steps(num_decodes: int, run: Run, engine: Engine) -> Mapping[str, Any]:
    """Measures steps that compute a part of a long prompt beside decodes, and the host time of each."""
    num_steps, length = run.size((3, LONG - 4096), (2, 150))
    with _decoding(run, engine, [16] * num_decodes, 20 * num_steps) as decoding:
        decoding.until(2)
        prompt = Decoding(engine, random_requests(run.seed, [length], 1, engine.spec.vocab_size))
        row = _timed_steps(run, engine, num_steps)
        prompt.abort()
    return row


def random_adapter(spec: Architecture, seed: int) -> Adapter:
    """Returns a LoRA adapter of all linear layers, with random weights that layers of one shape share."""
    generator, made = torch.Generator().manual_seed(seed), dict[tuple[int, ...], LowRank]()
    for part in linear_layers(spec).values():
        num_out, num_in = shape = tuple(part.shape)
        if shape not in made:
            a_RK = torch.randn(RANK, num_in, generator=generator) * num_in**-0.5
            made[shape] = LowRank(a_RK, torch.randn(num_out, RANK, generator=generator) * 0.01)
    layers = {name: made[tuple(part.shape)] for name, part in linear_layers(spec).items()}
    return Adapter(scaling=1.0, layers=layers)
