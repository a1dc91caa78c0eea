"""Checks the engine's greedy tokens on the device: Triton kernels, CUDA graphs and overlap against torch.

The reference is the torch backend, eager and in fp32, with the same weights and requests. In fp32 all tokens
must be equal. In bf16, rounding decides between tokens that are almost equally likely, so log-probabilities
are compared instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from experiments.gpu.engine_models import SMALL, TINY, Request, params_of, random_requests, served
from experiments.gpu.record import Record

BF16_LOGPROB = 0.05  # largest accepted mean difference of log-probabilities in bf16, in nats
VARIANTS: Mapping[str, dict[str, Any]] = {
    "kernels": {"cudagraph_mode": "NONE", "overlap": False},
    "graphs": {"cudagraph_mode": "FULL_DECODE_ONLY", "overlap": False},
    "pieces": {"cudagraph_mode": "PIECEWISE", "overlap": False},
    "overlap": {"cudagraph_mode": "NONE", "overlap": True},
    "graphs_and_overlap": {"cudagraph_mode": "FULL_AND_PIECEWISE", "overlap": True},
    "four_iterations": {"cudagraph_mode": "FULL_AND_PIECEWISE", "overlap": True, "max_iterations": 4},
    "few_blocks": {
        "cudagraph_mode": "FULL_AND_PIECEWISE",
        "overlap": True,
        "num_kv_blocks": 40,
    },  # so few that requests are preempted
}


def run(record: Record) -> None:
    """Adds one row per variant with the share of requests whose tokens all equal the reference's."""
    device, quick = record.device, record.quick
    architecture = TINY if quick else SMALL
    if quick:
        requests = random_requests(record.seed, 2, (1, 20), 3, architecture.vocab_size)
    else:
        requests = random_requests(record.seed, 24, (1, 300), 32, architecture.vocab_size)
    common: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": 512,
        "max_num_seqs": 32,
        "num_kv_blocks": 1200,
    }
    expected: list[tuple[int, ...]] = []

    def reference() -> dict[str, Any]:
        found = _tokens(record, architecture, requests, **common, backend="torch", **VARIANTS["kernels"])
        expected.extend(found)
        return {"num_requests": len(found), "num_tokens": sum(map(len, found))}

    if record.measure("reference", reference) is None or not expected:
        return
    for name, settings in VARIANTS.items():
        if device.type == "cpu" and settings["cudagraph_mode"] != "NONE":
            continue
        given = {**common, "backend": "triton", **settings}
        found = partial(_tokens, record, architecture, requests, **given)
        record.measure(f"fp32/{name}", partial(_agreement_of, expected, found))
    if device.type == "cuda":
        record.measure("bf16/logprobs", lambda: _bf16(record, requests, common))


def _agreement_of(
    expected: list[tuple[int, ...]], found: Callable[[], list[tuple[int, ...]]]
) -> dict[str, Any]:
    return agreement(expected, found())


def agreement(expected: list[tuple[int, ...]], found: list[tuple[int, ...]]) -> dict[str, Any]:
    """Returns the share of requests with equal tokens, and where the first unequal one begins to differ."""
    same = [one == other for one, other in zip(expected, found, strict=True)]
    row: dict[str, Any] = {"ok": all(same), "same_share": sum(same) / len(same)}
    if not all(same):
        request = same.index(False)
        pairs = list(zip(expected[request], found[request], strict=False))
        place = next((i for i, (one, other) in enumerate(pairs) if one != other), len(pairs))
        row["why"] = (
            f"{same.count(False)} of {len(same)} requests differ, request {request} from token {place} on"
        )
    return row


def _tokens(
    record: Record, architecture: Any, requests: list[Request], **settings: Any
) -> list[tuple[int, ...]]:
    with served(architecture, record.device, **settings) as llm:
        outputs = llm.generate([r.prompt for r in requests], [params_of(r) for r in requests])
    failed = next((output.error for output in outputs if output.error is not None), None)
    if failed is not None:
        raise RuntimeError(f"a request ended with an error: {failed}")
    return [output.outputs[0].token_ids for output in outputs]


def _bf16(record: Record, requests: list[Request], common: Mapping[str, Any]) -> dict[str, Any]:
    """Compares the first output token's log-probabilities of the torch and Triton backends in bf16."""
    found = []
    for backend in ("torch", "triton"):
        settings = {**common, "dtype": "bfloat16", "backend": backend, "cudagraph_mode": "NONE"}
        with served(SMALL, record.device, **settings) as llm:
            params = [params_of(r._replace(num_output_tokens=1), logprobs=5) for r in requests]
            outputs = llm.generate([r.prompt for r in requests], params)
        found.append([(output.outputs[0].logprobs or ())[0].top for output in outputs])
    off = [
        abs(one[token] - other[token])
        for one, other in zip(*found, strict=True)
        for token in one.keys() & other.keys()
    ]
    mean = sum(off) / max(len(off), 1)
    shared = len(off) / sum(len(one) for one in found[0])
    row = {
        "mean_difference": mean,
        "largest_difference": max(off, default=float("nan")),
        "shared_top": shared,
    }
    return row | {
        "ok": mean <= BF16_LOGPROB and shared >= 0.5,
        "why": f"mean difference {mean:.3f} nats, {shared:.0%} of the top 5 tokens shared",
    }
