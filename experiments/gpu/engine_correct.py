"""Checks the engine's greedy tokens on the device, in float32: kernels, CUDA graphs and drafts against torch.

The reference is the torch backend, eager, with the same weights and requests; all tokens must be equal. In
bf16, rounding decides between tokens that are almost equally likely, so log-probabilities are compared
instead. A draft model with the target's own weights drafts what the target draws, so that drafts are
accepted; other drafts of random weights are rejected nearly always.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from experiments.gpu.engine_models import KINDS, Request, model_of, random_requests, served
from experiments.gpu.measurement import Measurement, Run, UnavailableError
from policies.speculation.draft_lengths import Adaptive, ByBatchSize
from realengine.model.architecture import Architecture

Tokens = list[tuple[int, ...]]
LOGPROB = 0.05  # largest accepted mean difference of log-probabilities in 16 bits, in nats
TREE = [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1)]
EAGER = {"cudagraph_mode": "NONE", "overlap": False}
ALL = {"cudagraph_mode": "FULL_AND_PIECEWISE", "overlap": True}
BACKENDS = ("torch_sdpa", "torch_varlen", "flashinfer", "triton_hopper")
"""Names of attention_backend."""
WAYS: Mapping[str, Mapping[str, Any]] = {
    "graphs": ALL,
    "eager": EAGER,
    "decode_graphs": {"cudagraph_mode": "FULL_DECODE_ONLY", "overlap": False},
    "pieces": {"cudagraph_mode": "PIECEWISE", "overlap": False},
    "overlap": {"cudagraph_mode": "NONE", "overlap": True},
    "four_iterations": {**ALL, "max_iterations": 4},
    "few_blocks": {**ALL, "num_kv_blocks": 40},  # so few that requests are preempted
    "two_ranks": {**ALL, "tensor_parallel_size": 2},
}
HALF = ("sinks", "experts")
"""Kinds whose experts our kernels compute in 16 bits only."""
MAIN_WAYS = 2
"""So many ways are checked with every kind of attention, and all with the first one."""
COMMON = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 32, "num_kv_blocks": 1200}


class Reference(NamedTuple):
    """A model, its requests, and the tokens of the torch backend."""

    spec: Architecture
    requests: list[Request]
    tokens: Tokens


def table(run: Run) -> list[Measurement]:
    """Returns the checks of every kind of attention, of drafts, then of other ways to run, and of bf16."""
    plain, ways = {kind: partial(_reference, kind, 1) for kind in KINDS}, list(WAYS)
    return [
        *(
            Measurement(f"{kind}/{way}", partial(_way, way), plain[kind])
            for kind in KINDS
            if kind not in HALF
            for way in ways[:MAIN_WAYS]
        ),
        *(Measurement(f"{kind}/logprobs", partial(_logprobs, kind, "triton")) for kind in (*HALF, "full")),
        *_drafting(run, is_main=True),
        *(Measurement(f"full/{way}", partial(_way, way), plain["full"]) for way in ways[MAIN_WAYS:]),
        *(Measurement(f"full/logprobs_{name}", partial(_logprobs, "full", name)) for name in BACKENDS),
    ]


def drafts(run: Run) -> list[Measurement]:
    """Returns the checks of the other ways to draft."""
    return _drafting(run, is_main=False)


def _drafting(run: Run, *, is_main: bool) -> list[Measurement]:
    of, found = partial(_reference, "full", 4), list(variants(model_of("full", run)))
    chosen = found[:4] if is_main else found[4:6] if run.rehearse else found[4:]
    return [Measurement(f"drafts/{name}", partial(_drafts, config, own), of) for name, config, own in chosen]


@contextmanager
def _reference(kind: str, repeats: int, run: Run) -> Iterator[Reference]:
    """Yields the reference; prompts that repeat themselves let lookup find drafts."""
    spec, draw = model_of(kind, run), random.Random(run.seed)
    number, longest, num_output = run.size((24, 300 // repeats, 32), (2, 20 // repeats, 3))
    lengths = [draw.randint(1, longest) for _ in range(number)]
    requests = random_requests(run.seed, lengths, num_output, spec.vocab_size)
    requests = [request._replace(prompt=request.prompt * repeats) for request in requests]
    with served(spec, {**COMMON, **EAGER, "backend": "torch"}, run) as engine:
        tokens = [output.outputs[0].token_ids for output in engine.generate(requests)]
    yield Reference(spec, requests, tokens)


def _settings(own: Mapping[str, Any], run: Run) -> dict[str, Any]:
    """Returns the settings of an engine with our kernels; a CPU has no graphs."""
    found = {**COMMON, **ALL, "backend": "triton", **own}
    if run.device.type == "cpu":
        found["cudagraph_mode"] = "NONE"
    return found


def _way(way: str, run: Run, reference: Reference) -> Mapping[str, Any]:
    if way == "two_ranks" and (run.rehearse or torch.cuda.device_count() < 2):
        raise UnavailableError(f"two ranks need two GPUs, this machine has {torch.cuda.device_count()}")
    with served(reference.spec, _settings(WAYS[way], run), run) as engine:
        outputs = engine.generate(reference.requests)
    found = agreement(reference.tokens, [output.outputs[0].token_ids for output in outputs])
    return found | {"start_s": engine.seconds}


def _drafts(
    config: Mapping[str, Any], own: Mapping[str, Any], run: Run, reference: Reference
) -> Mapping[str, Any]:
    settings = _settings({"speculative_config": config, **own}, run)
    with served(reference.spec, settings, run) as engine:
        outputs = engine.generate(reference.requests)
    counts = [output.drafts for output in outputs if output.drafts is not None]
    return agreement(reference.tokens, [output.outputs[0].token_ids for output in outputs]) | {
        "num_draft_tokens": sum(each.num_draft_tokens for each in counts),
        "num_accepted_tokens": sum(each.num_accepted_tokens for each in counts),
        "start_s": engine.seconds,
    }


def agreement(expected: Tokens, found: Tokens) -> dict[str, Any]:
    """Returns the share of requests with equal tokens, and where the first unequal one begins to differ."""
    same = [one == other for one, other in zip(expected, found, strict=True)]
    row: dict[str, Any] = {"ok": all(same), "same_share": sum(same) / len(same), "num_requests": len(same)}
    if not all(same):
        request = same.index(False)
        pairs = list(zip(expected[request], found[request], strict=False))
        place = next((i for i, (one, other) in enumerate(pairs) if one != other), len(pairs))
        row["why"] = f"{same.count(False)} requests differ, request {request} from token {place} on"
    return row


def variants(spec: Architecture) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Yields names, speculative_configs and other settings, the most telling ones first."""
    small = replace(spec, num_layers=1)
    lookup = {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    tree = {"speculative_token_tree": TREE}

    def draft(method: str, model: Architecture, num_drafts: int) -> dict[str, Any]:
        return {"method": method, "model": model, "num_speculative_tokens": num_drafts}

    itself = draft("draft_model", spec, 4)
    yield "draft_model_of_itself/k4", itself, {}
    yield "ngram/k4", lookup | {"num_speculative_tokens": 4}, {}
    yield "medusa/tree", {"method": "medusa", "model": spec, **tree}, {}
    yield "eagle/k3", draft("eagle", small, 3), {}
    for num_drafts in (1, 4, 8):
        own = lookup | {"num_speculative_tokens": num_drafts}
        yield f"ngram/k{num_drafts}/eager", own, {"overlap": False}
        yield f"draft_model/k{num_drafts}", draft("draft_model", small, num_drafts), {}
    for num_drafts in (1, 8):
        yield f"draft_model_of_itself/k{num_drafts}", draft("draft_model", spec, num_drafts), {}
    yield "draft_model_of_itself/not_overlapped", itself, {"overlap": False}
    yield "draft_model_of_itself/without_graphs", itself, {"cudagraph_mode": "NONE"}
    yield "draft_model_of_itself/adaptive", itself | {"draft_length": Adaptive()}, {}
    by_size = ByBatchSize(num_speculative_tokens_per_batch_size=((1, 8, 4), (9, 16, 2), (17, 32, 0)))
    yield "draft_model_of_itself/by_batch_size", itself | {"draft_length": by_size}, {}
    yield "draft_model_of_itself/four_iterations", itself, {"max_iterations": 4}
    yield "draft_model_of_itself/few_blocks", itself, {"num_kv_blocks": 40}  # requests are preempted
    self_drafting = {"method": "self_speculative", "num_speculative_tokens": 4, "skipped_layers": [1]}
    yield "self_speculative/k4", self_drafting, {}
    yield "specinfer_tree", {"method": "specinfer_tree", "model": spec, "widths": [2, 2, 1]}, {}
    yield "lookahead", {"method": "lookahead", "window": 4, "ngram": 3, "guesses": 4}, {}
    yield "eagle3/k3", draft("eagle3", small, 3), {}
    yield "mtp/k2", draft("mtp", spec, 2), {}
    yield "medusa/k3", draft("medusa", spec, 3), {}
    yield "eagle/tree", {"method": "eagle", "model": small, **tree}, {}


def _logprobs(kind: str, attention_backend: str, run: Run, _: None) -> Mapping[str, Any]:
    """Compares the first output token's log-probabilities of the torch and Triton backends in 16 bits."""
    spec, number = model_of(kind, run), run.size(24, 2)
    requests = random_requests(run.seed, run.size(range(20, 260, 10), (9, 20)), 1, spec.vocab_size)
    dtype = "bfloat16" if run.device.type == "cuda" else "float16"  # interpreted kernels truncate to bf16
    found: list[Any] = []
    for backend in ("torch", "triton"):
        own = {"backend": backend} | ({"attention_backend": attention_backend} if found else {})
        with served(spec, {**COMMON, **EAGER, "dtype": dtype, **own}, run) as engine:
            outputs = engine.generate(requests[:number], logprobs=5)
        first = [logprobs[0] for output in outputs if (logprobs := output.outputs[0].logprobs)]
        found.append([each.top for each in first])
    off = [abs(a[k] - b[k]) for a, b in zip(*found, strict=True) for k in a.keys() & b.keys()]
    mean, shared = sum(off) / max(len(off), 1), len(off) / sum(map(len, found[0]))
    return {
        "dtype": dtype,
        "mean_difference": mean,
        "largest_difference": max(off, default=float("nan")),
        "shared_top": shared,
        "ok": mean <= LOGPROB and shared >= 0.5,
        "why": f"mean difference {mean:.3f} nats, {shared:.0%} of the top 5 tokens shared",
    }
